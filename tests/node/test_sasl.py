"""SASL on a listener: what is served before, during and after authentication, and what attackers try."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.conftest import StartNode
from tests.node.support_sasl import (
    ALL_MECHANISMS,
    PASSWORDS,
    authenticate,
    handshake,
    has_ended,
    is_served,
    log_in,
    receive_token,
    send_token,
    write_users,
)
from tests.node.support_wire import ConnectionEnded, WireClient, batch, connect, fetch_of, unique
from tests.support.eventually import eventually
from tests.support.node import Node
from tests.support.tokens import AUDIENCE, ISSUER, key_set, token_now

from chronik.authentication.clients import client_exchange
from chronik.authentication.scram import ScramClient
from chronik.node.serving import authentication
from chronik.wire import frames, messages
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FAILED = "Authentication failed during authentication due to invalid credentials with SASL mechanism "
HALF_OPEN = 3_000
REAUTHENTICATE_MS = 2_500


def sasl(folder: Path, **more: object) -> dict[str, object]:
    (folder / "keys.json").write_bytes(key_set())
    return {
        "mechanisms": list(ALL_MECHANISMS),
        "users_file": write_users(folder / "users"),
        "failure_delay_ms": 0,
        "jwks": str(folder / "keys.json"),
        "jwt_issuer": ISSUER,
        "jwt_audience": [AUDIENCE],
        **more,
    }


@pytest.fixture(scope="module")
def sasl_node(start_shared_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Node:
    return start_shared_node(
        security={"protocol": "SASL_PLAINTEXT"}, sasl=sasl(tmp_path_factory.mktemp("sasl")), connections_max=5_000
    )


@pytest.fixture
def client(sasl_node: Node) -> Iterator[WireClient]:
    with connect(sasl_node) as client:
        yield client


def last_refusal(node: Node) -> str:
    lines = [json.loads(line) for line in node.log_text().splitlines() if '"connection_refused"' in line]
    return str(lines[-1]["reason"])


# -- before authentication ---------------------------------------------------------------------------------------------


def test_api_versions_is_served_before_authentication(client: WireClient) -> None:
    for version in (0, 3, 99):
        if version == 99:
            client.send(ApiKey.API_VERSIONS, version, b"")
            client.receive()
        else:
            keys = {api.api_key for api in client.call(ApiKey.API_VERSIONS, version, {}).api_keys}
            assert {ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE, ApiKey.PRODUCE} <= keys
    assert log_in(client).error_code is ErrorCode.none


SERVED_LATER = [key for key in ApiKey if key not in authentication.UNAUTHENTICATED_APIS]


@pytest.mark.parametrize("key", [*SERVED_LATER, 999])
@pytest.mark.parametrize("with_handshake", [False, True], ids=["first", "after the handshake"])
def test_other_request_closes_the_connection(sasl_node: Node, key: int, with_handshake: bool) -> None:
    with connect(sasl_node) as client:
        if with_handshake:
            assert handshake(client, "PLAIN").error_code is ErrorCode.none
        client.send(key, 0, b"\0" * 16)
        assert has_ended(client)


def test_refused_request_is_logged_with_its_api(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node(security={"protocol": "SASL_PLAINTEXT"}, sasl=sasl(tmp_path))
    with connect(node) as client:
        client.send(ApiKey.METADATA, 12, b"")
        assert has_ended(client)
    eventually(lambda: last_refusal(node) == "Metadata before authentication", 5)


def test_produce_before_authentication_writes_nothing(sasl_node: Node) -> None:
    with connect(sasl_node) as honest, connect(sasl_node) as stranger:
        log_in(honest)
        topic = honest.new_topic()
        stranger.send_produce(topic, batch(b"stranger"))
        assert has_ended(stranger)
        assert honest.records(topic) == []


def test_unknown_mechanism_is_answered_with_the_enabled_ones(client: WireClient) -> None:
    answer = handshake(client, "GSSAPI")
    assert answer.error_code is ErrorCode.unsupported_sasl_mechanism
    assert answer.mechanisms == ALL_MECHANISMS
    assert has_ended(client)


def test_authenticate_without_a_handshake_is_an_illegal_state(client: WireClient) -> None:
    assert authenticate(client, b"\0admin\0admin-secret").error_code is ErrorCode.illegal_sasl_state
    assert has_ended(client)


def test_second_handshake_before_authentication_is_an_illegal_state(client: WireClient) -> None:
    assert handshake(client, "PLAIN").error_code is ErrorCode.none
    assert handshake(client, "PLAIN").error_code is ErrorCode.illegal_sasl_state
    assert has_ended(client)


@pytest.mark.parametrize("key", [ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE])
def test_listener_without_sasl_answers_an_illegal_state(shared_node: Node, key: ApiKey) -> None:
    with connect(shared_node) as client:
        body = {"mechanism": "PLAIN"} if key == ApiKey.SASL_HANDSHAKE else {"auth_bytes": b"\0a\0b"}
        assert client.call(key, 1, body).error_code is ErrorCode.illegal_sasl_state
        assert is_served(client)


# -- mechanisms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ALL_MECHANISMS)
@pytest.mark.parametrize("version", [0, 1, 2])
def test_each_mechanism_authenticates(client: WireClient, mechanism: str, version: int) -> None:
    answer = log_in(client, mechanism, "alice", token=token_now(), version=version)
    assert answer.error_code is ErrorCode.none
    assert is_served(client)


@pytest.mark.parametrize("mechanism", ALL_MECHANISMS)
def test_wrong_credentials_get_one_message_and_the_connection_ends(client: WireClient, mechanism: str) -> None:
    answer = log_in(client, mechanism, "alice", "wrong", token=token_now(lifetime_s=-60))
    assert answer.error_code is ErrorCode.sasl_authentication_failed
    assert answer.error_message == FAILED + mechanism
    assert answer.auth_bytes == b""
    assert has_ended(client)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_unknown_user_and_wrong_password_have_the_same_answers(sasl_node: Node, mechanism: str) -> None:
    def answers(user: str) -> list[tuple[object, object, int]]:
        exchange = client_exchange(mechanism, username=user, password="wrong", nonce="a" * 24)
        with connect(sasl_node) as client:
            handshake(client, mechanism)
            got = [authenticate(client, exchange.first())]
            while got[-1].error_code is ErrorCode.none:
                message = exchange.next(got[-1].auth_bytes)
                assert message is not None
                got.append(authenticate(client, message))
            assert has_ended(client)
        return [(answer.error_code, answer.error_message, len(answer.auth_bytes)) for answer in got]

    assert answers("alice") == answers("malic")


@pytest.mark.parametrize("mechanism", ALL_MECHANISMS)
def test_tokens_without_headers_follow_handshake_0(client: WireClient, mechanism: str) -> None:
    assert handshake(client, mechanism, version=0).error_code is ErrorCode.none
    exchange = client_exchange(
        mechanism, username="admin", password=PASSWORDS["admin"], token=token_now(), nonce="n" * 24
    )
    message: bytes | None = exchange.first()
    while message is not None:
        send_token(client, message)
        message = exchange.next(receive_token(client))
    exchange.verify()
    assert is_served(client)


@pytest.mark.parametrize("message", [b"", b"\0", b"\0admin\0wrong", b"\0" * 60_000])
def test_wrong_token_without_header_ends_the_connection(client: WireClient, message: bytes) -> None:
    handshake(client, "PLAIN", version=0)
    send_token(client, message)
    assert has_ended(client)


def test_request_with_a_header_is_not_a_token(client: WireClient) -> None:
    handshake(client, "SCRAM-SHA-256", version=0)
    client.send(ApiKey.METADATA, 12, messages.write_request(ApiKey.METADATA, 12, {"topics": None}))
    assert has_ended(client)


# -- attacks -----------------------------------------------------------------------------------------------------------


def test_replayed_client_final_is_refused_on_another_connection(sasl_node: Node) -> None:
    recorded = ScramClient("SCRAM-SHA-256", "admin", PASSWORDS["admin"], "nonce-of-the-victim")
    with connect(sasl_node) as victim:
        handshake(victim, "SCRAM-SHA-256")
        final = recorded.next(authenticate(victim, recorded.first()).auth_bytes)
        assert final is not None
        assert authenticate(victim, final).error_code is ErrorCode.none
        with connect(sasl_node) as attacker:
            handshake(attacker, "SCRAM-SHA-256")
            assert authenticate(attacker, recorded.first()).error_code is ErrorCode.none
            assert authenticate(attacker, final).error_code is ErrorCode.sasl_authentication_failed
            assert has_ended(attacker)
        # Nor on the victim's own connection.
        assert authenticate(victim, final).error_code is ErrorCode.illegal_sasl_state
        assert is_served(victim)


def test_reordered_messages_are_refused(client: WireClient) -> None:
    handshake(client, "SCRAM-SHA-256")
    answer = authenticate(client, b"c=biws,r=nonce,p=AAAA")
    assert answer.error_code is ErrorCode.sasl_authentication_failed
    assert has_ended(client)


@pytest.mark.parametrize("size", [64 * 1024 + 1, 1 << 20, 2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("with_frames", [False, True])
def test_frame_above_the_bound_ends_the_connection_at_its_size(
    client: WireClient, size: int, with_frames: bool
) -> None:
    handshake(client, "PLAIN", version=0 if with_frames else 1)
    client.send_bytes(struct.pack(">i", size))
    assert has_ended(client)


def test_bound_of_frames_is_lifted_by_authentication(client: WireClient) -> None:
    log_in(client)
    topic = client.new_topic()
    client.append(topic, b"x" * 500_000)
    assert [len(record.value or b"") for record in client.records(topic)] == [500_000]


@pytest.mark.parametrize("version", [0, 1])
def test_fragmented_messages_authenticate(client: WireClient, version: int) -> None:
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handshake(client, "PLAIN", version)
    message = b"\0admin\0" + PASSWORDS["admin"].encode()
    if version == 0:
        frame = struct.pack(">i", len(message)) + message
    else:
        frame, _ = client.frame(
            ApiKey.SASL_AUTHENTICATE, 1, messages.write_request(ApiKey.SASL_AUTHENTICATE, 1, {"auth_bytes": message})
        )
    for at in range(len(frame)):
        client.send_bytes(frame[at : at + 1])
    if version == 0:
        assert receive_token(client) == b""
    else:
        client.receive()
    assert is_served(client)


def pipelined(client: WireClient, password: str) -> int:
    """Send everything in one write: handshake, password and a fetch. Return the correlation id of the fetch."""
    shake = messages.write_request(ApiKey.SASL_HANDSHAKE, 1, {"mechanism": "PLAIN"})
    message = b"\0admin\0" + password.encode()
    with client.one_write():
        client.send(ApiKey.SASL_HANDSHAKE, 1, shake)
        client.send(
            ApiKey.SASL_AUTHENTICATE, 1, messages.write_request(ApiKey.SASL_AUTHENTICATE, 1, {"auth_bytes": message})
        )
        return client.send_fetch(fetch_of((unique("topic"), 0, 0)))


def test_request_in_the_same_packet_waits_for_the_authentication(client: WireClient) -> None:
    fetch = pipelined(client, PASSWORDS["admin"])
    assert [client.receive()[0], client.receive()[0], client.receive()[0]] == [fetch - 2, fetch - 1, fetch]


def test_request_in_the_same_packet_as_a_wrong_password_is_not_served(client: WireClient) -> None:
    pipelined(client, "wrong")
    client.receive()
    _, answer = client.receive()
    assert int.from_bytes(answer[:2], "big") == ErrorCode.sasl_authentication_failed
    assert has_ended(client)


def test_thousands_of_half_open_connections_do_not_stop_an_honest_client(sasl_node: Node) -> None:
    half_open: list[socket.socket] = []
    handshake_frame = frames.write_request(
        ApiKey.SASL_HANDSHAKE,
        1,
        1,
        "stranger",
        messages.write_request(ApiKey.SASL_HANDSHAKE, 1, {"mechanism": "SCRAM-SHA-512"}),
    )
    try:
        with connect(sasl_node) as early:
            log_in(early)
            for index in range(HALF_OPEN):
                stranger = socket.create_connection(("127.0.0.1", sasl_node.kafka_port))
                half_open.append(stranger)
                # One third is silent, one third stops after the handshake, one third inside a frame.
                if index % 3:
                    stranger.sendall(handshake_frame[: None if index % 3 == 1 else 7])
                if index % 300 == 299:
                    with connect(sasl_node) as honest:
                        assert log_in(honest).error_code is ErrorCode.none
                        assert is_served(honest)
            assert is_served(early)
        gauge = next(line for line in sasl_node.get("/metrics").splitlines() if line.startswith("chronik_connections "))
        assert float(gauge.split()[1]) <= authentication.UNAUTHENTICATED_MAX + 10
    finally:
        for stranger in half_open:
            stranger.close()


# -- after authentication ----------------------------------------------------------------------------------------------


def test_authenticate_after_success_is_an_illegal_state_and_changes_nothing(client: WireClient) -> None:
    log_in(client)
    assert authenticate(client, b"\0alice\0wrong").error_code is ErrorCode.illegal_sasl_state
    # A handshake right after the last authentication is not a re-authentication: so does Kafka.
    assert handshake(client, "SCRAM-SHA-512").error_code is ErrorCode.illegal_sasl_state
    assert is_served(client)


def counted(node: Node, name: str) -> float:
    line = f'chronik_{name}_total{{mechanism="SCRAM-SHA-256"}}'
    found = [each for each in node.get("/metrics").splitlines() if each.startswith(line)]
    return float(found[0].split()[1]) if found else 0.0


def test_failures_and_successes_are_counted_by_mechanism(sasl_node: Node) -> None:
    names = ("authentications", "authentication_failures")
    before = [counted(sasl_node, name) for name in names]
    for password in (PASSWORDS["admin"], "wrong"):
        with connect(sasl_node) as client:
            log_in(client, "SCRAM-SHA-256", "admin", password)
    assert [counted(sasl_node, name) for name in names] == [before[0] + 1, before[1] + 1]


def test_secrets_are_not_in_the_log_nor_on_the_page(sasl_node: Node) -> None:
    text = sasl_node.log_text() + sasl_node.get("/api/cluster")
    assert "authentication_failed" in text
    for secret in (*PASSWORDS.values(), "stored_key", "server_key"):
        assert secret not in text


def test_name_of_a_client_cannot_add_a_line_to_the_log(sasl_node: Node) -> None:
    name = 'mallory\n{"event": "broker_active"}\r\n\x1b[2J'
    with connect(sasl_node) as client:
        assert log_in(client, "SCRAM-SHA-256", name).error_code is ErrorCode.sasl_authentication_failed

    def lines() -> list[str]:
        return [line for line in sasl_node.log_text().splitlines() if "mallory" in line]

    eventually(lambda: lines() or '"count"' in sasl_node.log_text())
    for line in lines():
        assert json.loads(line)["user"] == name and "\x1b" not in line


# -- delays ------------------------------------------------------------------------------------------------------------


def test_failures_of_an_address_are_answered_later_and_later(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node(security={"protocol": "SASL_PLAINTEXT"}, sasl=sasl(tmp_path, failure_delay_ms=100))
    taken_s = []
    for _ in range(5):
        with connect(node) as client:
            started_s = time.monotonic()
            assert log_in(client, "PLAIN", "alice", "wrong").error_code is ErrorCode.sasl_authentication_failed
            taken_s.append(time.monotonic() - started_s)
    for least_s, took_s in zip((0.1, 0.1, 0.1, 0.2, 0.4), taken_s, strict=True):
        assert took_s >= least_s


def test_attacker_who_hangs_up_tries_no_more_passwords_than_one_who_waits(
    start_node: StartNode, tmp_path: Path
) -> None:
    most = authentication.FAILURES_PENDING_MAX
    node = start_node(security={"protocol": "SASL_PLAINTEXT"}, sasl=sasl(tmp_path, failure_delay_ms=600_000))

    def guess() -> None:
        with connect(node) as client:
            client.socket.settimeout(0.05)
            with suppress(TimeoutError, ConnectionEnded):
                log_in(client, "SCRAM-SHA-256", "alice", "wrong")

    def guesses() -> float:
        return counted(node, "authentication_failures")

    for _ in range(most - 1):
        guess()
    eventually(lambda: guesses() == most - 1)
    # A client with the right password at the same address is served while the failures are pending.
    with connect(node) as client:
        assert log_in(client, "SCRAM-SHA-256", "alice").error_code is ErrorCode.none
        assert is_served(client)
        for _ in range(50):
            guess()
        eventually(lambda: guesses() == most)
        assert is_served(client)
    with connect(node, source="127.0.0.2") as client:
        assert log_in(client, "SCRAM-SHA-256", "alice").error_code is ErrorCode.none
    assert guesses() == most


# -- re-authentication -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_node(start_shared_node: StartNode, tmp_path_factory: pytest.TempPathFactory) -> Node:
    return start_shared_node(
        security={"protocol": "SASL_PLAINTEXT"},
        sasl=sasl(tmp_path_factory.mktemp("short"), reauthenticate_ms=REAUTHENTICATE_MS),
    )


def wait_s(seconds: float) -> None:
    """Let a session's time pass: there is nothing else to wait for."""
    time.sleep(seconds)


