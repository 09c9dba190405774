"""A record's bytes for JSON: as text if they are text, otherwise as base64, truncated if they are long."""

from __future__ import annotations

import codecs
from base64 import b64encode

import msgspec

_CONTROLS = frozenset(range(0x20)) - {0x09, 0x0A, 0x0D} | {0x7F}


class Content(msgspec.Struct, frozen=True):
    """`data` is text if `encoding` is `utf-8`, else base64. If `is_cut`, it holds only the first bytes."""

    encoding: str
    data: str
    size_bytes: int
    is_cut: bool


def content_of(data: bytes | None, bytes_max: int) -> Content | None:
    """Return None for None, because Kafka distinguishes a null value from an empty one."""
    if data is None:
        return None
    shown = data[:bytes_max]
    is_cut = len(shown) < len(data)
    text = _text(shown, is_cut)
    if text is None:
        return Content("base64", b64encode(shown).decode(), len(data), is_cut)
    return Content("utf-8", text, len(data), is_cut)


def _text(data: bytes, is_cut: bool) -> str | None:
    """Return None if the bytes are not UTF-8, or contain unprintable characters."""
    if not _CONTROLS.isdisjoint(data):
        return None
    try:
        # The cut may split the last character.
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=not is_cut)
    except UnicodeDecodeError:
        return None
