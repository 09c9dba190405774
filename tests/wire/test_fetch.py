"""Fetch in every version and both directions, with kio as the oracle."""

import contextlib
import io
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from chronik.wire.errors import ErrorCode, MalformedRequest
from chronik.wire.fetch import (
    HIGH_WATERMARK_NOT_SENT,
    VERSIONS,
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    ReceivedPosition,
    read_fetch_request,
    read_fetch_response,
    write_fetch_request,
    write_fetch_response,
)

versions = st.sampled_from(VERSIONS)
int32 = st.integers(-(1 << 31), (1 << 31) - 1)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
names = st.text(min_size=1, max_size=150)
topic_ids = st.uuids().filter(lambda value: value.int != 0)
endpoints = st.lists(st.tuples(int32, st.text(max_size=20), int32, st.none() | st.text(max_size=5)), max_size=2)


@st.composite
def requests(draw: st.DrawFn, version: int) -> FetchRequest:
    def topic() -> tuple[str | None, UUID | None]:
        return (None, draw(topic_ids)) if version >= 13 else (draw(names), None)

    def partition() -> FetchPartition:
        return FetchPartition(
            draw(int32),
            draw(int32) if version >= 9 else -1,
            draw(int64),
            draw(int32) if version >= 12 else -1,
            draw(int64) if version >= 5 else -1,
            draw(int32),
            draw(st.just(HIGH_WATERMARK_NOT_SENT) | int64) if version >= 18 else HIGH_WATERMARK_NOT_SENT,
        )

    request = FetchRequest(
        draw(int32), draw(st.integers(-1, (1 << 31) - 1)), draw(int32), draw(int32), draw(st.integers(0, 1))
    )
    request.topics = [
        FetchTopic(*topic(), [partition() for _ in range(draw(st.integers(0, 3)))])
        for _ in range(draw(st.integers(0, 3)))
    ]
    if version >= 7:
        request.session_id = draw(int32)
        request.session_epoch = draw(int32)
        request.forgotten = [(*topic(), draw(st.lists(int32, max_size=3))) for _ in range(draw(st.integers(0, 2)))]
    if version >= 11:
        request.rack_id = draw(st.text(max_size=5))
    if version >= 12:
        request.cluster_id = draw(st.none() | st.text(max_size=30))
    if version >= 15:
        request.replica_epoch = draw(int64)
    return request


@st.composite
def responses(draw: st.DrawFn, version: int) -> list[tuple[str | None, UUID | None, list[FetchPartitionResponse]]]:
    def partition() -> FetchPartitionResponse:
        response = FetchPartitionResponse(draw(int32), draw(st.sampled_from(ErrorCode)).value, draw(int64), draw(int64))
        response.aborted_transactions = draw(st.none() | st.lists(st.tuples(int64, int64), max_size=2))
        response.records = draw(st.binary(max_size=300))
        if version >= 5:
            response.log_start_offset = draw(int64)
        if version >= 11:
            response.preferred_read_replica = draw(int32)
        if version >= 12:
            response.diverging_epoch = draw(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 99)))
            response.current_leader = draw(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)))
        return response

    return [
        (
            None if version >= 13 else draw(names),
            draw(topic_ids) if version >= 13 else None,
            [partition() for _ in range(draw(st.integers(0, 3)))],
        )
        for _ in range(draw(st.integers(0, 3)))
    ]


def by_kio(entity: Any) -> bytes:
    written = io.BytesIO()
    entity_writer(type(entity))(written, entity)
    return written.getvalue()


def topic_of(entity: Any) -> tuple[str | None, UUID | None]:
    return getattr(entity, "topic", None), getattr(entity, "topic_id", None)


@pytest.mark.parametrize("version", VERSIONS)
@given(data=st.data())
@settings(max_examples=40)
def test_requests_match_the_encoding_of_kio(version: int, data: st.DataObject) -> None:
    request = data.draw(requests(version))
    body = write_fetch_request(version, request)
    entity: Any
    entity, size_bytes = entity_reader(load_request_schema(1, version))(body, 0)
    assert size_bytes == len(body)
    assert by_kio(entity) == body
    assert entity.max_wait == timedelta(milliseconds=request.max_wait_ms)
    assert (entity.min_bytes, entity.max_bytes, entity.isolation_level) == (
        request.min_bytes,
        request.max_bytes,
        request.isolation_level,
    )
    replica = entity.replica_state if version >= 15 else entity
    assert replica.replica_id == request.replica_id
    assert getattr(replica, "replica_epoch", -1) == request.replica_epoch
    assert getattr(entity, "session_id", 0) == request.session_id
    assert getattr(entity, "session_epoch", -1) == request.session_epoch
    assert getattr(entity, "rack_id", "") == request.rack_id
    assert getattr(entity, "cluster_id", None) == request.cluster_id
    assert [
        (
            *topic_of(topic),
            [
                FetchPartition(
                    p.partition,
                    getattr(p, "current_leader_epoch", -1),
                    p.fetch_offset,
                    getattr(p, "last_fetched_epoch", -1),
                    getattr(p, "log_start_offset", -1),
                    p.partition_max_bytes,
                    getattr(p, "high_watermark", HIGH_WATERMARK_NOT_SENT),
                )
                for p in topic.partitions
            ],
        )
        for topic in entity.topics
    ] == [(topic.name, topic.topic_id, topic.partitions) for topic in request.topics]
    assert [
        (*topic_of(topic), list(topic.partitions)) for topic in getattr(entity, "forgotten_topics_data", ())
    ] == request.forgotten
    assert read_fetch_request(version, memoryview(b"header" + body), 6) == request


