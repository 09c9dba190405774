"""Reading batches that are not at the tail: on the event loop if the pages are cached, otherwise in a thread.

Also reading only the headers of a range of batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from chronik.storage.batches import end_of_intact_batches, end_of_whole_batches, is_intact
from chronik.storage.disk import Buffer
from chronik.storage.segment import LogSegment, SegmentView
from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

HINTS_MAX: Final = 256
"""How many readers' next positions a log remembers (a power of two)."""
INDEXED_CUT_BYTES: Final = 64 * 1024
"""Reads of at least this size use the index to find where to cut, if their batches are small."""
SMALL_BATCHES: Final = 64
"""Batches are small if at least this many fit into the read."""
CHECKED_ON_LOOP_MAX: Final = 128
CHECKED_ON_LOOP_BYTES_MAX: Final = 4 * 1024 * 1024
"""Both: reads of more batches or bytes are checked in a thread; this many take the event loop less than 1 ms."""


class ReadResult(NamedTuple):
    """Whole batches, and the offset after the last one."""

    data: Buffer
    next_offset: int


class Hint(NamedTuple):
    """The batch with `offset` starts at `position` of `segment`."""

    offset: int
    segment: LogSegment
    position: int


def read_batches(
    pread: Callable[[int, int], Buffer | None],
    position: int,
    end: int,
    offset: int,
    max_bytes: int,
    upto_offset: int,
    min_one_batch: bool,
    boundary_before: Callable[[int], int],
) -> ReadResult | None:
    """Read from the batch at `position`; None if `pread` returned None or there is no whole batch."""
    size = min(max(max_bytes, HEADER_BYTES), end - position)
    data = pread(position, size)
    if data is None or len(data) < HEADER_BYTES:
        return None
    first = read_batch_header(data)
    if first.size_bytes < HEADER_BYTES or position + first.size_bytes > end:
        return None
    if first.size_bytes > len(data) or first.size_bytes > max_bytes:
        if not min_one_batch:
            return ReadResult(b"", offset)
        if first.size_bytes != len(data):
            data = pread(position, first.size_bytes)
            if data is None or len(data) < first.size_bytes:
                return None
    start = 0
    if len(data) >= INDEXED_CUT_BYTES and first.size_bytes * SMALL_BATCHES <= len(data):
        start = max(0, boundary_before(position + len(data) - 1) - position)
    whole_end, next_offset = end_of_whole_batches(data, first.base_offset, upto_offset, start)
    if whole_end == start and start > 0:
        whole_end, next_offset = end_of_whole_batches(data, first.base_offset, upto_offset)
    if whole_end == len(data):
        return ReadResult(data, next_offset)
    return ReadResult(memoryview(data)[:whole_end], next_offset)


@dataclass(slots=True, eq=False)
class ReadJob:
    """A read for a thread; it touches only files. Call it once: it returns the batches, and `result` has everything.

    `segments` holds the segment that should contain `offset`, and its successor. If `may_have_gap`, compaction may have
    removed everything from `offset` on in the first segment; otherwise a first segment that ends before `offset` is
    damaged. `end_offset` is the log's end when the job was created: no batch reaches it. Every batch is checked by CRC,
    except those that this process has just appended; a bad batch ends the read. If the first batch is bad, it alone is
    returned, and `damaged_at` is its offset.
    """

    segments: Sequence[tuple[LogSegment, SegmentView]]
    hints: dict[int, Hint]
    offset: int
    max_bytes: int
    upto_offset: int
    min_one_batch: bool
    end_offset: int
    may_have_gap: bool
    result: ReadResult | None = None
    damaged_at: int | None = None

    def __call__(self) -> Buffer:
        try:
            self.result = self._read()
        finally:
            for _, view in self.segments:
                view.release()
        return self.result.data

    def _read(self) -> ReadResult:
        if self.offset >= self.upto_offset:
            return ReadResult(b"", self.offset)
        for segment, view in self.segments:
            first = view.find(self.offset)
            if first is None and self.may_have_gap:
                continue
            if first is None:
                # Its file was cut at a batch border: a reader that continued would skip records.
                reason = f"segment {view.base_offset} ends before offset {self.offset}"
                raise KafkaError(ErrorCode.corrupt_message, reason)
            position, header = first
            if header.last_offset >= self.upto_offset:
                # Either the batch reaches beyond the limit, or its header is wrong: then a reader would wait here
                # forever. Its offset may be wrong although the CRC is right, because the CRC does not cover it.
                batch = view.shared.file.pread(position, header.size_bytes)
                if header.last_offset >= self.end_offset or not is_intact(batch, header):
                    raise _damaged(view, position)
                break
            result = read_batches(
                view.shared.file.pread,
                position,
                view.size_bytes,
                header.base_offset,
                self.max_bytes,
                self.upto_offset,
                self.min_one_batch,
                view.boundary_before,
            )
            if result is None:
                raise _damaged(view, position)
            if position < segment.trusted_from:
                result = self._checked(result)
            # When positions change, the dict is replaced, never cleared; setting one key is safe next to the loop.
            next_offset, next_position = result.next_offset, position + len(result.data)
            self.hints[self.offset % HINTS_MAX] = Hint(self.offset, segment, position)
            if result.data and next_position < view.size_bytes:
                self.hints[next_offset % HINTS_MAX] = Hint(next_offset, segment, next_position)
            return result
        return ReadResult(b"", self.offset)

    def _checked(self, result: ReadResult) -> ReadResult:
        """Return the batches before the first bad one, or that one alone."""
        data = memoryview(result.data)
        end, next_offset = end_of_intact_batches(data, self.offset)
        if end == len(data):
            return result
        if end > 0:
            return ReadResult(data[:end], next_offset)
        bad = read_batch_header(data)
        self.damaged_at = bad.base_offset
        return ReadResult(data[: bad.size_bytes], bad.next_offset)


def _damaged(view: SegmentView, position: int) -> KafkaError:
    return KafkaError(ErrorCode.corrupt_message, f"segment {view.base_offset} is damaged at its byte {position}")


class HeadersResult(NamedTuple):
    """Headers in log order, and the offset to continue from; None if the range is complete."""

    headers: list[BatchHeader]
    next_offset: int | None


@dataclass(slots=True, eq=False)
class HeadersJob:
    """Reads headers in a thread; touches only files, and only the first bytes of each batch. Call it once.

    `views` are consecutive segments, starting with the one that should hold `offset`. `next_base` is the base
    offset of the segment after them, or None.
    """

    views: Sequence[SegmentView]
    next_base: int | None
    offset: int
    to_offset: int
    upto_offset: int
    headers_max: int

    def __call__(self) -> HeadersResult:
        try:
            return self._walk()
        finally:
            for view in self.views:
                view.release()

    def _walk(self) -> HeadersResult:
        headers: list[BatchHeader] = []
        for view in self.views:
            for _, header in view.walk(view.position_near(self.offset)):
                if header.last_offset < self.offset:
                    continue
                if header.base_offset >= self.to_offset or header.last_offset >= self.upto_offset:
                    return HeadersResult(headers, None)
                if len(headers) == self.headers_max:
                    return HeadersResult(headers, header.base_offset)
                headers.append(header)
        is_complete = self.next_base is None or self.next_base >= self.to_offset
        return HeadersResult(headers, None if is_complete else self.next_base)
