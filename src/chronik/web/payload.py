"""Records for JSON: bytes as text if they are text, otherwise as base64. Every size is bounded."""

from __future__ import annotations

import codecs
import contextlib
from base64 import b64encode
from typing import NamedTuple

from chronik.web.batches import headers_in, timestamp_type
from chronik.web.schemas import Content, Header, Message, TimestampType
from chronik.wire.batch import decode_batch
from chronik.wire.errors import KafkaError
from chronik.wire.records import Record

HEADER_BYTES_MAX = 1024
HEADERS_MAX = 100
DECOMPRESSED_BYTES_MAX = 64 * 1024 * 1024

_CONTROLS = frozenset(range(0x20)) - {0x09, 0x0A, 0x0D} | {0x7F}


class Decoded(NamedTuple):
    """`next_offset` is the offset of the first record not taken, or None if the data contains no whole batch."""

    messages: list[Message]
    size_bytes: int
    next_offset: int | None


def decode(data: memoryview, first: int, count_max: int, bytes_max: int, content_bytes_max: int) -> Decoded:
    """Decode records of whole batches from offset `first`, up to a count and an approximate size. Runs in a thread."""
    messages: list[Message] = []
    size_bytes = 0
    next_offset: int | None = None
    position = 0
    for header in headers_in(data):
        batch_position, position = position, position + header.size_bytes
        next_offset = max(first, header.next_offset)
        if header.is_control or header.last_offset < first:
            continue
        kind = timestamp_type(header)
        try:
            for record in decode_batch(data, batch_position, DECOMPRESSED_BYTES_MAX):
                if record.offset < first:
                    continue
                if len(messages) == count_max or size_bytes >= bytes_max:
                    return Decoded(messages, size_bytes, record.offset)
                messages.append(_message(record, kind, content_bytes_max))
                size_bytes += _shown_bytes(record, content_bytes_max)
        except KafkaError as error:
            offset = max(first, header.base_offset)
            if len(messages) == count_max:
                return Decoded(messages, size_bytes, offset)
            line = f"batch {header.base_offset} to {header.last_offset} cannot be decoded: {error.message}"
            messages.append(Message(offset, header.max_timestamp, kind, None, None, [], error=line))
    return Decoded(messages, size_bytes, next_offset)


def _message(record: Record, kind: TimestampType, bytes_max: int) -> Message:
    return Message(
        record.offset,
        record.timestamp_ms,
        kind,
        content_of(record.key, bytes_max),
        content_of(record.value, bytes_max),
        [
            # Replace invalid UTF-8 in a name, because JSON does not allow lone surrogates.
            Header(name.encode("utf-8", "replace").decode()[:HEADER_BYTES_MAX], content_of(value, HEADER_BYTES_MAX))
            for name, value in record.headers[:HEADERS_MAX]
        ],
        max(0, len(record.headers) - HEADERS_MAX),
    )


def _shown_bytes(record: Record, bytes_max: int) -> int:
    headers = sum(min(HEADER_BYTES_MAX, len(value or b"")) + len(name) for name, value in record.headers[:HEADERS_MAX])
    return min(bytes_max, len(record.key or b"")) + min(bytes_max, len(record.value or b"")) + headers


def content_of(data: bytes | None, bytes_max: int) -> Content | None:
    """Return None for None, because Kafka distinguishes a null value from an empty one."""
    if data is None:
        return None
    shown = data[:bytes_max]
    is_cut = len(shown) < len(data)
    if _CONTROLS.isdisjoint(shown):
        with contextlib.suppress(UnicodeDecodeError):
            # The cut may split the last character.
            text = codecs.getincrementaldecoder("utf-8")().decode(shown, final=not is_cut)
            return Content("utf-8", text, len(data), is_cut)
    return Content("base64", b64encode(shown).decode(), len(data), is_cut)
