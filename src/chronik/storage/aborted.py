"""The aborted transactions of a log, which read_committed consumers skip.

The file `NNN.txnindex`, 34 bytes per entry, as in Kafka; it exists only if its segment has the marker of an aborted
transaction with records:

    version             int16   0
    producer_id         int64
    first_offset        int64   of the transaction
    last_offset         int64   of its marker, which is in this segment
    last_stable_offset  int64   right after the marker: later entries have no transaction that begins below it

Entries are in the order of their markers. Unlike the other indexes (see `index`), a lost or damaged entry would give a
wrong result: consumers would read aborted records, or miss committed ones. So the number of entries and their checksum
are known: the log keeps them in memory, a snapshot (see `snapshot`) stores them, and readers get an error if they do
not match. When the log is opened, and when the segment is scrubbed, a missing or wrong index is rebuilt from the
batches.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from chronik.storage.batches import walk_headers
from chronik.storage.disk import Disk, File, read_file, remove_files, write_file_atomic
from chronik.storage.transactions import EndedTransaction, OpenTransactions, marker_of
from chronik.wire.batch import BatchHeader, Marker
from chronik.wire.errors import ErrorCode, KafkaError

ENTRY: Final = Struct(">hqqqq")
VERSION: Final = 0
SUFFIX: Final = ".txnindex"
OFFSET_MAX: Final = (1 << 63) - 1
UNWRITTEN_ENTRIES_MAX: Final = 128
"""How many entries accumulate before they are written."""


class AbortedTransaction(NamedTuple):
    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class Summary(NamedTuple):
    """What a segment's index must hold: the number of entries, and the CRC32C of all of them."""

    entries: int
    crc: int


EMPTY: Final = Summary(0, 0)


def aborted(producer_id: int, marker: Marker, ended: EndedTransaction | None) -> AbortedTransaction | None:
    """Return the entry for a transaction that a marker ended; None for a commit."""
    return None if ended is None or marker.is_commit else AbortedTransaction(producer_id, *ended)


def encode_entries(entries: Iterable[AbortedTransaction]) -> bytes:
    return b"".join(ENTRY.pack(VERSION, *entry) for entry in entries)


def decode_entries(data: bytes | bytearray) -> list[AbortedTransaction] | None:
    """Return None if the data is damaged: it has a part of an entry, or another version, or is not in order."""
    if len(data) % ENTRY.size:
        return None
    entries: list[AbortedTransaction] = []
    last_offset = -1
    for version, *numbers in ENTRY.iter_unpack(data):
        entry = AbortedTransaction(*numbers)
        if version != VERSION or not 0 <= entry.first_offset < entry.last_offset or entry.last_offset <= last_offset:
            return None
        last_offset = entry.last_offset
        entries.append(entry)
    return entries


class AbortedIndexDamaged(KafkaError):
    """An index lacks entries or is damaged. A scrub of its segment rebuilds it."""

    def __init__(self, path: str) -> None:
        reason = f"{path} is damaged or missing: scrubbing the segment or reopening the log rebuilds it"
        super().__init__(ErrorCode.kafka_storage_error, reason)
        self.base_offset = int(path.rpartition("/")[2].removesuffix(SUFFIX))