def lifetime_ms(answer: object) -> float:
    return float(answer.session_lifetime.total_seconds() * 1000)  # type: ignore[attr-defined]


def test_session_ends_unless_the_client_authenticates_again(short_node: Node) -> None:
    with connect(short_node) as faithful, connect(short_node) as idle:
        for client in (faithful, idle):
            assert lifetime_ms(log_in(client)) == REAUTHENTICATE_MS
        wait_s(1.3)
        assert is_served(idle)
        assert lifetime_ms(log_in(faithful)) == REAUTHENTICATE_MS
        wait_s(REAUTHENTICATE_MS / 1000 - 1.2)
        assert is_served(faithful)
        idle.send(ApiKey.METADATA, 12, messages.write_request(ApiKey.METADATA, 12, {"topics": None}))
        assert has_ended(idle)
    metrics = short_node.get("/metrics")
    assert 'chronik_reauthentications_total{mechanism="SCRAM-SHA-512"} 1.0' in metrics
    assert "chronik_sessions_expired_total 1.0" in metrics


def test_expired_session_can_still_authenticate_again(short_node: Node) -> None:
    with connect(short_node) as client:
        log_in(client)
        wait_s(REAUTHENTICATE_MS / 1000 + 0.1)
        assert log_in(client).error_code is ErrorCode.none
        assert is_served(client)


