"""Requests to spoil: a valid one of every API and version that the node answers, and a seeded way to damage them.

The valid ones are made from the message layouts themselves, so an API that is added is fuzzed without a line here.
Some damage makes a request that is valid and merely expensive (create 9,000 partitions, wait five minutes); those say
nothing about bad input and are left out by `is_tame`.
"""

from __future__ import annotations

import random
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from crc32c import crc32c
from tests.node.support_wire import batch

from chronik.wire import frames, messages
from chronik.wire.api import ApiKey, known_versions
from chronik.wire.errors import MalformedRequest
from chronik.wire.fetch import FetchPartition, FetchRequest, FetchTopic, read_fetch_request, write_fetch_request
from chronik.wire.produce import ProduceRequest, ProduceTopic, write_produce_request
from chronik.wire.schema import Field, Structure, load

FUZZED_TOPIC = "fuzzed"
CORRELATION_ID = 0x0BADF00D
PARTITIONS_TAME_MAX = 3
WAIT_TAME = timedelta(seconds=1)
BATCH_HEADER_BYTES = 61
BATCH_FIELDS = ((21, ">h"), (23, ">i"), (27, ">q"), (35, ">q"), (43, ">q"), (51, ">h"), (53, ">i"), (57, ">i"))
"""Everything in a batch's header that its CRC covers."""
EXTREMES = (0, 1 << 63 - 1, -1, -(1 << 63), (1 << 63) - 1, 1 << 32, 5 << 60, 1_700_000_000_000 << 16)
INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)

# What a field must say so that a request reaches the code behind its checks; others get a small value of their type.
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
# A name twice in one request is refused as such, before anything else is looked at.
_UNREPEATED = (ApiKey.CREATE_TOPICS, ApiKey.CREATE_PARTITIONS, ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS)


@dataclass(frozen=True, slots=True)
class Sample:
    """A valid request, its frame's size included."""

    key: int
    version: int
    frame: bytes

    def __str__(self) -> str:
        return f"{ApiKey(self.key).name} v{self.version}"


def samples(apis: Mapping[int, tuple[int, int]], topic_id: uuid.UUID) -> list[Sample]:
    """Valid requests in every version of `apis` (key: lowest and highest version answered)."""
    found: list[Sample] = []
    for key, (lowest, highest) in apis.items():
        for version in range(max(lowest, known_versions(key)[0]), min(highest, known_versions(key)[-1]) + 1):
            bodies: list[bytes]
            if key == ApiKey.PRODUCE:
                bodies = [_produce(version, topic_id, codec) for codec in range(5)]
            elif key == ApiKey.FETCH:
                bodies = [_fetch(version, topic_id, session) for session in ((0, -1), (0, 0))]
            else:
                values = _filled(key, load(key, version, "request"), topic_id)
                bodies = [messages.write_request(key, version, values)]
            found += [
                Sample(key, version, frames.write_request(key, version, CORRELATION_ID, "fuzz", body))
                for body in bodies
            ]
    return found


def mutant(random_: random.Random, sample: Sample) -> bytes:
    """The sample with one to four kinds of damage. What it claims as its size is usually kept true."""
    data = bytearray(sample.frame[4:])
    for _ in range(random_.choice((1, 1, 1, 2, 2, 3, 4))):
        _damage(random_, data)
    size = len(data)
    if random_.random() < 0.03:
        size = random_.choice((0, 1, 7, -1, -(2**31), 2**31 - 1, size + 1, size - 1, size + 1000, 101 * 1024 * 1024))
    return struct.pack(">i", size) + bytes(data)


def signed_mutant(random_: random.Random, good: bytes) -> bytes:
    """A batch that is damaged behind its CRC and signed anew, so that only its content can give it away."""
    data = bytearray(good)
    for _ in range(random_.choice((1, 1, 2, 3))):
        at, layout = random_.choice(BATCH_FIELDS)
        kind = random_.randrange(4)
        if kind == 0:
            width = struct.calcsize(layout)
            value = random_.choice(EXTREMES) >> (64 - 8 * width)
            struct.pack_into(layout, data, at, value)
        elif kind == 1 and len(data) > BATCH_HEADER_BYTES:
            data[random_.randrange(BATCH_HEADER_BYTES, len(data))] = random_.randrange(256)
        elif kind == 2 and len(data) > BATCH_HEADER_BYTES:
            del data[random_.randrange(BATCH_HEADER_BYTES, len(data)) :]
        else:
            place = random_.randrange(BATCH_HEADER_BYTES, len(data) + 1)
            data[place:place] = random_.randbytes(random_.randrange(1, 40))
    struct.pack_into(">i", data, 8, len(data) - 12)
    struct.pack_into(">I", data, 17, crc32c(bytes(data[21:])))
    return bytes(data)


