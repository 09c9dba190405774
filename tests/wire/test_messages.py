"""The schema-driven codec (used off the hot path), for every API and version, both ways, with kio as the oracle."""

import contextlib
import dataclasses
import io
import struct
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.serial import entity_reader, entity_writer

from chronik.wire.api import ApiKey, known_versions
from chronik.wire.errors import ErrorCode, MalformedRequest
from chronik.wire.fetch import read_fetch_request
from chronik.wire.messages import read_request, read_response, write_request, write_response
from chronik.wire.primitives import ELEMENTS_MAX, TAGS_MAX, uvarint
from chronik.wire.produce import read_produce_request
from chronik.wire.schema import Direction, Field, Structure, load

EVERY_MESSAGE = [
    (key, version, direction)
    for key in ApiKey
    for version in known_versions(key)
    for direction in ("request", "response")
]

INTEGERS = {"int8": (8, True), "int16": (16, True), "int32": (32, True), "int64": (64, True), "uint16": (16, False)}
PRIMITIVES: dict[str, st.SearchStrategy[Any]] = {
    kind: st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) if signed else st.integers(0, (1 << bits) - 1)
    for kind, (bits, signed) in INTEGERS.items()
} | {
    "bool": st.booleans(),
    "float64": st.floats(allow_nan=False),
    "string": st.text(max_size=200),
    "bytes": st.binary(max_size=300),
    "records": st.binary(max_size=300),
    "uuid": st.none() | st.uuids().filter(lambda value: value.int != 0),
    "error_code": st.sampled_from(ErrorCode),
    "timedelta_i32": st.integers(-1, (1 << 31) - 1),
    "timedelta_i64": st.integers(-1, 1 << 45),
    "datetime_i64": st.integers(0, 1 << 42),
}


def values_of(structure: Structure) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({field.name: values_of_field(field) for field in structure.fields})


def values_of_field(field: Field) -> st.SearchStrategy[Any]:
    one = values_of(field.nested) if field.nested else PRIMITIVES[field.kind]
    if field.is_array:
        one = st.lists(one, max_size=3)
    return st.none() | one if field.is_nullable else one


