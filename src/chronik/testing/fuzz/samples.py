"""Valid requests: one of every API and version that a node answers, built from the message layouts themselves.

A new API is fuzzed without a change to this module.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chronik.metadata.calls import (
    AlterIsrCall,
    HeartbeatCall,
    IsrMember,
    RegisterBrokerCall,
    ReplicaReport,
    ReportReplicasCall,
)
from chronik.node.membership.internal_api import (
    AllocateProducerIdsCall,
    Envelope,
    Hello,
    InternalKey,
    Proof,
    encode,
)
from chronik.node.membership.peer_handshake import NONCE_BYTES
from chronik.node.membership.topic_plans import NewTopic
from chronik.raft import messages as raft
from chronik.raft.membership import Member, Membership
from chronik.raft.store import Entry, EntryKind
from chronik.testing.sim.host import EPOCH_MS
from chronik.wire import frames, messages
from chronik.wire.api import ApiKey, known_versions
from chronik.wire.batch import encode_batch
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, write_fetch_request
from chronik.wire.produce import ProduceRequest, ProduceTopic, write_produce_request
from chronik.wire.schema import Field, Structure, load

FUZZED_TOPIC = "fuzzed"
CORRELATION_ID = 0x0BADF00D
CLIENT_ID = "fuzz"
TIMESTAMP_MS = EPOCH_MS
CODECS = 5
ZSTD = 4
ZSTD_FROM_VERSION = 7
IDS_FROM_VERSION = 13
PEER_ID = 2
PEER_STORE = uuid.UUID(int=2)
PEER_ADDRESS = "10.0.0.2:5092"
PEER_NONCE = bytes(NONCE_BYTES)

# Values that let a request pass its checks; all other fields get a small value of their type.
_VALUES: Mapping[str, Any] = {
    "topic": FUZZED_TOPIC,
    "topic_names": "no-such-topic",
    "resource_name": FUZZED_TOPIC,
    "resource_type": 2,
    "configuration_keys": "retention.ms",
    "value": "1000",
    "partition_index": 0,
    "partition_indexes": 0,
    "partitions": 0,
    "partition": 0,
    "count": 2,
    "offset": 0,
    "timestamp": -1,
    "replica_id": -1,
    "current_leader_epoch": -1,
    "generation_id": -1,
    "generation_id_or_member_epoch": -1,
    "producer_id": -1,
    "producer_epoch": -1,
    "key_type": 0,
    "config_operation": 0,
    "entity_type": "user",
    "match_type": 0,
    "member_id": "",
    "protocol_type": "consumer",
    "session_timeout": 6000,
    "rebalance_timeout": 6000,
    "timeout": 100,
    "validate_only": True,
    "allow_auto_topic_creation": False,
}
_NULL = ("transactional_id", "group_instance_id")
_EMPTY = ((ApiKey.CREATE_TOPICS, "assignments"), (ApiKey.CREATE_PARTITIONS, "assignments"))
# The node rejects a request with a duplicate name before any other check.
_UNREPEATED = (
    ApiKey.CREATE_TOPICS,
    ApiKey.CREATE_PARTITIONS,
    ApiKey.ALTER_CONFIGS,
    ApiKey.INCREMENTAL_ALTER_CONFIGS,
    ApiKey.DESCRIBE_CLIENT_QUOTAS,
    ApiKey.ALTER_CLIENT_QUOTAS,
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A valid request, including the size of its frame."""

    key: int
    version: int
    frame: bytes

    def __str__(self) -> str:
        names = InternalKey if self.key >= InternalKey.HELLO else ApiKey
        return f"{names(self.key).name} v{self.version}"


def samples(apis: Mapping[int, tuple[int, int]], topic_id: uuid.UUID) -> list[Sample]:
    """Return valid requests in every version of `apis` (key: lowest and highest version answered)."""
    found: list[Sample] = []
    for key, (lowest, highest) in apis.items():
        for version in range(max(lowest, known_versions(key)[0]), min(highest, known_versions(key)[-1]) + 1):
            found += [framed(key, version, body) for body in _bodies(key, version, topic_id)]
    return found


