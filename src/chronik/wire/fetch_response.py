"""Fetch responses (key 1), versions 4-18: hand-written reader and writer for the hot path. Records are never copied.

    response             throttle_time_ms int32, from 7 error_code int16 and session_id int32, topics array,
                         tagged from 16: 0 node_endpoints
    topic                name string (topic_id uuid from 13), partitions array
    partition            index int32, error_code int16, high_watermark int64, last_stable_offset int64,
                         from 5 log_start_offset int64, aborted_transactions nullable array,
                         from 11 preferred_read_replica int32, records bytes,
                         tagged from 12: 0 diverging_epoch, 1 current_leader, 2 snapshot_id (not used here)
    aborted transaction  producer_id int64, first_offset int64
    diverging_epoch      epoch int32, end_offset int64, tagged fields

From version 12, strings, bytes and arrays are compact, and each structure ends with tagged fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct, error
from typing import Final
from uuid import UUID

from chronik.wire.compression import Buffer
from chronik.wire.endpoints import LEADER, node_endpoints_tags, read_leader, read_node_endpoints
from chronik.wire.errors import MalformedRequest
from chronik.wire.primitives import (
    ELEMENTS_MAX,
    ZERO_UUID,
    read_array_count,
    read_string,
    read_tags,
    read_uuid,
    read_uvarint,
    skip_tags,
    uvarint,
    write_string,
)

__all__ = ["FetchPartitionResponse", "FetchResponse", "read_fetch_response", "write_fetch_response"]

FLEXIBLE_FROM: Final = 12
TOPIC_IDS_FROM: Final = 13
NODE_ENDPOINTS_FROM: Final = 16

_INT32: Final = Struct(">i")
_START_4: Final = Struct(">i")
_START_7: Final = Struct(">ihi")
_PARTITION_4: Final = Struct(">ihqq")
_PARTITION_5: Final = Struct(">ihqqq")
_ABORTED: Final = Struct(">qq")
_DIVERGING_EPOCH: Final = Struct(">iq")
# A partition without aborted transactions, up to the length of its records.
_NULL_ABORTED_4: Final = Struct(">ihqqii")
_NULL_ABORTED_5: Final = Struct(">ihqqqii")
_NULL_ABORTED_11: Final = Struct(">ihqqqiii")
_NULL_ABORTED_12: Final = Struct(">ihqqqBi")


@dataclass(slots=True)
class FetchPartitionResponse:
    partition: int
    error_code: int = 0
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted_transactions: Sequence[tuple[int, int]] | None = None
    """Producer id and first offset of each; None for read_uncommitted consumers."""
    preferred_read_replica: int = -1
    records: Buffer = b""
    diverging_epoch: tuple[int, int] | None = None
    """The epoch and its end offset."""
    current_leader: tuple[int, int] | None = None


TopicResponse = tuple[str | None, UUID | None, list[FetchPartitionResponse]]


@dataclass(slots=True)
class FetchResponse:
    error_code: int
    session_id: int
    topics: list[TopicResponse]
    throttle_ms: int = 0
    node_endpoints: Sequence[tuple[int, str, int, str | None]] = field(default_factory=list)


def write_topic(version: int, name: str | None, topic_id: UUID | None) -> bytes:
    if version >= TOPIC_IDS_FROM:
        return (topic_id or ZERO_UUID).bytes
    return write_string(name or "", version >= FLEXIBLE_FROM)


def write_fetch_response(
    version: int,
    error_code: int,
    session_id: int,
    topics: Sequence[TopicResponse],
    throttle_ms: int = 0,
    node_endpoints: Sequence[tuple[int, str, int, str | None]] = (),
) -> list[Buffer]:
    """Return the body of a response in parts: the given record buffers between encoded fields, without copies."""
    flexible = version >= FLEXIBLE_FROM
    buffers: list[Buffer] = []
    if version >= 7:
        out = bytearray(_START_7.pack(throttle_ms, error_code, session_id))
    else:
        out = bytearray(_START_4.pack(throttle_ms))
    out += uvarint(len(topics) + 1) if flexible else _INT32.pack(len(topics))
    for name, topic_id, partitions in topics:
        out += write_topic(version, name, topic_id)
        out += uvarint(len(partitions) + 1) if flexible else _INT32.pack(len(partitions))
        for partition in partitions:
            records = partition.records
            _put_partition_start(out, version, partition, len(records))
            if records:
                buffers.append(out)
                buffers.append(records)
                out = bytearray()
            if flexible:
                if partition.current_leader is None and partition.diverging_epoch is None:
                    out.append(0)
                else:
                    _put_partition_tags(out, partition)
        if flexible:
            out.append(0)
    if version >= NODE_ENDPOINTS_FROM:
        out += node_endpoints_tags(node_endpoints)
    elif flexible:
        out.append(0)
    if out:
        buffers.append(out)
    return buffers


def _put_partition_start(out: bytearray, version: int, partition: FetchPartitionResponse, records_bytes: int) -> None:
    index, code = partition.partition, partition.error_code
    high, stable, start = partition.high_watermark, partition.last_stable_offset, partition.log_start_offset
    replica = partition.preferred_read_replica
    if partition.aborted_transactions is None:
        if version >= FLEXIBLE_FROM:
            out += _NULL_ABORTED_12.pack(index, code, high, stable, start, 0, replica)
            out += uvarint(records_bytes + 1)
        elif version >= 11:
            out += _NULL_ABORTED_11.pack(index, code, high, stable, start, -1, replica, records_bytes)
        elif version >= 5:
            out += _NULL_ABORTED_5.pack(index, code, high, stable, start, -1, records_bytes)
        else:
            out += _NULL_ABORTED_4.pack(index, code, high, stable, -1, records_bytes)
        return
    flexible = version >= FLEXIBLE_FROM
    if version >= 5:
        out += _PARTITION_5.pack(index, code, high, stable, start)
    else:
        out += _PARTITION_4.pack(index, code, high, stable)
    aborted = partition.aborted_transactions
    out += uvarint(len(aborted) + 1) if flexible else _INT32.pack(len(aborted))
    for producer_id, first_offset in aborted:
        out += _ABORTED.pack(producer_id, first_offset)
        if flexible:
            out.append(0)
    if version >= 11:
        out += _INT32.pack(replica)
    out += uvarint(records_bytes + 1) if flexible else _INT32.pack(records_bytes)


def _put_partition_tags(out: bytearray, partition: FetchPartitionResponse) -> None:
    tags: list[bytes] = []
    if partition.diverging_epoch is not None:
        tags.append(b"\x00\x0d" + _DIVERGING_EPOCH.pack(*partition.diverging_epoch) + b"\x00")
    if partition.current_leader is not None:
        tags.append(b"\x01\x09" + LEADER.pack(*partition.current_leader) + b"\x00")
    out += uvarint(len(tags)) + b"".join(tags)


def read_fetch_response(version: int, body: memoryview, at: int = 0) -> FetchResponse:
    """Read the response whose body starts at `at`; records are slices of the body."""
    try:
        response, at = _read_response(version, body, at)
    except (error, IndexError) as e:
        raise MalformedRequest("Fetch response cut short") from e
    if at != len(body):
        raise MalformedRequest(f"Fetch response with {len(body) - at} bytes too many")
    return response


def _read_response(version: int, body: memoryview, at: int) -> tuple[FetchResponse, int]:
    flexible = version >= FLEXIBLE_FROM
    error_code = session_id = 0
    if version >= 7:
        throttle_ms, error_code, session_id = _START_7.unpack_from(body, at)
        at += 10
    else:
        (throttle_ms,) = _START_4.unpack_from(body, at)
        at += 4
    topics: list[TopicResponse] = []
    topic_count, at = read_array_count(body, at, flexible, 3)
    elements_left = ELEMENTS_MAX - topic_count
    for _ in range(topic_count):
        name: str | None = None
        topic_id: UUID | None = None
        if version >= TOPIC_IDS_FROM:
            topic_id, at = read_uuid(body, at)
        else:
            name, at = read_string(body, at, flexible)
        partition_count, at = read_array_count(body, at, flexible, 25)
        elements_left -= partition_count
        if elements_left < 0:
            raise MalformedRequest("Fetch response with too many partitions")
        partitions: list[FetchPartitionResponse] = []
        for _ in range(partition_count):
            partition, at = _read_partition(version, body, at)
            partitions.append(partition)
        if flexible:
            at = skip_tags(body, at)
        topics.append((name, topic_id, partitions))
    response = FetchResponse(error_code, session_id, topics, throttle_ms)
    if flexible:
        tags, at = read_tags(body, at)
        if 0 in tags and version >= NODE_ENDPOINTS_FROM:
            response.node_endpoints = read_node_endpoints(tags[0])
    return response, at


def _read_partition(version: int, body: memoryview, at: int) -> tuple[FetchPartitionResponse, int]:
    flexible = version >= FLEXIBLE_FROM
    if version >= 5:
        partition = FetchPartitionResponse(*_PARTITION_5.unpack_from(body, at))
        at += 30
    else:
        partition = FetchPartitionResponse(*_PARTITION_4.unpack_from(body, at))
        at += 22
    aborted_count, at = read_array_count(body, at, flexible, 16)
    if aborted_count >= 0:
        aborted: list[tuple[int, int]] = []
        for _ in range(aborted_count):
            producer_id, first_offset = _ABORTED.unpack_from(body, at)
            at += 16
            if flexible:
                at = skip_tags(body, at)
            aborted.append((producer_id, first_offset))
        partition.aborted_transactions = aborted
    if version >= 11:
        (partition.preferred_read_replica,) = _INT32.unpack_from(body, at)
        at += 4
    if flexible:
        size_bytes, at = read_uvarint(body, at)
        size_bytes -= 1
    else:
        (size_bytes,) = _INT32.unpack_from(body, at)
        at += 4
    if size_bytes < -1 or size_bytes > len(body) - at:
        raise MalformedRequest(f"records of {size_bytes} bytes, {len(body) - at} left")
    if size_bytes > 0:
        partition.records = body[at : at + size_bytes]
        at += size_bytes
    if flexible:
        if body[at] == 0:
            return partition, at + 1
        tags, at = read_tags(body, at)
        if 0 in tags:
            epoch, end_offset = _DIVERGING_EPOCH.unpack_from(tags[0])
            partition.diverging_epoch = None if (epoch, end_offset) == (-1, -1) else (epoch, end_offset)
        if 1 in tags:
            partition.current_leader = read_leader(tags[1])
    return partition, at
