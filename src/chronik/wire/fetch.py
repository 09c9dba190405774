"""Fetch (key 1), versions 4-18: hand-written readers and writers for the hot path. Records are never copied.

    request             replica_id int32 (until 14), max_wait_ms int32, min_bytes int32, max_bytes int32,
                        isolation_level int8, from 7 session_id int32 and session_epoch int32, topics array,
                        from 7 forgotten topics array, from 11 rack_id string,
                        tagged from 12: 0 cluster_id nullable string; from 15: 1 replica_state
    topic               name string (topic_id uuid from 13), partitions array
    partition           index int32, from 9 current_leader_epoch int32, fetch_offset int64,
                        from 12 last_fetched_epoch int32, from 5 log_start_offset int64, max_bytes int32,
                        tagged from 17: 0 replica_directory_id uuid; from 18: 1 high_watermark int64;
                        between nodes of Chronik: 1000 received_position
    received_position   offset int64, last_epoch int32, wants_records int8
    forgotten topic     name string (topic_id uuid from 13), partitions array of int32
    replica_state       replica_id int32, replica_epoch int64, tagged fields

    response             throttle_time_ms int32, from 7 error_code int16 and session_id int32, topics array,
                         tagged from 16: 0 node_endpoints; between nodes of Chronik: 1000 takes_received, empty
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
from typing import Final, NamedTuple
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

VERSIONS: Final = range(4, 19)
FLEXIBLE_FROM: Final = 12
TOPIC_IDS_FROM: Final = 13
REPLICA_STATE_FROM: Final = 15
NODE_ENDPOINTS_FROM: Final = 16

_INT32: Final = Struct(">i")
_INT64: Final = Struct(">q")
_START_4: Final = Struct(">iiiib")
_START_7: Final = Struct(">iiiibii")
_START_15: Final = Struct(">iiibii")
_PARTITION_4: Final = Struct(">iqi")
_PARTITION_5: Final = Struct(">iqqi")
_PARTITION_9: Final = Struct(">iiqqi")
_PARTITION_12: Final = Struct(">iiqiqi")
_RECEIVED: Final = Struct(">qib")
_REPLICA_STATE: Final = Struct(">iq")
_RESPONSE_START_4: Final = Struct(">i")
_RESPONSE_START_7: Final = Struct(">ihi")
_PARTITION_RESPONSE_4: Final = Struct(">ihqq")
_PARTITION_RESPONSE_5: Final = Struct(">ihqqq")
_ABORTED: Final = Struct(">qq")
_DIVERGING_EPOCH: Final = Struct(">iq")
# With an empty tagged section.
_PARTITION_12_UNTAGGED: Final = Struct(">iiqiqix")
_PARTITION_12_BYTES: Final = 33
# A partition with nothing but its offsets: no aborted transactions, no records, no tagged fields.
_OFFSETS_12: Final = Struct(">ihqqqBiBB")
# A partition without aborted transactions, up to the length of its records.
_NULL_ABORTED_4: Final = Struct(">ihqqii")
_NULL_ABORTED_5: Final = Struct(">ihqqqii")
_NULL_ABORTED_11: Final = Struct(">ihqqqiii")
_NULL_ABORTED_12: Final = Struct(">ihqqqBi")

HIGH_WATERMARK_NOT_SENT: Final = (1 << 63) - 1
OWN_TAG: Final = 1000
"""The tag of fields that only nodes of Chronik send each other: Kafka numbers its own from 0."""
_TAKES_RECEIVED: Final = b"\x01" + uvarint(OWN_TAG) + b"\x00"

Forgotten = tuple[str | None, UUID | None, list[int]]


class ReceivedPosition(NamedTuple):
    """The end of a follower's log, whose last part is not durable yet, and the epoch of its last record.

    Without `wants_records` the fetch only reports positions: what the follower requested before still applies.
    """

    offset: int
    last_epoch: int
    wants_records: bool


class FetchPartition(NamedTuple):
    """`high_watermark` is the one that the follower already knows (KIP-1166); HIGH_WATERMARK_NOT_SENT for consumers.

    A follower has everything below `fetch_offset` durably. It requests records from there on, or from its `received`
    position if there is one.
    """

    partition: int
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int
    max_bytes: int
    high_watermark: int = HIGH_WATERMARK_NOT_SENT
    received: ReceivedPosition | None = None

    @property
    def read_offset(self) -> int:
        """The offset of the first record that is requested."""
        return self.fetch_offset if self.received is None else self.received.offset


_NOT_STATED: Final = tuple(FetchPartition._field_defaults.values())


# Constructors by hand, because mypyc does not compile a dataclass's own one, and each fetch has many of these objects.
@dataclass(slots=True, init=False)
class FetchTopic:
    """Identified by name, or by id from version 13; the other one is None."""

    name: str | None
    topic_id: UUID | None
    partitions: list[FetchPartition]

    def __init__(self, name: str | None, topic_id: UUID | None, partitions: list[FetchPartition]) -> None:
        self.name = name
        self.topic_id = topic_id
        self.partitions = partitions


@dataclass(slots=True, init=False)
class FetchRequest:
    replica_id: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[FetchTopic]
    forgotten: list[Forgotten]
    rack_id: str
    cluster_id: str | None
    replica_epoch: int

    def __init__(
        self,
        replica_id: int = -1,
        max_wait_ms: int = 0,
        min_bytes: int = 0,
        max_bytes: int = 0x7FFFFFFF,
        isolation_level: int = 0,
        session_id: int = 0,
        session_epoch: int = -1,
        topics: list[FetchTopic] | None = None,
        forgotten: list[Forgotten] | None = None,
        rack_id: str = "",
        cluster_id: str | None = None,
        replica_epoch: int = -1,
    ) -> None:
        self.replica_id = replica_id
        self.max_wait_ms = max_wait_ms
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self.isolation_level = isolation_level
        self.session_id = session_id
        self.session_epoch = session_epoch
        self.topics = [] if topics is None else topics
        self.forgotten = [] if forgotten is None else forgotten
        self.rack_id = rack_id
        self.cluster_id = cluster_id
        self.replica_epoch = replica_epoch


@dataclass(slots=True, init=False)
class FetchPartitionResponse:
    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted_transactions: Sequence[tuple[int, int]] | None
    """Producer id and first offset of each; None for read_uncommitted consumers."""
    preferred_read_replica: int
    records: Buffer
    diverging_epoch: tuple[int, int] | None
    """The epoch and its end offset."""
    current_leader: tuple[int, int] | None

    def __init__(
        self,
        partition: int,
        error_code: int = 0,
        high_watermark: int = -1,
        last_stable_offset: int = -1,
        log_start_offset: int = -1,
        aborted_transactions: Sequence[tuple[int, int]] | None = None,
        preferred_read_replica: int = -1,
        records: Buffer = b"",
        diverging_epoch: tuple[int, int] | None = None,
        current_leader: tuple[int, int] | None = None,
    ) -> None:
        self.partition = partition
        self.error_code = error_code
        self.high_watermark = high_watermark
        self.last_stable_offset = last_stable_offset
        self.log_start_offset = log_start_offset
        self.aborted_transactions = aborted_transactions
        self.preferred_read_replica = preferred_read_replica
        self.records = records
        self.diverging_epoch = diverging_epoch
        self.current_leader = current_leader


TopicResponse = tuple[str | None, UUID | None, list[FetchPartitionResponse]]


@dataclass(slots=True)
class FetchResponse:
    error_code: int
    session_id: int
    topics: list[TopicResponse]
    throttle_ms: int = 0
    node_endpoints: Sequence[tuple[int, str, int, str | None]] = field(default_factory=list)
    takes_received: bool = False
    """Whether the leader understands received positions, in the first response of a follower's session."""


