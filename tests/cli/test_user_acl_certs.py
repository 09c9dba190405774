"""`chronik user`, `acl` and `certs`, against a broker whose answers the test chooses."""

from __future__ import annotations

import io
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.broker_thread import serving
from tests.cli.run_chronik import chronik
from tests.client.fake_broker import FakeBroker, metadata

from chronik.authentication.scram import salted_password
from chronik.cli import app
from chronik.wire.api import ApiKey

ORDERS = {"resource_type": 2, "resource_name": "orders", "pattern_type": 3}
ALICE_READS = {"principal": "User:alice", "host": "*", "operation": 3, "permission_type": 3}


class AdminBroker(FakeBroker):
    def __init__(self) -> None:
        super().__init__()
        keys = (ApiKey.DESCRIBE_ACLS, ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS)
        self.versions |= dict.fromkeys(keys, (1, 3)) | {
            ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: (0, 0),
            ApiKey.ALTER_USER_SCRAM_CREDENTIALS: (0, 0),
        }
        self.handlers |= {
            ApiKey.METADATA: lambda request: metadata(self),
            ApiKey.ALTER_USER_SCRAM_CREDENTIALS: lambda request: {
                "results": [
                    {"user": each.name, "error_code": 0, "error_message": None}
                    for each in (*request.upsertions, *request.deletions)
                ]
            },
            ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: lambda request: {
                "error_code": 0,
                "error_message": None,
                "results": [
                    {
                        "user": "alice",
                        "error_code": 0,
                        "error_message": None,
                        "credential_infos": [{"mechanism": 2, "iterations": 4096}],
                    }
                ],
            },
            ApiKey.CREATE_ACLS: lambda request: {
                "results": [{"error_code": 0, "error_message": None} for _ in request.creations]
            },
            ApiKey.DESCRIBE_ACLS: lambda request: {
                "error_code": 0,
                "error_message": None,
                "resources": [{**ORDERS, "acls": [ALICE_READS]}],
            },
            ApiKey.DELETE_ACLS: lambda request: {
                "filter_results": [
                    {
                        "error_code": 0,
                        "error_message": None,
                        "matching_acls": [
                            {
                                "error_code": 0,
                                "error_message": None,
                                **ORDERS,
                                **ALICE_READS,
                            }
                        ],
                    }
                ]
            },
        }

    def request(self, key: ApiKey) -> Any:
        return next(request for asked, request in self.asked if asked == key)


@pytest.fixture
def broker() -> Iterator[tuple[AdminBroker, str]]:
    fake = AdminBroker()
    with serving(fake) as address:
        yield fake, address


