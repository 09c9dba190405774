"""Produce (key 0), versions 3-13: hand-written readers and writers for the hot path. Records are never copied.

    request             transactional_id nullable string, acks int16, timeout_ms int32, topics array
    topic               name string (topic_id uuid from 13), partitions array
    partition           index int32, records bytes

    response            topics array, throttle_time_ms int32, from 10 tagged field 0: node_endpoints
    topic               name string (topic_id uuid from 13), partitions array
    partition           index int32, error_code int16, base_offset int64, log_append_time_ms int64,
                        from 5 log_start_offset int64, from 8 record_errors array, error_message nullable string,
                        from 10 tagged field 0: current_leader
    record error        batch_index int32, message nullable string

From version 9, strings, bytes and arrays are compact, and each structure ends with tagged fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct, error
from typing import Final
from uuid import UUID

from chronik.wire.compression import Buffer
from chronik.wire.errors import MalformedRequest
from chronik.wire.primitives import (
    ELEMENTS_MAX,
    LEADER,
    node_endpoints_tags,
    read_array_count,
    read_leader,
    read_node_endpoints,
    read_string,
    read_tags,
    read_topics,
    read_uuid,
    read_uvarint,
    skip_tags,
    uvarint,
    write_string,
    write_topic,
)

VERSIONS: Final = range(3, 14)
FLEXIBLE_FROM: Final = 9
LEADERS_FROM: Final = 10
TOPIC_IDS_FROM: Final = 13

_INT32: Final = Struct(">i")
_ACKS_TIMEOUT: Final = Struct(">hi")
# The start of a request without transactional id (length -1): acks, timeout and topic count follow.
_OLD_START: Final = Struct(">hhii")
_INDEX_SIZE: Final = Struct(">ii")
_PARTITION_3: Final = Struct(">ihqq")
_PARTITION_5: Final = Struct(">ihqqq")
# The only partition of a response, without message and leader, from the partition count to the last byte.
_ONLY_PARTITION_3: Final = Struct(">iihqqi")
_ONLY_PARTITION_5: Final = Struct(">iihqqqi")
_ONLY_PARTITION_8: Final = Struct(">iihqqqihi")
_ONLY_PARTITION_9: Final = Struct(">BihqqqBBBBiB")

Leader = tuple[int, int]
TopicResponse = tuple[str | None, UUID | None, "list[ProducePartitionResponse]"]


# Constructors by hand, because mypyc does not compile a dataclass's own one, and each request has these objects.
@dataclass(slots=True, init=False)
class ProduceTopic:
    """Identified by name, or by id from version 13; the other one is None."""

    name: str | None
    topic_id: UUID | None
    partitions: list[tuple[int, memoryview | None]]

    def __init__(
        self, name: str | None, topic_id: UUID | None, partitions: list[tuple[int, memoryview | None]]
    ) -> None:
        self.name = name
        self.topic_id = topic_id
        self.partitions = partitions


@dataclass(slots=True, init=False)
class ProduceRequest:
    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[ProduceTopic]

    def __init__(self, transactional_id: str | None, acks: int, timeout_ms: int, topics: list[ProduceTopic]) -> None:
        self.transactional_id = transactional_id
        self.acks = acks
        self.timeout_ms = timeout_ms
        self.topics = topics


@dataclass(slots=True, init=False)
class ProducePartitionResponse:
    partition: int
    error_code: int
    base_offset: int
    log_append_time_ms: int
    log_start_offset: int
    error_message: str | None
    current_leader: Leader | None
    record_errors: Sequence[tuple[int, str | None]]

    def __init__(
        self,
        partition: int,
        error_code: int = 0,
        base_offset: int = -1,
        log_append_time_ms: int = -1,
        log_start_offset: int = -1,
        error_message: str | None = None,
        current_leader: Leader | None = None,
        record_errors: Sequence[tuple[int, str | None]] = (),
    ) -> None:
        self.partition = partition
        self.error_code = error_code
        self.base_offset = base_offset
        self.log_append_time_ms = log_append_time_ms
        self.log_start_offset = log_start_offset
        self.error_message = error_message
        self.current_leader = current_leader
        self.record_errors = record_errors


@dataclass(slots=True)
class ProduceResponse:
    topics: list[TopicResponse]
    throttle_ms: int = 0
    node_endpoints: Sequence[tuple[int, str, int, str | None]] = field(default_factory=list)


def read_produce_request(version: int, frame: memoryview, at: int) -> ProduceRequest:
    """Read the request whose body starts at `at`; records are slices of the frame."""
    try:
        if version >= FLEXIBLE_FROM:
            request, at = _read_flexible_request(version, frame, at)
        else:
            request, at = _read_old_request(frame, at)
    except (error, IndexError) as e:
        raise MalformedRequest("Produce request cut short") from e
    if at != len(frame):
        raise MalformedRequest(f"Produce request with {len(frame) - at} bytes too many")
    return request


def _read_flexible_request(version: int, frame: memoryview, at: int) -> tuple[ProduceRequest, int]:
    by_id = version >= TOPIC_IDS_FROM
    frame_bytes = len(frame)
    transactional_id: str | None = None
    if frame[at] == 0:
        at += 1
    else:
        transactional_id, at = read_string(frame, at, True)
    acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(frame, at)
    topic_count, at = read_array_count(frame, at + 6, True, 3)
    if topic_count < 0:
        raise MalformedRequest("Produce request without topics")
    elements_left = ELEMENTS_MAX - topic_count
    tags_left = [ELEMENTS_MAX]
    topics: list[ProduceTopic] = []
    for _ in range(topic_count):
        name: str | None = None
        topic_id: UUID | None = None
        if by_id:
            topic_id, at = read_uuid(frame, at)
        else:
            name, at = read_string(frame, at, True)
            if name is None:
                raise MalformedRequest("topic without a name")
        partition_count = frame[at] - 1
        if 0 <= partition_count < 0x7F:
            at += 1
        else:
            partition_count, at = read_array_count(frame, at, True, 6)
        elements_left -= partition_count
        if partition_count < 0 or elements_left < 0:
            raise MalformedRequest(f"topic with {partition_count} partitions")
        partitions: list[tuple[int, memoryview | None]] = []
        for _ in range(partition_count):
            (index,) = _INT32.unpack_from(frame, at)
            size_bytes, at = read_uvarint(frame, at + 4)
            if size_bytes:
                end = at + size_bytes - 1
                if end >= frame_bytes:
                    raise MalformedRequest(f"records of {size_bytes - 1} bytes, {frame_bytes - at} left")
                partitions.append((index, frame[at:end]))
                at = end
            else:
                partitions.append((index, None))
            at = at + 1 if frame[at] == 0 else skip_tags(frame, at, tags_left)
        at = at + 1 if frame[at] == 0 else skip_tags(frame, at, tags_left)
        topics.append(ProduceTopic(name, topic_id, partitions))
    at = skip_tags(frame, at, tags_left)
    return ProduceRequest(transactional_id, acks, timeout_ms, topics), at


def _read_old_request(frame: memoryview, at: int) -> tuple[ProduceRequest, int]:
    frame_bytes = len(frame)
    transactional_id: str | None = None
    id_bytes, acks, timeout_ms, topic_count = _OLD_START.unpack_from(frame, at)
    if id_bytes == -1 and topic_count == 1:
        at += 12
    else:
        transactional_id, at = read_string(frame, at, False)
        acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(frame, at)
        topic_count, at = read_array_count(frame, at + 6, False, 6)
        if topic_count < 0:
            raise MalformedRequest("Produce request without topics")
    elements_left = ELEMENTS_MAX - topic_count
    topics: list[ProduceTopic] = []
    for _ in range(topic_count):
        name, at = read_string(frame, at, False)
        if name is None:
            raise MalformedRequest("topic without a name")
        partition_count, at = read_array_count(frame, at, False, 8)
        elements_left -= partition_count
        if partition_count < 0 or elements_left < 0:
            raise MalformedRequest(f"topic with {partition_count} partitions")
        partitions: list[tuple[int, memoryview | None]] = []
        for _ in range(partition_count):
            index, size_bytes = _INDEX_SIZE.unpack_from(frame, at)
            at += 8
            if size_bytes >= 0:
                end = at + size_bytes
                if end > frame_bytes:
                    raise MalformedRequest(f"records of {size_bytes} bytes, {frame_bytes - at} left")
                partitions.append((index, frame[at:end]))
                at = end
            elif size_bytes == -1:
                partitions.append((index, None))
            else:
                raise MalformedRequest(f"records of {size_bytes} bytes")
        topics.append(ProduceTopic(name, None, partitions))
    return ProduceRequest(transactional_id, acks, timeout_ms, topics), at


def write_produce_response(
    version: int,
    topics: Sequence[TopicResponse],
    throttle_ms: int = 0,
    node_endpoints: Sequence[tuple[int, str, int, str | None]] = (),
) -> bytes:
    flexible = version >= FLEXIBLE_FROM
    if len(topics) == 1 and not node_endpoints:
        name, topic_id, partitions = topics[0]
        if len(partitions) == 1:
            only = partitions[0]
            if only.error_message is None and only.current_leader is None and not only.record_errors:
                return _write_only_partition(
                    version, write_topic(name, topic_id, version >= TOPIC_IDS_FROM, flexible), only, throttle_ms
                )
    out = bytearray(uvarint(len(topics) + 1) if flexible else _INT32.pack(len(topics)))
    for name, topic_id, partitions in topics:
        out += write_topic(name, topic_id, version >= TOPIC_IDS_FROM, flexible)
        out += uvarint(len(partitions) + 1) if flexible else _INT32.pack(len(partitions))
        for partition in partitions:
            _put_partition(out, version, partition)
        if flexible:
            out.append(0)
    out += _INT32.pack(throttle_ms)
    if flexible:
        out += node_endpoints_tags(node_endpoints) if version >= LEADERS_FROM else b"\x00"
    return bytes(out)


def _write_only_partition(version: int, topic: bytes, only: ProducePartitionResponse, throttle_ms: int) -> bytes:
    index, code = only.partition, only.error_code
    offset, time_ms, start = only.base_offset, only.log_append_time_ms, only.log_start_offset
    if version >= FLEXIBLE_FROM:
        return (
            b"\x02" + topic + _ONLY_PARTITION_9.pack(2, index, code, offset, time_ms, start, 1, 0, 0, 0, throttle_ms, 0)
        )
    if version >= 8:
        rest = _ONLY_PARTITION_8.pack(1, index, code, offset, time_ms, start, 0, -1, throttle_ms)
    elif version >= 5:
        rest = _ONLY_PARTITION_5.pack(1, index, code, offset, time_ms, start, throttle_ms)
    else:
        rest = _ONLY_PARTITION_3.pack(1, index, code, offset, time_ms, throttle_ms)
    return b"\x00\x00\x00\x01" + topic + rest


def _put_partition(out: bytearray, version: int, partition: ProducePartitionResponse) -> None:
    start = (partition.partition, partition.error_code, partition.base_offset, partition.log_append_time_ms)
    if version < 5:
        out += _PARTITION_3.pack(*start)
        return
    out += _PARTITION_5.pack(*start, partition.log_start_offset)
    if version < 8:
        return
    flexible = version >= FLEXIBLE_FROM
    errors = partition.record_errors
    out += uvarint(len(errors) + 1) if flexible else _INT32.pack(len(errors))
    for batch_index, message in errors:
        out += _INT32.pack(batch_index)
        out += write_string(message, flexible)
        if flexible:
            out.append(0)
    out += write_string(partition.error_message, flexible)
    if flexible:
        if partition.current_leader is None or version < LEADERS_FROM:
            out.append(0)
        else:
            out += b"\x01\x00\x09" + LEADER.pack(*partition.current_leader) + b"\x00"


def produce_request_buffers(version: int, request: ProduceRequest) -> list[Buffer]:
    """Return the body of a request in parts, so that sending does not copy records."""
    flexible = version >= FLEXIBLE_FROM
    buffers: list[Buffer] = []
    out = bytearray(write_string(request.transactional_id, flexible))
    out += _ACKS_TIMEOUT.pack(request.acks, request.timeout_ms)
    out += uvarint(len(request.topics) + 1) if flexible else _INT32.pack(len(request.topics))
    for topic in request.topics:
        out += write_topic(topic.name, topic.topic_id, version >= TOPIC_IDS_FROM, flexible)
        out += uvarint(len(topic.partitions) + 1) if flexible else _INT32.pack(len(topic.partitions))
        for index, records in topic.partitions:
            out += _INT32.pack(index)
            size_bytes = -1 if records is None else len(records)
            out += uvarint(size_bytes + 1) if flexible else _INT32.pack(size_bytes)
            if records:
                buffers += (out, records)
                out = bytearray()
            if flexible:
                out.append(0)
        if flexible:
            out.append(0)
    if flexible:
        out.append(0)
    if out:
        buffers.append(out)
    return buffers


def write_produce_request(version: int, request: ProduceRequest) -> bytes:
    return b"".join(produce_request_buffers(version, request))


def read_produce_response(version: int, body: memoryview, at: int = 0) -> ProduceResponse:
    """Read the response whose body starts at `at`."""
    flexible = version >= FLEXIBLE_FROM
    try:
        topics, at = read_topics(version, body, at, flexible, version >= TOPIC_IDS_FROM, 22, _read_partition)
        (throttle_ms,) = _INT32.unpack_from(body, at)
        response = ProduceResponse(topics, throttle_ms)
        at += 4
        if flexible:
            tags, at = read_tags(body, at)
            if 0 in tags and version >= LEADERS_FROM:
                response.node_endpoints = read_node_endpoints(tags[0])
    except (error, IndexError) as e:
        raise MalformedRequest("Produce response cut short") from e
    if at != len(body):
        raise MalformedRequest(f"Produce response with {len(body) - at} bytes too many")
    return response


def _read_partition(version: int, body: memoryview, at: int) -> tuple[ProducePartitionResponse, int]:
    if version < 5:
        return ProducePartitionResponse(*_PARTITION_3.unpack_from(body, at)), at + _PARTITION_3.size
    partition = ProducePartitionResponse(*_PARTITION_5.unpack_from(body, at))
    at += _PARTITION_5.size
    if version < 8:
        return partition, at
    flexible = version >= FLEXIBLE_FROM
    error_count, at = read_array_count(body, at, flexible, 6)
    errors: list[tuple[int, str | None]] = []
    for _ in range(error_count):
        (batch_index,) = _INT32.unpack_from(body, at)
        message, at = read_string(body, at + 4, flexible)
        if flexible:
            at = skip_tags(body, at)
        errors.append((batch_index, message))
    partition.record_errors = errors
    partition.error_message, at = read_string(body, at, flexible)
    if flexible:
        tags, at = read_tags(body, at)
        if 0 in tags and version >= LEADERS_FROM:
            partition.current_leader = read_leader(tags[0])
    return partition, at
