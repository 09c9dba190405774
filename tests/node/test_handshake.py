"""A proof of the cluster secret covers everything that both sides sent, for one connection and one direction."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
import pytest

from chronik.node.config import ConfigError
from chronik.node.membership.cluster_secret import CHARACTERS_MIN, SECRETS_MAX, ClusterSecret
from chronik.node.membership.internal_api import (
    Hello,
    HelloReply,
    Proof,
    ProofReply,
    decode_hello,
    decode_hello_reply,
    decode_proof,
    encode,
)
from chronik.node.membership.peer_handshake import NONCE_BYTES, Answerer, Caller, Role, mac
from chronik.wire.errors import MalformedRequest

OURS = "ours-" * 8
THEIRS = "theirs-" * 8


def secret(*texts: str) -> ClusterSecret:
    return ClusterSecret("\n".join(texts), "the test")


def nonce(number: int) -> bytes:
    return bytes([number]) * NONCE_BYTES


HELLO = Hello("cluster", 2, UUID(int=2), 1, "127.0.0.1:5093", "control", nonce(2))
REPLY = HelloReply("cluster", 1, UUID(int=1), nonce=nonce(1))


class Met:
    """Both sides of one connection, up to the caller's proof."""

    def __init__(
        self,
        caller: ClusterSecret = secret(OURS),
        answerer: ClusterSecret = secret(OURS),
        hello: Hello = HELLO,
        reply: HelloReply = REPLY,
    ) -> None:
        self.caller = Caller(caller, hello)
        self.answerer = Answerer(answerer, self.caller.hello, reply)
        self.reply, self.proof = self.caller.prove(self.answerer.answer)

    def is_proven(self) -> bool:
        """Return whether both sides accept the other's proof; if one side refuses, both must."""
        answer = self.answerer.prove(self.proof)
        assert answer is None or self.caller.confirms(encode(ProofReply(answer)))[0]
        return answer is not None


def test_both_sides_prove_the_secret_and_neither_sends_it() -> None:
    met = Met()
    answer = met.answerer.prove(met.proof)
    assert answer is not None
    assert met.caller.confirms(encode(ProofReply(answer))) == (True, "")
    assert met.reply == REPLY
    for sent in (met.caller.hello, met.answerer.answer, met.proof, answer):
        assert OURS.encode() not in sent


def test_a_caller_distinguishes_refusals_by_proven_and_unproven_peers() -> None:
    met = Met()
    answer = met.answerer.prove(met.proof)
    assert answer is not None
    assert met.caller.confirms(encode(ProofReply(answer, "no"))) == (True, "no")
    assert met.caller.confirms(encode(ProofReply(b"", "no"))) == (False, "no")


def test_both_sides_refuse_another_secret() -> None:
    met = Met(caller=secret(THEIRS))
    assert met.answerer.prove(met.proof) is None
    # An impostor that answers anyway cannot convince the caller.
    pretended = mac(secret(OURS).proven, Role.ANSWERER, met.caller.hello, met.answerer.answer)
    assert met.caller.confirms(encode(ProofReply(pretended)))[0] is False


def test_a_proof_is_valid_for_one_connection_only() -> None:
    """A replay: the caller sends the same bytes, but the answering node's nonce differs."""
    heard = Met()
    assert heard.is_proven()
    replayed = Answerer(secret(OURS), heard.caller.hello, msgspec.structs.replace(REPLY, nonce=nonce(9)))
    assert replayed.prove(heard.proof) is None


def test_a_replayed_proof_reply_proves_nothing() -> None:
    heard = Met()
    answer = heard.answerer.prove(heard.proof)
    assert answer is not None
    again = Caller(secret(OURS), msgspec.structs.replace(HELLO, nonce=nonce(8)))
    again.prove(heard.answerer.answer)
    assert again.confirms(encode(ProofReply(answer)))[0] is False


