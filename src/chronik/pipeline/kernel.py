"""The inner loop of the decoder: compiled code that copies a batch's records into Arrow's buffers.

It creates no Python object per record. `fill` is written for numba: plain loops over arrays, nothing else.
`wire.records` describes the layout that it reads. numba checks no index, so the code checks each one before use: every
read is below the end of its record, every write below the capacity of its buffer. A violation returns a negative
status, and never accesses memory out of bounds.

`fill` can stop before any record that does not fit, and resume there with empty buffers. `state` records what it has
consumed and filled, and is updated only when a record is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["CORRUPT", "DONE", "FULL", "STATE_FIELDS", "Buffers", "State", "fill"]

# The status that `fill` returns.
DONE = 0
"""All records of the batch are in the buffers."""
FULL = 1
"""The next record does not fit."""
CORRUPT = {
    -1: "record longer than its batch",
    -2: "number longer than its record, or than 64 bits",
    -3: "offset outside of the batch",
    -4: "timestamp out of range",
    -5: "field longer than its record",
    -6: "more headers than the record has room for",
    -7: "header without a key",
    -8: "record does not end where it says",
    -9: "bytes behind the last record",
}

TIMESTAMP_MS_MAX = (2**63 - 1) // 1000
"""The largest timestamp that fits in microseconds. Beyond it, the table's timestamp is null."""


class State(NamedTuple):
    """Indexes into the state array: the position in the batch, and how much is filled."""

    at: int = 0
    records_left: int = 1
    rows: int = 2
    key_bytes: int = 3
    value_bytes: int = 4
    headers: int = 5
    header_name_bytes: int = 6
    header_value_bytes: int = 7
    null_keys: int = 8
    null_values: int = 9
    null_timestamps: int = 10
    null_headers: int = 11
    null_header_values: int = 12
    odd_names: int = 13
    """Header names with non-ASCII bytes. They may not be valid UTF-8."""


STATE = State()
STATE_FIELDS = len(STATE)


class Buffers(NamedTuple):
    """Arrow's own buffers: validity bitmaps, int32 offsets, concatenated bytes, fixed-size values."""

    key_valid: npt.NDArray[np.uint8]
    key_ends: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint8]
    value_valid: npt.NDArray[np.uint8]
    value_ends: npt.NDArray[np.int32]
    values: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    timestamp_valid: npt.NDArray[np.uint8]
    timestamps_us: npt.NDArray[np.int64]
    timestamp_types: npt.NDArray[np.int32]
    header_valid: npt.NDArray[np.uint8]
    header_ends: npt.NDArray[np.int32]
    header_name_ends: npt.NDArray[np.int32]
    header_names: npt.NDArray[np.uint8]
    header_value_valid: npt.NDArray[np.uint8]
    header_value_ends: npt.NDArray[np.int32]
    header_values: npt.NDArray[np.uint8]


_njit: Callable[[Any], Any] = numba.njit(cache=True, nogil=True)


@_njit
def _varint(data, at, end):  # type: ignore[no-untyped-def]
    """Return a zigzag number and where it ends, or -1 as its end if it exceeds `end` or 64 bits."""
    if at >= end:
        return np.int64(0), np.int64(-1)
    byte = np.uint64(data[np.uint64(at)])
    at += 1
    number = byte
    if byte > np.uint64(0x7F):
        number = byte & np.uint64(0x7F)
        shift = np.uint64(7)
        while byte > np.uint64(0x7F):
            if at >= end or shift > np.uint64(63):
                return np.int64(0), np.int64(-1)
            byte = np.uint64(data[np.uint64(at)])
            at += 1
            if shift == np.uint64(63) and byte > np.uint64(1):
                return np.int64(0), np.int64(-1)
            number |= (byte & np.uint64(0x7F)) << shift
            shift += np.uint64(7)
    return np.int64(number >> np.uint64(1)) ^ -np.int64(number & np.uint64(1)), np.int64(at)


@_njit
def _copy(source, at, target, to, length):  # type: ignore[no-untyped-def]
    # Unsigned: otherwise each index is tested for being negative, and nothing is vectorised.
    source_at = np.uint64(at)
    target_at = np.uint64(to)
    for i in range(np.uint64(length)):
        target[target_at + i] = source[source_at + i]


@_njit
def _mark(bits, at, is_set):  # type: ignore[no-untyped-def]
    """Set or clear one bit of a validity bitmap. An abandoned record may have left it set."""
    place = np.uint64(at >> 3)
    mask = np.uint8(1 << (at & 7))
    if is_set:
        bits[place] |= mask
    else:
        bits[place] &= ~mask


