"""One segment of a log: a file of batches, its two sparse indexes, and the index of its aborted transactions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, NamedTuple

from chronik.storage.aborted import SUFFIX as ABORTED_SUFFIX
from chronik.storage.aborted import AbortedIndex
from chronik.storage.batches import header_at, is_zero, walk_headers
from chronik.storage.disk import Disk, File, remove_files
from chronik.storage.index import OFFSET_ENTRY, TIME_ENTRY, IndexView, SparseIndex
from chronik.wire.batch import BatchHeader
from chronik.wire.errors import ErrorCode, KafkaError

NO_TIMESTAMP: Final = -1
RELATIVE_OFFSET_MAX: Final = (1 << 31) - 1


def segment_path(folder: str, base_offset: int, suffix: str = ".log") -> str:
    """Return Kafka's file name: the base offset with 20 digits, so that names sort."""
    return f"{folder}/{base_offset:020d}{suffix}"


@dataclass(slots=True, eq=False)
class SharedFile:
    """An open file with a reference count: the last user closes it.

    The log releases files (retention, compaction, the limit on open files) while a thread may still read or sync them.
    Closing at once could leave that thread with a descriptor that another file reuses.
    """

    file: File
    _users: int = 1
    _lock: Lock = field(default_factory=Lock)

    def acquire(self) -> "SharedFile":
        """Add a reference. The caller must know that another reference is still held."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self.file.close()


class SegmentView(NamedTuple):
    """A segment at one moment, with a reference to its file: what a thread reads from."""

    base_offset: int
    size_bytes: int
    shared: SharedFile
    offsets: IndexView
    times: IndexView

    def release(self) -> None:
        self.shared.release()

    def __enter__(self) -> "SegmentView":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def find(self, offset: int) -> tuple[int, BatchHeader] | None:
        """Return the first batch that ends at or after `offset`, with its position; None if all end before it."""
        for position, header in self.walk(self.position_near(offset)):
            if header.last_offset >= offset:
                return position, header
        return None

    def position_near(self, offset: int) -> int:
        """Return the start of a batch that is not after `offset`, as close to it as the index has."""
        entry = self.offsets.floor(0, offset - self.base_offset)
        return entry[1] if entry is not None and self.is_correct(entry[0], entry[1]) else 0

    def boundary_before(self, position: int) -> int:
        """Return the start of a batch at or before `position`, as close to it as the index has."""
        entry = self.offsets.floor(1, position)
        return entry[1] if entry is not None and self.is_correct(entry[0], entry[1]) else 0

    def is_correct(self, relative_offset: int, position: int) -> bool:
        header = header_at(self.shared.file, position, self.size_bytes) if position >= 0 else None
        return header is not None and header.last_offset == self.base_offset + relative_offset

    def walk(self, position: int) -> Iterator[tuple[int, BatchHeader]]:
        """Yield every batch from `position` on. Raises CORRUPT_MESSAGE if the chain of batches is broken."""
        return _walk(self.shared.file, self.base_offset, position, self.size_bytes)

    def largest_timestamp(self) -> tuple[int, int]:
        """Return the largest timestamp and the last offset of the first batch that has it; (-1, -1) without any."""
        entry = self.times.last()
        if entry is not None:
            offset = self.base_offset + entry[1]
            batch = self.find(offset)
            if batch is not None and batch[1].last_offset == offset and batch[1].max_timestamp == entry[0]:
                return entry[0], offset
        largest, its_offset = NO_TIMESTAMP, -1
        for _, header in self.walk(0):
            if header.max_timestamp > largest:
                largest, its_offset = header.max_timestamp, header.last_offset
        return largest, its_offset


def _walk(file: File, base_offset: int, position: int, size_bytes: int) -> Iterator[tuple[int, BatchHeader]]:
    end = position
    for at, header in walk_headers(file, position, size_bytes):
        yield at, header
        end = at + header.size_bytes
    # Zeros at the end are preallocated; zeros followed by data are a hole.
    if not is_zero(file, end, size_bytes):
        raise KafkaError(ErrorCode.corrupt_message, f"segment {base_offset} is damaged at its byte {end}")


@dataclass(slots=True, eq=False)
class LogSegment:
    """Owns NNN.log, NNN.index and NNN.timeindex, and NNN.txnindex if it has aborted transactions.

    Invariant: bytes [0, size_bytes) of the file are whole batches with increasing offsets, all at or above
    `base_offset` and less than 2^31 above it; the rest of the file is preallocated zeros. Owned by the event loop;
    threads get a view. The file is opened when first needed and can be released at any time.
    """

    disk: Disk
    folder: str
    base_offset: int
    size_bytes: int = 0
    allocated_bytes: int = field(init=False)
    max_timestamp: int | None = field(init=False)
    max_timestamp_offset: int = field(init=False, default=-1)
    first_append_ms: int | None = field(init=False, default=None)
    unindexed_bytes: int = field(init=False, default=0)
    last_batch_position: int = field(init=False, default=-1)
    trusted_from: int = field(init=False)
    """What this process appended from here on, while the segment is active, needs no check when it is read: it is
    recent and in memory. The disk may have corrupted anything before it."""
    offset_index: SparseIndex = field(init=False)
    time_index: SparseIndex = field(init=False)
    aborted: AbortedIndex = field(init=False)
    _shared: SharedFile | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.allocated_bytes = self.trusted_from = self.size_bytes
        self.max_timestamp = None if self.size_bytes else NO_TIMESTAMP
        self.offset_index = SparseIndex(self.disk, segment_path(self.folder, self.base_offset, ".index"), OFFSET_ENTRY)
        self.time_index = SparseIndex(self.disk, segment_path(self.folder, self.base_offset, ".timeindex"), TIME_ENTRY)
        self.aborted = AbortedIndex(self.disk, segment_path(self.folder, self.base_offset, ABORTED_SUFFIX))

    @staticmethod
    def create(disk: Disk, folder: str, base_offset: int) -> "LogSegment":
        """Create an empty segment; discard any previous content of its files."""
        file = disk.open(segment_path(folder, base_offset), create=True)
        segment = LogSegment(disk, folder, base_offset)
        try:
            file.truncate(0)
            for index in (segment.offset_index, segment.time_index):
                if disk.exists(index.path):
                    index.cut(0)
            remove_files(disk, [segment.aborted.path])
        except OSError:
            file.close()
            disk.remove(segment.path)
            raise
        segment._shared = SharedFile(file)
        return segment

    @property
    def path(self) -> str:
        return segment_path(self.folder, self.base_offset)

    @property
    def file(self) -> File:
        return (self._shared or self.shared).file  # every append reads this: usually skip `shared`

    @property
    def shared(self) -> SharedFile:
        if self._shared is None:
            self._shared = SharedFile(self.disk.open(self.path))
        return self._shared

    @property
    def is_open(self) -> bool:
        return self._shared is not None

    def release(self) -> None:
        """Close the file, or leave that to the thread that still uses it."""
        if self._shared is not None:
            self._shared.release()
            self._shared = None

    def view(self) -> SegmentView:
        """Return a view, which the caller must release."""
        return SegmentView(
            self.base_offset, self.size_bytes, self.shared.acquire(), self.offset_index.view(), self.time_index.view()
        )

    @contextmanager
    def brief_view(self) -> Iterator[SegmentView]:
        """Return a view for a `with` block; afterwards the file is closed again, unless it was open before."""
        was_open = self.is_open
        try:
            with self.view() as view:
                yield view
        finally:
            if not was_open:
                self.release()

    def largest_timestamp(self) -> tuple[int, int]:
        """Return the largest timestamp and its batch's last offset. May read the file; the result is cached."""
        if self.max_timestamp is None:
            with self.brief_view() as view:
                self.max_timestamp, self.max_timestamp_offset = view.largest_timestamp()
        return self.max_timestamp, self.max_timestamp_offset

    def note_batch(self, position: int, last_offset: int, size_bytes: int, max_timestamp: int, interval: int) -> None:
        """Note a batch appended at `position`: update the timestamps, and the indexes if an entry is due."""
        self.last_batch_position = position
        if self.max_timestamp is None or max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp
            self.max_timestamp_offset = last_offset
        if self.unindexed_bytes > interval:
            self.offset_index.append(last_offset - self.base_offset, position)
            self.add_time_entry()
            self.unindexed_bytes = 0
        self.unindexed_bytes += size_bytes

    def add_time_entry(self) -> None:
        """Add an entry for the largest timestamp so far, if it is new."""
        if self.max_timestamp is None or self.max_timestamp < 0:
            return
        last = self.time_index.last_appended
        if last is None or last < self.max_timestamp:
            self.time_index.append(self.max_timestamp, self.max_timestamp_offset - self.base_offset)

    def finish(self) -> None:
        """End appends: complete the indexes and release preallocated space. An OSError does no harm."""
        self.trusted_from = self.size_bytes
        self.add_time_entry()
        self.aborted.try_write()
        try:
            for index in (self.offset_index, self.time_index):
                if not index.try_write() and self.disk.exists(index.path):
                    # A missing index is rebuilt when the log is opened; one that lacks its end would be trusted.
                    self.disk.remove(index.path)
            if self._shared is not None or self.allocated_bytes != self.size_bytes:
                self.file.truncate(self.size_bytes)
                self.allocated_bytes = self.size_bytes
        except OSError:
            # The zeros stay; readers and recovery treat them as the end.
            return

    def cut(self, size_bytes: int, last_offset_kept: int) -> None:
        """Drop everything from `size_bytes` on; `last_offset_kept` is the last offset of the batch before. Blocks.

        The caller cuts `aborted`.
        """
        self.file.truncate(size_bytes)
        self.size_bytes = self.allocated_bytes = size_bytes
        self.trusted_from = min(self.trusted_from, size_bytes)
        self.offset_index.cut(self.offset_index.count_upto(1, size_bytes - 1))
        self.time_index.cut(self.time_index.count_upto(1, last_offset_kept - self.base_offset))
        self.resume()

    def resume(self) -> None:
        """Restore the state that appends need, from the indexes and the batches after their last entries. Blocks."""
        times, offsets = self.time_index.view().last(), self.offset_index.view().last()
        self.max_timestamp, self.max_timestamp_offset = NO_TIMESTAMP, -1
        if times is not None:
            self.max_timestamp, self.max_timestamp_offset = times[0], self.base_offset + times[1]
        start = offsets[1] if offsets is not None else 0
        self.unindexed_bytes = self.size_bytes - start
        self.last_batch_position = -1
        for position, header in walk_headers(self.file, start, self.size_bytes):
            self.last_batch_position = position
            if header.max_timestamp > self.max_timestamp:
                self.max_timestamp, self.max_timestamp_offset = header.max_timestamp, header.last_offset

    def clear_indexes(self) -> None:
        """Drop all entries and the timestamps, before the segment's batches are noted again. Blocks."""
        self.offset_index.cut(0)
        self.time_index.cut(0)
        self.max_timestamp, self.max_timestamp_offset = NO_TIMESTAMP, -1
        self.unindexed_bytes = 0

    def rebuild_indexes(self, interval: int) -> None:
        """Rebuild both indexes from the batches. Blocks."""
        self.clear_indexes()
        for position, header in walk_headers(self.file, 0, self.size_bytes):
            self.note_batch(position, header.last_offset, header.size_bytes, header.max_timestamp, interval)
        self.add_time_entry()
        self.offset_index.write()
        self.time_index.write()

    def paths(self) -> list[str]:
        """Return all files of the segment, the log last: a segment without indexes is still complete."""
        return [self.offset_index.path, self.time_index.path, self.aborted.path, self.path]
