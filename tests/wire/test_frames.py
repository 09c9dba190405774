"""Request headers and response prefixes."""

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.request_header.v1.header import RequestHeader as HeaderV1
from kio.schema.request_header.v2.header import RequestHeader as HeaderV2
from kio.serial import entity_writer

from chronik.wire.api import ApiKey, is_flexible, known_versions
from chronik.wire.errors import MalformedRequest
from chronik.wire.frames import read_request_header, response_prefix, write_request

keys_and_versions = st.sampled_from([(key, version) for key in ApiKey for version in known_versions(key)])
correlation_ids = st.integers(-(1 << 31), (1 << 31) - 1)
client_ids = st.none() | st.text(max_size=40)


@given(keys_and_versions, correlation_ids, client_ids, st.binary(max_size=50))
def test_request_headers_match_the_encoding_of_kio(
    key_version: tuple[ApiKey, int], correlation_id: int, client_id: str | None, body: bytes
) -> None:
    key, version = key_version
    flexible = is_flexible(key, version)
    schema: Any = HeaderV2 if flexible else HeaderV1
    written = io.BytesIO()
    entity_writer(schema)(
        written,
        schema(request_api_key=key, request_api_version=version, correlation_id=correlation_id, client_id=client_id),
    )
    frame = write_request(key, version, correlation_id, client_id, body)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert frame[4:] == written.getvalue() + body

    header = read_request_header(memoryview(frame)[4:])
    assert header[:4] == (key, version, correlation_id, client_id)
    assert frame[4 + header.body_at :] == body


@given(keys_and_versions, client_ids, st.data())
def test_a_truncated_header_is_malformed(
    key_version: tuple[ApiKey, int], client_id: str | None, data: st.DataObject
) -> None:
    frame = write_request(*key_version, 7, client_id, b"")[4:]
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(MalformedRequest):
        read_request_header(memoryview(frame)[:cut])


@given(st.binary(max_size=64))
def test_random_bytes_parse_as_a_header_or_are_malformed(frame: bytes) -> None:
    try:
        header = read_request_header(memoryview(frame))
    except MalformedRequest:
        return
    assert 10 <= header.body_at <= len(frame)


def test_unknown_tagged_fields_of_the_header_are_skipped() -> None:
    frame = write_request(ApiKey.METADATA, 12, 7, "me", b"")[4:-1]
    with_tags = frame + b"\x02\x05\x03abc\x81\x01\x00" + b"body"
    header = read_request_header(memoryview(with_tags))
    assert header.client_id == "me"
    assert with_tags[header.body_at :] == b"body"


@pytest.mark.parametrize(
    "frame",
    [
        b"\x00\x03\x00\x01\x00\x00\x00\x07\xff\xfe",
        b"\x00\x03\x00\x01\x00\x00\x00\x07\x00\x01\xff",
        b"\x00\x03\x00\x0c\x00\x00\x00\x07\xff\xff\xff\xff\xff\xff\x0f",
        b"\x00\x03\x00\x0c\x00\x00\x00\x07\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
    ids=["length -2", "not UTF-8", "absurd count of tags", "endless varint"],
)
def test_hostile_headers_are_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read_request_header(memoryview(frame))


def test_response_prefix_length_includes_header_and_body() -> None:
    assert response_prefix(7, False, 10) == b"\x00\x00\x00\x0e\x00\x00\x00\x07"
    assert response_prefix(7, True, 10) == b"\x00\x00\x00\x0f\x00\x00\x00\x07\x00"
