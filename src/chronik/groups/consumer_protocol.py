"""What classic consumers exchange through the group: subscriptions and assignments of protocol type "consumer".

Integers are big-endian; a string is int16 length and UTF-8; bytes are int32 length (-1 for null) and data.

    Subscription   version int16, topics: int32 count of string, user_data bytes, from v1 owned: int32 count of
                   (topic string, partitions: int32 count of int32), from v2 generation int32, from v3 rack string?
    Assignment     version int16, int32 count of (topic string, partitions: int32 count of int32), user_data bytes
"""

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from chronik.groups.records import RecordReader, TopicPartition, UnreadableRecord
from chronik.wire.primitives import write_string

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_NULL_BYTES = b"\xff\xff\xff\xff"

HIGHEST_VERSION = 3


class Subscription(NamedTuple):
    version: int
    topics: tuple[str, ...]
    owned: tuple[TopicPartition, ...] = ()
    rack: str | None = None


def read_subscription(data: bytes) -> Subscription | None:
    """Return the subscription, or None if the bytes are not one."""
    reader = RecordReader(data)
    try:
        version = reader.int16()
        if version < 0:
            return None
        topics = tuple([reader.string() for _ in range(_count(reader))])
        reader.data_bytes()
        owned = _read_partitions(reader) if version >= 1 else ()
        if version >= 2:
            reader.int32()
        return Subscription(version, topics, owned, reader.nullable_string() if version >= 3 else None)
    except UnreadableRecord:
        return None


def read_assignment(data: bytes) -> tuple[TopicPartition, ...] | None:
    """Return the partitions of an assignment, none if it is empty, or None if the bytes are not one."""
    if not data:
        return ()
    reader = RecordReader(data)
    try:
        reader.int16()
        return _read_partitions(reader)
    except UnreadableRecord:
        return None


def write_assignment(version: int, partitions: Mapping[str, Sequence[int]]) -> bytes:
    parts = [_INT16.pack(min(version, HIGHEST_VERSION)), _INT32.pack(len(partitions))]
    for topic, indexes in partitions.items():
        parts += [write_string(topic, False), _INT32.pack(len(indexes)), *map(_INT32.pack, indexes)]
    return b"".join([*parts, _NULL_BYTES])


def _read_partitions(reader: RecordReader) -> tuple[TopicPartition, ...]:
    partitions: list[TopicPartition] = []
    for _ in range(_count(reader)):
        topic = reader.string()
        partitions += [(topic, reader.int32()) for _ in range(_count(reader))]
    return tuple(partitions)


def _count(reader: RecordReader) -> int:
    count = reader.int32()
    if not 0 <= count <= len(reader.data):
        raise UnreadableRecord(f"{count} elements in {len(reader.data)} bytes")
    return count