@pytest.mark.parametrize("version", VERSIONS)
@given(
    data=st.data(),
    error_code=st.sampled_from(ErrorCode),
    session_id=int32,
    throttle_ms=st.integers(0, 1 << 30),
    node_endpoints=endpoints,
)
@settings(max_examples=40)
def test_responses_match_the_encoding_of_kio(
    version: int, data: st.DataObject, error_code: ErrorCode, session_id: int, throttle_ms: int, node_endpoints: Any
) -> None:
    topics = data.draw(responses(version))
    body = b"".join(write_fetch_response(version, error_code, session_id, topics, throttle_ms, node_endpoints))
    entity: Any
    entity, size_bytes = entity_reader(load_response_schema(1, version))(body, 0)
    assert size_bytes == len(body)
    assert by_kio(entity) == body
    assert entity.throttle_time == timedelta(milliseconds=throttle_ms)
    if version >= 7:
        assert (entity.error_code, entity.session_id) == (error_code, session_id)
    for theirs, (name, topic_id, partitions) in zip(entity.responses, topics, strict=True):
        assert topic_of(theirs) == (name, topic_id)
        for their, ours in zip(theirs.partitions, partitions, strict=True):
            aborted = their.aborted_transactions
            assert ours == FetchPartitionResponse(
                their.partition_index,
                their.error_code.value,
                their.high_watermark,
                their.last_stable_offset,
                getattr(their, "log_start_offset", -1),
                None if aborted is None else [(one.producer_id, one.first_offset) for one in aborted],
                getattr(their, "preferred_read_replica", -1),
                their.records,
                ours.diverging_epoch and (their.diverging_epoch.epoch, their.diverging_epoch.end_offset),
                ours.current_leader and (their.current_leader.leader_id, their.current_leader.leader_epoch),
            )
    response = read_fetch_response(version, memoryview(b"header" + body), 6)
    assert (response.error_code, response.session_id) == ((error_code, session_id) if version >= 7 else (0, 0))
    assert response.throttle_ms == throttle_ms
    assert list(response.node_endpoints) == (node_endpoints if version >= 16 else [])
    assert [
        (name, topic_id, [replace(partition, records=bytes(partition.records)) for partition in partitions])
        for name, topic_id, partitions in response.topics
    ] == topics


def test_records_are_written_and_read_without_a_copy() -> None:
    records = memoryview(b"abcdef")
    for version in VERSIONS:
        topics = [("t", UUID(int=1), [FetchPartitionResponse(0, records=records), FetchPartitionResponse(1)])]
        buffers = write_fetch_response(version, 0, 0, topics)
        assert any(buffer is records for buffer in buffers)
        frame = bytearray(b"".join(buffers))
        ((_, _, (first, second)),) = read_fetch_response(version, memoryview(frame)).topics
        frame[frame.index(b"abcdef")] = ord("A")
        assert (bytes(first.records), bytes(second.records)) == (b"Abcdef", b"")


def test_null_records_are_read_as_empty() -> None:
    body = b"".join(write_fetch_response(11, 0, 0, [("t", None, [FetchPartitionResponse(0)])]))
    assert body.endswith(bytes(4))
    ((_, _, (partition,)),) = read_fetch_response(11, memoryview(body[:-4] + b"\xff\xff\xff\xff")).topics
    assert partition.records == b""


@given(versions.flatmap(lambda version: st.tuples(st.just(version), requests(version))), st.data())
def test_a_truncated_or_extended_request_is_malformed(drawn: tuple[int, FetchRequest], data: st.DataObject) -> None:
    version, request = drawn
    body = write_fetch_request(version, request)
    with pytest.raises(MalformedRequest):
        read_fetch_request(version, memoryview(body)[: data.draw(st.integers(0, len(body) - 1))], 0)
    with pytest.raises(MalformedRequest):
        read_fetch_request(version, memoryview(body + b"\x00"), 0)


