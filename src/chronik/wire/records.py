"""Records inside a batch of format 2, decompressed.

    length           varint   of all that follows
    attributes       int8     0
    timestamp_delta  varlong  against the batch's base timestamp
    offset_delta     varint   against the batch's base offset
    key              varint length (-1 is null), bytes
    value            varint length (-1 is null), bytes
    headers          varint count, then each: varint length and UTF-8 key, varint length (-1 is null) and bytes

These varints are zigzag encoded: 0, -1, 1, -2 are 0, 1, 2, 3.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from chronik.wire.errors import ErrorCode, KafkaError

Headers = Sequence[tuple[str, bytes | None]]
NewRecord = tuple[bytes | None, bytes | None, Headers, int]
"""Key, value, headers, timestamp_ms: a record without an offset."""

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1


class Record(NamedTuple):
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def put_varint(out: bytearray, value: int) -> None:
    value = value << 1 if value >= 0 else (-value << 1) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_bytes(out: bytearray, data: bytes | None) -> None:
    if data is None:
        out.append(1)
    else:
        put_varint(out, len(data))
        out += data


def encode_record(
    out: bytearray, key: bytes | None, value: bytes | None, headers: Headers, timestamp_delta: int, offset_delta: int
) -> None:
    """Append one record to `out`."""
    body = bytearray(1)
    put_varint(body, timestamp_delta)
    put_varint(body, offset_delta)
    _put_bytes(body, key)
    _put_bytes(body, value)
    put_varint(body, len(headers))
    for name, content in headers:
        # Restore the original bytes of a header key that was not UTF-8 when decoded.
        _put_bytes(body, name.encode("utf-8", "surrogateescape"))
        _put_bytes(body, content)
    put_varint(out, len(body))
    out += body


def decode_records(
    data: bytes, record_count: int, base_offset: int, base_timestamp: int, append_time_ms: int | None
) -> Iterator[Record]:
    """Yield the records of a batch; CORRUPT_MESSAGE if the bytes are invalid.

    If `append_time_ms` is set, every record has that timestamp, as in batches with log append time.
    """
    at = 0
    for _ in range(record_count):
        try:
            length, at = read_varint(data, at)
            end = at + length
            if length < 1 or end > len(data):
                raise _corrupt(f"record of {length} bytes, {len(data) - at} left")
            timestamp_delta, at = read_varint(data, at + 1)
            offset_delta, at = read_varint(data, at)
            key, at = _bytes(data, at, end)
            value, at = _bytes(data, at, end)
            headers, at = _headers(data, at, end)
        except IndexError as e:
            raise _corrupt("record cut short") from e
        if at != end:
            raise _corrupt(f"record ends {abs(end - at)} bytes {'early' if at < end else 'late'}")
        timestamp_ms = base_timestamp + timestamp_delta if append_time_ms is None else append_time_ms
        if not INT64_MIN <= timestamp_ms <= INT64_MAX:
            raise _corrupt("timestamp out of range")
        yield Record(base_offset + offset_delta, timestamp_ms, key, value, headers)
    if at != len(data):
        raise _corrupt(f"{len(data) - at} bytes after the last record")


def record_prefixes(data: bytes, record_count: int, size: int) -> list[tuple[bytes | None, bytes | None]]:
    """Return the first `size` bytes of each record's key and value. Headers are skipped, and not checked."""
    found: list[tuple[bytes | None, bytes | None]] = []
    at = 0
    try:
        for _ in range(record_count):
            length, at = read_varint(data, at)
            end = at + length
            if length < 1 or end > len(data):
                raise _corrupt(f"record of {length} bytes, {len(data) - at} left")
            _, at = read_varint(data, at + 1)
            _, at = read_varint(data, at)
            parts: list[bytes | None] = []
            for _ in range(2):
                length, at = read_varint(data, at)
                if length > end - at:
                    raise _corrupt(f"field of {length} bytes, {end - at} left")
                parts.append(data[at : at + min(length, size)] if length >= 0 else None)
                at += max(length, 0)
            found.append((parts[0], parts[1]))
            at = end
    except IndexError as e:
        raise _corrupt("record cut short") from e
    return found


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a zigzag varint; IndexError past the end."""
    byte = data[at]
    at += 1
    if byte > 0x7F:
        value = byte & 0x7F
        shift = 7
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise _corrupt("varint longer than ten bytes")
        if value >> 64:
            raise _corrupt("varint of more than 64 bits")
        byte = value
    return (byte >> 1) ^ -(byte & 1), at


def _bytes(data: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    length, at = read_varint(data, at)
    if length < 0:
        if length != -1:
            raise _corrupt(f"field of {length} bytes")
        return None, at
    stop = at + length
    if stop > end:
        raise _corrupt(f"field of {length} bytes, {end - at} left")
    return data[at:stop], stop


def _headers(data: bytes, at: int, end: int) -> tuple[list[tuple[str, bytes | None]], int]:
    count, at = read_varint(data, at)
    if count == 0:
        return [], at
    if count < 0 or count * 2 > end - at:
        raise _corrupt(f"{count} headers, {end - at} bytes left")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        name, at = _bytes(data, at, end)
        if name is None:
            raise _corrupt("header without a key")
        content, at = _bytes(data, at, end)
        headers.append((name.decode("utf-8", "surrogateescape"), content))
    return headers, at


def _corrupt(why: str) -> KafkaError:
    return KafkaError(ErrorCode.corrupt_message, why)
