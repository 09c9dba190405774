"""Decoys: neither the messages nor the work of an authentication tell an unknown user from a wrong password."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chronik.authentication.credentials import Credentials, local_user
from chronik.authentication.plain import PlainServer
from chronik.authentication.sasl import (
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    Authenticated,
    Challenge,
    Outcome,
    Refused,
)
from chronik.authentication.scram import ScramClient, ScramServer, new_credential

SECRET = b"the secret of these tests"
BOTH = (SCRAM_SHA_256, SCRAM_SHA_512)


def credentials(secret: bytes = SECRET) -> Credentials:
    return Credentials(secret, {}, {"alice": local_user(SECRET, "alice", "wonderland")})


def exchange(of: Credentials, mechanism: str, user: str, password: str) -> tuple[bytes, Outcome]:
    """Return the server's challenge and the outcome."""
    client, node = ScramClient(mechanism, user, password, "client-nonce"), ScramServer(mechanism, of.lookup, "nonce")
    first = node.respond(client.first())
    assert isinstance(first, Challenge)
    final = client.next(first.data)
    assert final is not None
    return first.data, node.respond(final)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the operations that take time, with what determines how much."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, describe: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def counted(*args: Any) -> Any:
            counts[f"{name} {describe(*args)}"] += 1
            return real(*args)

        monkeypatch.setattr(owner, name, counted)

    count(hmac, "digest", lambda key, message, digest: str(digest))
    count(hmac, "compare_digest", lambda left, right: str(len(left)))
    count(hashlib, "new", lambda name, data: name)
    count(hashlib, "pbkdf2_hmac", lambda name, password, salt, iterations: f"{name} {len(salt)} {iterations}")
    yield counts


@pytest.mark.parametrize("mechanism", BOTH)
def test_scram_does_the_same_work_for_an_unknown_user(work: Counter[str], mechanism: str) -> None:
    of = credentials()
    work.clear()
    _, outcome = exchange(of, mechanism, "alice", "wrong")
    wrong_password = Counter(work)
    work.clear()
    _, unknown = exchange(of, mechanism, "malice", "wrong")
    assert isinstance(outcome, Refused)
    assert isinstance(unknown, Refused)
    assert work == wrong_password
    assert sum(work.values()) > 5


def test_plain_does_the_same_work_for_an_unknown_user(work: Counter[str]) -> None:
    of = credentials()
    work.clear()
    assert isinstance(PlainServer(of).respond(b"\0alice\0wrong"), Refused)
    wrong_password = Counter(work)
    work.clear()
    assert isinstance(PlainServer(of).respond(b"\0malice\0wrong"), Refused)
    assert work == wrong_password
    assert sum(count for name, count in work.items() if name.startswith("pbkdf2_hmac")) == 1


@pytest.mark.parametrize("mechanism", BOTH)
def test_challenge_of_an_unknown_user_has_the_same_shape(mechanism: str) -> None:
    known, _ = exchange(credentials(), mechanism, "alice", "wrong")
    unknown, _ = exchange(credentials(), mechanism, "malice", "wrong")
    assert len(known) == len(unknown)
    assert known.rpartition(b",i=")[2] == unknown.rpartition(b",i=")[2]


def test_unknown_user_has_the_same_salt_in_every_attempt_and_on_every_node() -> None:
    first, _ = exchange(credentials(), SCRAM_SHA_256, "malice", "a")
    again, _ = exchange(credentials(), SCRAM_SHA_256, "malice", "b")
    other_name, _ = exchange(credentials(), SCRAM_SHA_256, "bob", "a")
    other_cluster, _ = exchange(credentials(b"another secret"), SCRAM_SHA_256, "malice", "a")
    assert first == again
    assert len({first, other_name, other_cluster}) == 3


def test_decoy_looks_like_the_credentials_of_most_users() -> None:
    many = {f"user-{n}": {SCRAM_SHA_256: new_credential(SCRAM_SHA_256, "x", bytes(40), 8192)} for n in range(3)}
    one = {"one": {SCRAM_SHA_256: new_credential(SCRAM_SHA_256, "x", bytes(12), 4096)}}
    decoy, is_known = Credentials(SECRET, {**many, **one}, {}).lookup(SCRAM_SHA_256, "malice")
    assert (decoy.iterations, len(decoy.salt), is_known) == (8192, 40, False)


def test_stored_user_replaces_the_one_of_the_file_entirely() -> None:
    """A user whose password was changed in the metadata must not log in with the old one by another mechanism."""
    stored = {"alice": {SCRAM_SHA_512: new_credential(SCRAM_SHA_512, "changed", b"a salt")}}
    of = Credentials(SECRET, stored, {"alice": local_user(SECRET, "alice", "wonderland")})
    assert isinstance(exchange(of, SCRAM_SHA_256, "alice", "wonderland")[1], Refused)
    assert isinstance(exchange(of, SCRAM_SHA_512, "alice", "changed")[1], Authenticated)
    assert isinstance(PlainServer(of).respond(b"\0alice\0wonderland"), Refused)
    assert isinstance(PlainServer(of).respond(b"\0alice\0changed"), Authenticated)


@pytest.mark.parametrize("mechanism", BOTH)
def test_plain_accepts_a_user_with_one_scram_credential(mechanism: str) -> None:
    of = Credentials(SECRET, {"bob": {mechanism: new_credential(mechanism, "builder", b"salt")}}, {})
    assert PlainServer(of).respond(b"\0bob\0builder") == Authenticated("bob")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "1 parts"),
        (b"alice\0wonderland", "2 parts"),
        (b"\0alice\0wonder\0land", "4 parts"),
        (b"\0\0wonderland", "empty"),
        (b"\0alice\0", "empty"),
        (b"root\0alice\0wonderland", "authorization id differs"),
        (b"\0alice\0\xff", "not UTF-8"),
        (b"\0alice\0" + b"x" * 9000, "bytes; allowed are"),
        (b"\0alice\0wrong", "unknown user or wrong password"),
    ],
)
def test_plain_message_is_refused_with_a_reason(message: bytes, reason: str) -> None:
    node = PlainServer(credentials())
    outcome = node.respond(message)
    assert isinstance(outcome, Refused)
    assert reason in outcome.reason
    assert isinstance(node.respond(b"\0alice\0wonderland"), Refused)


@pytest.mark.parametrize("message", [b"\0alice\0wonderland", b"alice\0alice\0wonderland"])
def test_plain_message_with_the_right_password_is_accepted(message: bytes) -> None:
    assert PlainServer(credentials()).respond(message) == Authenticated("alice")