class Shell:
    def __init__(self, address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.address = address
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.out = self.err = ""

    def run(self, *words: str, stdin: str = "") -> int:
        self._monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = app.main([*words, "-b", self.address])
        self.out, self.err = self._capsys.readouterr()
        return code


@pytest.fixture
def shell(
    broker: tuple[AdminBroker, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Shell:
    return Shell(broker[1], capsys, monkeypatch)


def test_a_created_user_sends_the_salted_password_only(broker: tuple[AdminBroker, str], shell: Shell) -> None:
    assert shell.run("user", "create", "alice", "--iterations", "8192", stdin="sesame\n") == 0
    (sent,) = broker[0].request(ApiKey.ALTER_USER_SCRAM_CREDENTIALS).upsertions
    assert (sent.name, sent.mechanism, sent.iterations) == ("alice", 2, 8192)
    assert sent.salted_password == salted_password("SCRAM-SHA-512", b"sesame", sent.salt, 8192)
    assert len(sent.salt) >= 16
    assert "sesame" not in shell.out + shell.err


def test_two_creations_of_a_user_have_different_salts(broker: tuple[AdminBroker, str], shell: Shell) -> None:
    for _ in range(2):
        assert shell.run("user", "create", "alice", "--mechanism", "scram-sha-256", stdin="sesame") == 0
    salts = {request.upsertions[0].salt for key, request in broker[0].asked if key == 51}
    assert len(salts) == 2


@pytest.mark.parametrize(
    ("words", "stdin", "reason"),
    [
        (("create", "alice"), "", "the password is empty"),
        (("create", "alice", "--mechanism", "PLAIN"), "x", "--mechanism PLAIN is unknown: use SCRAM-SHA-256"),
        (("create", "alice", "--iterations", "1000"), "x", "4096"),
        (("create", ""), "x", "cannot be empty"),
        (("create", "alice"), "x" * 1025, "longer than 1024 bytes"),
        (("delete", "alice", "--mechanism", "SCRAM-SHA-256"), "", "no credential for SCRAM-SHA-256, only for"),
    ],
)
def test_wrong_input_to_user_is_one_line(words: tuple[str, ...], stdin: str, reason: str, shell: Shell) -> None:
    assert shell.run("user", *words, stdin=stdin) == 2
    assert len(shell.err.splitlines()) == 1
    assert reason in shell.err


def test_users_are_listed_and_deleted(broker: tuple[AdminBroker, str], shell: Shell) -> None:
    assert shell.run("user", "list", "--json") == 0
    credentials = [{"mechanism": "SCRAM-SHA-512", "iterations": 4096}]
    assert json.loads(shell.out) == {"users": [{"user": "alice", "credentials": credentials}]}
    assert shell.run("user", "delete", "alice") == 0
    (sent,) = broker[0].request(ApiKey.ALTER_USER_SCRAM_CREDENTIALS).deletions
    assert (sent.name, sent.mechanism) == ("alice", 2)


def test_acl_add_sends_each_operation(broker: tuple[AdminBroker, str], shell: Shell) -> None:
    words = ("--principal", "User:alice", "--operation", "read", "--operation", "describe-configs", "--topic", "ord")
    assert shell.run("acl", "add", *words, "--prefixed", "--deny", "--host", "10.0.0.0/8") == 0
    sent = broker[0].request(ApiKey.CREATE_ACLS).creations
    assert [(each.operation, each.permission_type, each.resource_pattern_type) for each in sent] == [
        (3, 2, 4),
        (10, 2, 4),
    ]
    assert {(each.principal, each.host, each.resource_name, each.resource_type) for each in sent} == {
        ("User:alice", "10.0.0.0/8", "ord", 2)
    }
    assert "User:alice may not READ topic names that begin with ord from 10.0.0.0/8" in shell.err


def test_acl_list_prints_one_json_object(shell: Shell) -> None:
    assert shell.run("acl", "list", "--json", "--topic", "orders") == 0
    (acl,) = json.loads(shell.out)["acls"]
    assert acl == {
        "principal": "User:alice",
        "permission": "ALLOW",
        "operation": "READ",
        "resource_type": "TOPIC",
        "name": "orders",
        "pattern": "LITERAL",
        "host": "*",
    }


def test_acl_remove_needs_yes_unless_it_names_one_acl_exactly(broker: tuple[AdminBroker, str], shell: Shell) -> None:
    assert shell.run("acl", "remove", "--principal", "User:alice") == 2
    assert "1 ACLs match: pass --yes" in shell.err
    assert broker[0].times_asked(ApiKey.DELETE_ACLS) == 0
    assert shell.run("acl", "remove", "--principal", "User:alice", "--yes") == 0
    exact = ("--principal", "User:alice", "--operation", "READ", "--topic", "orders")
    assert shell.run("acl", "remove", *exact) == 0
    sent = [request.filters[0] for key, request in broker[0].asked if key == ApiKey.DELETE_ACLS][-1]
    assert (sent.host_filter, sent.permission_type, sent.pattern_type_filter) == ("*", 3, 3)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("add", "--principal", "alice", "--operation", "READ", "--topic", "t"), "is not TYPE:NAME: write it as in"),
        (("add", "--principal", "User:a", "--operation", "EAT", "--topic", "t"), "--operation EAT is unknown: use ALL"),
        (("add", "--principal", "User:a", "--operation", "READ"), "name the resource: --topic"),
        (("add", "--principal", "User:a", "--operation", "READ", "--topic", "t", "--cluster"), "name one resource"),
        (("add", "--principal", "User:a", "--operation", "READ", "--topic", ""), "cannot be empty"),
        (("remove",), "name what to remove"),
        (("list", "--prefixed"), "--prefixed needs"),
    ],
)
def test_wrong_input_to_acl_is_one_line(words: tuple[str, ...], reason: str, shell: Shell) -> None:
    assert shell.run("acl", *words) == 2
    assert len(shell.err.splitlines()) == 1
    assert reason in shell.err


def test_a_cluster_without_an_authorizer_says_what_to_set(broker: tuple[AdminBroker, str], shell: Shell) -> None:
    broker[0].handlers[ApiKey.DESCRIBE_ACLS] = lambda request: {
        "error_code": 54,
        "error_message": "No Authorizer is configured.",
        "resources": [],
    }
    assert shell.run("acl", "list") == 2
    assert "set enabled = true and super_users in [authorization]" in shell.err


def test_certs_create_makes_certificates_that_openssl_verifies(tmp_path: Path) -> None:
    folder = str(tmp_path / "certs")
    made = chronik(
        "certs", "create", "--dir", folder, "--host", "localhost", "--host", "127.0.0.1", "--client", "alice"
    )
    assert made.code == 0, made.err
    for name in ("node", "alice"):
        verified = subprocess.run(
            ["openssl", "verify", "-x509_strict", "-CAfile", f"{folder}/ca.pem", f"{folder}/{name}.pem"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert verified.returncode == 0, verified.stderr
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(f"{folder}/{name}.pem", f"{folder}/{name}.key")
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path(folder).iterdir() if path.suffix == ".key"}
    assert modes == {"ca.key": 0o600, "node.key": 0o600, "alice.key": 0o600}
    authority = Path(folder, "ca.pem").read_bytes()
    assert chronik("certs", "create", "--dir", folder, "--client", "bob", "--days", "7").code == 0
    assert Path(folder, "ca.pem").read_bytes() == authority


def test_wrong_input_to_certs_is_one_line(tmp_path: Path) -> None:
    for words, reason in (
        ((), "name the nodes' hosts with --host"),
        (("--client", "node"), "would replace the certificate of the nodes"),
        (("--client", "../up"), "cannot name a certificate"),
        (("--host", "a", "--days", "0"), "days"),
    ):
        outcome = chronik("certs", "create", "--dir", str(tmp_path), *words)
        assert outcome.code == 2
        assert reason in outcome.error_line