def read_fetch_request(version: int, frame: memoryview, at: int) -> FetchRequest:
    """Read the request whose body starts at `at`."""
    try:
        request, at = _read_request(version, frame, at)
    except (error, IndexError) as e:
        raise MalformedRequest("Fetch request cut short") from e
    if at != len(frame):
        raise MalformedRequest(f"Fetch request with {len(frame) - at} bytes too many")
    return request


def _read_request(version: int, frame: memoryview, at: int) -> tuple[FetchRequest, int]:
    flexible = version >= FLEXIBLE_FROM
    replica_id = -1
    session_id = 0
    session_epoch = -1
    if version >= REPLICA_STATE_FROM:
        max_wait_ms, min_bytes, max_bytes, isolation_level, session_id, session_epoch = _START_15.unpack_from(frame, at)
        at += 21
    elif version >= 7:
        replica_id, max_wait_ms, min_bytes, max_bytes, isolation_level, session_id, session_epoch = (
            _START_7.unpack_from(frame, at)
        )
        at += 25
    else:
        replica_id, max_wait_ms, min_bytes, max_bytes, isolation_level = _START_4.unpack_from(frame, at)
        at += 17
    topics, at = _read_topics(version, frame, at)
    forgotten: list[Forgotten] = []
    rack_id = ""
    if version >= 7:
        if flexible and frame[at] == 1:
            at += 1
        else:
            forgotten, at = _read_forgotten(version, frame, at)
        if version >= 11:
            if flexible and frame[at] == 1:
                at += 1
            else:
                given_rack_id, at = read_string(frame, at, flexible)
                if given_rack_id is None:
                    raise MalformedRequest("Fetch request without a rack id")
                rack_id = given_rack_id
    request = FetchRequest(
        replica_id,
        max_wait_ms,
        min_bytes,
        max_bytes,
        isolation_level,
        session_id,
        session_epoch,
        topics,
        forgotten,
        rack_id,
    )
    if flexible:
        if frame[at] == 0:
            at += 1
        else:
            tags, at = read_tags(frame, at)
            if 0 in tags:
                request.cluster_id, _ = read_string(tags[0], 0, True)
            if 1 in tags and version >= REPLICA_STATE_FROM:
                request.replica_id, request.replica_epoch = _REPLICA_STATE.unpack_from(tags[1])
    return request, at