def plain(value: Any) -> Any:
    """Convert a kio entity to the values that would encode it."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, timedelta):
        return value // timedelta(milliseconds=1)
    if isinstance(value, datetime):
        return (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    return value


def write(key: int, version: int, direction: Direction, values: dict[str, Any]) -> bytes:
    return (write_request if direction == "request" else write_response)(key, version, values)


def read(key: int, version: int, direction: Direction, body: bytes) -> Any:
    return (read_request if direction == "request" else read_response)(key, version, body)


def by_kio(entity: Any) -> bytes:
    written = io.BytesIO()
    entity_writer(type(entity))(written, entity)
    return written.getvalue()


@given(st.sampled_from(EVERY_MESSAGE), st.data())
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
def test_every_message_matches_the_encoding_of_kio(message: tuple[ApiKey, int, Direction], data: st.DataObject) -> None:
    key, version, direction = message
    values = data.draw(values_of(load(key, version, direction)))
    body = write(key, version, direction, values)
    entity = read(key, version, direction, body)
    oracle, size_bytes = entity_reader(type(entity))(body, 0)
    assert entity == oracle
    assert size_bytes == len(body)
    assert plain(entity) == values
    assert by_kio(entity) == body
    assert write(key, version, direction, plain(entity)) == body


@pytest.mark.parametrize("key", list(ApiKey), ids=lambda key: key.name)
def test_every_version_can_be_written_with_defaults_only(key: ApiKey) -> None:
    for version in known_versions(key):
        for direction in ("request", "response"):
            body = write(key, version, direction, {})
            assert by_kio(read(key, version, direction, body)) == body


@given(st.sampled_from(EVERY_MESSAGE), st.data())
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
def test_damaged_messages_parse_or_raise_malformed_request(
    message: tuple[ApiKey, int, Direction], data: st.DataObject
) -> None:
    key, version, direction = message
    body = bytearray(write(key, version, direction, data.draw(values_of(load(key, version, direction)))))
    for _ in range(data.draw(st.integers(1, 4))):
        if not body:
            break
        at = data.draw(st.integers(0, len(body) - 1))
        kind = data.draw(st.sampled_from(["byte", "int32", "cut", "grow"]))
        if kind == "byte":
            body[at] = data.draw(st.integers(0, 255))
        elif kind == "int32":
            body[at : at + 4] = data.draw(
                st.sampled_from([b"\x7f\xff\xff\xff", b"\xff\xff\xff\xfe", b"\xff\xff\xff\x07"])
            )
        elif kind == "cut":
            del body[at:]
        else:
            body[at:at] = data.draw(st.binary(max_size=8))
    with contextlib.suppress(MalformedRequest):
        read(key, version, direction, bytes(body))


@pytest.mark.parametrize("version", [1, 9])
def test_an_oversized_array_count_is_refused_before_memory_is_allocated(version: int) -> None:
    body = b"\xff\xff\xff\xff\x0f" if version >= 9 else b"\x7f\xff\xff\xff"
    with pytest.raises(MalformedRequest):
        read_request(ApiKey.METADATA, version, body + bytes(20))


def test_a_message_with_too_many_elements_is_refused() -> None:
    count = ELEMENTS_MAX + 1
    body = struct.pack(">i", count) + b"\x00\x01a" * count
    with pytest.raises(MalformedRequest):
        read_request(ApiKey.METADATA, 1, body)


def test_nested_arrays_share_the_element_limit_of_the_message() -> None:
    half = ELEMENTS_MAX // 2
    topic = b"\x00\x01a" + struct.pack(">i", half) + bytes(4 * half)
    body = struct.pack(">i", 3) + topic * 3 + struct.pack(">i", 1000)
    with pytest.raises(MalformedRequest):
        read_request(ApiKey.OFFSET_FETCH, 1, b"\x00\x01g" + body)


@pytest.mark.parametrize("count", [TAGS_MAX, TAGS_MAX + 1])
def test_a_structure_has_at_most_ten_thousand_tagged_fields(count: int) -> None:
    # An unknown tag without content, this many times: after the whole request, and after one of its topics.
    tags = uvarint(count) + b"\x63\x00" * count
    whole = bytes(3) + tags
    nested = b"\x02" + bytes(16) + b"\x02a" + tags + bytes(3)
    fetch = bytes(25) + b"\x01\x01\x01" + tags
    produce = b"\x00" + bytes(6) + b"\x01" + tags
    reads = (
        lambda: read_request(ApiKey.METADATA, 13, whole),
        lambda: read_request(ApiKey.METADATA, 13, nested),
        lambda: read_fetch_request(12, memoryview(fetch), 0),
        lambda: read_produce_request(9, memoryview(produce), 0),
    )
    for read_one in reads:
        if count <= TAGS_MAX:
            read_one()
        else:
            with pytest.raises(MalformedRequest, match="tagged fields"):
                read_one()


def test_all_structures_of_a_message_share_a_limit_of_tagged_fields() -> None:
    tags = uvarint(TAGS_MAX) + b"\x63\x00" * TAGS_MAX
    count = ELEMENTS_MAX // TAGS_MAX + 1
    topics = uvarint(count + 1) + (bytes(16) + b"\x02a" + tags) * count
    partition = b"\x00\x00\x00\x00\x00"
    produce = b"\x00" + bytes(6) + b"\x02\x02t" + uvarint(count + 1) + (partition + tags) * count + b"\x00\x00"
    with pytest.raises(MalformedRequest, match="more than 1000000 tagged fields"):
        read_request(ApiKey.METADATA, 13, topics + b"\x00\x00\x00")
    with pytest.raises(MalformedRequest, match="more than 1000000 tagged fields"):
        read_produce_request(9, memoryview(produce), 0)


def test_a_count_of_tagged_fields_is_compared_with_the_bytes_at_hand() -> None:
    with pytest.raises(MalformedRequest, match="9999 tagged fields in 4 bytes"):
        read_request(ApiKey.METADATA, 13, bytes(3) + uvarint(9999) + bytes(4))


def test_trailing_bytes_are_ignored() -> None:
    """The request that librdkafka 2.16 sends to list all topics, byte for byte."""
    request = read_request(ApiKey.METADATA, 13, bytes.fromhex("00000000010000"))
    assert request.topics is None


def test_an_unknown_version_or_key_is_malformed() -> None:
    for key, version in ((3, 99), (3, -1), (4711, 0)):
        with pytest.raises(MalformedRequest):
            read_request(key, version, b"")


def test_unknown_tagged_fields_are_skipped() -> None:
    body = write_request(ApiKey.HEARTBEAT, 4, {"group_id": "g", "member_id": "m", "generation_id": 3})
    assert body[-1] == 0
    assert read_request(ApiKey.HEARTBEAT, 4, body[:-1] + b"\x01\x63\x02hi").group_id == "g"


def test_fields_that_a_version_lacks_are_dropped() -> None:
    values = {"error_code": ErrorCode.rebalance_in_progress, "throttle_time": 7}
    assert write_response(ApiKey.HEARTBEAT, 0, values) == b"\x00\x1b"
    assert write_response(ApiKey.HEARTBEAT, 1, values) == b"\x00\x00\x00\x07\x00\x1b"


def test_a_field_that_no_version_has_raises_key_error() -> None:
    with pytest.raises(KeyError, match="eror_code"):
        write_response(ApiKey.HEARTBEAT, 4, {"eror_code": 0})
    with pytest.raises(KeyError, match="partition_idx"):
        write_response(ApiKey.METADATA, 1, {"topics": [{"partitions": [{"partition_idx": 0}]}]})


def test_none_is_written_as_empty_if_the_version_has_no_null() -> None:
    old = read_response(ApiKey.JOIN_GROUP, 5, write_response(ApiKey.JOIN_GROUP, 5, {"protocol_name": None}))
    new = read_response(ApiKey.JOIN_GROUP, 7, write_response(ApiKey.JOIN_GROUP, 7, {"protocol_name": None}))
    assert (old.protocol_name, new.protocol_name) == ("", None)


def test_uuids_and_durations_accept_plain_values() -> None:
    topic_id = UUID(int=7)
    body = write_response(ApiKey.METADATA, 12, {"throttle_time": 1500, "topics": [{"name": "t", "topic_id": topic_id}]})
    response = read_response(ApiKey.METADATA, 12, body)
    assert response.throttle_time == timedelta(milliseconds=1500)
    assert response.topics[0].topic_id == topic_id
    assert (
        write_response(ApiKey.METADATA, 12, {"throttle_time": timedelta(milliseconds=1500)})[:4] == b"\x00\x00\x05\xdc"
    )


def test_the_error_for_an_oversized_value_names_its_field() -> None:
    with pytest.raises(struct.error) as caught:
        write_response(ApiKey.HEARTBEAT, 4, {"error_code": 1 << 40})
    assert "HeartbeatResponse.error_code" in "".join(caught.value.__notes__)
