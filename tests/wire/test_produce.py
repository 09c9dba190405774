"""Produce in every version and both directions, with kio as the oracle."""

import contextlib
import io
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from chronik.wire.errors import ErrorCode, MalformedRequest
from chronik.wire.primitives import ELEMENTS_MAX
from chronik.wire.produce import (
    VERSIONS,
    ProducePartitionResponse,
    ProduceRequest,
    ProduceTopic,
    produce_request_buffers,
    read_produce_request,
    read_produce_response,
    write_produce_request,
    write_produce_response,
)

versions = st.sampled_from(VERSIONS)
int32 = st.integers(-(1 << 31), (1 << 31) - 1)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
names = st.text(min_size=1, max_size=150)
# kio reads the zero uuid as None; a topic id is never zero.
topic_ids = st.uuids().filter(lambda value: value.int != 0)
records: st.SearchStrategy[memoryview | None] = st.none() | st.binary(max_size=300).map(lambda data: memoryview(data))
endpoints = st.lists(st.tuples(int32, st.text(max_size=20), int32, st.none() | st.text(max_size=5)), max_size=2)


@st.composite
def requests(draw: st.DrawFn, version: int) -> ProduceRequest:
    topics = [
        ProduceTopic(
            None if version >= 13 else draw(names),
            draw(topic_ids) if version >= 13 else None,
            draw(st.lists(st.tuples(int32, records), max_size=3)),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    transactional_id = draw(st.none() | st.text(max_size=200))
    return ProduceRequest(transactional_id, draw(st.integers(-1, 1)), draw(st.integers(0, 1 << 30)), topics)


@st.composite
def responses(draw: st.DrawFn, version: int) -> list[tuple[str | None, UUID | None, list[ProducePartitionResponse]]]:
    def partition() -> ProducePartitionResponse:
        response = ProducePartitionResponse(
            draw(int32), draw(st.sampled_from(ErrorCode)).value, draw(int64), draw(st.integers(-1, 1 << 42))
        )
        if version >= 5:
            response.log_start_offset = draw(int64)
        if version >= 8:
            response.error_message = draw(st.none() | st.text(max_size=200))
            response.record_errors = draw(st.lists(st.tuples(int32, st.none() | st.text(max_size=9)), max_size=2))
        if version >= 10:
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


@pytest.mark.parametrize("version", VERSIONS)
@given(data=st.data())
@settings(max_examples=40)
def test_requests_match_the_encoding_of_kio(version: int, data: st.DataObject) -> None:
    request = data.draw(requests(version))
    body = write_produce_request(version, request)
    entity: Any
    entity, size_bytes = entity_reader(load_request_schema(0, version))(body, 0)
    assert size_bytes == len(body)
    assert by_kio(entity) == body
    assert entity.transactional_id == request.transactional_id
    assert entity.acks == request.acks
    assert entity.timeout == timedelta(milliseconds=request.timeout_ms)
    assert [
        (
            getattr(topic, "name", None),
            getattr(topic, "topic_id", None),
            [(p.index, p.records) for p in topic.partition_data],
        )
        for topic in entity.topic_data
    ] == [(topic.name, topic.topic_id, topic.partitions) for topic in request.topics]
    assert read_produce_request(version, memoryview(b"header" + body), 6) == request


@pytest.mark.parametrize("version", VERSIONS)
@given(data=st.data(), throttle_ms=st.integers(0, 1 << 30), node_endpoints=endpoints)
@settings(max_examples=40)
def test_responses_match_the_encoding_of_kio(
    version: int, data: st.DataObject, throttle_ms: int, node_endpoints: Any
) -> None:
    topics = data.draw(responses(version))
    check_response(version, topics, throttle_ms, node_endpoints)


@pytest.mark.parametrize("version", VERSIONS)
@given(partition=int32, base_offset=int64, time_ms=st.integers(-1, 1 << 42), log_start_offset=int64)
@settings(max_examples=10)
def test_the_response_for_one_partition_matches_the_encoding_of_kio(
    version: int, partition: int, base_offset: int, time_ms: int, log_start_offset: int
) -> None:
    only = ProducePartitionResponse(partition, 0, base_offset, time_ms, log_start_offset if version >= 5 else -1)
    topic = (None, UUID(int=5), [only]) if version >= 13 else ("topic", None, [only])
    check_response(version, [topic], 7, [])


def check_response(version: int, topics: Any, throttle_ms: int, node_endpoints: Any) -> None:
    body = write_produce_response(version, topics, throttle_ms, node_endpoints)
    entity: Any
    entity, size_bytes = entity_reader(load_response_schema(0, version))(body, 0)
    assert size_bytes == len(body)
    assert by_kio(entity) == body
    assert entity.throttle_time == timedelta(milliseconds=throttle_ms)
    assert len(entity.responses) == len(topics)
    for theirs, (name, topic_id, partitions) in zip(entity.responses, topics, strict=True):
        assert (getattr(theirs, "name", None), getattr(theirs, "topic_id", None)) == (name, topic_id)
        for their, ours in zip(theirs.partition_responses, partitions, strict=True):
            assert (their.index, their.error_code, their.base_offset) == (
                ours.partition,
                ours.error_code,
                ours.base_offset,
            )
            epoch = datetime(1970, 1, 1, tzinfo=UTC)
            at = None if ours.log_append_time_ms == -1 else epoch + timedelta(milliseconds=ours.log_append_time_ms)
            assert their.log_append_time == at
            assert getattr(their, "log_start_offset", -1) == ours.log_start_offset
            assert getattr(their, "error_message", None) == ours.error_message
            if ours.current_leader:
                assert (their.current_leader.leader_id, their.current_leader.leader_epoch) == ours.current_leader
    response = read_produce_response(version, memoryview(b"header" + body), 6)
    assert (list(response.topics), response.throttle_ms) == (
        [
            (name, id_, [_with_list(p) for p in partitions] if version >= 8 else partitions)
            for name, id_, partitions in topics
        ],
        throttle_ms,
    )
    assert list(response.node_endpoints) == (node_endpoints if version >= 10 else [])


def _with_list(partition: ProducePartitionResponse) -> ProducePartitionResponse:
    partition.record_errors = list(partition.record_errors)
    return partition


def test_records_are_slices_of_the_frame() -> None:
    for version in VERSIONS:
        topic = ProduceTopic("t", UUID(int=1), [(0, memoryview(b"abcdef"))])
        frame = bytearray(write_produce_request(version, ProduceRequest(None, 1, 5, [topic])))
        (index, sliced), *_ = read_produce_request(version, memoryview(frame), 0).topics[0].partitions
        assert sliced is not None
        at = frame.index(b"abcdef")
        frame[at : at + 6] = b"stamped"[:6]
        assert (index, bytes(sliced)) == (0, b"stampe")


def test_request_buffers_contain_the_records_without_a_copy() -> None:
    records_of_partition = memoryview(b"abcdef")
    request = ProduceRequest(None, 1, 5, [ProduceTopic("t", UUID(int=1), [(0, records_of_partition), (1, None)])])
    for version in VERSIONS:
        buffers = produce_request_buffers(version, request)
        assert any(buffer is records_of_partition for buffer in buffers)
        assert b"".join(buffers) == write_produce_request(version, request)


@given(versions.flatmap(lambda version: st.tuples(st.just(version), requests(version))), st.data())
def test_a_truncated_or_extended_request_is_malformed(drawn: tuple[int, ProduceRequest], data: st.DataObject) -> None:
    version, request = drawn
    body = write_produce_request(version, request)
    with pytest.raises(MalformedRequest):
        read_produce_request(version, memoryview(body)[: data.draw(st.integers(0, len(body) - 1))], 0)
    with pytest.raises(MalformedRequest):
        read_produce_request(version, memoryview(body + b"\x00"), 0)


@given(versions.flatmap(lambda version: st.tuples(st.just(version), requests(version))), st.data())
def test_damaged_requests_parse_or_raise_malformed_request(
    drawn: tuple[int, ProduceRequest], data: st.DataObject
) -> None:
    version, request = drawn
    body = bytearray(write_produce_request(version, request))
    at = data.draw(st.integers(0, len(body) - 1))
    damage = data.draw(
        st.binary(min_size=1, max_size=6) | st.just(b"\x7f\xff\xff\xff") | st.just(b"\xff\xff\xff\xff\x0f")
    )
    body[at : at + len(damage)] = damage
    with contextlib.suppress(MalformedRequest):
        read_produce_request(version, memoryview(body), 0)
    with contextlib.suppress(MalformedRequest):
        read_produce_response(version, memoryview(body), 0)


ACKS_TIMEOUT = b"\x00\x01\x00\x00\x00\x05"


@pytest.mark.parametrize(
    ("version", "body"),
    [
        (7, b"\xff\xff" + ACKS_TIMEOUT + b"\x7f\xff\xff\xff"),
        (7, b"\xff\xff" + ACKS_TIMEOUT + b"\xff\xff\xff\xff"),
        (7, b"\xff\xff" + ACKS_TIMEOUT + b"\x00\x00\x00\x01\xff\xff\x00\x00\x00\x00"),
        (7, b"\xff\xfe" + ACKS_TIMEOUT + b"\x00\x00\x00\x00"),
        (7, b"\xff\xff" + ACKS_TIMEOUT + b"\x00\x00\x00\x01\x00\x01\xff\x00\x00\x00\x00"),
        (7, b"\xff\xff" + ACKS_TIMEOUT + b"\x00\x00\x00\x01\x00\x01t\x00\x00\x00\x01\x00\x00\x00\x00\xff\xff\xff\xfe"),
        (7, b"\xff\xff" + ACKS_TIMEOUT + b"\x00\x00\x00\x01\x00\x01t\x00\x00\x00\x01\x00\x00\x00\x00\x7f\xff\xff\xff"),
        (9, b"\x00" + ACKS_TIMEOUT + b"\xff\xff\xff\xff\x0f"),
        (9, b"\x00" + ACKS_TIMEOUT + b"\xff\xff\xff\xff\xff\xff\xff\xff"),
        (9, b"\x00" + ACKS_TIMEOUT + b"\x02\x02t\x02\x00\x00\x00\x00\xff\xff\xff\xff\x0f\x00\x00\x00"),
        (9, b"\x00" + ACKS_TIMEOUT + b"\x02\x00\x01\x00\x00"),
        (13, b"\x00" + ACKS_TIMEOUT + b"\x02" + bytes(10)),
    ],
    ids=[
        "absurd topic count",
        "null topics",
        "null name",
        "negative length",
        "name not UTF-8",
        "negative records",
        "absurd records",
        "absurd compact count",
        "endless varint",
        "absurd compact records",
        "null compact name",
        "short topic id",
    ],
)
def test_hostile_requests_are_malformed(version: int, body: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read_produce_request(version, memoryview(body), 0)


def test_a_request_with_too_many_partitions_is_refused() -> None:
    partitions: list[tuple[int, memoryview | None]] = [(0, None)] * (ELEMENTS_MAX // 2)
    request = ProduceRequest(None, 1, 5, [ProduceTopic("a", None, partitions), ProduceTopic("b", None, partitions)])
    with pytest.raises(MalformedRequest):
        read_produce_request(9, memoryview(write_produce_request(9, request)), 0)


def test_unknown_tagged_fields_are_skipped_at_every_level() -> None:
    tags = b"\x02\x07\x03abc\x81\x01\x00"
    partition = b"\x00\x00\x00\x05\x04xyz" + tags
    body = b"\x00" + ACKS_TIMEOUT + b"\x02\x02t\x02" + partition + tags + tags
    request = read_produce_request(9, memoryview(body), 0)
    assert request.topics == [ProduceTopic("t", None, [(5, memoryview(b"xyz"))])]
