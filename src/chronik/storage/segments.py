"""The segments of one log, in order, and which of their files are open."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from chronik.storage.disk import Disk
from chronik.storage.headers import HeadersJob
from chronik.storage.reading import HINTS_MAX, Hint, ReadJob, ReadResult, read_batches
from chronik.storage.segment import LogSegment

__all__ = ["OPEN_CLOSED_SEGMENTS_MAX", "Segments"]

OPEN_CLOSED_SEGMENTS_MAX: Final = 2
"""How many files of closed segments one log holds open."""

_base_offset = attrgetter("base_offset")


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
            self._open_closed.pop(oldest).let_go()

    def remove(self, first: int, behind: int) -> list[LogSegment]:
        """Remove segments [first, behind) from the log; the caller removes their files."""
        removed = self.all[first:behind]
        del self.all[first:behind]
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
            segment.let_go()
            self.size_bytes -= segment.size_bytes
        # Threads may still add to the old dict, which is no longer read.
        self._hints = {}

    def close(self) -> None:
        for segment in self.all:
            segment.let_go()
        self._open_closed = {}
        self._hints = {}

    # -- reads away from the tail --------------------------------------------------------------------------------------

    def read_cached(self, offset: int, max_bytes: int, upto_offset: int, min_one_batch: bool) -> ReadResult | None:
        """Continue where a reader stopped, if the pages are in memory; None if a `read_job` is needed.

        Bytes not checked since the log was opened need one too: a thread checks them, once.
        """
        hint = self._hints.get(offset % HINTS_MAX)
        if hint is None or hint.offset != offset:
            return None
        segment, position = hint.segment, hint.position
        if not segment.is_checked(position, position + 1):
            return None
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
        next_position = position + len(result.data)
        if not segment.is_checked(position, next_position):
            return None
        if result.data and next_position < segment.size_bytes:
            self._hints[result.next_offset % HINTS_MAX] = Hint(result.next_offset, segment, next_position)
        return result

    def read_job(self, offset: int, max_bytes: int, upto_offset: int, min_one_batch: bool, end_offset: int) -> ReadJob:
        """Return the same read as a job for a thread, which may search and wait for the disk."""
        views = [(segment, segment.view()) for segment in self._from(offset)]
        upto_offset = min(upto_offset, end_offset)
        return ReadJob(views, self._hints, offset, max_bytes, upto_offset, min_one_batch, end_offset)

    def headers_job(self, offset: int, to_offset: int, upto_offset: int, headers_max: int) -> HeadersJob:
        """Return a job for a thread that reads the headers of the batches from `offset` on."""
        wanted = self._from(offset)
        behind = self.all.index(wanted[-1]) + 1 if wanted else len(self.all)
        behind_offset = self.all[behind].base_offset if behind < len(self.all) else None
        views = [segment.view() for segment in wanted]
        return HeadersJob(views, behind_offset, offset, to_offset, upto_offset, headers_max)

    def _from(self, offset: int) -> list[LogSegment]:
        """Return the segment that should hold `offset` and its successor, with their files kept open."""
        first = behind = self.index_of(offset)
        wanted = self.all[first : first + 1]
        while behind + 1 < len(self.all) and len(wanted) < 2:
            # Compaction may have removed everything from the offset on, or emptied the segment.
            behind += 1
            if self.all[behind].size_bytes > 0:
                wanted.append(self.all[behind])
        for segment in wanted:
            if segment is not self.all[-1]:
                self.touch(segment)
        return wanted

    def bytes_between(self, offset: int, upto_offset: int, end_offset: int) -> int:
        """Estimate the size of the batches from `offset` to `upto_offset`."""
        total = 0
        for at in range(self.index_of(offset), len(self.all)):
            segment = self.all[at]
            if segment.base_offset >= upto_offset:
                break
            behind = self.all[at + 1].base_offset if at + 1 < len(self.all) else end_offset
            covered = min(upto_offset, behind) - max(offset, segment.base_offset)
            total += segment.size_bytes * max(0, covered) // max(1, behind - segment.base_offset)
        return total
