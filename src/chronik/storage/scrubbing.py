"""Re-reading a closed segment, to check that it still holds what was written.

It checks:
- the file: it exists, is readable, and is not shorter than the log expects;
- every batch: its CRC; its offsets and its leader epoch, which the CRC does not cover;
- the end: only preallocated zeros follow, and the next segment starts there, unless compaction left a gap;
- both sparse indexes: each entry describes the batch that it points to;
- the index of aborted transactions: it has an entry for each abort marker that needs one, and no other.

Damage in an index loses no record: the index is rebuilt. Any other damage means that this replica has lost records.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from crc32c import crc32c

from chronik.storage.aborted import AbortedTransaction, Summary, decode_entries
from chronik.storage.batches import SCAN_READ_BYTES, is_zero, scan_batches
from chronik.storage.disk import Disk, File, read_file
from chronik.storage.epochs import UNDEFINED, LeaderEpochs
from chronik.storage.index import OFFSET_ENTRY, TIME_ENTRY, Entry
from chronik.storage.segment import LogSegment
from chronik.storage.transactions import OpenTransactions, marker_of
from chronik.wire.batch import BatchHeader, Marker

PIECE_BYTES: Final = SCAN_READ_BYTES


class SegmentScrub:
    """One closed segment, read piece by piece: call `step` until `is_done`.

    `step` runs in a thread and touches only files. It opens the file each time, so that it notices a deleted
    file and holds none open between steps. Its result is valid only while the log still has the segment.
    """

    def __init__(
        self, disk: Disk, segment: LogSegment, next_base: int, *, may_have_gap: bool, epochs: LeaderEpochs
    ) -> None:
        """`next_base` is the start of the next segment; if `may_have_gap`, compaction may have left a gap before it."""
        self.segment = segment
        self.is_done = False
        self.damage = ""
        """Why records of the segment are lost; empty if no damage was found."""
        self.has_bad_index = False
        """One of the indexes is missing or wrong."""
        self.has_bad_aborted = False
        """It is the index of aborted transactions."""
        self.derived_from: Sequence[LogSegment] = ()
        """The segments that the index of aborted transactions is being rebuilt from."""
        self.position = 0
        self.offset = segment.base_offset
        """Both: how far the segment was found intact."""
        self._disk = disk
        self._next_base = next_base
        self._may_have_gap = may_have_gap
        self._epochs = epochs
        self._offset_entries = _Entries(OFFSET_ENTRY)
        self._time_entries = _Entries(TIME_ENTRY)
        self._aborted = _AbortedEntries(segment.base_offset, segment.aborted.summary)

    def step(self) -> None:
        """Read and check the next piece. An OSError is not damage, unless the device cannot read (EIO)."""
        try:
            if self.position == 0:
                self._offset_entries.load(self._disk, self.segment.offset_index.path)
                self._time_entries.load(self._disk, self.segment.time_index.path)
                self._aborted.load(self._disk, self.segment.aborted.path)
            file = self._disk.open(self.segment.path)
        except FileNotFoundError:
            self._set_damage("its file is missing")
            return
        try:
            self._read(file)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._set_damage(f"the device cannot read it after byte {self.position}")
        finally:
            file.close()

    def _read(self, file: File) -> None:
        segment, start = self.segment, self.position
        file_bytes = file.size()
        if file_bytes < segment.size_bytes:
            self._set_damage(f"its file has {file_bytes} of {segment.size_bytes} bytes")
            return
        for at, header, batch, intact in scan_batches(file, start, segment.size_bytes, once=True):
            damage = self._damage_of(header, intact)
            if damage:
                self._set_damage(f"{damage} at byte {at}")
                return
            relative_offset = header.last_offset - segment.base_offset
            self._offset_entries.passed((relative_offset, at))
            self._time_entries.passed((header.max_timestamp, relative_offset))
            if header.is_transactional:
                self._aborted.passed(header, marker_of(header, batch) if header.is_control else None)
            self.position = at + header.size_bytes
            self.offset = header.next_offset
            if self.position - start >= PIECE_BYTES:
                break
        if self.position - start < PIECE_BYTES:
            self._ended(file, file_bytes)

    def _damage_of(self, header: BatchHeader, intact: bool) -> str:
        if not intact:
            return "a batch fails its checksum"
        if header.base_offset < self.offset or header.next_offset > self._next_base:
            return f"a batch claims the offsets {header.base_offset} to {header.last_offset}"
        epoch = self._epochs.epoch_of(header.base_offset)
        if epoch not in (UNDEFINED, header.partition_leader_epoch):
            return f"a batch claims the leader epoch {header.partition_leader_epoch} instead of {epoch}"
        return ""

    def _ended(self, file: File, file_bytes: int) -> None:
        """Check the segment's end: no whole batch follows."""
        if not is_zero(file, self.position, file_bytes):
            self._set_damage(f"no batch begins at byte {self.position}")
        elif self.offset != self._next_base and not self._may_have_gap:
            self._set_damage(f"it ends at offset {self.offset}, and the next segment begins at {self._next_base}")
        else:
            are_correct = self._offset_entries.are_correct() and self._time_entries.are_correct()
            self.has_bad_aborted = not self._aborted.are_correct()
            self.has_bad_index = self.has_bad_aborted or (self.segment.size_bytes > 0 and not are_correct)
            self.is_done = True

    def _set_damage(self, damage: str) -> None:
        self.damage = damage
        self.is_done = True