@given(versions.flatmap(lambda version: st.tuples(st.just(version), requests(version))), st.data())
def test_damaged_requests_parse_or_raise_malformed_request(
    drawn: tuple[int, FetchRequest], data: st.DataObject
) -> None:
    version, request = drawn
    body = bytearray(write_fetch_request(version, request))
    at = data.draw(st.integers(0, len(body) - 1))
    damage = data.draw(
        st.binary(min_size=1, max_size=6) | st.just(b"\x7f\xff\xff\xff") | st.just(b"\xff\xff\xff\xff\x0f")
    )
    body[at : at + len(damage)] = damage
    with contextlib.suppress(MalformedRequest):
        read_fetch_request(version, memoryview(body), 0)


@given(versions.flatmap(lambda version: st.tuples(st.just(version), responses(version))), st.data())
def test_damaged_responses_parse_or_raise_malformed_request(drawn: tuple[int, Any], data: st.DataObject) -> None:
    version, topics = drawn
    body = bytearray(b"".join(write_fetch_response(version, 0, 0, topics)))
    at = data.draw(st.integers(0, len(body) - 1))
    damage = data.draw(
        st.binary(min_size=1, max_size=6) | st.just(b"\x7f\xff\xff\xff") | st.just(b"\xff\xff\xff\xff\x0f")
    )
    body[at : at + len(damage)] = damage
    with contextlib.suppress(MalformedRequest):
        read_fetch_response(version, memoryview(body))


START_7 = bytes(25)
START_15 = bytes(21)


@pytest.mark.parametrize(
    ("version", "body"),
    [
        (7, START_7 + b"\x7f\xff\xff\xff"),
        (7, START_7 + b"\xff\xff\xff\xff"),
        (7, START_7 + b"\x00\x00\x00\x01\xff\xff\x00\x00\x00\x00" + bytes(4)),
        (7, START_7 + b"\x00\x00\x00\x01\x00\x01\xff\x00\x00\x00\x00" + bytes(4)),
        (7, START_7 + bytes(4) + b"\x7f\xff\xff\xff"),
        (7, START_7 + bytes(4) + b"\x00\x00\x00\x01\x00\x01t\x7f\xff\xff\xff"),
        (11, START_7 + bytes(8) + b"\xff\xff"),
        (15, START_15 + b"\xff\xff\xff\xff\x0f"),
        (15, START_15 + b"\x01\x01\x01\xff\xff\xff\xff\x0f"),
        (15, START_15 + b"\x01\x01\x01\x01\x01\x04\x00\x00\x00\x01"),
        (15, START_15 + b"\x01\x01\x01\x01\x00\x02\x7fa"),
    ],
    ids=[
        "absurd topic count",
        "null topics",
        "null name",
        "name not UTF-8",
        "absurd forgotten count",
        "absurd forgotten partitions",
        "null rack",
        "absurd compact count",
        "absurd tag count",
        "replica state cut short",
        "cluster id longer than its tag",
    ],
)
def test_hostile_requests_are_malformed(version: int, body: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read_fetch_request(version, memoryview(body), 0)


@given(int64, int32, st.booleans(), st.just(HIGH_WATERMARK_NOT_SENT) | int64)
def test_received_positions_are_sent_beside_the_high_watermark(
    offset: int, last_epoch: int, wants_records: bool, high_watermark: int
) -> None:
    received = ReceivedPosition(offset, last_epoch, wants_records)
    partition = FetchPartition(3, 1, 100, 1, 0, 1 << 20, high_watermark, received)
    body = write_fetch_request(18, FetchRequest(topics=[FetchTopic(None, UUID(int=1), [partition])]))
    assert read_fetch_request(18, memoryview(body), 0).topics[0].partitions == [partition]
    assert partition.read_offset == offset
    assert partition._replace(received=None).read_offset == 100


def test_a_response_says_whether_the_leader_takes_received_positions() -> None:
    for takes in (True, False):
        body = b"".join(write_fetch_response(18, 0, 5, [], takes_received=takes))
        assert read_fetch_response(18, memoryview(body)).takes_received is takes


def test_unknown_tagged_fields_are_skipped_at_every_level() -> None:
    tags = b"\x01\x63\x03abc"
    partition = FetchPartition(3, 1, 100, 1, 0, 1 << 20)
    plain = write_fetch_request(12, FetchRequest(topics=[FetchTopic("t", None, [partition])]))
    at = plain.index(b"\x02t") + 3 + 32
    assert plain[at:] == b"\x00\x00\x01\x01\x00"
    tagged = plain[:at] + tags + tags + b"\x01\x01" + tags
    assert read_fetch_request(12, memoryview(tagged), 0) == read_fetch_request(12, memoryview(plain), 0)
