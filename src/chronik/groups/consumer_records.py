"""The records of consumer groups (KIP-848) in `__consumer_offsets`, in Kafka's own format.

A key is not flexible: version int16 (which is its kind), group string, and for a member or an expression a string. A
value is int16 version 0, then these fields in flexible encoding: strings and arrays are compact, and each structure
ends with tagged fields. `partitions` is an array of: topic_id uuid, partitions int32 array.

    3  group metadata       epoch int32
    4  partition metadata   topics: id uuid, name string, count int32, partitions: index int32, racks string array
    5  member metadata      instance_id string?, rack string?, client_id string, client_host string,
                            topics string array, regex string?, rebalance_timeout int32, assignor string?; tag 0, if
                            not null: int8 1, session_timeout int32, protocols: name string, metadata bytes
    6  target metadata      assignment_epoch int32
    7  target of a member   partitions
    8  current assignment   epoch int32, previous_epoch int32, state int8, assigned partitions, revoking partitions
    16 regular expression   topics string array, metadata version int64, timestamp int64
"""

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple
from uuid import UUID

from chronik.groups.consumer_member import ClassicMetadata, CurrentAssignment, MemberMetadata, MemberState
from chronik.groups.records import Record, RecordReader, UnreadableRecord
from chronik.groups.topics import Assignment, Topic, by_topic
from chronik.wire.primitives import uvarint, write_string

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_EPOCHS = struct.Struct(">iib")
_INT64S = struct.Struct(">qq")

_VERSION = b"\x00\x00"
_NO_TAGS = b"\x00"


class Kind(IntEnum):
    """The version of a key, which is the kind of its record."""

    GROUP = 3
    PARTITIONS = 4
    MEMBER = 5
    TARGET = 6
    TARGET_MEMBER = 7
    CURRENT_MEMBER = 8
    EXPRESSION = 16


KINDS = frozenset(Kind)
KINDS_WITH_DETAIL = frozenset({Kind.MEMBER, Kind.TARGET_MEMBER, Kind.CURRENT_MEMBER, Kind.EXPRESSION})


class ConsumerKey(NamedTuple):
    """`detail` is the member id or the expression; empty for the records of the group itself."""

    kind: Kind
    group_id: str
    detail: str = ""


class ResolvedExpression(NamedTuple):
    """The topics that an expression selects, sorted, as of a version of the metadata."""

    topics: tuple[str, ...]
    version: int
    wall_ms: int


def read_consumer_key(kind: Kind, reader: RecordReader) -> ConsumerKey:
    group_id = reader.string()
    return ConsumerKey(kind, group_id, reader.string() if kind in KINDS_WITH_DETAIL else "")


def _key(kind: Kind, group_id: str, detail: str = "") -> bytes:
    key = _INT16.pack(kind) + write_string(group_id, False)
    return key + write_string(detail, False) if kind in KINDS_WITH_DETAIL else key


def tombstone(kind: Kind, group_id: str, detail: str = "") -> Record:
    return _key(kind, group_id, detail), None


# -- values ------------------------------------------------------------------------------------------------------------


def epoch_record(kind: Kind, group_id: str, epoch: int) -> Record:
    """Return the record of the group's epoch, or of the epoch of its target assignment."""
    return _key(kind, group_id), _VERSION + _INT32.pack(epoch) + _NO_TAGS


def partitions_record(group_id: str, topics: Iterable[Topic]) -> Record:
    entries = [
        topic.id.bytes
        + write_string(topic.name, True)
        + _INT32.pack(topic.partition_count)
        + _array(
            [
                _INT32.pack(index) + _strings(racks) + _NO_TAGS
                for index, racks in enumerate(topic.racks)
                if any(topic.racks)
            ]
        )
        + _NO_TAGS
        for topic in topics
    ]
    return _key(Kind.PARTITIONS, group_id), _VERSION + _array(entries) + _NO_TAGS


def member_record(group_id: str, member_id: str, member: MemberMetadata) -> Record:
    parts = [
        _VERSION,
        write_string(member.instance_id, True),
        write_string(member.rack, True),
        write_string(member.client_id, True),
        write_string(member.client_host, True),
        _strings(member.topics),
        write_string(member.expression or None, True),
        _INT32.pack(member.rebalance_timeout_ms),
        write_string(member.assignor, True),
        _NO_TAGS if member.classic is None else _classic_tag(member.classic),
    ]
    return _key(Kind.MEMBER, group_id, member_id), b"".join(parts)