@dataclass(slots=True, eq=False)
class _Entries:
    """An index's entries, compared with the batches in order.

    In both indexes, the second column identifies the batch of an entry: by its position, or by its last offset.
    """

    _layout: Struct
    _is_wrong: bool = False
    _entries: list[Entry] = field(default_factory=list)

    def load(self, disk: Disk, path: str) -> None:
        data = read_file(disk, path)
        if data is None or len(data) % self._layout.size:
            self._is_wrong = True
            return
        self._entries = [(first, second) for first, second in self._layout.iter_unpack(data)]
        self._entries.reverse()

    def passed(self, right: Entry) -> None:
        """Check the entries for the next batch: each must equal `right`."""
        entries = self._entries
        while entries and entries[-1][1] <= right[1]:
            if entries.pop() != right:
                self._is_wrong = True

    def are_correct(self) -> bool:
        """Return whether, after all batches, each entry described one of them."""
        return not self._is_wrong and not self._entries


class _AbortedEntries:
    """The entries of a segment's index of aborted transactions, compared with the batches in order.

    Transactions that began in an earlier segment are unknown here: their entries must point there. If compaction
    removed all their records, they have none.
    """

    def __init__(self, base_offset: int, summary: Summary) -> None:
        self._base_offset = base_offset
        self._summary = summary
        self._is_wrong = False
        self._entries: list[AbortedTransaction] = []
        self._open = OpenTransactions()

    def load(self, disk: Disk, path: str) -> None:
        data = read_file(disk, path) or b""
        entries = decode_entries(data)
        if entries is None or (len(entries), crc32c(data)) != self._summary:
            self._is_wrong = True
        else:
            self._entries = entries[::-1]

    def passed(self, header: BatchHeader, marker: Marker | None) -> None:
        """Check the entry for the next batch, if it is an abort marker."""
        if not header.is_control:
            self._open.begin(header.producer_id, header.base_offset)
        if marker is None:
            return
        ended = self._open.end(header.producer_id, header.base_offset)
        entry = self._entries.pop() if self._entries and self._entries[-1].last_offset <= header.base_offset else None
        if entry is None:
            self._is_wrong = self._is_wrong or (ended is not None and not marker.is_commit)
            return
        first_offset = None if ended is None else ended.first_offset
        stable = next(iter(self._open.first_offsets()), header.base_offset + 1)
        is_correct = (
            not marker.is_commit
            and (entry.producer_id, entry.last_offset) == (header.producer_id, header.base_offset)
            and (entry.first_offset < self._base_offset or entry.first_offset == first_offset)
            and (entry.last_stable_offset < self._base_offset or entry.last_stable_offset == stable)
        )
        self._is_wrong = self._is_wrong or not is_correct

    def are_correct(self) -> bool:
        """Return whether, after all batches, each entry described one of them."""
        return not self._is_wrong and not self._entries
