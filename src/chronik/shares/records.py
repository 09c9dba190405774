"""The records of `__share_group_state`, in Kafka's own format, so that Kafka tools can read the topic.

All integers are big-endian. A string is int16 length and UTF-8; an array has uvarint count + 1.

    ShareSnapshotKey v0, ShareUpdateKey v0   type int16 (0 or 1), group string, topic_id uuid, partition int32
    ShareSnapshotValue v0   version int16, snapshot_epoch int32, state_epoch int32, leader_epoch int32,
                            start_offset int64, create_timestamp int64, write_timestamp int64, batches array,
                            tagged fields: 0 delivery_complete_count int32
    ShareUpdateValue v0     version int16, snapshot_epoch int32, leader_epoch int32, start_offset int64, batches array,
                            tagged fields: 0 delivery_complete_count int32
        batch               first_offset int64, last_offset int64, delivery_state int8, delivery_count int16,
                            tagged fields

A null value of either key removes its record. In Kafka an update has what one request changed, and the topic is
pruned. Here an update has everything that changed since the snapshot, so that compaction may remove earlier updates.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from chronik.shares.state import NO_COUNT, SharePartitionKey, StateBatch
from chronik.wire.errors import MalformedRequest
from chronik.wire.primitives import read_array_count, read_string, read_tags, uvarint, write_string

SNAPSHOT, UPDATE = 0, 1
VALUE_VERSION = 0

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_KEY_TAIL = struct.Struct(">16si")
_SNAPSHOT_HEAD = struct.Struct(">hiiiqqq")
_UPDATE_HEAD = struct.Struct(">hiiq")
_BATCH = struct.Struct(">qqbh")
_BATCH_BYTES_MIN = _BATCH.size + 1
_COMPLETE_COUNT = 0


class UnreadableRecord(ValueError):
    """Bytes that are not a valid record of the share group state topic, although their key claims so."""


class StateKey(NamedTuple):
    kind: int
    partition: SharePartitionKey


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole state of a shared partition."""

    snapshot_epoch: int
    state_epoch: int
    leader_epoch: int
    start_offset: int
    batches: tuple[StateBatch, ...]
    delivery_complete_count: int = NO_COUNT
    created_ms: int = 0
    written_ms: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """What changed since the snapshot with this snapshot epoch."""

    snapshot_epoch: int
    leader_epoch: int
    start_offset: int
    batches: tuple[StateBatch, ...]
    delivery_complete_count: int = NO_COUNT


def write_key(kind: int, key: SharePartitionKey) -> bytes:
    tail = _KEY_TAIL.pack(key.topic_id.bytes, key.partition)
    return _INT16.pack(kind) + write_string(key.group_id, flexible=False) + tail


def read_key(key: bytes) -> StateKey | None:
    """Return the key; None for a kind of record that this coordinator does not use."""
    try:
        kind = _INT16.unpack_from(key)[0]
        if kind not in (SNAPSHOT, UPDATE):
            return None
        group_id, at = read_string(memoryview(key), 2, flexible=False)
        topic_id, partition = _KEY_TAIL.unpack_from(key, at)
    except (struct.error, MalformedRequest) as error:
        raise UnreadableRecord(str(error)) from error
    if group_id is None:
        raise UnreadableRecord("a null group id")
    return StateKey(kind, SharePartitionKey(group_id, UUID(bytes=topic_id), partition))


def write_snapshot(state: Snapshot) -> bytes:
    head = _SNAPSHOT_HEAD.pack(
        VALUE_VERSION,
        state.snapshot_epoch,
        state.state_epoch,
        state.leader_epoch,
        state.start_offset,
        state.created_ms,
        state.written_ms,
    )
    return head + _tail(state.batches, state.delivery_complete_count)


def write_update(update: Update) -> bytes:
    head = _UPDATE_HEAD.pack(VALUE_VERSION, update.snapshot_epoch, update.leader_epoch, update.start_offset)
    return head + _tail(update.batches, update.delivery_complete_count)


def _tail(batches: tuple[StateBatch, ...], complete_count: int) -> bytes:
    parts = [uvarint(len(batches) + 1)]
    for batch in batches:
        parts += [_BATCH.pack(*batch), b"\0"]
    if complete_count == NO_COUNT:
        parts.append(b"\0")
    else:
        parts += [uvarint(1), uvarint(_COMPLETE_COUNT), uvarint(_INT32.size), _INT32.pack(complete_count)]
    return b"".join(parts)


def read_snapshot(value: bytes) -> Snapshot:
    try:
        version, snapshot_epoch, state_epoch, leader_epoch, start, created_ms, written_ms = _SNAPSHOT_HEAD.unpack_from(
            value
        )
        _check_version(version)
        batches, count = _read_tail(memoryview(value), _SNAPSHOT_HEAD.size)
    except (struct.error, IndexError, MalformedRequest) as error:
        raise UnreadableRecord(str(error)) from error
    return Snapshot(snapshot_epoch, state_epoch, leader_epoch, start, batches, count, created_ms, written_ms)


def read_update(value: bytes) -> Update:
    try:
        version, snapshot_epoch, leader_epoch, start = _UPDATE_HEAD.unpack_from(value)
        _check_version(version)
        batches, count = _read_tail(memoryview(value), _UPDATE_HEAD.size)
    except (struct.error, IndexError, MalformedRequest) as error:
        raise UnreadableRecord(str(error)) from error
    return Update(snapshot_epoch, leader_epoch, start, batches, count)


def _check_version(version: int) -> None:
    if version != VALUE_VERSION:
        raise UnreadableRecord(f"a share group state value of version {version}")


def _read_tail(value: memoryview, at: int) -> tuple[tuple[StateBatch, ...], int]:
    count, at = read_array_count(value, at, True, _BATCH_BYTES_MIN)
    batches = []
    for _ in range(count):
        batches.append(StateBatch(*_BATCH.unpack_from(value, at)))
        _, at = read_tags(value, at + _BATCH.size)
    tags, _ = read_tags(value, at)
    complete = tags.get(_COMPLETE_COUNT)
    return tuple(batches), NO_COUNT if complete is None else int(_INT32.unpack(complete)[0])