def _classic_tag(classic: ClassicMetadata) -> bytes:
    protocols = [
        write_string(name, True) + uvarint(len(metadata) + 1) + metadata + _NO_TAGS
        for name, metadata in classic.protocols
    ]
    field = b"\x01" + _INT32.pack(classic.session_timeout_ms) + _array(protocols) + _NO_TAGS
    return b"\x01\x00" + uvarint(len(field)) + field


def target_record(group_id: str, member_id: str, target: Assignment) -> Record:
    return _key(Kind.TARGET_MEMBER, group_id, member_id), _VERSION + _partitions(target) + _NO_TAGS


def current_record(group_id: str, member_id: str, current: CurrentAssignment) -> Record:
    head = _EPOCHS.pack(current.epoch, current.previous_epoch, current.state)
    value = _VERSION + head + _partitions(current.assigned) + _partitions(current.revoking) + _NO_TAGS
    return _key(Kind.CURRENT_MEMBER, group_id, member_id), value


def expression_record(group_id: str, expression: str, resolved: ResolvedExpression) -> Record:
    value = _VERSION + _strings(resolved.topics) + _INT64S.pack(resolved.version, resolved.wall_ms) + _NO_TAGS
    return _key(Kind.EXPRESSION, group_id, expression), value


def _array(elements: Sequence[bytes]) -> bytes:
    return uvarint(len(elements) + 1) + b"".join(elements)


def _strings(texts: Sequence[str]) -> bytes:
    return _array([write_string(text, True) for text in texts])


def _partitions(assignment: Assignment) -> bytes:
    return _array(
        [
            topic_id.bytes + _array([_INT32.pack(index) for index in indexes]) + _NO_TAGS
            for topic_id, indexes in by_topic(assignment).items()
        ]
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def _value(value: bytes) -> RecordReader:
    reader = RecordReader(value)
    version = reader.int16()
    if version != 0:
        raise UnreadableRecord(f"value of version {version}")
    return reader


def read_epoch(value: bytes) -> int:
    return _value(value).int32()


def read_partitions(value: bytes) -> list[Topic]:
    reader = _value(value)
    topics = []
    for _ in range(reader.compact_count()):
        topic_id, name, count = UUID(bytes=reader.take_16()), reader.compact_string(), reader.int32()
        racks: dict[int, tuple[str, ...]] = {}
        for _ in range(reader.compact_count()):
            index = reader.int32()
            racks[index] = _read_strings(reader)
            reader.tags()
        reader.tags()
        topics.append(Topic(name, topic_id, tuple(racks.get(index, ()) for index in range(count))))
    return topics


def read_member(value: bytes) -> MemberMetadata:
    reader = _value(value)
    instance_id, rack = reader.compact_nullable_string(), reader.compact_nullable_string()
    client_id, client_host = reader.compact_string(), reader.compact_string()
    topics, expression = _read_strings(reader), reader.compact_nullable_string() or ""
    rebalance_timeout_ms, assignor = reader.int32(), reader.compact_nullable_string()
    field = reader.tags().get(0)
    classic = _read_classic(RecordReader(field)) if field is not None else None
    return MemberMetadata(
        instance_id, rack, client_id, client_host, topics, expression, rebalance_timeout_ms, assignor, classic
    )


def _read_classic(reader: RecordReader) -> ClassicMetadata | None:
    if reader.int8() < 0:
        return None
    session_timeout_ms = reader.int32()
    protocols = []
    for _ in range(reader.compact_count()):
        protocols.append((reader.compact_string(), reader.compact_bytes()))
        reader.tags()
    return ClassicMetadata(session_timeout_ms, tuple(protocols))


def read_target(value: bytes) -> Assignment:
    return _read_assignment(_value(value))


def read_current(value: bytes) -> CurrentAssignment:
    reader = _value(value)
    epoch, previous_epoch, state = reader.int32(), reader.int32(), reader.int8()
    try:
        return CurrentAssignment(
            epoch, previous_epoch, MemberState(state), _read_assignment(reader), _read_assignment(reader)
        )
    except ValueError as error:
        raise UnreadableRecord(f"member state {state}") from error


def read_expression(value: bytes) -> ResolvedExpression:
    reader = _value(value)
    return ResolvedExpression(_read_strings(reader), reader.int64(), reader.int64())


def _read_strings(reader: RecordReader) -> tuple[str, ...]:
    return tuple([reader.compact_string() for _ in range(reader.compact_count())])


def _read_assignment(reader: RecordReader) -> Assignment:
    partitions = []
    for _ in range(reader.compact_count()):
        topic_id = UUID(bytes=reader.take_16())
        partitions += [(topic_id, reader.int32()) for _ in range(reader.compact_count())]
        reader.tags()
    return frozenset(partitions)
