"""The records of share groups (KIP-932) in `__consumer_offsets`, in Kafka's own format.

`image_records` has the keys, the encoding, and the kinds that consumer groups have too.

    10 member metadata      rack string?, client_id string, client_host string, topics string array
    11 group metadata       epoch int32, metadata_hash int64
    14 current assignment   epoch int32, previous_epoch int32, state int8 (0), assigned partitions
    15 state of partitions  initializing and initialized topics: id uuid, name string, partitions int32 array;
                            deleting topics: id uuid, name string
"""

import struct
from typing import NamedTuple
from uuid import UUID

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
from chronik.groups.records import Record, RecordReader
from chronik.groups.share_member import ShareAssignment, ShareMetadata
from chronik.groups.share_topics import SharedTopic, ShareTopics, Topics
from chronik.wire.primitives import write_string

_GROUP = struct.Struct(">iq")
_EPOCHS = struct.Struct(">iib")

STABLE = 0


class ShareGroupValue(NamedTuple):
    epoch: int
    metadata_hash: int


def share_group_record(group_id: str, value: ShareGroupValue) -> Record:
    return image_key(Kind.SHARE_GROUP, group_id), VERSION + _GROUP.pack(*value) + NO_TAGS


def share_member_record(group_id: str, member_id: str, member: ShareMetadata) -> Record:
    parts = [
        VERSION,
        write_string(member.rack, True),
        write_string(member.client_id, True),
        write_string(member.client_host, True),
        write_strings(member.topics),
        NO_TAGS,
    ]
    return image_key(Kind.SHARE_MEMBER, group_id, member_id), b"".join(parts)


def share_current_record(group_id: str, member_id: str, current: ShareAssignment) -> Record:
    head = _EPOCHS.pack(current.epoch, current.previous_epoch, STABLE)
    value = VERSION + head + write_partitions(current.partitions) + NO_TAGS
    return image_key(Kind.SHARE_CURRENT_MEMBER, group_id, member_id), value


def share_state_record(group_id: str, topics: ShareTopics) -> Record:
    deleting = [
        topic_id.bytes + write_string(topics.deleting[topic_id], True) + NO_TAGS for topic_id in sorted(topics.deleting)
    ]
    value = _topics(topics.initializing) + _topics(topics.initialized) + write_array(deleting)
    return image_key(Kind.SHARE_STATE, group_id), VERSION + value + NO_TAGS


def _topics(topics: Topics) -> bytes:
    return write_array(
        [
            topic_id.bytes
            + write_string(topics[topic_id].name, True)
            + write_array([INT32.pack(index) for index in sorted(topics[topic_id].partitions)])
            + NO_TAGS
            for topic_id in sorted(topics)
        ]
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def read_share_group(value: bytes) -> ShareGroupValue:
    reader = read_value(value)
    return ShareGroupValue(reader.int32(), reader.int64())


def read_share_member(value: bytes) -> ShareMetadata:
    reader = read_value(value)
    rack = reader.compact_nullable_string()
    return ShareMetadata(rack, reader.compact_string(), reader.compact_string(), read_strings(reader))


def read_share_current(value: bytes) -> ShareAssignment:
    reader = read_value(value)
    epoch, previous_epoch, _ = reader.int32(), reader.int32(), reader.int8()
    return ShareAssignment(epoch, previous_epoch, read_assignment(reader))


def read_share_state(value: bytes) -> ShareTopics:
    reader = read_value(value)
    initializing, initialized = _read_topics(reader), _read_topics(reader)
    deleting = {}
    for _ in range(reader.compact_count()):
        topic_id = UUID(bytes=reader.take_16())
        deleting[topic_id] = reader.compact_string()
        reader.tags()
    return ShareTopics(initializing, initialized, deleting)


def _read_topics(reader: RecordReader) -> Topics:
    topics = {}
    for _ in range(reader.compact_count()):
        topic_id, name = UUID(bytes=reader.take_16()), reader.compact_string()
        topics[topic_id] = SharedTopic(name, frozenset([reader.int32() for _ in range(reader.compact_count())]))
        reader.tags()
    return topics