def test_token_that_expires_earlier_limits_the_session(short_node: Node) -> None:
    with connect(short_node) as client:
        assert 0 < lifetime_ms(log_in(client, "OAUTHBEARER", token=token_now(lifetime_s=2))) <= 2_000
    with connect(short_node) as client:
        assert lifetime_ms(log_in(client, "OAUTHBEARER", token=token_now())) == REAUTHENTICATE_MS


def test_token_limits_a_session_without_a_configured_limit(client: WireClient) -> None:
    assert 0 < lifetime_ms(log_in(client, "OAUTHBEARER", token=token_now(lifetime_s=100))) <= 100_000
    # Within the clock skew a token is accepted after its expiry; its session has ended already.
    with connect_like(client) as late:
        assert lifetime_ms(log_in(late, "OAUTHBEARER", token=token_now(lifetime_s=-5))) == 1


def connect_like(client: WireClient) -> WireClient:
    return WireClient(client.socket.getpeername()[1])


def test_another_user_may_not_take_over_the_connection(short_node: Node) -> None:
    with connect(short_node) as client:
        log_in(client, user="alice")
        wait_s(1.1)
        assert log_in(client, user="admin").error_code is ErrorCode.sasl_authentication_failed
        assert has_ended(client)


def test_another_mechanism_may_not_reauthenticate(short_node: Node) -> None:
    with connect(short_node) as client:
        log_in(client, "SCRAM-SHA-512")
        wait_s(1.1)
        assert handshake(client, "SCRAM-SHA-256").error_code is ErrorCode.unsupported_sasl_mechanism
        assert has_ended(client)


def test_wrong_password_in_a_reauthentication_ends_the_connection(short_node: Node) -> None:
    with connect(short_node) as client:
        log_in(client)
        wait_s(1.1)
        assert log_in(client, password="wrong").error_code is ErrorCode.sasl_authentication_failed
        assert has_ended(client)


def test_no_request_is_served_during_a_reauthentication(short_node: Node) -> None:
    with connect(short_node) as client:
        log_in(client)
        wait_s(1.1)
        assert handshake(client, "SCRAM-SHA-512").error_code is ErrorCode.none
        with pytest.raises(ConnectionEnded):
            is_served(client)


def test_tokens_without_headers_do_not_reauthenticate(short_node: Node) -> None:
    with connect(short_node) as client:
        log_in(client)
        wait_s(1.1)
        assert handshake(client, "SCRAM-SHA-512", version=0).error_code is ErrorCode.illegal_sasl_state
        assert is_served(client)
