"""A chunk of rows that the compiled loop fills: Arrow's buffers, allocated here, handed over when full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from chronik.pipeline.columns import HEADER_FIELDS, HEADERS, RecordRange, arrow_schema, readable_name
from chronik.pipeline.kernel import CORRUPT, FULL, STATE, STATE_FIELDS, Buffers, fill
from chronik.wire.batch import BatchHeader
from chronik.wire.compression import Buffer
from chronik.wire.errors import ErrorCode, KafkaError

__all__ = ["CompiledChunk"]

HEADERS_PER_ROW = 4
"""Capacity for headers in a chunk. A record with more headers than a whole chunk holds gets its own chunk."""


class CompiledChunk:
    """A chunk whose buffers numba fills.

    Invariant: the buffers hold `rows` complete rows. Only this object accesses them until `cut` hands them over.
    """

    def __init__(self, wanted: RecordRange, *, with_headers: bool, rows_max: int, bytes_max: int) -> None:
        self._wanted = wanted
        self._with_headers = with_headers
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._schema = arrow_schema(with_headers)
        self._topics = pa.array([wanted.topic] * rows_max, pa.string())
        self._partitions = pa.array(np.full(rows_max, wanted.partition, np.int32))
        self._state = np.zeros(STATE_FIELDS, np.int64)
        self._buffers = self._room(bytes_max)
        self._header: BatchHeader | None = None
        self._payload = np.empty(0, np.uint8)

    @property
    def rows(self) -> int:
        return int(self._state[STATE.rows])

    def begin(self, header: BatchHeader, payload: Buffer) -> None:
        self._header = header
        self._payload = np.frombuffer(payload, np.uint8)
        self._state[STATE.at] = 0
        self._state[STATE.records_left] = header.record_count

    def fill(self) -> bool:
        header = self._header
        assert header is not None
        status = fill(
            self._payload,
            self._state,
            self._buffers,
            header.base_offset,
            header.last_offset_delta,
            header.base_timestamp,
            header.max_timestamp,
            header.log_append_time,
            self._wanted.start,
            self._wanted.stop,
            self._with_headers,
        )
        if status == FULL and self.rows == 0:
            # The record is larger than the whole chunk. No record is larger than its batch.
            self._buffers = self._room(max(self._bytes_max, len(self._payload)))
            return self.fill()
        if status < 0:
            place = f"{self._wanted.topic}-{self._wanted.partition}, batch at {header.base_offset}"
            raise KafkaError(ErrorCode.corrupt_message, f"{place}: {CORRUPT[status]}")
        return bool(status != FULL)

    def cut(self) -> Any:
        buffers, state, rows = self._buffers, self._state, self.rows
        bits = (rows + 7) // 8
        columns = [
            _bytes_array(pa.binary(), rows, buffers.key_valid, buffers.key_ends, buffers.keys, state[STATE.null_keys]),
            _bytes_array(
                pa.binary(), rows, buffers.value_valid, buffers.value_ends, buffers.values, state[STATE.null_values]
            ),
            self._topics.slice(0, rows),
            self._partitions.slice(0, rows),
            pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(buffers.offsets[:rows])], 0),
            pa.Array.from_buffers(
                pa.timestamp("us", tz="UTC"),
                rows,
                [pa.py_buffer(buffers.timestamp_valid[:bits]), pa.py_buffer(buffers.timestamps_us[:rows])],
                int(state[STATE.null_timestamps]),
            ),
            pa.Array.from_buffers(pa.int32(), rows, [None, pa.py_buffer(buffers.timestamp_types[:rows])], 0),
        ]
        if self._with_headers:
            columns.append(self._headers_column(rows))
        made = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._buffers = self._room(self._bytes_max)
        return made

    def _headers_column(self, rows: int) -> Any:
        buffers, state = self._buffers, self._state
        count = int(state[STATE.headers])
        names = _bytes_array(pa.string(), count, None, buffers.header_name_ends, buffers.header_names, 0)
        if state[STATE.odd_names]:
            names = _readable(names)
        contents = _bytes_array(
            pa.binary(),
            count,
            buffers.header_value_valid,
            buffers.header_value_ends,
            buffers.header_values,
            state[STATE.null_header_values],
        )
        pairs = pa.StructArray.from_arrays([names, contents], fields=HEADER_FIELDS)
        validity = pa.py_buffer(buffers.header_valid[: (rows + 7) // 8])
        ends = pa.py_buffer(buffers.header_ends[: rows + 1])
        return pa.Array.from_buffers(HEADERS, rows, [validity, ends], int(state[STATE.null_headers]), children=[pairs])

    def _room(self, bytes_max: int) -> Buffers:
        """Allocate buffers. Only bitmaps and each first end are zeroed, because untouched memory costs nothing."""
        self._state[STATE.rows :] = 0
        rows, headers = self._rows_max, 0
        if self._with_headers:
            headers = max(self._rows_max * HEADERS_PER_ROW, bytes_max // 2 if bytes_max > self._bytes_max else 0)
        header_bytes = bytes_max if self._with_headers else 0
        return Buffers(
            key_valid=_bits(rows),
            key_ends=_ends(rows),
            keys=np.empty(bytes_max, np.uint8),
            value_valid=_bits(rows),
            value_ends=_ends(rows),
            values=np.empty(bytes_max, np.uint8),
            offsets=np.empty(rows, np.int64),
            timestamp_valid=_bits(rows),
            timestamps_us=np.empty(rows, np.int64),
            timestamp_types=np.empty(rows, np.int32),
            header_valid=_bits(rows),
            header_ends=_ends(rows),
            header_name_ends=_ends(headers),
            header_names=np.empty(header_bytes, np.uint8),
            header_value_valid=_bits(headers),
            header_value_ends=_ends(headers),
            header_values=np.empty(header_bytes, np.uint8),
        )


def _bits(count: int) -> Any:
    return np.zeros((count + 7) // 8, np.uint8)


def _ends(count: int) -> Any:
    ends = np.empty(count + 1, np.int32)
    ends[0] = 0
    return ends


def _bytes_array(kind: Any, count: int, valid: Any, ends: Any, data: Any, nulls: int) -> Any:
    validity = None if valid is None else pa.py_buffer(valid[: (count + 7) // 8])
    used = int(ends[count])
    return pa.Array.from_buffers(
        kind, count, [validity, pa.py_buffer(ends[: count + 1]), pa.py_buffer(data[:used])], int(nulls)
    )


def _readable(names: Any) -> Any:
    try:
        names.validate(full=True)
        return names
    except pa.ArrowInvalid:
        return pa.array([readable_name(name) for name in names.view(pa.binary()).to_pylist()], pa.string())
