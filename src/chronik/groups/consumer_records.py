"""The records of consumer groups (KIP-848) in `__consumer_offsets`, in Kafka's own format.

`image_records` has the keys, the encoding, and the kinds that share groups have too.

    4  partition metadata   topics: id uuid, name string, count int32, partitions: index int32, racks string array
    5  member metadata      instance_id string?, rack string?, client_id string, client_host string,
                            topics string array, regex string?, rebalance_timeout int32, assignor string?; tag 0, if
                            not null: int8 1, session_timeout int32, protocols: name string, metadata bytes
    8  current assignment   epoch int32, previous_epoch int32, state int8, assigned partitions, revoking partitions
    16 regular expression   topics string array, metadata version int64, timestamp int64
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple
from uuid import UUID

from chronik.groups.consumer_member import ClassicMetadata, CurrentAssignment, MemberMetadata, MemberState
from chronik.groups.image_records import (
    INT32,
    NO_TAGS,
    VERSION,
    Kind,
    image_key,
    read_assignment,
    read_strings,
    read_value,
    write_array,
    write_partitions,
    write_strings,
)
from chronik.groups.records import Record, RecordReader, UnreadableRecord
from chronik.groups.topics import Topic
from chronik.wire.primitives import uvarint, write_string

_EPOCHS = struct.Struct(">iib")
_INT64S = struct.Struct(">qq")


class ResolvedExpression(NamedTuple):
    """The topics that an expression selects, sorted, as of a version of the metadata."""

    topics: tuple[str, ...]
    version: int
    wall_ms: int


# -- values ------------------------------------------------------------------------------------------------------------


def partitions_record(group_id: str, topics: Iterable[Topic]) -> Record:
    entries = [
        topic.id.bytes
        + write_string(topic.name, True)
        + INT32.pack(topic.partition_count)
        + write_array(
            [
                INT32.pack(index) + write_strings(racks) + NO_TAGS
                for index, racks in enumerate(topic.racks)
                if any(topic.racks)
            ]
        )
        + NO_TAGS
        for topic in topics
    ]
    return image_key(Kind.PARTITIONS, group_id), VERSION + write_array(entries) + NO_TAGS


def member_record(group_id: str, member_id: str, member: MemberMetadata) -> Record:
    parts = [
        VERSION,
        write_string(member.instance_id, True),
        write_string(member.rack, True),
        write_string(member.client_id, True),
        write_string(member.client_host, True),
        write_strings(member.topics),
        write_string(member.expression or None, True),
        INT32.pack(member.rebalance_timeout_ms),
        write_string(member.assignor, True),
        NO_TAGS if member.classic is None else _classic_tag(member.classic),
    ]
    return image_key(Kind.MEMBER, group_id, member_id), b"".join(parts)


def _classic_tag(classic: ClassicMetadata) -> bytes:
    protocols = [
        write_string(name, True) + uvarint(len(metadata) + 1) + metadata + NO_TAGS
        for name, metadata in classic.protocols
    ]
    field = b"\x01" + INT32.pack(classic.session_timeout_ms) + write_array(protocols) + NO_TAGS
    return b"\x01\x00" + uvarint(len(field)) + field


def current_record(group_id: str, member_id: str, current: CurrentAssignment) -> Record:
    head = _EPOCHS.pack(current.epoch, current.previous_epoch, current.state)
    value = VERSION + head + write_partitions(current.assigned) + write_partitions(current.revoking) + NO_TAGS
    return image_key(Kind.CURRENT_MEMBER, group_id, member_id), value


def expression_record(group_id: str, expression: str, resolved: ResolvedExpression) -> Record:
    value = VERSION + write_strings(resolved.topics) + _INT64S.pack(resolved.version, resolved.wall_ms) + NO_TAGS
    return image_key(Kind.EXPRESSION, group_id, expression), value


# -- reading -----------------------------------------------------------------------------------------------------------


def read_partitions(value: bytes) -> list[Topic]:
    reader = read_value(value)
    topics = []
    for _ in range(reader.compact_count()):
        topic_id, name, count = UUID(bytes=reader.take_16()), reader.compact_string(), reader.int32()
        racks: dict[int, tuple[str, ...]] = {}
        for _ in range(reader.compact_count()):
            index = reader.int32()
            racks[index] = read_strings(reader)
            reader.tags()
        reader.tags()
        topics.append(Topic(name, topic_id, tuple(racks.get(index, ()) for index in range(count))))
    return topics


def read_member(value: bytes) -> MemberMetadata:
    reader = read_value(value)
    instance_id, rack = reader.compact_nullable_string(), reader.compact_nullable_string()
    client_id, client_host = reader.compact_string(), reader.compact_string()
    topics, expression = read_strings(reader), reader.compact_nullable_string() or ""
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


def read_current(value: bytes) -> CurrentAssignment:
    reader = read_value(value)
    epoch, previous_epoch, state = reader.int32(), reader.int32(), reader.int8()
    try:
        return CurrentAssignment(
            epoch, previous_epoch, MemberState(state), read_assignment(reader), read_assignment(reader)
        )
    except ValueError as error:
        raise UnreadableRecord(f"member state {state}") from error


def read_expression(value: bytes) -> ResolvedExpression:
    reader = read_value(value)
    return ResolvedExpression(read_strings(reader), reader.int64(), reader.int64())