def _read_topics(version: int, frame: memoryview, at: int) -> tuple[list[FetchTopic], int]:
    flexible = version >= FLEXIBLE_FROM
    by_id = version >= TOPIC_IDS_FROM
    topic_count, at = read_array_count(frame, at, flexible, 3)
    if topic_count < 0:
        raise MalformedRequest("Fetch request without topics")
    elements_left = ELEMENTS_MAX - topic_count
    tags_left = [ELEMENTS_MAX]
    topics: list[FetchTopic] = []
    for _ in range(topic_count):
        name: str | None = None
        topic_id: UUID | None = None
        if by_id:
            topic_id, at = read_uuid(frame, at)
        else:
            name, at = read_string(frame, at, flexible)
            if name is None:
                raise MalformedRequest("topic without a name")
        partition_count, at = read_array_count(frame, at, flexible, 16)
        elements_left -= partition_count
        if partition_count < 0 or elements_left < 0:
            raise MalformedRequest(f"topic with {partition_count} partitions")
        partitions: list[FetchPartition] = []
        untagged = _read_untagged(frame, at, partition_count) if flexible else None
        if untagged is not None:
            partitions = untagged
            at += partition_count * _PARTITION_12_BYTES
            at = at + 1 if frame[at] == 0 else skip_tags(frame, at, tags_left)
        elif flexible:
            for _ in range(partition_count):
                values = _PARTITION_12.unpack_from(frame, at)
                at += 32
                high_watermark: int = HIGH_WATERMARK_NOT_SENT
                received: ReceivedPosition | None = None
                if frame[at] == 0:
                    at += 1
                else:
                    tags, at = read_tags(frame, at, tags_left)
                    if 1 in tags and version >= 18:
                        (high_watermark,) = _INT64.unpack_from(tags[1])
                    if OWN_TAG in tags:
                        offset, last_epoch, wants_records = _RECEIVED.unpack_from(tags[OWN_TAG])
                        received = ReceivedPosition(offset, last_epoch, bool(wants_records))
                partitions.append(tuple.__new__(FetchPartition, (*values, high_watermark, received)))
            at = at + 1 if frame[at] == 0 else skip_tags(frame, at, tags_left)
        else:
            at = _read_old_partitions(version, frame, at, partition_count, partitions)
        topics.append(FetchTopic(name, topic_id, partitions))
    return topics, at


def _read_untagged(frame: memoryview, at: int, count: int) -> list[FetchPartition] | None:
    """Read the partitions of a topic if none has tagged fields; else return None.

    Consumers may request thousands of partitions each time: this reads them at once, and makes the tuples without
    FetchPartition's own constructor, which is Python code.
    """
    end = at + count * _PARTITION_12_BYTES
    if end > len(frame) or any(bytes(frame[at + _PARTITION_12_BYTES - 1 : end : _PARTITION_12_BYTES])):
        return None
    return [
        tuple.__new__(FetchPartition, values + _NOT_STATED)
        for values in _PARTITION_12_UNTAGGED.iter_unpack(frame[at:end])
    ]