def is_tame(frame: bytes) -> bool:
    """Whether the frame, should it be valid, asks for little work and an answer without a long wait."""
    data = memoryview(frame)[4:]
    if struct.unpack_from(">i", frame)[0] != len(data):
        return True
    try:
        header = frames.read_request_header(data)
        if header.api_key == ApiKey.FETCH:
            fetch = read_fetch_request(header.api_version, data, header.body_at)
            return fetch.max_wait_ms <= WAIT_TAME / timedelta(milliseconds=1) or fetch.min_bytes <= 0
        message = messages.read_request(header.api_key, header.api_version, bytes(data[header.body_at :]))
    except (MalformedRequest, ValueError, KeyError):
        return True
    if header.api_key == ApiKey.CREATE_TOPICS:
        return all(max(topic.num_partitions, len(topic.assignments)) <= PARTITIONS_TAME_MAX for topic in message.topics)
    if header.api_key == ApiKey.CREATE_PARTITIONS:
        return all(topic.count <= PARTITIONS_TAME_MAX for topic in message.topics)
    if header.api_key == ApiKey.JOIN_GROUP:
        # A second member of a group waits for the first one, which never comes back.
        return bool(message.session_timeout <= timedelta(seconds=10))
    return True


def every_place(sample: Sample, bad: bytes) -> Iterator[bytes]:
    """The sample with `bad` over its bytes at each place of its body in turn; sizes stay true."""
    data = sample.frame[4:]
    for at in range(14, len(data)):
        spoilt = data[:at] + bad + data[at + len(bad) :]
        yield struct.pack(">i", len(spoilt)) + spoilt


def _damage(random_: random.Random, data: bytearray) -> None:
    # The first eight bytes (key, version, correlation id) are hit less often: most of those die at the door.
    first = 0 if random_.random() < 0.1 else min(8, len(data) - 1)
    at = random_.randrange(first, len(data)) if len(data) > first else 0
    kind = random_.randrange(8)
    if kind == 0:
        data[at] ^= 1 << random_.randrange(8)
    elif kind == 1:
        data[at] = random_.randrange(256)
    elif kind == 2:
        width = random_.choice((1, 2, 4))
        value = random_.choice(INTERESTING) & ((1 << 8 * width) - 1)
        data[at : at + width] = value.to_bytes(width, "big")
    elif kind == 3:
        del data[at : at + random_.randrange(1, 9)]
    elif kind == 4:
        data[at:at] = random_.randbytes(random_.randrange(1, 9))
    elif kind == 5:
        del data[at:]
    elif kind == 6:
        # The largest counts that varints can say, in the place of a small one.
        data[at : at + 1] = random_.choice((b"\xff\xff\xff\xff\x07", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x08"))
    else:
        end = at + random_.randrange(1, 33)
        data[at:at] = data[at:end]
    if not data:
        data.append(0)


def _produce(version: int, topic_id: uuid.UUID, codec: int) -> bytes:
    records = memoryview(batch(b"value" * 20, b"another", codec=codec if version >= 7 or codec != 4 else 0))
    by_id = version >= 13
    topic = ProduceTopic(None if by_id else FUZZED_TOPIC, topic_id if by_id else None, [(0, records)])
    return write_produce_request(version, ProduceRequest(None, 1, 1000, [topic]))


def _fetch(version: int, topic_id: uuid.UUID, session: tuple[int, int]) -> bytes:
    by_id = version >= 13
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
            value = _primitive(field, structure.entity.__name__, topic_id)
            values[field.name] = [value] if field.is_array else value
    return values


def _primitive(field: Field, structure: str, topic_id: uuid.UUID) -> Any:
    if field.name == "name":
        return _name(structure)
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
