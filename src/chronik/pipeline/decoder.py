"""Decode fetched record batches of one partition into Arrow batches: the part of the source that needs no Spark.

Each batch's length, magic, CRC, codec and counts are checked before a record is read (`wire.batch`). Skipped are
control batches, batches of aborted transactions if the response lists these, and offsets outside the requested range. A
fetch returns whole batches, so it can begin with such offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any

from chronik.pipeline.columns import Chunk, RecordRange
from chronik.pipeline.plain import PlainChunk
from chronik.wire.batch import (
    DECOMPRESSED_BYTES_MAX,
    HEADER_BYTES,
    LENGTH_END,
    BatchHeader,
    check_batches,
    read_batch_header,
)
from chronik.wire.compression import Buffer, decompress
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import decode_records

__all__ = ["ROWS_MAX", "ArrowDecoder", "next_offset_behind"]

ROWS_MAX = 4096
"""Spark processes chunks of about this many rows fastest."""
BYTES_MAX = 8 * 1024 * 1024
BATCH_BYTES_MAX = 2**31 - 1

_LENGTH = Struct(">i")
_LENGTH_AT = 8
_CONTROL_KEY = Struct(">hh")
_ABORT = 0


class ArrowDecoder:
    """Takes batches in offset order, and yields Arrow batches. `next_offset` is where the next fetch continues."""

    def __init__(
        self,
        wanted: RecordRange,
        *,
        with_headers: bool = False,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BYTES_MAX,
        chunk: type[Chunk] | None = None,
    ) -> None:
        self.next_offset = wanted.start
        self._wanted = wanted
        self._chunk: Chunk = (chunk or _fastest_chunk())(  # type: ignore[call-arg]
            wanted, with_headers=with_headers, rows_max=rows_max, bytes_max=bytes_max
        )
        self._aborting: set[int] = set()

    @property
    def is_done(self) -> bool:
        return self.next_offset >= self._wanted.stop

    def feed(self, records: memoryview, aborted: Sequence[tuple[int, int]] = ()) -> Iterator[Any]:
        """Yield full Arrow batches from one fetch response. An incomplete batch at its end is left for the next fetch.

        `aborted` lists producers with the first offset of a transaction that they aborted, as Fetch returns them to
        read_committed consumers.
        """
        whole = records[: _whole_bytes(records)[0]]
        if not len(whole):
            if len(records):
                raise KafkaError(ErrorCode.corrupt_message, f"{self._place}: batch of more bytes than one fetch brings")
            return
        waiting = sorted(((first, producer) for producer, first in aborted), reverse=True)
        for at, header in check_batches(whole, BATCH_BYTES_MAX, from_producer=False):
            while waiting and waiting[-1][0] <= header.last_offset:
                self._aborting.add(waiting.pop()[1])
            if self.is_done:
                return
            if self._holds_rows(whole, at, header):
                self._chunk.begin(header, self._payload(whole, at, header))
                while not self._chunk.fill():
                    yield self._chunk.cut()
            self.next_offset = max(self.next_offset, header.next_offset)

    def finish(self) -> Iterator[Any]:
        """Yield the rows that did not fill a batch."""
        if self._chunk.rows:
            yield self._chunk.cut()

    def _holds_rows(self, records: memoryview, at: int, header: BatchHeader) -> bool:
        if header.is_control:
            if self._aborting and header.record_count and _is_abort(self._payload(records, at, header)):
                self._aborting.discard(header.producer_id)
            return False
        if header.is_transactional and header.producer_id in self._aborting:
            return False
        return header.record_count > 0 and header.last_offset >= self._wanted.start

    def _payload(self, records: memoryview, at: int, header: BatchHeader) -> Buffer:
        block = records[at + HEADER_BYTES : at + header.size_bytes]
        if not header.codec:
            return block
        try:
            return decompress(header.codec, block, DECOMPRESSED_BYTES_MAX)
        except KafkaError as error:
            raise KafkaError(error.code, f"{self._place}, batch at {header.base_offset}: {error.message}") from None

    @property
    def _place(self) -> str:
        return f"{self._wanted.topic}-{self._wanted.partition}"


def _fastest_chunk() -> type[Chunk]:
    """Return the compiled class, imported only to decode: numba loads for a second, and planning does not need it."""
    try:
        from chronik.pipeline.compiled import CompiledChunk
    except ImportError:
        return PlainChunk
    return CompiledChunk


def next_offset_behind(records: memoryview, otherwise: int) -> int:
    """Return the offset after the last whole batch, without decoding it, so that the next fetch can start early."""
    whole, last = _whole_bytes(records)
    return read_batch_header(records, last).next_offset if whole else otherwise


def _whole_bytes(records: memoryview) -> tuple[int, int]:
    """Return the total length of the complete batches, and where the last of them begins.

    Lengths below a header's size are left for `check_batches` to reject.
    """
    at = last = 0
    while len(records) - at >= LENGTH_END:
        size_bytes = max(HEADER_BYTES, _LENGTH.unpack_from(records, at + _LENGTH_AT)[0] + LENGTH_END)
        if size_bytes > len(records) - at:
            break
        last = at
        at += size_bytes
    return at, last


def _is_abort(payload: Buffer) -> bool:
    """Return whether a control batch aborts a transaction. Its one record's key is version int16, type int16."""
    key = next(decode_records(bytes(payload), 1, 0, 0, 0)).key
    return key is not None and len(key) >= _CONTROL_KEY.size and _CONTROL_KEY.unpack_from(key)[1] == _ABORT