def _read_old_partitions(version: int, frame: memoryview, at: int, count: int, out: list[FetchPartition]) -> int:
    for _ in range(count):
        epoch = -1
        log_start_offset = -1
        if version >= 9:
            index, epoch, fetch_offset, log_start_offset, max_bytes = _PARTITION_9.unpack_from(frame, at)
            at += 28
        elif version >= 5:
            index, fetch_offset, log_start_offset, max_bytes = _PARTITION_5.unpack_from(frame, at)
            at += 24
        else:
            index, fetch_offset, max_bytes = _PARTITION_4.unpack_from(frame, at)
            at += 16
        out.append(FetchPartition(index, epoch, fetch_offset, -1, log_start_offset, max_bytes))
    return at


def _read_forgotten(version: int, frame: memoryview, at: int) -> tuple[list[Forgotten], int]:
    flexible = version >= FLEXIBLE_FROM
    topic_count, at = read_array_count(frame, at, flexible, 3)
    elements_left = ELEMENTS_MAX - topic_count
    tags_left = [ELEMENTS_MAX]
    forgotten: list[Forgotten] = []
    for _ in range(topic_count):
        name: str | None = None
        topic_id: UUID | None = None
        if version >= TOPIC_IDS_FROM:
            topic_id, at = read_uuid(frame, at)
        else:
            name, at = read_string(frame, at, flexible)
            if name is None:
                raise MalformedRequest("topic without a name")
        count, at = read_array_count(frame, at, flexible, 4)
        elements_left -= count
        if count < 0 or elements_left < 0:
            raise MalformedRequest(f"topic with {count} forgotten partitions")
        forgotten.append((name, topic_id, [index for (index,) in _INT32.iter_unpack(frame[at : at + 4 * count])]))
        at += 4 * count
        if flexible:
            at = skip_tags(frame, at, tags_left)
    return forgotten, at


def write_fetch_request(version: int, request: FetchRequest) -> bytes:
    flexible = version >= FLEXIBLE_FROM
    limits = (request.max_wait_ms, request.min_bytes, request.max_bytes, request.isolation_level)
    session = (request.session_id, request.session_epoch)
    if version >= REPLICA_STATE_FROM:
        out = bytearray(_START_15.pack(*limits, *session))
    elif version >= 7:
        out = bytearray(_START_7.pack(request.replica_id, *limits, *session))
    else:
        out = bytearray(_START_4.pack(request.replica_id, *limits))
    _put_count(out, flexible, len(request.topics))
    for topic in request.topics:
        out += write_topic(topic.name, topic.topic_id, version >= TOPIC_IDS_FROM, flexible)
        _put_count(out, flexible, len(topic.partitions))
        for partition in topic.partitions:
            _put_partition(out, version, partition)
        if flexible:
            out.append(0)
    if version >= 7:
        _put_forgotten(out, version, request.forgotten)
    if version >= 11:
        out += write_string(request.rack_id, flexible)
    if flexible:
        _put_request_tags(out, version, request)
    return bytes(out)


def _put_count(out: bytearray, flexible: bool, count: int) -> None:
    out += uvarint(count + 1) if flexible else _INT32.pack(count)


def _put_partition(out: bytearray, version: int, partition: FetchPartition) -> None:
    index, epoch, fetch_offset, last_epoch, log_start_offset, max_bytes, high_watermark, received = partition
    if version >= FLEXIBLE_FROM:
        out += _PARTITION_12.pack(index, epoch, fetch_offset, last_epoch, log_start_offset, max_bytes)
        has_watermark = high_watermark != HIGH_WATERMARK_NOT_SENT and version >= 18
        out.append(has_watermark + (received is not None))
        if has_watermark:
            out += b"\x01\x08" + _INT64.pack(high_watermark)
        if received is not None:
            out += uvarint(OWN_TAG) + b"\x0d" + _RECEIVED.pack(*received)
    elif version >= 9:
        out += _PARTITION_9.pack(index, epoch, fetch_offset, log_start_offset, max_bytes)
    elif version >= 5:
        out += _PARTITION_5.pack(index, fetch_offset, log_start_offset, max_bytes)
    else:
        out += _PARTITION_4.pack(index, fetch_offset, max_bytes)


def _put_forgotten(out: bytearray, version: int, forgotten: Sequence[Forgotten]) -> None:
    flexible = version >= FLEXIBLE_FROM
    _put_count(out, flexible, len(forgotten))
    for name, topic_id, partitions in forgotten:
        out += write_topic(name, topic_id, version >= TOPIC_IDS_FROM, flexible)
        _put_count(out, flexible, len(partitions))
        for index in partitions:
            out += _INT32.pack(index)
        if flexible:
            out.append(0)


