"""The records of `__consumer_offsets`, in Kafka's own format, so that Kafka tools can read the topic.

All integers are big-endian; a string is int16 length (-1 for null) and UTF-8; bytes are int32 length and data.

    OffsetCommitKey v0, v1      version int16, group string, topic string, partition int32
    OffsetCommitValue v3        version int16, offset int64, leader_epoch int32, metadata string, commit_timestamp int64
        v0, v2                  without leader_epoch
        v1                      as v0, then expire_timestamp int64
    GroupMetadataKey v2         version int16, group string
    GroupMetadataValue v3       version int16, protocol_type string, generation int32, protocol string?, leader string?,
                                current_state_timestamp int64 (from v2), members int32 count, then each:
        member                  member_id string, group_instance_id string? (from v3), client_id string,
                                client_host string, rebalance_timeout int32 (from v1), session_timeout int32,
                                subscription bytes, assignment bytes

    ConsumerProtocolSubscription  any version, in `subscription`: version int16, topics int32 count, then each: string;
                                then user data, owned partitions, generation, rack, which are not read

This module writes OffsetCommitKey v1, OffsetCommitValue v3, GroupMetadataKey v2 and GroupMetadataValue v3, and reads
all of the above. `image_records` has the keys 3-8 and 10-16, of consumer groups (KIP-848) and share groups (KIP-932).
Other keys belong to other kinds of groups and are skipped.
"""

import struct
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from chronik.wire.errors import MalformedRequest
from chronik.wire.primitives import read_uvarint, write_string

TopicPartition: TypeAlias = tuple[str, int]
Record: TypeAlias = tuple[bytes, bytes | None]
"""Key and value of an offsets topic record; a null value is a tombstone."""

_INT8 = struct.Struct(">b")
_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")
_OFFSET_VALUE_HEAD = struct.Struct(">hqi")

OFFSET_KEY_VERSION = 1
OFFSET_VALUE_VERSION = 3
GROUP_KEY_VERSION = 2
GROUP_VALUE_VERSION = 3

CONSUMER_PROTOCOL_TYPE = "consumer"


class UnreadableRecord(ValueError):
    """Bytes that are not a valid offsets topic record, although their key claims so."""


class CommittedOffset(NamedTuple):
    """A group's committed position in one partition."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int


class OffsetKey(NamedTuple):
    group_id: str
    topic: str
    partition: int


class GroupKey(NamedTuple):
    group_id: str


@dataclass(frozen=True, slots=True)
class MemberMetadata:
    """One member as stored in the log."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """One group as stored in the log; without members it is empty."""

    protocol_type: str
    generation: int
    protocol_name: str | None
    leader_id: str | None
    state_since_ms: int
    members: tuple[MemberMetadata, ...]


def group_partition(group_id: str, partition_count: int) -> int:
    """Return the offsets partition that owns a group, by Java's String.hashCode as in every Kafka tool."""
    units = group_id.encode("utf-16-be", "surrogatepass")
    value = 0
    for (unit,) in struct.iter_unpack(">H", units):
        value = (31 * value + unit) & 0xFFFFFFFF
    if value == 0x80000000:
        return 0
    return (0x1_0000_0000 - value if value > 0x80000000 else value) % partition_count


def _string(text: str | None) -> bytes:
    return write_string(text, False)


def _bytes(data: bytes) -> bytes:
    return _INT32.pack(len(data)) + data


def write_offset_key(group_id: str, topic: str, partition: int) -> bytes:
    return _INT16.pack(OFFSET_KEY_VERSION) + _string(group_id) + _string(topic) + _INT32.pack(partition)


def write_offset_value(committed: CommittedOffset) -> bytes:
    head = _OFFSET_VALUE_HEAD.pack(OFFSET_VALUE_VERSION, committed.offset, committed.leader_epoch)
    return head + _string(committed.metadata) + _INT64.pack(committed.commit_ms)


def offset_record(group_id: str, partition: TopicPartition, committed: CommittedOffset | None) -> Record:
    key = write_offset_key(group_id, *partition)
    return key, None if committed is None else write_offset_value(committed)


def write_group_key(group_id: str) -> bytes:
    return _INT16.pack(GROUP_KEY_VERSION) + _string(group_id)


def write_group_value(group: GroupMetadata) -> bytes:
    parts = [
        _INT16.pack(GROUP_VALUE_VERSION),
        _string(group.protocol_type),
        _INT32.pack(group.generation),
        _string(group.protocol_name),
        _string(group.leader_id),
        _INT64.pack(group.state_since_ms),
        _INT32.pack(len(group.members)),
    ]
    for member in group.members:
        parts += (
            _string(member.member_id),
            _string(member.instance_id),
            _string(member.client_id),
            _string(member.client_host),
            _INT32.pack(member.rebalance_timeout_ms),
            _INT32.pack(member.session_timeout_ms),
            _bytes(member.subscription),
            _bytes(member.assignment),
        )
    return b"".join(parts)


