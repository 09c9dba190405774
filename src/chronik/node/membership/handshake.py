"""Mutual authentication of two nodes: each proves that it knows the cluster secret, without sending it.

    caller                                                answering node
    HELLO   its identity, the target node, its nonce  ->
                                                      <-  its identity, its nonce
    PROOF   mac(secret, CALLER, both messages)        ->
                                                      <-  mac(secret, ANSWERER, both messages), and any refusal

    mac(secret, role, hello, answer) = HMAC-SHA256(secret, label, role, hello, answer), each preceded by its length

`hello` and `answer` are the bytes as sent, so a proof covers everything in them: both nonces, node ids and
incarnations, the cluster id, the target node, the purpose and the caller's address. Fresh nonces from both sides
prevent replays, and the role prevents reflection: a proof is valid for one direction of one connection. The caller
proves first, so an unauthenticated caller obtains nothing from a node that it could test guessed secrets against.

The handshake shows that a node of the cluster opened the connection under the id that it claims. It does not protect
later messages: an attacker who can modify packets can take over a connection after its proof.
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
"""Another version of these messages needs another label."""

NONCE_BYTES = 32


class Role(Enum):
    CALLER = b"caller"
    ANSWERER = b"answerer"


def mac(key: bytes, role: Role, hello: bytes, answer: bytes) -> bytes:
    parts = (LABEL, role.value, hello, answer)
    return hmac.digest(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


class Caller:
    """The side that opened the connection. Single use: `hello` first, then `prove`, then `confirms`."""

    def __init__(self, secret: ClusterSecret, hello: Hello) -> None:
        self.hello = encode(hello)
        self._key = secret.proven
        self._answer = b""

    def prove(self, answer: bytes) -> tuple[HelloReply, bytes]:
        """Return the answering node and the PROOF for it. Raise MalformedRequest if `answer` is malformed."""
        reply = decode_hello_reply(answer)
        _check_nonce(reply.nonce)
        self._answer = answer
        return reply, encode(Proof(mac(self._key, Role.CALLER, self.hello, answer)))

    def confirms(self, answer: bytes) -> tuple[bool, str]:
        """Return whether the other side has proven itself too, and its refusal, which can be trusted only then."""
        reply = decode_proof_reply(answer)
        expected = mac(self._key, Role.ANSWERER, self.hello, self._answer)
        return hmac.compare_digest(expected, reply.mac), reply.refusal


class Answerer:
    """The side that accepted the connection, from the caller's first HELLO to its PROOF. Single use."""

    def __init__(self, secret: ClusterSecret, hello: bytes, reply: HelloReply) -> None:
        """`reply` is the answer, with this side's nonce. Raise MalformedRequest if `hello` is no first HELLO."""
        self.hello = decode_hello(hello)
        _check_nonce(self.hello.nonce)
        self.answer = encode(reply)
        self._secret = secret
        self._hello = hello

    def prove(self, proof: bytes) -> bytes | None:
        """Return this side's proof if the caller's proof is valid; None if the caller does not know the secret."""
        claimed = decode_proof(proof).mac
        for key in self._secret.accepted:
            if hmac.compare_digest(mac(key, Role.CALLER, self._hello, self.answer), claimed):
                return mac(key, Role.ANSWERER, self._hello, self.answer)
        return None


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise MalformedRequest(f"a first HELLO, or the answer to it, with a nonce of {len(nonce)} bytes")
