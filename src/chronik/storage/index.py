"""The sparse indexes of a segment.

Offset index, `NNN.index`, 8 bytes per entry, as in Kafka:

    relative_offset  int32   last offset of a batch, minus the segment's base offset
    position         int32   where that batch starts in the segment

Time index, `NNN.timeindex`, 12 bytes per entry, as in Kafka:

    timestamp        int64   largest timestamp in the segment so far
    relative_offset  int32   last offset of the first batch that has it, minus the segment's base offset

An index only speeds up lookups: an entry is checked against its batch when it is used, so a lost or damaged index costs
time but never gives a wrong result. The newest entries are kept in memory and written in blocks.
"""

from bisect import bisect_right
from contextlib import closing
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, NamedTuple

from chronik.storage.disk import Disk, File

OFFSET_ENTRY: Final = Struct(">ii")
TIME_ENTRY: Final = Struct(">qi")

UNWRITTEN_ENTRIES_MAX: Final = 128
"""How many entries accumulate before they are written."""
DROPPED_ENTRIES_AT: Final = 4096
"""At this many entries in memory, after failed writes, the older half is dropped: the index gets sparser."""

Entry = tuple[int, int]


class IndexView(NamedTuple):
    """An index at one moment; a thread may search it while the index grows."""

    disk: Disk
    path: str
    layout: Struct
    written_count: int
    unwritten: bytes

    def floor(self, column: int, value: int) -> Entry | None:
        """Return the last entry whose `column` is at most `value`. Both columns increase from entry to entry."""
        layout, unwritten = self.layout, self.unwritten
        count = _count_unwritten_upto(unwritten, layout, column, value)
        if count > 0:
            first, second = layout.unpack_from(unwritten, (count - 1) * layout.size)
            return first, second
        if self.written_count == 0:
            return None
        try:
            file = self.disk.open(self.path)
        except FileNotFoundError:
            return None
        with closing(file):
            count = _count_upto(file, layout, self.written_count, column, value)
            data = file.pread((count - 1) * layout.size, layout.size) if count > 0 else b""
        if len(data) < layout.size:
            return None
        first, second = layout.unpack(data)
        # A thread may have rebuilt the index since the entries were counted.
        return (first, second) if (first, second)[column] <= value else None

    def last(self) -> Entry | None:
        return self.floor(0, 1 << 63)


@dataclass(slots=True, eq=False)
class SparseIndex:
    """One index file and its newest entries. Owned by the event loop; threads get a `view`."""

    _disk: Disk
    path: str
    _layout: Struct
    _count: int | None = None
    _unwritten: bytearray = field(default_factory=bytearray)
    last_appended: int | None = None
    """The first column of the last appended entry, as far as this process knows."""

    @property
    def written_count(self) -> int:
        """Entries in the file; read from the disk when first needed."""
        if self._count is None:
            try:
                self._count = self._disk.size(self.path) // self._layout.size
            except FileNotFoundError:
                self._count = 0
        return self._count

    @property
    def unwritten_count(self) -> int:
        return len(self._unwritten) // self._layout.size

    def view(self) -> IndexView:
        return IndexView(self._disk, self.path, self._layout, self.written_count, bytes(self._unwritten))

    def append(self, first: int, second: int) -> None:
        """Add an entry; it is written later, in a block."""
        self._unwritten += self._layout.pack(first, second)
        self.last_appended = first
        if len(self._unwritten) >= UNWRITTEN_ENTRIES_MAX * self._layout.size:
            self.try_write()

    def try_write(self) -> bool:
        """Write the accumulated entries. A failure does no harm: the entries stay in memory, within a bound."""
        try:
            self.write()
        except OSError:
            if self.unwritten_count >= DROPPED_ENTRIES_AT:
                del self._unwritten[: len(self._unwritten) // self._layout.size // 2 * self._layout.size]
            return False
        return True

    def write(self) -> None:
        if not self._unwritten and self._count:
            return
        with closing(self._disk.open(self.path, create=True)) as file:
            if self._unwritten:
                file.pwrite(self._unwritten, self.written_count * self._layout.size)
        self._count = self.written_count + self.unwritten_count
        self._unwritten = bytearray()

    def cut(self, count: int) -> None:
        """Keep the first `count` entries, in the file too."""
        self._unwritten = bytearray()
        size = self._layout.size
        with closing(self._disk.open(self.path, create=True)) as file:
            count = min(count, file.size() // size)
            file.truncate(count * size)
            self.last_appended = self._layout.unpack(file.pread((count - 1) * size, size))[0] if count else None
        self._count = count

    def count_upto(self, column: int, value: int) -> int:
        """Count the file's entries whose `column` is at most `value`; entries in memory are written first."""
        self.write()
        with closing(self._disk.open(self.path)) as file:
            return _count_upto(file, self._layout, self.written_count, column, value)

    def sync(self) -> None:
        """Make the file durable. Safe in a thread."""
        with closing(self._disk.open(self.path)) as file:
            file.datasync()


def _count_unwritten_upto(entries: bytes, layout: Struct, column: int, value: int) -> int:
    """Count those of `entries` whose `column` is at most `value`."""
    indexes = range(len(entries) // layout.size)
    return bisect_right(indexes, value, key=lambda index: layout.unpack_from(entries, index * layout.size)[column])


def _count_upto(file: File, layout: Struct, count: int, column: int, value: int) -> int:
    """Count those of the file's first `count` entries whose `column` is at most `value`; the file may be shorter."""

    def column_of(index: int) -> int:
        data = file.pread(index * layout.size, layout.size)
        return int(layout.unpack(data)[column]) if len(data) == layout.size else value + 1

    return bisect_right(range(count), value, key=column_of)