def test_a_reflected_proof_proves_nothing() -> None:
    """A reflection: an attacker sends a node its own proof, as the answer or over a connection of its own."""
    met = Met()
    own = decode_proof(met.proof).mac
    assert met.caller.confirms(encode(ProofReply(own)))[0] is False
    answer = met.answerer.prove(met.proof)
    assert answer is not None
    assert met.answerer.prove(encode(Proof(answer))) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"cluster_id": "another"},
        {"cluster_id": ""},
        {"node_id": 3},
        {"incarnation": UUID(int=3)},
        {"target_node_id": 3},
        {"internal": "127.0.0.1:1"},
        {"purpose": "fetch"},
        {"nonce": nonce(3)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_the_proof_covers_every_field_of_the_hello(changed: dict[str, Any]) -> None:
    """An attacker in the middle changes one field and passes on everything else."""
    caller = Caller(secret(OURS), HELLO)
    answerer = Answerer(secret(OURS), encode(msgspec.structs.replace(HELLO, **changed)), REPLY)
    _, proof = caller.prove(answerer.answer)
    assert answerer.prove(proof) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"cluster_id": "another"},
        {"cluster_id": ""},
        {"node_id": 3},
        {"incarnation": UUID(int=3)},
        {"nonce": nonce(3)},
        {"refusal": "go away"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_the_proof_covers_every_field_of_the_hello_reply(changed: dict[str, Any]) -> None:
    caller = Caller(secret(OURS), HELLO)
    answerer = Answerer(secret(OURS), caller.hello, REPLY)
    _, proof = caller.prove(encode(msgspec.structs.replace(REPLY, **changed)))
    assert answerer.prove(proof) is None


def test_swapped_node_ids_are_detected() -> None:
    caller = Caller(secret(OURS), HELLO)
    swapped = msgspec.structs.replace(HELLO, node_id=1, target_node_id=2)
    answerer = Answerer(secret(OURS), encode(swapped), msgspec.structs.replace(REPLY, node_id=2))
    _, proof = caller.prove(encode(REPLY))
    assert answerer.prove(proof) is None


def test_the_mac_covers_the_boundary_between_two_parts() -> None:
    """Otherwise the end of one message could be taken for the beginning of the next."""
    key = secret(OURS).proven
    assert mac(key, Role.CALLER, b"ab", b"c") != mac(key, Role.CALLER, b"a", b"bc")
    assert mac(key, Role.CALLER, b"a", b"b") != mac(key, Role.ANSWERER, b"a", b"b")


def test_truncated_messages_are_refused() -> None:
    met = Met()
    for size in range(len(met.caller.hello)):
        with pytest.raises(MalformedRequest):
            Answerer(secret(OURS), met.caller.hello[:size], REPLY)
    for size in range(len(met.answerer.answer)):
        with pytest.raises(MalformedRequest):
            Caller(secret(OURS), HELLO).prove(met.answerer.answer[:size])
    for size in range(len(met.proof)):
        with pytest.raises(MalformedRequest):
            met.answerer.prove(met.proof[:size])
    short = decode_proof(met.proof).mac[:-1]
    assert met.answerer.prove(encode(Proof(short))) is None
    assert met.answerer.prove(encode(Proof(b""))) is None
    assert met.caller.confirms(encode(ProofReply()))[0] is False


@pytest.mark.parametrize("size", [0, 1, NONCE_BYTES - 1, NONCE_BYTES + 1])
def test_a_first_hello_without_a_complete_nonce_is_refused(size: int) -> None:
    """Do not fall back to a HELLO without a proof."""
    with pytest.raises(MalformedRequest):
        Answerer(secret(OURS), encode(msgspec.structs.replace(HELLO, nonce=b"n" * size)), REPLY)
    with pytest.raises(MalformedRequest):
        Caller(secret(OURS), HELLO).prove(encode(msgspec.structs.replace(REPLY, nonce=b"n" * size)))


def test_the_secret_can_be_rotated_node_by_node() -> None:
    """Check each step of docs/operations.md between a node that has taken it and one that has not."""
    for before, after in (
        (secret(OURS), secret(OURS, THEIRS)),
        (secret(OURS, THEIRS), secret(THEIRS, OURS)),
        (secret(THEIRS, OURS), secret(THEIRS)),
    ):
        assert Met(before, after).is_proven()
        assert Met(after, before).is_proven()
    assert not Met(secret(OURS), secret(THEIRS)).is_proven()


def test_no_text_about_the_secret_contains_it() -> None:
    held = secret(OURS)
    for text in (repr(held), str(held), f"{held!r}", repr([held])):
        assert OURS not in text
    with pytest.raises(ConfigError) as refused:
        ClusterSecret("a-short-one", "the test")
    assert "a-short-one" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "x" * (CHARACTERS_MIN - 1),
        f"{OURS}\nshort",
        "\N{LATIN SMALL LETTER A WITH ACUTE}" * 40,
        "\x00" * 40,
        "\n".join([OURS] * (SECRETS_MAX + 1)),
    ],
)
def test_text_that_is_not_a_secret_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the test holds no cluster secret"):
        ClusterSecret(text, "the test")


def test_hellos_of_other_versions_keep_their_fields() -> None:
    """Readers skip unknown fields. The proof still covers these fields, because it covers the bytes."""
    extended = msgspec.msgpack.encode({**msgspec.to_builtins(HELLO, builtin_types=(bytes,)), "more": 1})
    assert decode_hello(extended) == HELLO
    assert decode_hello_reply(encode(REPLY)) == REPLY
    assert mac(b"k", Role.CALLER, extended, b"") != mac(b"k", Role.CALLER, encode(HELLO), b"")
