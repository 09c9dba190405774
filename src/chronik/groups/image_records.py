"""What the records of consumer groups and share groups in `__consumer_offsets` have in common, in Kafka's own format.

A key is not flexible: version int16 (which is its kind), group string, and for a member or an expression a string. A
value is int16 version 0, then its fields in flexible encoding: strings and arrays are compact, and each structure ends
with tagged fields. `partitions` is an array of: topic_id uuid, partitions int32 array.

    3, 11   group metadata       epoch int32; of a share group also metadata_hash int64
    6, 12   target metadata      assignment_epoch int32
    7, 13   target of a member   partitions

`consumer_records` and `share_records` have the other kinds.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple
from uuid import UUID

from chronik.groups.records import Record, RecordReader, UnreadableRecord
from chronik.groups.topics import Assignment, by_topic
from chronik.wire.primitives import uvarint, write_string

INT16 = struct.Struct(">h")
INT32 = struct.Struct(">i")

VERSION = b"\x00\x00"
NO_TAGS = b"\x00"


class Kind(IntEnum):
    """The version of a key, which is the kind of its record."""

    GROUP = 3
    PARTITIONS = 4
    MEMBER = 5
    TARGET = 6
    TARGET_MEMBER = 7
    CURRENT_MEMBER = 8
    SHARE_MEMBER = 10
    SHARE_GROUP = 11
    SHARE_TARGET = 12
    SHARE_TARGET_MEMBER = 13
    SHARE_CURRENT_MEMBER = 14
    SHARE_STATE = 15
    EXPRESSION = 16


KINDS = frozenset(Kind)
KINDS_WITH_DETAIL = frozenset(
    {
        Kind.MEMBER,
        Kind.TARGET_MEMBER,
        Kind.CURRENT_MEMBER,
        Kind.EXPRESSION,
        Kind.SHARE_MEMBER,
        Kind.SHARE_TARGET_MEMBER,
        Kind.SHARE_CURRENT_MEMBER,
    }
)


class ImageKey(NamedTuple):
    """`detail` is the member id or the expression; empty for the records of the group itself."""

    kind: Kind
    group_id: str
    detail: str = ""


def read_image_key(kind: Kind, reader: RecordReader) -> ImageKey:
    group_id = reader.string()
    return ImageKey(kind, group_id, reader.string() if kind in KINDS_WITH_DETAIL else "")


def image_key(kind: Kind, group_id: str, detail: str = "") -> bytes:
    key = INT16.pack(kind) + write_string(group_id, False)
    return key + write_string(detail, False) if kind in KINDS_WITH_DETAIL else key


def tombstone(kind: Kind, group_id: str, detail: str = "") -> Record:
    return image_key(kind, group_id, detail), None


def epoch_record(kind: Kind, group_id: str, epoch: int) -> Record:
    """Return the record of the epoch of a consumer group, or of the epoch of a group's target assignment."""
    return image_key(kind, group_id), VERSION + INT32.pack(epoch) + NO_TAGS


def target_record(kind: Kind, group_id: str, member_id: str, target: Assignment) -> Record:
    return image_key(kind, group_id, member_id), VERSION + write_partitions(target) + NO_TAGS


def write_array(elements: Sequence[bytes]) -> bytes:
    return uvarint(len(elements) + 1) + b"".join(elements)


def write_strings(texts: Sequence[str]) -> bytes:
    return write_array([write_string(text, True) for text in texts])


def write_partitions(assignment: Assignment) -> bytes:
    return write_array(
        [
            topic_id.bytes + write_array([INT32.pack(index) for index in indexes]) + NO_TAGS
            for topic_id, indexes in by_topic(assignment).items()
        ]
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def read_value(value: bytes) -> RecordReader:
    """Return a reader of a value, after its version."""
    reader = RecordReader(value)
    version = reader.int16()
    if version != 0:
        raise UnreadableRecord(f"value of version {version}")
    return reader


def read_epoch(value: bytes) -> int:
    return read_value(value).int32()


def read_target(value: bytes) -> Assignment:
    return read_assignment(read_value(value))


def read_strings(reader: RecordReader) -> tuple[str, ...]:
    return tuple([reader.compact_string() for _ in range(reader.compact_count())])


def read_assignment(reader: RecordReader) -> Assignment:
    partitions = []
    for _ in range(reader.compact_count()):
        topic_id = UUID(bytes=reader.take_16())
        partitions += [(topic_id, reader.int32()) for _ in range(reader.compact_count())]
        reader.tags()
    return frozenset(partitions)
