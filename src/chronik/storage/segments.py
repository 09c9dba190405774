"""The segments of one log, in order: which of their files are open, and the removal of files no longer needed."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Final, NamedTuple

from chronik.storage.batches import end_of_intact_batches
from chronik.storage.disk import Disk, remove_files
from chronik.storage.reading import (
    CHECKED_ON_LOOP_BYTES_MAX,
    CHECKED_ON_LOOP_MAX,
    HINTS_MAX,
    HeadersJob,
    Hint,
    ReadJob,
    ReadResult,
    read_batches,
)
from chronik.storage.segment import LogSegment
from chronik.storage.small_files import write_number

OPEN_CLOSED_SEGMENTS_MAX: Final = 2
"""How many files of closed segments one log holds open."""

_base_offset = attrgetter("base_offset")


class NumberFile(NamedTuple):
    """A file that holds one number, to be written durably.

    The number is read when the file is written: if two jobs run out of order, both write the newer number.
    """

    path: str
    number: Callable[[], int]


@dataclass(eq=False)
class DeletionJob:
    """Files to remove in a thread. The log has already released them; without `run` the next open brings them back.

    `run` first makes the new log start and the names of new segments durable: a crash must not find the old segments
    gone and nothing in their place. Files are removed oldest first, so that a crash leaves no hole.
    """

    disk: Disk
    folder: str
    paths: Sequence[str]
    segments: int
    size_bytes: int
    number_file: NumberFile | None = None

    def run(self) -> None:
        if self.number_file is not None:
            path, number = self.number_file
            write_number(self.disk, path, number())
        if self.paths:
            self.disk.sync_dir(self.folder)
        remove_files(self.disk, self.paths)


class Segments:
    """Invariant: base offsets increase; every offset of the log is in the last segment whose base is not above it.

    The last segment is the active one. Owned by the event loop.
    """

    __slots__ = ("_disk", "_folder", "_hints", "_open_closed", "all", "size_bytes")

    def __init__(self, disk: Disk, folder: str, segments: list[LogSegment]) -> None:
        self._disk = disk
        self._folder = folder
        self.all = segments
        self.size_bytes = sum(segment.size_bytes for segment in segments)
        self._hints: dict[int, Hint] = {}
        self._open_closed: dict[int, LogSegment] = {}

    @property
    def active(self) -> LogSegment | None:
        return self.all[-1] if self.all else None

    def begin(self, base_offset: int) -> LogSegment:
        """Create a new active segment; the caller must finish the previous one, if any."""
        fresh = LogSegment.create(self._disk, self._folder, base_offset)
        if self.all:
            self.touch(self.all[-1])
        self.all.append(fresh)
        return fresh

    def index_of(self, offset: int) -> int:
        """Return the index of the segment that holds `offset`, if any does."""
        return max(0, bisect_right(self.all, offset, key=_base_offset) - 1)

    def touch(self, segment: LogSegment) -> None:
        """Keep the file of a closed segment open, and release the least recently used one."""
        self._open_closed.pop(segment.base_offset, None)
        self._open_closed[segment.base_offset] = segment
        if len(self._open_closed) > OPEN_CLOSED_SEGMENTS_MAX:
            oldest = next(iter(self._open_closed))
            self._open_closed.pop(oldest).release()

    def remove(self, first: int, end: int) -> list[LogSegment]:
        """Remove segments [first, end) from the log; the caller removes their files."""
        removed = self.all[first:end]
        del self.all[first:end]
        self._forget(removed)
        return removed

    def replace(self, old: Sequence[LogSegment], new: LogSegment | None) -> None:
        """Replace adjacent segments by a compacted one, or by nothing."""
        first = self.all.index(old[0])
        self.all[first : first + len(old)] = [] if new is None else [new]
        self._forget(old)
        self.size_bytes += 0 if new is None else new.size_bytes

    def cut_active(self, position: int, last_offset_kept: int) -> None:
        """Drop the end of the last segment. Blocks."""
        active = self.all[-1]
        self._open_closed.pop(active.base_offset, None)
        self._hints = {}
        self.size_bytes -= active.size_bytes - position
        active.cut(position, last_offset_kept)

    def _forget(self, segments: Sequence[LogSegment]) -> None:
        for segment in segments:
            self._open_closed.pop(segment.base_offset, None)
            segment.release()
            self.size_bytes -= segment.size_bytes
        # Threads may still add to the old dict, which is no longer read.
        self._hints = {}

    def close(self) -> None:
        for segment in self.all:
            segment.release()
        self._open_closed = {}
        self._hints = {}

    # -- reads away from the tail --------------------------------------------------------------------------------------

    def read_cached(self, offset: int, max_bytes: int, upto_offset: int, min_one_batch: bool) -> ReadResult | None:
        """Continue where a reader stopped, if the pages are in memory; None if a `read_job` is needed.

        A thread also checks many small batches, and any that are damaged.
        """
        hint = self._hints.get(offset % HINTS_MAX)
        if hint is None or hint.offset != offset:
            return None
        segment, position = hint.segment, hint.position
        if segment is not self.all[-1]:
            self.touch(segment)
        view = segment.view()
        try:
            result = read_batches(
                segment.file.pread_cached,
                position,
                segment.size_bytes,
                offset,
                max_bytes,
                upto_offset,
                min_one_batch,
                view.boundary_before,
            )
        finally:
            view.release()
        if result is None or (min_one_batch and not result.data):
            # Data was expected here: a search will show whether it is damaged.
            return None
        if result.data and position < segment.trusted_from and not _is_intact(result, offset):
            return None
        next_position = position + len(result.data)
        if result.data and next_position < segment.size_bytes:
            self._hints[result.next_offset % HINTS_MAX] = Hint(result.next_offset, segment, next_position)
        return result

    def read_job(
        self, offset: int, max_bytes: int, upto_offset: int, min_one_batch: bool, end_offset: int, *, may_have_gap: bool
    ) -> ReadJob:
        """Return the same read as a job for a thread, which may search and wait for the disk."""
        views = [(segment, segment.view()) for segment in self._from(offset)]
        upto_offset = min(upto_offset, end_offset)
        return ReadJob(views, self._hints, offset, max_bytes, upto_offset, min_one_batch, end_offset, may_have_gap)

    def headers_job(self, offset: int, to_offset: int, upto_offset: int, headers_max: int) -> HeadersJob:
        """Return a job for a thread that reads the headers of the batches from `offset` on."""
        segments = self._from(offset)
        following = self.all.index(segments[-1]) + 1 if segments else len(self.all)
        next_base = self.all[following].base_offset if following < len(self.all) else None
        views = [segment.view() for segment in segments]
        return HeadersJob(views, next_base, offset, to_offset, upto_offset, headers_max)

    def read_limit(self, offset: int, end_offset: int) -> int:
        """Return an offset that no single read from `offset` reaches beyond: it ends with the segment after its own."""
        following = list(islice(self._with_data(self.index_of(offset) + 1), 2))
        return following[1].base_offset if len(following) > 1 else end_offset

    def _with_data(self, index: int) -> Iterator[LogSegment]:
        """Yield the segments from `index` on that have data: compaction may have emptied some."""
        for segment in islice(self.all, index, None):
            if segment.size_bytes > 0:
                yield segment

    def _from(self, offset: int) -> list[LogSegment]:
        """Return the segment that should hold `offset` and its successor, with their files kept open."""
        first = self.index_of(offset)
        segments = self.all[first : first + 1]
        # Compaction may have removed everything from the offset on.
        segments += islice(self._with_data(first + 1), 1)
        for segment in segments:
            if segment is not self.all[-1]:
                self.touch(segment)
        return segments

    def bytes_between(self, offset: int, upto_offset: int, end_offset: int) -> int:
        """Estimate the size of the batches from `offset` to `upto_offset`."""
        total = 0
        for index in range(self.index_of(offset), len(self.all)):
            segment = self.all[index]
            if segment.base_offset >= upto_offset:
                break
            segment_end = self.all[index + 1].base_offset if index + 1 < len(self.all) else end_offset
            covered = min(upto_offset, segment_end) - max(offset, segment.base_offset)
            total += segment.size_bytes * max(0, covered) // max(1, segment_end - segment.base_offset)
        return total


def _is_intact(found: ReadResult, offset: int) -> bool:
    """Return whether the checksums of the batches are right; False also if checking them could take too long."""
    data = memoryview(found.data)
    if len(data) > CHECKED_ON_LOOP_BYTES_MAX:
        return False
    end, _ = end_of_intact_batches(data, offset, CHECKED_ON_LOOP_MAX)
    return end == len(data)
