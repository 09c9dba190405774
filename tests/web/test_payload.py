"""Bytes in JSON."""

from __future__ import annotations

from base64 import b64decode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.web.contents import Content, content_of


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
