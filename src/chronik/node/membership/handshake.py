"""Two nodes prove to each other that they know the cluster secret, without sending it.

    caller                                             answering node
    HELLO   who calls, whom it wants, its nonce  ->
                                                 <-    who answers, its nonce
    PROOF   mac(secret, CALLER, both messages)   ->
                                                 <-    mac(secret, ANSWERER, both messages), and a refusal if any

    mac(secret, role, hello, answer) = HMAC-SHA256(secret, label, role, hello, answer), each with its length before it

`hello` and `answer` are the bytes that were sent, so that a proof covers all they say: both nonces, node ids and
incarnations, the cluster id, the node that is wanted, the purpose and the caller's address. Fresh nonces of both sides
rule out replays, and the role rules out reflections: a proof is good for one direction of one connection. The caller
proves first, so a stranger gets nothing from a node that it could try secrets on.

This shows that a node of the cluster opened the connection, under the id that it says. It does not protect what
follows: whoever can change packets on the way can take over a connection after its proof.
"""

from __future__ import annotations

import hmac
from enum import Enum

from chronik.node.membership.cluster_secret import ClusterSecret
from chronik.node.membership.internal_api import (
    Hello,
    HelloReply,
    Proof,
    decode_hello,
    decode_hello_reply,
    decode_proof,
    decode_proof_reply,
    encode,
)
from chronik.wire.errors import MalformedRequest

LABEL = b"chronik node to node 1"
"""Another version of the messages above gets another label."""

NONCE_BYTES = 32


class Role(Enum):
    CALLER = b"caller"
    ANSWERER = b"answerer"


def mac(key: bytes, role: Role, hello: bytes, answer: bytes) -> bytes:
    parts = (LABEL, role.value, hello, answer)
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


class Caller:
    """The side that opened the connection. One use: `hello` first, then `prove`, then `confirms`."""

    def __init__(self, secret: ClusterSecret, hello: Hello) -> None:
        self.hello = encode(hello)
        self._key = secret.proven
        self._answer = b""

    def prove(self, answer: bytes) -> tuple[HelloReply, bytes]:
        """Who answered, and the PROOF for it. MalformedRequest where that is no answer to a first HELLO."""
        reply = decode_hello_reply(answer)
        _check_nonce(reply.nonce)
        self._answer = answer
        return reply, encode(Proof(mac(self._key, Role.CALLER, self.hello, answer)))

    def confirms(self, answer: bytes) -> tuple[bool, str]:
        """Whether the other side has proven itself too, and its refusal, which is to be believed only then."""
        reply = decode_proof_reply(answer)
        expected = mac(self._key, Role.ANSWERER, self.hello, self._answer)
        return hmac.compare_digest(expected, reply.mac), reply.refusal


class Answerer:
    """The side that accepted the connection, from its caller's first HELLO to the PROOF. One use."""

    def __init__(self, secret: ClusterSecret, hello: bytes, reply: HelloReply) -> None:
        """MalformedRequest where that is no first HELLO. `reply` is answered to it, with a nonce of its own."""
        self.hello = decode_hello(hello)
        _check_nonce(self.hello.nonce)
        self.answer = encode(reply)
        self._secret = secret
        self._hello = hello

    def prove(self, proof: bytes) -> bytes | None:
        """This side's proof where the caller's is right; None where the caller does not know the secret."""
        claimed = decode_proof(proof).mac
        for key in self._secret.accepted:
            if hmac.compare_digest(mac(key, Role.CALLER, self._hello, self.answer), claimed):
                return mac(key, Role.ANSWERER, self._hello, self.answer)
        return None


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise MalformedRequest(f"a first HELLO, or the answer to it, with a nonce of {len(nonce)} bytes")