def _put_request_tags(out: bytearray, version: int, request: FetchRequest) -> None:
    tags: list[bytes] = []
    if request.cluster_id is not None:
        content = write_string(request.cluster_id, True)
        tags.append(b"\x00" + uvarint(len(content)) + content)
    if version >= REPLICA_STATE_FROM and (request.replica_id, request.replica_epoch) != (-1, -1):
        tags.append(b"\x01\x0d" + _REPLICA_STATE.pack(request.replica_id, request.replica_epoch) + b"\x00")
    out += uvarint(len(tags)) + b"".join(tags)


def write_fetch_response(
    version: int,
    error_code: int,
    session_id: int,
    topics: Sequence[TopicResponse],
    throttle_ms: int = 0,
    node_endpoints: Sequence[tuple[int, str, int, str | None]] = (),
    *,
    takes_received: bool = False,
) -> list[Buffer]:
    """Return the body of a response in parts: the given record buffers between encoded fields, without copies."""
    flexible = version >= FLEXIBLE_FROM
    buffers: list[Buffer] = []
    if version >= 7:
        out = bytearray(_RESPONSE_START_7.pack(throttle_ms, error_code, session_id))
    else:
        out = bytearray(_RESPONSE_START_4.pack(throttle_ms))
    out += uvarint(len(topics) + 1) if flexible else _INT32.pack(len(topics))
    for name, topic_id, partitions in topics:
        out += write_topic(name, topic_id, version >= TOPIC_IDS_FROM, flexible)
        out += uvarint(len(partitions) + 1) if flexible else _INT32.pack(len(partitions))
        for partition in partitions:
            records = partition.records
            has_tags = partition.current_leader is not None or partition.diverging_epoch is not None
            if flexible and not records and not has_tags and not partition.aborted_transactions:
                # Most partitions of most responses.
                out += _OFFSETS_12.pack(
                    partition.partition,
                    partition.error_code,
                    partition.high_watermark,
                    partition.last_stable_offset,
                    partition.log_start_offset,
                    0 if partition.aborted_transactions is None else 1,
                    partition.preferred_read_replica,
                    1,
                    0,
                )
                continue
            _put_partition_start(out, version, partition, len(records))
            if records:
                buffers.append(out)
                buffers.append(records)
                out = bytearray()
            if has_tags and flexible:
                _put_partition_tags(out, partition)
            elif flexible:
                out.append(0)
        if flexible:
            out.append(0)
    if takes_received and flexible:
        out += _TAKES_RECEIVED
    elif version >= NODE_ENDPOINTS_FROM:
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
        out += _PARTITION_RESPONSE_5.pack(index, code, high, stable, start)
    else:
        out += _PARTITION_RESPONSE_4.pack(index, code, high, stable)
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
    flexible = version >= FLEXIBLE_FROM
    error_code = session_id = 0
    try:
        if version >= 7:
            throttle_ms, error_code, session_id = _RESPONSE_START_7.unpack_from(body, at)
            at += 10
        else:
            (throttle_ms,) = _RESPONSE_START_4.unpack_from(body, at)
            at += 4
        topics, at = read_topics(version, body, at, flexible, version >= TOPIC_IDS_FROM, 25, _read_partition)
        response = FetchResponse(error_code, session_id, topics, throttle_ms)
        if flexible:
            tags, at = read_tags(body, at)
            if 0 in tags and version >= NODE_ENDPOINTS_FROM:
                response.node_endpoints = read_node_endpoints(tags[0])
            response.takes_received = OWN_TAG in tags
    except (error, IndexError) as e:
        raise MalformedRequest("Fetch response cut short") from e
    if at != len(body):
        raise MalformedRequest(f"Fetch response with {len(body) - at} bytes too many")
    return response


def _read_partition(version: int, body: memoryview, at: int) -> tuple[FetchPartitionResponse, int]:
    flexible = version >= FLEXIBLE_FROM
    if version >= 5:
        index, code, high, stable, start = _PARTITION_RESPONSE_5.unpack_from(body, at)
        partition = FetchPartitionResponse(index, code, high, stable, start)
        at += 30
    else:
        partition = FetchPartitionResponse(*_PARTITION_RESPONSE_4.unpack_from(body, at))
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
