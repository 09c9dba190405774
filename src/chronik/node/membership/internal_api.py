"""What nodes say to each other on the internal listener: Kafka's frames with API keys of our own, msgpack inside.

    30000 HELLO            who calls, and whom it wants; comes first on a connection, and again as its sign of life
    30004 PROOF            that the caller of the first HELLO knows the cluster secret; nothing else is answered before
    30001 RAFT             one message of chronik.raft; never answered
    30002 CONTROLLER_CALL  something that only the controller may do, or know; answered when it is done
    30003 ENVELOPE         a client's whole request, for the controller to answer

All are version 0. A body is one msgpack map (RAFT: the bytes of `raft.messages`); readers pass over keys they do not
know, so a field may be added with a default. Produce and Fetch of Kafka's protocol, and what replicas need beside them,
are answered on the same listener. Answers come in the order in which they are ready: the correlation id tells which is
which, so that a slow one does not hold up a heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

import msgspec

from chronik.metadata.calls import (
    AlterIsrCall,
    HeartbeatCall,
    HeartbeatResult,
    RegisterBrokerCall,
    ReportedResult,
    ReportReplicasCall,
)
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest

VERSION = 0


class InternalKey(IntEnum):
    """API keys beyond those that Kafka will ever use."""

    HELLO = 30_000
    RAFT = 30_001
    CONTROLLER_CALL = 30_002
    ENVELOPE = 30_003
    PROOF = 30_004


# -- hello -------------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True):
    """`cluster_id` is empty while the caller has none; `internal` is where it can be reached, HOST:PORT.

    `purpose` tells the link that carries control messages from those that carry data. `nonce` comes with the first
    HELLO of a connection, which is to be proven (see `handshake`).
    """

    cluster_id: str
    node_id: int
    incarnation: UUID
    target_node_id: int
    internal: str
    purpose: str = "control"
    nonce: bytes = b""


class HelloReply(msgspec.Struct, frozen=True):
    """Who answers. `nonce` comes with the answer to the first HELLO: the caller must prove itself now.

    `refusal` is empty where the caller is still welcome; otherwise it says what is wrong and what to do.
    """

    cluster_id: str
    node_id: int
    incarnation: UUID
    refusal: str = ""
    nonce: bytes = b""


class Proof(msgspec.Struct, frozen=True):
    mac: bytes


class ProofReply(msgspec.Struct, frozen=True):
    """The answering node's own proof, empty where the caller has not proven itself. `refusal` as in HelloReply."""

    mac: bytes = b""
    refusal: str = ""


# -- calls to the controller -------------------------------------------------------------------------------------------


class CreateTopicCall(msgspec.Struct, frozen=True, tag="create_topic"):
    """A topic that a broker needs for itself or for a client that named it; the fields of `topic_creation.NewTopic`."""

    name: str
    num_partitions: int = -1
    replication_factor: int = -1
    assignments: Mapping[int, Sequence[int]] = {}
    configs: Mapping[str, str | None] = {}
    by_broker: bool = False


class AllocateProducerIdsCall(msgspec.Struct, frozen=True, tag="allocate_producer_ids"):
    broker_id: int
    count: int


Call: TypeAlias = (
    CreateTopicCall | AllocateProducerIdsCall | RegisterBrokerCall | HeartbeatCall | AlterIsrCall | ReportReplicasCall
)


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Nothing to tell but that it is done."""


class TopicCreatedResult(msgspec.Struct, frozen=True, tag="topic_created"):
    topic_id: UUID


class ProducerIdsResult(msgspec.Struct, frozen=True, tag="producer_ids"):
    first: int
    count: int


class RegisteredResult(msgspec.Struct, frozen=True, tag="registered"):
    broker_epoch: int


Result: TypeAlias = Done | TopicCreatedResult | ProducerIdsResult | RegisteredResult | HeartbeatResult | ReportedResult


class CallReply(msgspec.Struct, frozen=True):
    """`version` is the controller's image after the call: what it did is in any image at least as new.

    `is_controller` False: nothing was done, and `controller_id` is who to ask instead, -1 where that is not known. A
    `code` other than 0 is why the controller refused.
    """

    is_controller: bool
    controller_id: int = -1
    version: int = 0
    code: int = 0
    message: str = ""
    result: Result | None = None


# -- envelopes ---------------------------------------------------------------------------------------------------------


class Envelope(msgspec.Struct, frozen=True):
    """A client's request as it came, without its header."""

    api_key: int
    api_version: int
    client_id: str | None
    body: bytes


class EnvelopeReply(msgspec.Struct, frozen=True):
    """The response's body; the other fields as in CallReply. `is_failed`: the body is an error, for the metrics."""

    is_controller: bool
    controller_id: int = -1
    version: int = 0
    is_failed: bool = False
    body: bytes = b""


# -- bytes -------------------------------------------------------------------------------------------------------------

T = TypeVar("T")
Body: TypeAlias = bytes | memoryview

_encoder = msgspec.msgpack.Encoder()
_hello = msgspec.msgpack.Decoder(Hello)
_hello_reply = msgspec.msgpack.Decoder(HelloReply)
_proof = msgspec.msgpack.Decoder(Proof)
_proof_reply = msgspec.msgpack.Decoder(ProofReply)
_call: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_call_reply = msgspec.msgpack.Decoder(CallReply)
_envelope = msgspec.msgpack.Decoder(Envelope)
_envelope_reply = msgspec.msgpack.Decoder(EnvelopeReply)


def encode(body: Any) -> bytes:
    """The bytes of any struct of this module."""
    return _encoder.encode(body)


def decode_hello(body: Body) -> Hello:
    return _decode(_hello, body)


def decode_hello_reply(body: Body) -> HelloReply:
    return _decode(_hello_reply, body)


def decode_proof(body: Body) -> Proof:
    return _decode(_proof, body)


def decode_proof_reply(body: Body) -> ProofReply:
    return _decode(_proof_reply, body)


def decode_call(body: memoryview) -> Call:
    return _decode(_call, body)


def decode_call_reply(body: memoryview) -> CallReply:
    return _decode(_call_reply, body)


def decode_envelope(body: memoryview) -> Envelope:
    return _decode(_envelope, body)


def decode_envelope_reply(body: memoryview) -> EnvelopeReply:
    return _decode(_envelope_reply, body)


def _decode(decoder: msgspec.msgpack.Decoder[T], body: Body) -> T:
    try:
        return decoder.decode(body)
    except ValueError as error:
        raise MalformedRequest(f"a message of another node does not parse: {error}") from None


def refusal_of(reply: CallReply) -> KafkaError | None:
    """The error that the controller answered with, if it did."""
    return KafkaError(ErrorCode(reply.code), reply.message) if reply.code else None
