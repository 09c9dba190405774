"""A chunk of rows decoded without numba.

It serves Python versions that numba does not support yet, and the tests as a reference. It decodes one record at a
time through `wire.records`, which is much slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from chronik.pipeline.source.columns import TIMESTAMP_MS_MAX, arrow_schema, decode_header_name
from chronik.pipeline.source.ranges import RecordRange
from chronik.wire.batch import BatchHeader
from chronik.wire.compression import Buffer
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import Record, decode_records


class PythonChunk:
    def __init__(self, requested: RecordRange, *, with_headers: bool, rows_max: int, bytes_max: int) -> None:
        self._requested = requested
        self._with_headers = with_headers
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._records: Iterator[Record] = iter(())
        self._header: BatchHeader | None = None
        self._waiting: Record | None = None
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    @property
    def rows(self) -> int:
        return len(self._rows)

    def begin(self, header: BatchHeader, payload: Buffer) -> None:
        append_time_ms = header.max_timestamp if header.log_append_time else None
        self._header = header
        self._records = decode_records(
            bytes(payload), header.record_count, header.base_offset, header.base_timestamp, append_time_ms
        )

    def decode_batch(self) -> bool:
        header = self._header
        assert header is not None
        while True:
            record = self._waiting or next(self._records, None)
            self._waiting = None
            if record is None:
                return True
            if not header.base_offset <= record.offset <= header.last_offset:
                raise KafkaError(ErrorCode.corrupt_message, "offset outside of the batch")
            if not self._requested.start <= record.offset < self._requested.stop:
                continue
            size_bytes = len(record.key or b"") + len(record.value or b"")
            if self._rows and (len(self._rows) == self._rows_max or self._bytes + size_bytes > self._bytes_max):
                self._waiting = record
                return False
            self._rows.append(self._row(record, header))
            self._bytes += size_bytes

    def cut(self) -> Any:
        batch = pa.RecordBatch.from_pylist(self._rows, schema=arrow_schema(self._with_headers))
        self._rows, self._bytes = [], 0
        return batch

    def _row(self, record: Record, header: BatchHeader) -> dict[str, Any]:
        in_range = -TIMESTAMP_MS_MAX <= record.timestamp_ms <= TIMESTAMP_MS_MAX
        named = [
            {"key": decode_header_name(name.encode("utf-8", "surrogateescape")), "value": content}
            for name, content in record.headers
        ]
        return {
            "key": record.key,
            "value": record.value,
            "topic": self._requested.topic,
            "partition": self._requested.partition,
            "offset": record.offset,
            "timestamp": record.timestamp_ms * 1000 if in_range else None,
            "timestampType": int(header.log_append_time),
            "headers": named or None,
        }