class RecordReader:
    """A read position in the bytes of one key or value."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def int8(self) -> int:
        return self._number(_INT8)

    def int16(self) -> int:
        return self._number(_INT16)

    def int32(self) -> int:
        return self._number(_INT32)

    def int64(self) -> int:
        return self._number(_INT64)

    def _number(self, layout: struct.Struct) -> int:
        try:
            (value,) = layout.unpack_from(self.data, self.at)
        except struct.error as error:
            raise UnreadableRecord(str(error)) from error
        self.at += layout.size
        return int(value)

    def nullable_string(self) -> str | None:
        length = self.int16()
        if length < 0:
            return None
        return self._text(length)

    def string(self) -> str:
        text = self.nullable_string()
        if text is None:
            raise UnreadableRecord("a null string where one is required")
        return text

    def data_bytes(self) -> bytes:
        length = self.int32()
        return self._take(length) if length > 0 else b""

    # Flexible encoding: lengths are varints, one higher than the length; 0 is null.

    def uvarint(self) -> int:
        try:
            value, self.at = read_uvarint(self.data, self.at)
        except (IndexError, MalformedRequest) as error:
            raise UnreadableRecord(str(error)) from error
        return value

    def compact_nullable_string(self) -> str | None:
        length = self.uvarint() - 1
        return None if length < 0 else self._text(length)

    def compact_string(self) -> str:
        return self._text(self.uvarint() - 1)

    def compact_bytes(self) -> bytes:
        return self._take(self.uvarint() - 1)

    def compact_count(self) -> int:
        """Return the number of elements of an array, of at least one byte each; a null array has none."""
        count = self.uvarint() - 1
        if count > len(self.data) - self.at:
            raise UnreadableRecord(f"{count} elements at {self.at} of {len(self.data)}")
        return max(count, 0)

    def tags(self) -> dict[int, bytes]:
        """Return the tagged fields at the end of a structure; the caller ignores those that it does not know."""
        return {self.uvarint(): self._take(self.uvarint()) for _ in range(self.compact_tag_count())}

    def compact_tag_count(self) -> int:
        count = self.uvarint()
        if count > len(self.data) - self.at:
            raise UnreadableRecord(f"{count} tagged fields at {self.at} of {len(self.data)}")
        return count

    def _text(self, length: int) -> str:
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise UnreadableRecord(str(error)) from error

    def take_16(self) -> bytes:
        return self._take(16)

    def _take(self, length: int) -> bytes:
        end = self.at + length
        if length < 0 or end > len(self.data):
            raise UnreadableRecord(f"{length} bytes wanted at {self.at} of {len(self.data)}")
        taken = self.data[self.at : end]
        self.at = end
        return taken


def read_key(key: bytes) -> OffsetKey | GroupKey | None:
    """Parse a record key; None for a kind of record that this coordinator does not use."""
    reader = RecordReader(key)
    version = reader.int16()
    if version in (0, OFFSET_KEY_VERSION):
        return OffsetKey(reader.string(), reader.string(), reader.int32())
    if version == GROUP_KEY_VERSION:
        return GroupKey(reader.string())
    return None


def read_offset_value(value: bytes) -> CommittedOffset:
    reader = RecordReader(value)
    version = reader.int16()
    if not 0 <= version <= OFFSET_VALUE_VERSION:
        raise UnreadableRecord(f"offset value of version {version}")
    offset = reader.int64()
    leader_epoch = reader.int32() if version >= 3 else -1
    return CommittedOffset(offset, leader_epoch, reader.string(), reader.int64())


def read_group_value(value: bytes) -> GroupMetadata:
    reader = RecordReader(value)
    version = reader.int16()
    if not 0 <= version <= GROUP_VALUE_VERSION:
        raise UnreadableRecord(f"group value of version {version}")
    protocol_type = reader.string()
    generation = reader.int32()
    protocol_name = reader.nullable_string()
    leader_id = reader.nullable_string()
    state_since_ms = reader.int64() if version >= 2 else -1
    members = tuple([_read_member(reader, version) for _ in range(reader.int32())])
    return GroupMetadata(protocol_type, generation, protocol_name, leader_id, state_since_ms, members)


def _read_member(reader: RecordReader, version: int) -> MemberMetadata:
    member = MemberMetadata(
        member_id=reader.string(),
        instance_id=reader.nullable_string() if version >= 3 else None,
        client_id=reader.string(),
        client_host=reader.string(),
        rebalance_timeout_ms=reader.int32() if version >= 1 else -1,
        session_timeout_ms=reader.int32(),
        subscription=reader.data_bytes(),
        assignment=reader.data_bytes(),
    )
    return (
        member if member.rebalance_timeout_ms >= 0 else replace(member, rebalance_timeout_ms=member.session_timeout_ms)
    )


def subscribed_topics(subscription: bytes) -> frozenset[str] | None:
    """Return the topics in the subscription of a member of a "consumer" group, or None if the bytes are not one.

    The coordinator parses no more of what assignors exchange. It needs the topics, because it neither deletes nor
    expires the offsets of topics that a group still uses.
    """
    reader = RecordReader(subscription)
    try:
        reader.int16()
        count = reader.int32()
        return frozenset([reader.string() for _ in range(count)]) if count >= 0 else None
    except UnreadableRecord:
        return None
