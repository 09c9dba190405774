"""A chunk of rows that compiled code decodes: it copies a batch's records into Arrow's buffers.

It creates no Python object per record. `_decode_batch` is written for numba: plain loops over arrays, nothing else.
`wire.records` describes the layout that it reads. numba checks no index, so the code checks each one before use: every
read is below the end of its record, every write below the capacity of its buffer. A violation returns a negative
status, and never accesses memory out of bounds.

`_decode_batch` can stop before any record that does not fit, and resume there with empty buffers. `state` records what
it has consumed and filled, and is updated only when a record is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chronik.pipeline.source.columns import HEADER_FIELDS, HEADERS, TIMESTAMP_MS_MAX, arrow_schema, decode_header_name
from chronik.pipeline.source.ranges import RecordRange
from chronik.wire.batch import BatchHeader
from chronik.wire.compression import Buffer
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import INT64_MAX, INT64_MIN

HEADERS_PER_ROW = 4
"""Capacity for headers in a chunk. A record with more headers than a whole chunk holds gets its own chunk."""

# The status that `_decode_batch` returns.
DONE, FULL = 0, 1
"""All records of the batch are in the buffers, or the next record does not fit."""
CORRUPT = {
    -1: "record longer than its batch",
    -2: "number longer than its record, or than 64 bits",
    -3: "offset outside of the batch",
    -4: "timestamp out of range",
    -5: "field longer than its record",
    -6: "more headers than the record has room for",
    -7: "header without a key",
    -8: "record does not end where it says",
    -9: "bytes after the last record",
}


AT, RECORDS_LEFT, ROWS, KEY_BYTES, VALUE_BYTES, HEADER_COUNT, NAME_BYTES, CONTENT_BYTES, ODD_NAMES = range(9)
"""Indexes into the state array: the position in the batch, how much is filled, and header names that are not ASCII.

Such names may not be valid UTF-8.
"""


class BytesColumn(NamedTuple):
    """Arrow's buffers of a binary column: validity bitmap, int32 offsets, concatenated bytes."""

    valid: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int32]
    data: npt.NDArray[np.uint8]


class Buffers(NamedTuple):
    """Arrow's own buffers of all columns. Header names are never null, so their bitmap is not used."""

    keys: BytesColumn
    values: BytesColumn
    offsets: npt.NDArray[np.int64]
    timestamp_valid: npt.NDArray[np.uint8]
    timestamps_us: npt.NDArray[np.int64]
    timestamp_types: npt.NDArray[np.int32]
    header_valid: npt.NDArray[np.uint8]
    header_ends: npt.NDArray[np.int32]
    header_names: BytesColumn
    header_values: BytesColumn


