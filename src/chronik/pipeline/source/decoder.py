"""Decode fetched record batches of one partition into Arrow batches: the part of the source that needs no Spark.

Each batch's length, magic, CRC, codec and counts are checked before a record is read (`wire.batch`). Skipped are
control batches, batches of aborted transactions if the response lists these, and offsets outside the requested range. A
fetch returns whole batches, so it can begin with such offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any

import pyarrow as pa

from chronik.pipeline.source.columns import TIMESTAMP_MS_MAX, Chunk, arrow_schema, decode_header_name
from chronik.pipeline.source.ranges import RecordRange
from chronik.wire.batch import (
    DECOMPRESSED_BYTES_MAX,
    HEADER_BYTES,
    LENGTH_END,
    BatchHeader,
    check_batches,
    read_batch_header,
    read_marker,
)
from chronik.wire.compression import Buffer, decompress
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import Record, decode_records

ROWS_MAX = 4096
"""Spark processes chunks of about this many rows fastest."""
BYTES_MAX = 8 * 1024 * 1024
BATCH_BYTES_MAX = 2**31 - 1

_LENGTH = Struct(">i")
_LENGTH_AT = 8


class AbortedTransactions:
    """Tells which batches of a partition belong to aborted transactions. Takes all batches of a reader, in order."""

    def __init__(self) -> None:
        self._listed: list[tuple[int, int]] = []
        self._aborting: set[int] = set()

    def expect(self, aborted: Sequence[tuple[int, int]]) -> None:
        """Set what the next response lists: producers with the first offset of a transaction that they aborted."""
        self._listed = sorted(((first, producer) for producer, first in aborted), reverse=True)

    def cover(self, header: BatchHeader, records: memoryview, start: int) -> bool:
        """Return whether the batch at `start` is of an aborted transaction. A marker is of none."""
        while self._listed and self._listed[-1][0] <= header.last_offset:
            self._aborting.add(self._listed.pop()[1])
        if not header.is_transactional or header.producer_id not in self._aborting:
            return False
        if header.is_control and header.record_count and not read_marker(records, start).is_commit:
            self._aborting.discard(header.producer_id)
        return not header.is_control


class ArrowDecoder:
    """Takes batches in offset order, and yields Arrow batches. `next_offset` is where the next fetch continues."""

    def __init__(
        self,
        requested: RecordRange,
        *,
        with_headers: bool = False,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BYTES_MAX,
        chunk: type[Chunk] | None = None,
    ) -> None:
        self.next_offset = requested.start
        self._requested = requested
        self._chunk: Chunk = (chunk or _fastest_chunk())(  # type: ignore[call-arg]
            requested, with_headers=with_headers, rows_max=rows_max, bytes_max=bytes_max
        )
        self._aborted = AbortedTransactions()

    @property
    def is_done(self) -> bool:
        return self.next_offset >= self._requested.stop

    def feed(self, records: memoryview, aborted: Sequence[tuple[int, int]] = ()) -> Iterator[Any]:
        """Yield full Arrow batches from one fetch response. An incomplete batch at its end is left for the next fetch.

        `aborted` lists producers with the first offset of a transaction that they aborted, as Fetch returns them to
        read_committed consumers.
        """
        batches = whole_batches(records)
        if len(records) and not batches:
            place = self._requested.partition_name
            raise KafkaError(ErrorCode.corrupt_message, f"{place}: the batch is larger than one fetch response")
        self._aborted.expect(aborted)
        for start, header in batches:
            is_aborted = self._aborted.cover(header, records, start)
            if self.is_done:
                return
            if not is_aborted and self._holds_rows(header):
                self._chunk.begin(header, self._payload(records, start, header))
                while not self._chunk.decode_batch():
                    yield self._chunk.cut()
            self.next_offset = max(self.next_offset, header.next_offset)

    def finish(self) -> Iterator[Any]:
        """Yield the rows that did not fill a batch."""
        if self._chunk.rows:
            yield self._chunk.cut()

    def _holds_rows(self, header: BatchHeader) -> bool:
        return not header.is_control and header.record_count > 0 and header.last_offset >= self._requested.start

    def _payload(self, records: memoryview, start: int, header: BatchHeader) -> Buffer:
        block = records[start + HEADER_BYTES : start + header.size_bytes]
        if not header.codec:
            return block
        try:
            return decompress(header.codec, block, DECOMPRESSED_BYTES_MAX)
        except KafkaError as error:
            place = f"{self._requested.partition_name}, batch at {header.base_offset}"
            raise KafkaError(error.code, f"{place}: {error.message}") from None


class PythonChunk:
    """A chunk of rows decoded one record at a time through `wire.records`, which is much slower than NumbaChunk.

    It serves Python versions that numba does not support yet, and the tests as a reference.
    """

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


def _fastest_chunk() -> type[Chunk]:
    """Return the compiled class, imported only to decode: numba loads for a second, and planning does not need it."""
    try:
        from chronik.pipeline.source.numba_chunk import NumbaChunk
    except ImportError:
        return PythonChunk
    return NumbaChunk


def whole_batches(records: memoryview) -> list[tuple[int, BatchHeader]]:
    """Check the complete batches of a fetch response. Return where each begins, and its header."""
    size_bytes, _ = _whole_bytes(records)
    return check_batches(records[:size_bytes], BATCH_BYTES_MAX, from_producer=False) if size_bytes else []


def next_offset_after(records: memoryview, otherwise: int) -> int:
    """Return the offset after the last whole batch, without decoding it, so that the next fetch can start early."""
    whole, last = _whole_bytes(records)
    return read_batch_header(records, last).next_offset if whole else otherwise


def _whole_bytes(records: memoryview) -> tuple[int, int]:
    """Return the total length of the complete batches, and where the last of them begins.

    Lengths below a header's size are left for `check_batches` to reject.
    """
    end = last = 0
    while len(records) - end >= LENGTH_END:
        size_bytes = max(HEADER_BYTES, _LENGTH.unpack_from(records, end + _LENGTH_AT)[0] + LENGTH_END)
        if size_bytes > len(records) - end:
            break
        last = end
        end += size_bytes
    return end, last
