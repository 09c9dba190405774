"""Bytes of a record as JSON can carry them: text where they are text, base64 where they are not, cut where long."""

from __future__ import annotations

import codecs
from base64 import b64encode

import msgspec

_CONTROLS = frozenset(range(0x20)) - {0x09, 0x0A, 0x0D} | {0x7F}


class Content(msgspec.Struct, frozen=True):
    """`data` is text in the encoding `utf-8` and base64 in the encoding `base64`; the first bytes where `is_cut`."""

    encoding: str
    data: str
    size_bytes: int
    is_cut: bool


def content_of(data: bytes | None, bytes_max: int) -> Content | None:
    """None stays None: Kafka tells a missing value from an empty one."""
    if data is None:
        return None
    shown = data[:bytes_max]
    is_cut = len(shown) < len(data)
    text = _text(shown, is_cut)
    if text is None:
        return Content("base64", b64encode(shown).decode(), len(data), is_cut)
    return Content("utf-8", text, len(data), is_cut)


def _text(data: bytes, is_cut: bool) -> str | None:
    """None where the bytes are no UTF-8, or hold characters that nobody could read."""
    if not _CONTROLS.isdisjoint(data):
        return None
    try:
        # A cut may go through the last character.
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=not is_cut)
    except UnicodeDecodeError:
        return None