class NumbaChunk:
    """A chunk whose buffers numba fills.

    Invariant: the buffers hold `rows` complete rows. Only this object accesses them until `cut` hands them over.
    """

    def __init__(self, requested: RecordRange, *, with_headers: bool, rows_max: int, bytes_max: int) -> None:
        self._requested = requested
        self._with_headers = with_headers
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._schema = arrow_schema(with_headers)
        self._topics = pa.array([requested.topic] * rows_max, pa.string())
        self._partitions = pa.array(np.full(rows_max, requested.partition, np.int32))
        self._state = np.zeros(ODD_NAMES + 1, np.int64)
        self._buffers = self._allocate(bytes_max)
        self._header: BatchHeader | None = None
        self._payload = np.empty(0, np.uint8)

    @property
    def rows(self) -> int:
        return int(self._state[ROWS])

    def begin(self, header: BatchHeader, payload: Buffer) -> None:
        self._header = header
        self._payload = np.frombuffer(payload, np.uint8)
        self._state[AT] = 0
        self._state[RECORDS_LEFT] = header.record_count

    def decode_batch(self) -> bool:
        header = self._header
        assert header is not None
        status = _decode_batch(
            self._payload,
            self._state,
            self._buffers,
            header.base_offset,
            header.last_offset_delta,
            header.base_timestamp,
            header.max_timestamp,
            header.log_append_time,
            self._requested.start,
            self._requested.stop,
            self._with_headers,
        )
        if status == FULL and self.rows == 0:
            # The record is larger than the whole chunk. No record is larger than its batch.
            self._buffers = self._allocate(max(self._bytes_max, len(self._payload)))
            return self.decode_batch()
        if status < 0:
            place = f"{self._requested.partition_name}, batch at {header.base_offset}"
            raise KafkaError(ErrorCode.corrupt_message, f"{place}: {CORRUPT[status]}")
        return bool(status != FULL)

    def cut(self) -> Any:
        buffers, rows = self._buffers, self.rows
        columns = [
            _bytes_array(pa.binary(), rows, buffers.keys),
            _bytes_array(pa.binary(), rows, buffers.values),
            self._topics.slice(0, rows),
            self._partitions.slice(0, rows),
            _array(pa.int64(), rows, None, buffers.offsets[:rows]),
            _array(pa.timestamp("us", tz="UTC"), rows, buffers.timestamp_valid, buffers.timestamps_us[:rows]),
            _array(pa.int32(), rows, None, buffers.timestamp_types[:rows]),
        ]
        if self._with_headers:
            columns.append(self._headers_column(rows))
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._buffers = self._allocate(self._bytes_max)
        return batch

    def _headers_column(self, rows: int) -> Any:
        buffers, count = self._buffers, int(self._state[HEADER_COUNT])
        names = _bytes_array(pa.string(), count, buffers.header_names, has_nulls=False)
        if self._state[ODD_NAMES]:
            names = _replace_invalid(names)
        contents = _bytes_array(pa.binary(), count, buffers.header_values)
        pairs = pa.StructArray.from_arrays([names, contents], fields=HEADER_FIELDS)
        return _array(HEADERS, rows, buffers.header_valid, buffers.header_ends[: rows + 1], children=[pairs])

    def _allocate(self, bytes_max: int) -> Buffers:
        """Allocate buffers. Only bitmaps and each first end are zeroed, because untouched memory costs nothing."""
        self._state[ROWS:] = 0
        rows, headers = self._rows_max, 0
        if self._with_headers:
            headers = max(self._rows_max * HEADERS_PER_ROW, bytes_max // 2 if bytes_max > self._bytes_max else 0)
        header_bytes = bytes_max if self._with_headers else 0
        return Buffers(
            keys=_bytes_column(rows, bytes_max),
            values=_bytes_column(rows, bytes_max),
            offsets=np.empty(rows, np.int64),
            timestamp_valid=_bits(rows),
            timestamps_us=np.empty(rows, np.int64),
            timestamp_types=np.empty(rows, np.int32),
            header_valid=_bits(rows),
            header_ends=_ends(rows),
            header_names=_bytes_column(headers, header_bytes),
            header_values=_bytes_column(headers, header_bytes),
        )


def _bits(count: int) -> Any:
    return np.zeros((count + 7) // 8, np.uint8)


def _ends(count: int) -> Any:
    ends = np.empty(count + 1, np.int32)
    ends[0] = 0
    return ends


def _bytes_column(count: int, bytes_max: int) -> BytesColumn:
    return BytesColumn(_bits(count), _ends(count), np.empty(bytes_max, np.uint8))


def _bytes_array(kind: Any, count: int, column: BytesColumn, *, has_nulls: bool = True) -> Any:
    valid = column.valid if has_nulls else None
    return _array(kind, count, valid, column.ends[: count + 1], column.data[: int(column.ends[count])])


def _array(kind: Any, count: int, valid: Any, *buffers: Any, children: Any = None) -> Any:
    """Make an Arrow array of filled buffers. Arrow counts the nulls in `valid`; None: there are none."""
    validity = None if valid is None else pa.py_buffer(valid[: (count + 7) // 8])
    return pa.Array.from_buffers(kind, count, [validity, *map(pa.py_buffer, buffers)], children=children)


def _replace_invalid(names: Any) -> Any:
    try:
        names.validate(full=True)
        return names
    except pa.ArrowInvalid:
        return pa.array([decode_header_name(name) for name in names.view(pa.binary()).to_pylist()], pa.string())


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
def _mark(bits, at, is_set):  # type: ignore[no-untyped-def]
    """Set or clear one bit of a validity bitmap. An abandoned record may have left it set."""
    place = np.uint64(at >> 3)
    mask = np.uint8(1 << (at & 7))
    if is_set:
        bits[place] |= mask
    else:
        bits[place] &= ~mask


@_njit
def _copy(source, at, target, to, length):  # type: ignore[no-untyped-def]
    # Unsigned: otherwise each index is tested for being negative, and nothing is vectorised.
    source_at = np.uint64(at)
    target_at = np.uint64(to)
    for i in range(np.uint64(length)):
        target[target_at + i] = source[source_at + i]


@_njit
def _decode_batch(  # type: ignore[no-untyped-def]
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
    # Unpacked once: access through the tuples costs a reference count each time.
    key_valid, key_ends, keys = buffers.keys
    value_valid, value_ends, values = buffers.values
    _, header_name_ends, header_names = buffers.header_names
    header_value_valid, header_value_ends, header_values = buffers.header_values
    offsets, timestamp_valid, timestamps_us = buffers.offsets, buffers.timestamp_valid, buffers.timestamps_us
    timestamp_types, header_valid, header_ends = buffers.timestamp_types, buffers.header_valid, buffers.header_ends
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
            # Tested before: the compiler assumes that a sum does not overflow.
            if base_timestamp > INT64_MAX - max(delta_ms, 0) or base_timestamp < INT64_MIN - min(delta_ms, 0):
                status = -4
                break
            timestamp = base_timestamp + delta_ms
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
        requested = first <= offset and offset < stop
        keep_headers = requested and with_headers
        if requested and (
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
        odd_names = state[8]
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
                header_name_ends[headers + i + 1] = name_bytes
                _mark(header_value_valid, headers + i, content_length >= 0)
                if content_length >= 0:
                    _copy(data, content_at, header_values, content_bytes, content_length)
                    content_bytes += content_length
                header_value_ends[headers + i + 1] = content_bytes
        if status != DONE:
            at = start
            break
        if at != end:
            status = -8
            break
        if requested:
            _mark(key_valid, rows, key_length >= 0)
            if key_length >= 0:
                _copy(data, key_at, keys, key_bytes, key_length)
                key_bytes += key_length
            key_ends[rows + 1] = key_bytes
            _mark(value_valid, rows, value_length >= 0)
            if value_length >= 0:
                _copy(data, value_at, values, value_bytes, value_length)
                value_bytes += value_length
            value_ends[rows + 1] = value_bytes
            offsets[rows] = offset
            in_range = timestamp >= -TIMESTAMP_MS_MAX and timestamp <= TIMESTAMP_MS_MAX
            _mark(timestamp_valid, rows, in_range)
            timestamps_us[rows] = timestamp * 1000 if in_range else 0
            timestamp_types[rows] = 1 if has_append_time else 0
            if with_headers:
                _mark(header_valid, rows, count > 0)
                headers += count
                header_ends[rows + 1] = headers
                state[6] = name_bytes
                state[7] = content_bytes
                state[8] = odd_names
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
