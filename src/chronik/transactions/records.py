"""The records of `__transaction_state`, in Kafka's own format, so that Kafka tools can read the topic.

All integers are big-endian. A string is int16 length and UTF-8; a compact string is uvarint length + 1 and UTF-8.

    TransactionLogKey v0        version int16, transactional_id string
    TransactionLogValue v0      version int16, producer_id int64, producer_epoch int16, timeout_ms int32, state int8,
                                topics int32 count (-1 for none), then each: topic string, partitions int32 count,
                                each int32; last_update_timestamp int64, start_timestamp int64
    TransactionLogValue v1      the same with compact strings and arrays, each topic and the value followed by tagged
                                fields: 0 previous_producer_id int64, 1 next_producer_id int64,
                                2 client_transaction_version int16

This module writes v1 and reads both. A null value removes the transactional id.
"""

import struct

from chronik.transactions.transaction import NO_PRODUCER_ID, TopicPartition, TransactionMetadata, TransactionState
from chronik.wire.errors import MalformedRequest
from chronik.wire.primitives import read_array_count, read_string, read_tags, uvarint, write_string

KEY_VERSION = 0
VALUE_VERSION = 1

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")
_HEAD = struct.Struct(">hqhib")
_TIMES = struct.Struct(">qq")
_PREVIOUS_PRODUCER_ID, _NEXT_PRODUCER_ID, _CLIENT_VERSION = range(3)


class UnreadableRecord(ValueError):
    """Bytes that are not a valid record of the transaction topic, although their key claims so."""


def write_key(transactional_id: str) -> bytes:
    return _INT16.pack(KEY_VERSION) + write_string(transactional_id, flexible=False)


def write_value(metadata: TransactionMetadata) -> bytes:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(metadata.partitions):
        by_topic.setdefault(topic, []).append(partition)
    parts = [
        _HEAD.pack(
            VALUE_VERSION, metadata.producer_id, metadata.producer_epoch, metadata.timeout_ms, metadata.state.value
        ),
        uvarint(len(by_topic) + 1),
    ]
    for topic, indexes in by_topic.items():
        parts += [write_string(topic, flexible=True), uvarint(len(indexes) + 1), *map(_INT32.pack, indexes), b"\0"]
    parts.append(_TIMES.pack(metadata.updated_ms, metadata.start_ms))
    tags = []
    if metadata.previous_producer_id != NO_PRODUCER_ID:
        tags.append((_PREVIOUS_PRODUCER_ID, _INT64.pack(metadata.previous_producer_id)))
    if metadata.next_producer_id != NO_PRODUCER_ID:
        tags.append((_NEXT_PRODUCER_ID, _INT64.pack(metadata.next_producer_id)))
    if metadata.client_version:
        tags.append((_CLIENT_VERSION, _INT16.pack(metadata.client_version)))
    parts.append(uvarint(len(tags)))
    for tag, data in tags:
        parts += [uvarint(tag), uvarint(len(data)), data]
    return b"".join(parts)


def read_key(key: bytes) -> str | None:
    """Return the transactional id; None for a kind of record that this coordinator does not use."""
    try:
        if _INT16.unpack_from(key)[0] != KEY_VERSION:
            return None
        transactional_id, _ = read_string(memoryview(key), 2, flexible=False)
    except (struct.error, MalformedRequest) as error:
        raise UnreadableRecord(str(error)) from error
    if transactional_id is None:
        raise UnreadableRecord("a null transactional id")
    return transactional_id


def read_value(value: bytes) -> TransactionMetadata:
    try:
        return _read_value(memoryview(value))
    except (struct.error, IndexError, ValueError, MalformedRequest) as error:
        raise UnreadableRecord(str(error)) from error


def _read_value(value: memoryview) -> TransactionMetadata:
    version, producer_id, epoch, timeout_ms, state = _HEAD.unpack_from(value)
    if not 0 <= version <= VALUE_VERSION:
        raise UnreadableRecord(f"transaction value of version {version}")
    flexible = version >= 1
    partitions: list[TopicPartition] = []
    count, at = read_array_count(value, _HEAD.size, flexible, 3)
    for _ in range(count):
        topic, at = read_string(value, at, flexible)
        if topic is None:
            raise UnreadableRecord("a null topic")
        index_count, at = read_array_count(value, at, flexible, 4)
        for _ in range(index_count):
            partitions.append((topic, _INT32.unpack_from(value, at)[0]))
            at += _INT32.size
        if flexible:
            _, at = read_tags(value, at)
    updated_ms, start_ms = _TIMES.unpack_from(value, at)
    tags = read_tags(value, at + _TIMES.size)[0] if flexible else {}
    return TransactionMetadata(
        producer_id,
        epoch,
        timeout_ms,
        TransactionState(state),
        updated_ms,
        frozenset(partitions),
        start_ms,
        _number(tags, _PREVIOUS_PRODUCER_ID, _INT64, NO_PRODUCER_ID),
        _number(tags, _NEXT_PRODUCER_ID, _INT64, NO_PRODUCER_ID),
        _number(tags, _CLIENT_VERSION, _INT16, 0),
    )


def _number(tags: dict[int, memoryview], tag: int, layout: struct.Struct, default: int) -> int:
    return default if tag not in tags else int(layout.unpack(tags[tag])[0])
