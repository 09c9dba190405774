"""The protocol between nodes on the internal listener: Kafka's frames with Chronik's own API keys and msgpack bodies.

    30000 HELLO            the caller's identity and its target node; first on a connection, then as its keepalive
    30004 PROOF            that the sender of the first HELLO knows the cluster secret; required before anything else
    30001 RAFT             one message of chronik.raft; has no response
    30002 CONTROLLER_CALL  an operation or query that only the controller may answer; answered when it is done
    30003 ENVELOPE         a client's whole request, for the controller to answer
    30005 REGISTRY         a command of the schema registry, for the leader of its topic; JSON, see node.schema_registry

All are version 0. A body is one msgpack map (RAFT: the bytes of `raft.messages`). Readers skip unknown keys, so a field
may be added with a default. The same listener also serves Kafka's Produce and Fetch, and the other Kafka APIs that
replicas need. Responses are sent as they become ready and are matched by correlation id, so that a slow one does not
delay a heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

import msgspec

from chronik.authorization.acls import ANONYMOUS
from chronik.metadata.calls import (
    AlterIsrCall,
    HeartbeatCall,
    HeartbeatResult,
    RegisterBrokerCall,
    ReportedResult,
    ReportReplicasCall,
)
from chronik.node.membership.topic_plans import NewTopic
from chronik.wire.errors import MalformedRequest

VERSION = 0


class InternalKey(IntEnum):
    """API keys outside the range that Kafka uses."""

    HELLO = 30_000
    RAFT = 30_001
    CONTROLLER_CALL = 30_002
    ENVELOPE = 30_003
    PROOF = 30_004
    REGISTRY = 30_005


MARKERS = "markers"
"""The purpose of a connection for transaction markers."""


class Hello(msgspec.Struct, frozen=True):
    """The caller's identity. `cluster_id` is empty while the caller has none; `internal` is its own address, HOST:PORT.

    `purpose` distinguishes the control link from data connections. `nonce` is set in the first HELLO of a connection,
    which must be followed by a proof (see `peer_handshake`).
    """

    cluster_id: str
    node_id: int
    incarnation: UUID
    target_node_id: int
    internal: str
    purpose: str = "control"
    nonce: bytes = b""


class HelloReply(msgspec.Struct, frozen=True):
    """The answering node. `nonce` is set in the answer to the first HELLO: the caller must prove itself next.

    `refusal` is empty if the caller is accepted; otherwise it states the problem and the remedy.
    """

    cluster_id: str
    node_id: int
    incarnation: UUID
    refusal: str = ""
    nonce: bytes = b""


class Proof(msgspec.Struct, frozen=True):
    mac: bytes


class ProofReply(msgspec.Struct, frozen=True):
    """The answering node's own proof; empty if the caller's proof is wrong. `refusal` is as in HelloReply."""

    mac: bytes = b""
    refusal: str = ""


class AllocateProducerIdsCall(msgspec.Struct, frozen=True, tag="allocate_producer_ids"):
    broker_id: int
    count: int


Call: TypeAlias = (
    NewTopic | AllocateProducerIdsCall | RegisterBrokerCall | HeartbeatCall | AlterIsrCall | ReportReplicasCall
)


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The call succeeded and has no result."""


class TopicCreatedResult(msgspec.Struct, frozen=True, tag="topic_created"):
    topic_id: UUID


class ProducerIdsResult(msgspec.Struct, frozen=True, tag="producer_ids"):
    first: int
    count: int


class RegisteredResult(msgspec.Struct, frozen=True, tag="registered"):
    broker_epoch: int


Result: TypeAlias = Done | TopicCreatedResult | ProducerIdsResult | RegisteredResult | HeartbeatResult | ReportedResult


class CallReply(msgspec.Struct, frozen=True):
    """`version` is the controller's image after the call: any image at least as new includes the call's effect.

    If `is_controller` is False, nothing was done; `controller_id` is the node to call instead, -1 if unknown. A `code`
    other than 0 is the controller's reason to refuse.
    """

    is_controller: bool
    controller_id: int = -1
    version: int = 0
    code: int = 0
    message: str = ""
    result: Result | None = None


class Envelope(msgspec.Struct, frozen=True):
    """A client's request as received, without its header."""

    api_key: int
    api_version: int
    client_id: str | None
    body: bytes
    principal: str = ANONYMOUS
    """Of the client: the controller authorizes the request as this principal. An older node does not send it."""
    host: str = ""
    has_authorizer: bool = False
    """Whether the sender has an authorizer. A controller without one must not carry out the request unchecked."""


class EnvelopeReply(msgspec.Struct, frozen=True):
    """The response body; the other fields are as in CallReply. `is_failed` marks an error response, for the metrics."""

    is_controller: bool
    controller_id: int = -1
    version: int = 0
    is_failed: bool = False
    body: bytes = b""


T = TypeVar("T")
Body: TypeAlias = bytes | memoryview

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
"""Encode any struct of this module."""


def _decode_by(decoder: msgspec.msgpack.Decoder[T]) -> Callable[[Body], T]:
    def decode(body: Body) -> T:
        try:
            return decoder.decode(body)
        except ValueError as error:
            raise MalformedRequest(f"a message of another node does not parse: {error}") from None

    return decode


_call: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
decode_hello = _decode_by(msgspec.msgpack.Decoder(Hello))
decode_hello_reply = _decode_by(msgspec.msgpack.Decoder(HelloReply))
decode_proof = _decode_by(msgspec.msgpack.Decoder(Proof))
decode_proof_reply = _decode_by(msgspec.msgpack.Decoder(ProofReply))
decode_call = _decode_by(_call)
decode_call_reply = _decode_by(msgspec.msgpack.Decoder(CallReply))
decode_envelope = _decode_by(msgspec.msgpack.Decoder(Envelope))
decode_envelope_reply = _decode_by(msgspec.msgpack.Decoder(EnvelopeReply))