def internal_samples(on_controller: Iterable[int], highest: Mapping[int, int], topic_id: uuid.UUID) -> list[Sample]:
    """Return requests between nodes: every kind of call and Raft message, and each API forwarded to the controller."""
    calls: Sequence[Any] = (
        NewTopic("made-by-peer", 1, 1),
        AllocateProducerIdsCall(PEER_ID, 1000),
        RegisterBrokerCall(PEER_ID, PEER_STORE, "10.0.0.2", 9092, PEER_ADDRESS),
        HeartbeatCall(PEER_ID, PEER_STORE, 1, 1),
        AlterIsrCall(PEER_ID, topic_id, 0, 0, 0, (IsrMember(1),)),
        ReportReplicasCall(PEER_ID, 1, (ReplicaReport(topic_id, 0, 5, 0, "certain", "its log is missing"),)),
    )
    envelopes = [
        Envelope(key, highest[key], CLIENT_ID, _bodies(key, highest[key], topic_id)[0]) for key in on_controller
    ]
    member = Member(PEER_ID, PEER_STORE, is_voter=True, address=PEER_ADDRESS)
    bodies: Sequence[raft.Body] = (
        raft.VoteRequest(1, 1),
        raft.VoteReply(True),
        raft.Append(1, 1, (Entry(2, 1, EntryKind.COMMAND, b"data"),), 1),
        raft.AppendReply(1),
        raft.Heartbeat(1, 1),
        raft.HeartbeatReply(1),
        raft.SnapshotChunk(1, 1, Membership((member,)), 4, 0, b"data"),
        raft.SnapshotReply(1, 1),
        raft.TimeoutNow(),
        raft.Hello(PEER_ID, PEER_STORE, PEER_ADDRESS),
        raft.HelloReply(PEER_ADDRESS),
    )
    return [
        framed(InternalKey.HELLO, 0, encode(hello())),
        framed(InternalKey.HELLO, 0, encode(hello(PEER_NONCE))),
        framed(InternalKey.PROOF, 0, encode(Proof(PEER_NONCE))),
        *(framed(InternalKey.CONTROLLER_CALL, 0, encode(call)) for call in calls),
        *(framed(InternalKey.ENVELOPE, 0, encode(envelope)) for envelope in envelopes),
        *(
            framed(InternalKey.RAFT, 0, raft.encode_message(raft.Message(PEER_ID, PEER_STORE, 1, None, 1, body)))
            for body in bodies
        ),
    ]


def hello(nonce: bytes = b"") -> Hello:
    """Return a peer's HELLO; only the first one has a nonce. The peer belongs to no cluster yet."""
    return Hello("", PEER_ID, PEER_STORE, 1, PEER_ADDRESS, nonce=nonce)


def framed(key: int, version: int, body: bytes) -> Sample:
    return Sample(key, version, frames.write_request(key, version, CORRELATION_ID, CLIENT_ID, body))


def produce_body(
    version: int, topic_id: uuid.UUID, records: bytes | None, *, acks: int = 1, partition: int = 0
) -> bytes:
    by_id = version >= IDS_FROM_VERSION
    view = None if records is None else memoryview(records)
    topic = ProduceTopic(None if by_id else FUZZED_TOPIC, topic_id if by_id else None, [(partition, view)])
    return write_produce_request(version, ProduceRequest(None, acks, 1000, [topic]))


def valid_batch(codec: int = 0, **more: Any) -> bytes:
    values = (b"value" * 20, b"another")
    return encode_batch([(b"k", value, (), TIMESTAMP_MS + at) for at, value in enumerate(values)], codec=codec, **more)


def _bodies(key: int, version: int, topic_id: uuid.UUID) -> list[bytes]:
    if key == ApiKey.PRODUCE:
        codecs = range(CODECS if version >= ZSTD_FROM_VERSION else ZSTD)
        return [produce_body(version, topic_id, valid_batch(codec)) for codec in codecs]
    if key == ApiKey.FETCH:
        return [_fetch(version, topic_id, session) for session in ((0, -1), (0, 0))]
    return [messages.write_request(key, version, _filled(key, load(key, version, "request"), topic_id))]


def _fetch(version: int, topic_id: uuid.UUID, session: tuple[int, int]) -> bytes:
    by_id = version >= IDS_FROM_VERSION
    topic = FetchTopic(
        None if by_id else FUZZED_TOPIC, topic_id if by_id else None, [FetchPartition(0, -1, 0, -1, -1, 1 << 20)]
    )
    request = FetchRequest(max_wait_ms=1, min_bytes=1, session_id=session[0], session_epoch=session[1], topics=[topic])
    return write_fetch_request(version, request)


def _filled(key: int, structure: Structure, topic_id: uuid.UUID) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in structure.fields:
        if (key, field.name) in _EMPTY:
            values[field.name] = []
        elif field.nested:
            nested = _filled(key, field.nested, topic_id)
            values[field.name] = [nested] * (1 if key in _UNREPEATED else 2) if field.is_array else nested
        else:
            value = usual_value(field, structure.entity.__name__, topic_id)
            values[field.name] = [value] if field.is_array else value
    return values


def usual_value(field: Field, structure: str, topic_id: uuid.UUID) -> Any:
    """Return what a sane client might send in this field."""
    if field.name == "name":
        return _name(structure)
    if structure == "OpData" and field.name == "key":
        # No request takes time on a simulated node: a mutant that sets this quota cannot throttle the fuzzer.
        return "request_percentage"
    if field.kind == "float64":
        return 1000.0
    if field.name in _VALUES:
        return _VALUES[field.name]
    if field.is_nullable and field.name in _NULL:
        return None
    by_kind = {"string": "text", "bytes": b"bytes", "records": b"bytes", "uuid": topic_id, "bool": False}
    return by_kind.get(field.kind, 1)


def _name(structure: str) -> str:
    if "Config" in structure:
        return "retention.ms"
    if "Protocol" in structure:
        return "range"
    return {"CreatableTopic": "new-topic", "DeleteTopicState": "no-such-topic"}.get(structure, FUZZED_TOPIC)