@_njit
def fill(  # type: ignore[no-untyped-def]
    data,
    state,
    buffers,
    base_offset,
    last_delta,
    base_timestamp,
    append_time,
    has_append_time,
    first,
    stop,
    with_headers,
):
    """Decode records with first <= offset < stop into `buffers`, starting at `state`. Return a status.

    `append_time` is every record's timestamp if `has_append_time`.
    """
    (
        key_valid,
        key_ends,
        keys,
        value_valid,
        value_ends,
        values,
        offsets,
        timestamp_valid,
        timestamps_us,
        timestamp_types,
        header_valid,
        header_ends,
        header_name_ends,
        header_names,
        header_value_valid,
        header_value_ends,
        header_values,
    ) = buffers
    size = np.int64(len(data))
    rows_max = np.int64(len(offsets))
    at = state[0]
    left = state[1]
    rows = state[2]
    key_bytes = state[3]
    value_bytes = state[4]
    headers = state[5]
    status = DONE
    while left > 0:
        start = at
        length, at = _varint(data, at, size)
        if at < 0 or length < 1 or length > size - at:
            status = -1
            break
        end = at + length
        delta_ms, at = _varint(data, at + 1, end)
        if at < 0:
            status = -2
            break
        delta, at = _varint(data, at, end)
        if at < 0:
            status = -2
            break
        if delta < 0 or delta > last_delta:
            status = -3
            break
        timestamp = append_time
        if not has_append_time:
            timestamp = base_timestamp + delta_ms
            if (delta_ms >= 0) != (timestamp >= base_timestamp):
                status = -4
                break
        key_length, key_at = _varint(data, at, end)
        if key_at < 0:
            status = -2
            break
        if key_length < -1 or key_length > end - key_at:
            status = -5
            break
        at = key_at + max(key_length, 0)
        value_length, value_at = _varint(data, at, end)
        if value_at < 0:
            status = -2
            break
        if value_length < -1 or value_length > end - value_at:
            status = -5
            break
        at = value_at + max(value_length, 0)
        count, at = _varint(data, at, end)
        if at < 0:
            status = -2
            break
        if count < 0 or count > (end - at) // 2:
            status = -6
            break
        offset = base_offset + delta
        wanted = first <= offset and offset < stop
        keep_headers = wanted and with_headers
        if wanted and (
            rows == rows_max
            or key_length > len(keys) - key_bytes
            or value_length > len(values) - value_bytes
            or (keep_headers and count > len(header_name_ends) - 1 - headers)
        ):
            at = start
            status = FULL
            break
        name_bytes = state[6]
        content_bytes = state[7]
        null_contents = state[12]
        odd_names = state[13]
        for i in range(count):
            name_length, name_at = _varint(data, at, end)
            if name_at < 0:
                status = -2
                break
            if name_length < 0:
                status = -7
                break
            if name_length > end - name_at:
                status = -5
                break
            at = name_at + name_length
            content_length, content_at = _varint(data, at, end)
            if content_at < 0:
                status = -2
                break
            if content_length < -1 or content_length > end - content_at:
                status = -5
                break
            at = content_at + max(content_length, 0)
            if keep_headers:
                if name_length > len(header_names) - name_bytes or content_length > len(header_values) - content_bytes:
                    status = FULL
                    break
                odd = np.uint8(0)
                for j in range(name_length):
                    odd |= data[name_at + j]
                    header_names[name_bytes + j] = data[name_at + j]
                odd_names += np.int64(odd >> np.uint8(7))
                name_bytes += name_length
                _mark(header_value_valid, headers + i, content_length >= 0)
                if content_length < 0:
                    null_contents += 1
                else:
                    _copy(data, content_at, header_values, content_bytes, content_length)
                    content_bytes += content_length
                header_name_ends[headers + i + 1] = name_bytes
                header_value_ends[headers + i + 1] = content_bytes
        if status != DONE:
            at = start
            break
        if at != end:
            status = -8
            break
        if wanted:
            _mark(key_valid, rows, key_length >= 0)
            if key_length < 0:
                state[8] += 1
            else:
                _copy(data, key_at, keys, key_bytes, key_length)
                key_bytes += key_length
            key_ends[rows + 1] = key_bytes
            _mark(value_valid, rows, value_length >= 0)
            if value_length < 0:
                state[9] += 1
            else:
                _copy(data, value_at, values, value_bytes, value_length)
                value_bytes += value_length
            value_ends[rows + 1] = value_bytes
            offsets[rows] = offset
            in_range = timestamp >= -TIMESTAMP_MS_MAX and timestamp <= TIMESTAMP_MS_MAX
            _mark(timestamp_valid, rows, in_range)
            timestamps_us[rows] = timestamp * 1000 if in_range else 0
            if not in_range:
                state[10] += 1
            timestamp_types[rows] = 1 if has_append_time else 0
            if with_headers:
                _mark(header_valid, rows, count > 0)
                if count == 0:
                    state[11] += 1
                headers += count
                header_ends[rows + 1] = headers
                state[6] = name_bytes
                state[7] = content_bytes
                state[12] = null_contents
                state[13] = odd_names
            rows += 1
        left -= 1
    if status == DONE and at != size:
        status = -9
    state[0] = at
    state[1] = left
    state[2] = rows
    state[3] = key_bytes
    state[4] = value_bytes
    state[5] = headers
    return status
