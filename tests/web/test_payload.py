"""Records in JSON."""

from __future__ import annotations

from base64 import b64decode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.web.messages import CONTENT_BYTES_MAX
from chronik.web.payload import content_of, decode
from chronik.web.schemas import Content
from chronik.wire.batch import encode_batch

GZIP = 1


def test_text_is_returned_as_text_and_other_bytes_as_base64() -> None:
    assert content_of(None, 10) is None
    assert content_of(b"", 10) == Content("utf-8", "", 0, False)
    assert content_of("grün\n".encode(), 10) == Content("utf-8", "grün\n", 6, False)
    assert content_of(b"\xff\x00", 10) == Content("base64", "/wA=", 2, False)
    assert content_of(b"a\x00b", 10) == Content("base64", "YQBi", 3, False)


def test_long_text_is_cut_between_characters() -> None:
    assert content_of("ü".encode() * 5, 3) == Content("utf-8", "ü", 10, True)
    assert content_of(b"\xff" * 5, 2) == Content("base64", "//8=", 5, True)


@given(st.binary(max_size=40), st.integers(min_value=0, max_value=50))
def test_the_content_always_starts_with_the_first_bytes(data: bytes, bytes_max: int) -> None:
    content = content_of(data, bytes_max)
    assert content is not None
    assert content.size_bytes == len(data)
    assert content.is_cut == (len(data) > bytes_max)
    shown = content.data.encode() if content.encoding == "utf-8" else b64decode(content.data)
    assert data.startswith(shown)
    assert len(shown) > min(len(data), bytes_max) - 4


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "\u202e", '{"a": 1}'])
def test_markup_is_returned_unchanged(text: str) -> None:
    content = content_of(text.encode(), 1000)
    assert content is not None
    assert content.data == text


def test_an_undecodable_batch_is_one_error_message_and_decoding_continues() -> None:
    good = encode_batch([(b"k", b"v", [], 1)], base_offset=0)
    bad = bytearray(encode_batch([(b"k", b"v" * 50, [], 1)] * 3, base_offset=1, codec=GZIP))
    bad[70:80] = b"\x00" * 10
    after = encode_batch([(b"k", b"w", [], 1)], base_offset=4)
    decoded = decode(memoryview(good + bytes(bad) + after), 0, 100, 1 << 20, CONTENT_BYTES_MAX)
    assert [message.offset for message in decoded.messages] == [0, 1, 4]
    assert "batch 1 to 3 cannot be decoded" in decoded.messages[1].error
    assert decoded.next_offset == 5


def test_a_page_is_limited_in_records_and_bytes() -> None:
    data = memoryview(encode_batch([(None, b"v" * 1000, [("h", None)] * 200, 1)] * 50))
    assert decode(data, 10, 5, 1 << 20, 100).next_offset == 15
    by_bytes = decode(data, 0, 100, 2500, CONTENT_BYTES_MAX)
    assert (len(by_bytes.messages), by_bytes.next_offset) == (3, 3)
    message = by_bytes.messages[0]
    assert (len(message.headers), message.headers_left_out) == (100, 100)
