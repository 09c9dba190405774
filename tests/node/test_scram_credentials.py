"""SCRAM credentials in the metadata: altered, described, used to log in, and never shown."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import StartNode
from tests.node.support_sasl import authenticate, handshake, is_served, log_in, write_users
from tests.node.support_wire import WireClient, connect, unique
from tests.support.node import Node

from chronik.authentication.clients import client_exchange
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

SHA_256, SHA_512 = 1, 2
HASHES = {SHA_256: "sha256", SHA_512: "sha512"}
SALT = b"a salt of sixteen"


@pytest.fixture(scope="module")
def sasl_node(start_shared_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Node:
    users = write_users(tmp_path_factory.mktemp("scram") / "users")
    return start_shared_node(
        security={"protocol": "SASL_PLAINTEXT"},
        sasl={
            "mechanisms": ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"],
            "users_file": users,
            "failure_delay_ms": 0,
        },
    )


@pytest.fixture
def admin(sasl_node: Node) -> Iterator[WireClient]:
    with connect(sasl_node) as client:
        log_in(client)
        yield client


def upsertion(user: str, password: str = "secret", mechanism: int = SHA_512, iterations: int = 4096) -> dict[str, Any]:
    salted = hashlib.pbkdf2_hmac(HASHES.get(mechanism, "sha256"), password.encode(), SALT, max(1, iterations))
    return {"name": user, "mechanism": mechanism, "iterations": iterations, "salt": SALT, "salted_password": salted}


def deletion(user: str, mechanism: int = SHA_512) -> dict[str, Any]:
    return {"name": user, "mechanism": mechanism}


def alter(client: WireClient, *, upsertions: Any = (), deletions: Any = ()) -> dict[str, tuple[ErrorCode, str | None]]:
    answer = client.call(
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, {"deletions": list(deletions), "upsertions": list(upsertions)}
    )
    return {result.user: (result.error_code, result.error_message) for result in answer.results}


def describe(client: WireClient, *users: str) -> dict[str, tuple[ErrorCode, dict[int, int]]]:
    named = [{"name": user} for user in users] if users else None
    answer = client.call(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, {"users": named})
    assert answer.error_code is ErrorCode.none
    return {
        result.user: (result.error_code, {info.mechanism: info.iterations for info in result.credential_infos})
        for result in answer.results
    }


def test_new_user_logs_in_with_its_mechanisms_only(sasl_node: Node, admin: WireClient) -> None:
    user = unique("user")
    assert alter(admin, upsertions=[upsertion(user, "secret", SHA_256, 8192)]) == {user: (ErrorCode.none, None)}
    assert describe(admin, user) == {user: (ErrorCode.none, {SHA_256: 8192})}
    for mechanism, outcome in (
        ("SCRAM-SHA-256", ErrorCode.none),
        ("PLAIN", ErrorCode.none),
        ("SCRAM-SHA-512", ErrorCode.sasl_authentication_failed),
    ):
        with connect(sasl_node) as client:
            assert log_in(client, mechanism, user, "secret").error_code is outcome


def test_deleted_user_cannot_log_in_and_connected_clients_stay(sasl_node: Node, admin: WireClient) -> None:
    user = unique("user")
    alter(admin, upsertions=[upsertion(user)])
    with connect(sasl_node) as connected, connect(sasl_node) as late:
        assert log_in(connected, user=user, password="secret").error_code is ErrorCode.none
        assert alter(admin, deletions=[deletion(user)]) == {user: (ErrorCode.none, None)}
        assert log_in(late, user=user, password="secret").error_code is ErrorCode.sasl_authentication_failed
        assert is_served(connected)
    assert describe(admin, user) == {user: (ErrorCode.resource_not_found, {})}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_user_deleted_after_the_handshake_is_refused(sasl_node: Node, admin: WireClient, mechanism: str) -> None:
    user = unique("user")
    alter(admin, upsertions=[upsertion(user)])
    with connect(sasl_node) as client:
        handshake(client, mechanism)
        alter(admin, deletions=[deletion(user)])
        exchange = client_exchange(mechanism, username=user, password="secret", nonce="n" * 24)
        answer = authenticate(client, exchange.first())
        if mechanism != "PLAIN":
            final = exchange.next(answer.auth_bytes)
            assert final is not None
            answer = authenticate(client, final)
        assert answer.error_code is ErrorCode.sasl_authentication_failed


def test_changed_password_replaces_the_old_one(sasl_node: Node, admin: WireClient) -> None:
    user = unique("user")
    alter(admin, upsertions=[upsertion(user, "old")])
    alter(admin, upsertions=[upsertion(user, "new")])
    for password, outcome in (("new", ErrorCode.none), ("old", ErrorCode.sasl_authentication_failed)):
        with connect(sasl_node) as client:
            assert log_in(client, user=user, password=password).error_code is outcome


UNACCEPTABLE = [
    (upsertion(""), ErrorCode.unacceptable_credential, "Username must not be empty"),
    (upsertion("u", iterations=4095), ErrorCode.unacceptable_credential, "Too few iterations"),
    (upsertion("u", iterations=0), ErrorCode.unacceptable_credential, "Too few iterations"),
    (upsertion("u", iterations=16385), ErrorCode.unacceptable_credential, "Too many iterations"),
    (upsertion("u", mechanism=0), ErrorCode.unsupported_sasl_mechanism, "Unknown SCRAM mechanism"),
    (upsertion("u", mechanism=3), ErrorCode.unsupported_sasl_mechanism, "Unknown SCRAM mechanism"),
    ({**upsertion("u"), "salt": b""}, ErrorCode.unacceptable_credential, "The salt must have"),
    ({**upsertion("u"), "salted_password": b""}, ErrorCode.unacceptable_credential, "not a hash"),
    (upsertion("u" * 2000), ErrorCode.unacceptable_credential, "at most 1024"),
]


@pytest.mark.parametrize(("entry", "code", "message"), UNACCEPTABLE)
def test_unacceptable_credential_is_refused(
    admin: WireClient, entry: dict[str, Any], code: ErrorCode, message: str
) -> None:
    got_code, got_message = alter(admin, upsertions=[entry])[entry["name"]]
    assert got_code is code
    assert message in (got_message or "")


def test_deletion_of_what_does_not_exist_is_refused(admin: WireClient) -> None:
    user = unique("user")
    alter(admin, upsertions=[upsertion(user, mechanism=SHA_256)])
    assert alter(admin, deletions=[deletion(user, SHA_512)])[user][0] is ErrorCode.resource_not_found
    assert alter(admin, deletions=[deletion("nobody")])["nobody"][0] is ErrorCode.resource_not_found
    assert describe(admin, user)[user][1] == {SHA_256: 4096}


def test_credential_altered_twice_is_a_duplicate_and_other_users_are_altered(admin: WireClient) -> None:
    twice, both, fine = unique("twice"), unique("both"), unique("fine")
    alter(admin, upsertions=[upsertion(both)])
    outcomes = alter(
        admin,
        deletions=[deletion(both)],
        upsertions=[upsertion(twice), upsertion(twice, "other"), upsertion(both), upsertion(fine)],
    )
    assert {user: code for user, (code, _) in outcomes.items()} == {
        both: ErrorCode.duplicate_resource,
        twice: ErrorCode.duplicate_resource,
        fine: ErrorCode.none,
    }
    described = describe(admin, twice, both, fine)
    assert [code for code, _ in described.values()] == [
        ErrorCode.resource_not_found,
        ErrorCode.none,
        ErrorCode.none,
    ]


def test_alterations_of_a_user_are_carried_out_together_or_not_at_all(admin: WireClient) -> None:
    user = unique("user")
    entries = [upsertion(user, mechanism=SHA_256), upsertion(user, mechanism=SHA_512, iterations=1)]
    assert alter(admin, upsertions=entries)[user][0] is ErrorCode.unacceptable_credential
    assert describe(admin, user)[user][0] is ErrorCode.resource_not_found


def test_all_users_are_described_without_a_list(admin: WireClient) -> None:
    user = unique("user")
    alter(admin, upsertions=[upsertion(user, mechanism=SHA_256), upsertion(user, mechanism=SHA_512)])
    described = describe(admin)
    assert described[user] == (ErrorCode.none, {SHA_256: 4096, SHA_512: 4096})
    # Users of the file are no metadata.
    assert "admin" not in described


def test_user_named_twice_is_a_duplicate(admin: WireClient) -> None:
    assert describe(admin, "same", "same") == {"same": (ErrorCode.duplicate_resource, {})}


def test_credentials_survive_a_crash(start_node: StartNode, tmp_path: Path) -> None:
    users = write_users(tmp_path / "users")
    node = start_node(security={"protocol": "SASL_PLAINTEXT"}, sasl={"users_file": users, "failure_delay_ms": 0})
    with connect(node) as client:
        log_in(client)
        alter(client, upsertions=[upsertion("kept")])
    node.kill()
    node.start()
    with connect(node) as client:
        assert log_in(client, user="kept", password="secret").error_code is ErrorCode.none


def test_keys_are_neither_in_the_log_nor_in_the_http_api(sasl_node: Node, admin: WireClient) -> None:
    user = unique("user")
    entry = upsertion(user, "very-secret-password")
    alter(admin, upsertions=[entry])
    shown = sasl_node.log_text() + "".join(
        sasl_node.get(path) for path in ("/api/cluster", "/api/topics", "/metrics", "/")
    )
    for secret in ("very-secret-password", entry["salted_password"].hex(), "stored_key", "server_key"):
        assert secret not in shown