class AbortedView(NamedTuple):
    """An index at one moment: a thread reads it once, which closes the file, and opens it if it is not open."""

    disk: Disk
    path: str
    file: File | None
    written_count: int
    unwritten: bytes
    crc: int

    def read(self, offset: int = 0, upto_offset: int = OFFSET_MAX) -> list[AbortedTransaction]:
        """Return the entries that may overlap [offset, upto_offset); decode only those, as there may be many.

        Raises AbortedIndexDamaged if the file does not have the expected entries.
        """
        data = self._written() + self.unwritten
        if len(data) % ENTRY.size or crc32c(data) != self.crc:
            raise AbortedIndexDamaged(self.path)
        count = len(data) // ENTRY.size
        entries: list[AbortedTransaction] = []
        for at in range(_first_ending_from(offset, data), count):
            _, *numbers = ENTRY.unpack_from(data, at * ENTRY.size)
            entries.append(AbortedTransaction(*numbers))
            if entries[-1].last_stable_offset >= upto_offset:
                break
        return entries

    def _written(self) -> bytes:
        if not self.written_count:
            return b""
        with closing(self.file or _open(self.disk, self.path)) as file:
            return file.pread(0, self.written_count * ENTRY.size)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _first_ending_from(offset: int, data: bytes) -> int:
    """Return the index of the first entry whose marker is at or after `offset`: that column increases."""
    return bisect_left(
        range(len(data) // ENTRY.size), offset, key=lambda at: ENTRY.unpack_from(data, at * ENTRY.size)[3]
    )


def _open(disk: Disk, path: str) -> File:
    try:
        return disk.open(path)
    except FileNotFoundError:
        raise AbortedIndexDamaged(path) from None


@dataclass(slots=True, eq=False)
class AbortedIndex:
    """One segment's index file and its newest entries. Owned by the event loop; threads get a `view`.

    `load`, `replace`, `reset` or `adopt` sets the state; without them, the segment has no aborted transactions.
    """

    _disk: Disk
    path: str
    lowest_first_offset: int = 0
    last: AbortedTransaction | None = None
    _written_count: int = 0
    _crc: int = 0
    _unwritten: bytearray = field(default_factory=bytearray)

    @property
    def count(self) -> int:
        return self._written_count + len(self._unwritten) // ENTRY.size

    @property
    def summary(self) -> Summary:
        return Summary(self.count, self._crc)

    @property
    def file_count(self) -> int:
        """Entries in the file, by its size; -1 if it ends with a part of an entry. Blocks."""
        try:
            count, rest = divmod(self._disk.size(self.path), ENTRY.size)
        except FileNotFoundError:
            return 0
        return -1 if rest else count

    def sync(self) -> None:
        """Make the file durable, if there is one. Safe in a thread."""
        if self._disk.exists(self.path):
            with closing(self._disk.open(self.path)) as file:
                file.datasync()

    def append(self, entry: AbortedTransaction) -> None:
        """Add an entry; it is written later, in a block."""
        data = encode_entries([entry])
        self._note([entry])
        self._crc = crc32c(data, self._crc)
        self._unwritten += data
        if len(self._unwritten) >= UNWRITTEN_ENTRIES_MAX * ENTRY.size:
            self.try_write()

    def _note(self, entries: Sequence[AbortedTransaction]) -> None:
        if entries:
            lowest = min(entry.first_offset for entry in entries)
            self.lowest_first_offset = lowest if self.last is None else min(lowest, self.lowest_first_offset)
            self.last = entries[-1]

    def try_write(self) -> bool:
        """Write the accumulated entries. After a failure they stay in memory."""
        if self._unwritten:
            try:
                with closing(self._disk.open(self.path, create=True)) as file:
                    file.pwrite(self._unwritten, self._written_count * ENTRY.size)
                    file.truncate(self.count * ENTRY.size)
            except OSError:
                return False
            self._written_count = self.count
            self._unwritten = bytearray()
        return True

    def view(self, *, opens: bool = True) -> AbortedView:
        """Return a view, which must be read or closed.

        If it `opens` the file now, the index may be replaced before the view is read. Raises AbortedIndexDamaged if the
        file is missing.
        """
        file = _open(self._disk, self.path) if opens and self._written_count else None
        return AbortedView(self._disk, self.path, file, self._written_count, bytes(self._unwritten), self._crc)

    def load(self, summary: Summary) -> bool:
        """Take over the file's first entries, and remove any after them. Blocks.

        Return False, without a change, if the file does not have them.
        """
        data = (read_file(self._disk, self.path) or b"")[: summary.entries * ENTRY.size]
        entries = decode_entries(data)
        if entries is None or Summary(len(entries), crc32c(data)) != summary:
            return False
        self._truncate(summary.entries)
        self.adopt(entries)
        return True

    def cut_after(self, last_offset: int) -> bool:
        """Keep the entries whose marker is at or below `last_offset`. Blocks. Return False if the file is damaged."""
        if self.last is None or self.last.last_offset <= last_offset:
            return True
        try:
            entries = [entry for entry in self.view().read() if entry.last_offset <= last_offset]
        except AbortedIndexDamaged:
            return False
        written, unwritten = self._written_count, self._unwritten
        self.adopt(entries)
        if len(entries) > written:
            self._written_count = written
            self._unwritten = unwritten[: (len(entries) - written) * ENTRY.size]
        else:
            self._truncate(len(entries))
        return True

    def _truncate(self, count: int) -> None:
        """Cut the file to its first `count` entries."""
        if count == 0:
            remove_files(self._disk, [self.path])
        else:
            with closing(self._disk.open(self.path)) as file:
                file.truncate(count * ENTRY.size)

    def replace(self, entries: Sequence[AbortedTransaction]) -> None:
        """Write these entries instead, durably. Blocks."""
        if entries:
            write_file_atomic(self._disk, self.path, encode_entries(entries))
        else:
            remove_files(self._disk, [self.path])
        self.adopt(entries)

    def reset(self, entries: Sequence[AbortedTransaction]) -> None:
        """Replace the entries in memory; they are written later."""
        self.adopt(entries)
        self._written_count, self._unwritten = 0, bytearray(encode_entries(entries))

    def adopt(self, entries: Sequence[AbortedTransaction]) -> None:
        """Note that the file holds these entries."""
        self._written_count, self._unwritten, self.last = len(entries), bytearray(), None
        self._crc = crc32c(encode_entries(entries))
        self._note(entries)


@dataclass(slots=True, eq=False)
class AbortedJob:
    """Finds the aborted transactions that overlap [offset, upto_offset), in a thread. Call it once."""

    views: Sequence[AbortedView]
    offset: int
    upto_offset: int

    def __call__(self) -> list[AbortedTransaction]:
        """Return them by first offset. Raises AbortedIndexDamaged."""
        try:
            entries = [entry for view in self.views for entry in view.read(self.offset, self.upto_offset)]
        finally:
            self.close()
        offset, upto_offset = self.offset, self.upto_offset
        overlapping = [each for each in entries if each.last_offset >= offset and each.first_offset < upto_offset]
        return sorted(overlapping, key=lambda each: each.first_offset)

    def close(self) -> None:
        """Close the files, if the job does not run."""
        for view in self.views:
            view.close()


def search(indexes: Iterable[AbortedIndex], offset: int, upto_offset: int, *, opens: bool = True) -> AbortedJob | None:
    """Return a job that searches the indexes of consecutive segments, from the one that holds `offset` on.

    None if no transaction overlaps the range. `opens`: see `AbortedIndex.view`.
    """
    views: list[AbortedView] = []
    try:
        for index in indexes:
            last = index.last
            if last is None:
                continue
            if last.last_offset >= offset and index.lowest_first_offset < upto_offset:
                views.append(index.view(opens=opens))
            if last.last_stable_offset >= upto_offset:
                break
    except BaseException:
        for view in views:
            view.close()
        raise
    return AbortedJob(views, offset, upto_offset) if views else None


class TransactionScan:
    """Derives the aborted transactions from the batches of consecutive segments, starting with the log's first."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open = OpenTransactions()

    def passed(self, header: BatchHeader, marker: Marker | None) -> AbortedTransaction | None:
        """Note the next batch; return the transaction that it aborts. `marker` is that of a control batch."""
        if marker is not None:
            return aborted(header.producer_id, marker, self._open.end(header.producer_id, header.base_offset))
        if header.is_transactional and not header.is_control:
            self._open.begin(header.producer_id, header.base_offset)
        return None

    def passed_file(self, file: File, size_bytes: int) -> Iterator[AbortedTransaction]:
        """Pass all batches of a segment, reading only headers and control batches. Blocks."""
        for position, header in walk_headers(file, 0, size_bytes):
            if header.is_control:
                entry = self.passed(header, marker_of(header, file.pread(position, header.size_bytes)))
                if entry is not None:
                    yield entry
            elif header.is_transactional:
                self.passed(header, None)


def derive_last(disk: Disk, segments: Iterable[tuple[str, int]]) -> list[AbortedTransaction]:
    """Return the entries for the last of these segments, which are the log's first ones, by path and size. Blocks.

    It skips a segment that retention or compaction removes in the meantime.
    """
    scan = TransactionScan()
    entries: list[AbortedTransaction] = []
    for path, size_bytes in segments:
        try:
            file = disk.open(path)
        except FileNotFoundError:
            continue
        with closing(file):
            entries = list(scan.passed_file(file, size_bytes))
    return entries
