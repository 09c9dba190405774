"""Compaction: for each key, only the last record remains.

One pass reads the part of the log that was not compacted before (the dirty part) and notes the last offset of each key.
Then it rewrites all closed segments up to there without the superseded records. Its memory is bounded: it ends early
when it has noted enough keys, and the next pass continues from there. Small adjacent segments are merged. `cleaning`
describes what happens to a batch. A pass ends before the first transaction that is not decided. The new index of
aborted transactions, which has those of the remaining batches, is written with the next checkpoint.

A group of adjacent segments is compacted into one, under the first one's base offset. The files go through:

    NNN.log.cleaned          being written; useless after a crash, and removed
    NNN-MMM.swap             complete and durable; replaces all segments with base offsets from NNN to below MMM
    OOO.log.deleted          an old segment to be removed, in a thread or when the log is next opened; also its indexes
    NNN.log                  the compacted one in its place

The rename to .swap commits the replacement: the next open of the folder completes it. An error that passes does not
stop the log: the replacement is then completed at once, or undone and repeated by the next pass.
Indexes are written as NNN.index.cleaned and may be lost in a crash: they are rebuilt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from errno import EINPROGRESS
from typing import Final

from chronik.storage.aborted import SUFFIX as ABORTED_SUFFIX
from chronik.storage.aborted import AbortedJob, AbortedTransaction, TransactionScan
from chronik.storage.batches import ScannedBatch, scan_all_batches
from chronik.storage.cleaning import TransactionFilter, clean_batch, clean_marker, key_digest, raw_records
from chronik.storage.config import LogConfig
from chronik.storage.disk import Disk, remove_files
from chronik.storage.index import OFFSET_ENTRY, TIME_ENTRY, SparseIndex
from chronik.storage.producers import LastBatch
from chronik.storage.segment import RELATIVE_OFFSET_MAX, LogSegment, segment_path
from chronik.storage.segments import DeletionJob, NumberFile
from chronik.storage.transactions import marker_of
from chronik.wire.batch import BatchHeader, read_batch_header
from chronik.wire.errors import KafkaError

CLEANER_NAME: Final = "cleaner-offset"
"""A text file with one number: everything below that offset has been compacted once."""
INDEX_SUFFIXES: Final = (".index", ".timeindex", ABORTED_SUFFIX)
WRITE_BYTES: Final = 1024 * 1024


@dataclass(slots=True)
class CompactedGroup:
    """Adjacent segments that become one (or none)."""

    old: list[LogSegment]
    next_base: int
    """Base offset of the segment after the group."""
    size_bytes: int = 0
    is_changed: bool = False
    has_successor: bool = True
    """Whether a compacted segment replaces them; otherwise nothing is left of them."""
    aborted: list[AbortedTransaction] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class CompactionJob:
    """One pass. Call `run` in a thread: it reads closed segments and writes .cleaned files, nothing else."""

    disk: Disk
    folder: str
    segments: Sequence[LogSegment]
    next_base: int
    """Base offset of the segment after them."""
    config: LogConfig
    now_ms: int
    dirty_from: int
    last_batches: Mapping[int, LastBatch]
    find_aborted: AbortedJob | None
    """Finds the aborted transactions in the segments."""
    release: Callable[[], None]
    """Makes the segments independent of the commit log, before they are replaced."""
    removed_records: int = 0
    removed_bytes: int = 0
    cleaned_upto: int = field(init=False)
    """Where the pass ends: below this offset the log is compacted."""
    reading_at: int = field(init=False)
    """The segment that is being read, or whose read failed."""
    is_done: bool = False
    swap_error: OSError | None = None
    """Why the old segments were not replaced and are still in use."""
    _newest: dict[bytes, int] = field(default_factory=dict)
    _groups: list[CompactedGroup] = field(default_factory=list)
    _transactions: TransactionFilter = field(default_factory=lambda: TransactionFilter(()))
    _remaining: TransactionScan = field(default_factory=TransactionScan)

    def __post_init__(self) -> None:
        self.cleaned_upto = self.next_base
        self.reading_at = self.segments[0].base_offset

    def _with_next_base(self) -> Iterator[tuple[LogSegment, int]]:
        next_bases = [*(segment.base_offset for segment in self.segments[1:]), self.next_base]
        return zip(self.segments, next_bases, strict=True)

    def run(self) -> None:
        """Write the compacted segments. An error leaves the log unchanged; `finish_compaction` cleans up."""
        if self.find_aborted is not None:
            self._transactions = TransactionFilter(self.find_aborted())
        self._note_keys()
        for group in self._grouped():
            self._groups.append(group)
            self._write(group)
        self.release()
        self.is_done = True

    def usable_groups(self, segments: Sequence[LogSegment]) -> list[CompactedGroup]:
        """Return the groups that changed something and whose segments the log still has."""
        if not self.is_done:
            return []
        present = {id(segment) for segment in segments}
        groups = [
            group for group in self._groups if group.is_changed and all(id(segment) in present for segment in group.old)
        ]
        for group in groups:
            # The first segment stays even if empty: its name records the log start.
            group.has_successor = group.size_bytes > 0 or group.old[0] is segments[0]
        return groups

    def cleanup(self, deleted: Sequence[str], cleaned_upto: Callable[[], int]) -> DeletionJob:
        """Return the job that removes leftover files; if the pass completed, it also records how far it got."""
        leftovers = [
            segment_path(self.folder, group.old[0].base_offset, suffix + ".cleaned")
            for group in self._groups
            for suffix in (".log", *INDEX_SUFFIXES)
        ]
        return DeletionJob(
            self.disk,
            self.folder,
            [*leftovers, *deleted],
            segments=sum(path.endswith(".log.deleted") for path in deleted),
            size_bytes=self.removed_bytes,
            number_file=NumberFile(f"{self.folder}/{CLEANER_NAME}", cleaned_upto) if self.is_done else None,
        )

    def _note_keys(self) -> None:
        """Find each key's last offset in the dirty part, or in as much of it as memory allows."""
        newest = self._newest
        for segment, next_base in self._with_next_base():
            if next_base <= self.dirty_from:
                continue
            self.reading_at = segment.base_offset
            with closing(self.disk.open(segment.path)) as file:
                for _, header, batch, intact in scan_all_batches(file, segment.path):
                    if header.next_offset <= self.dirty_from or not intact or header.is_control:
                        continue
                    if self._transactions.is_aborted(header):
                        continue
                    try:
                        _, records = raw_records(batch, header)
                    except KafkaError:
                        continue
                    for record in records:
                        if record.key is not None:
                            newest[key_digest(record.key)] = header.base_offset + record.offset_delta
                    if len(newest) >= self.config.compaction_keys_max:
                        self.cleaned_upto = header.next_offset
                        return

    def _grouped(self) -> list[CompactedGroup]:
        groups: list[CompactedGroup] = []
        size_bytes = 0
        for segment, next_base in self._with_next_base():
            if segment.base_offset >= self.cleaned_upto:
                break
            size_bytes += segment.size_bytes
            if (
                groups
                and size_bytes <= self.config.segment_bytes
                and next_base - groups[-1].old[0].base_offset <= RELATIVE_OFFSET_MAX
            ):
                groups[-1].old.append(segment)
                groups[-1].next_base = next_base
            else:
                groups.append(CompactedGroup([segment], next_base))
                size_bytes = segment.size_bytes
        return groups

    def _keeps(self, offset: int, key: bytes | None) -> bool:
        if offset >= self.cleaned_upto:
            return True
        # A compacted topic accepts no record without a key; those from before compaction was enabled are removed.
        return key is not None and self._newest.get(key_digest(key), -1) <= offset

    def _write(self, group: CompactedGroup) -> None:
        base_offset = group.old[0].base_offset
        out = LogSegment(self.disk, self.folder, base_offset)
        out.offset_index = SparseIndex(self.disk, out.offset_index.path + ".cleaned", OFFSET_ENTRY)
        out.time_index = SparseIndex(self.disk, out.time_index.path + ".cleaned", TIME_ENTRY)
        out.clear_indexes()
        group.is_changed = len(group.old) > 1
        with closing(self.disk.open(segment_path(self.folder, base_offset, ".log.cleaned"), create=True)) as file:
            file.truncate(0)
            block = bytearray()
            for segment in group.old:
                self.reading_at = segment.base_offset
                with closing(self.disk.open(segment.path)) as source:
                    for scanned in scan_all_batches(source, segment.path):
                        _, header, batch, _ = scanned
                        kept = self._cleaned(scanned)
                        group.is_changed = group.is_changed or kept is not batch
                        if kept is None:
                            self.removed_records += header.record_count
                            self.removed_bytes += header.size_bytes
                            continue
                        if kept is not batch:
                            now = read_batch_header(kept)
                            self.removed_records += header.record_count - now.record_count
                            self.removed_bytes += header.size_bytes - now.size_bytes
                            header = now
                        self._note_remaining(group, header, kept)
                        position = out.size_bytes
                        out.note_batch(
                            position,
                            header.last_offset,
                            header.size_bytes,
                            header.max_timestamp,
                            self.config.index_interval_bytes,
                        )
                        out.size_bytes += header.size_bytes
                        block += kept
                        if len(block) >= WRITE_BYTES:
                            file.pwrite(block, out.size_bytes - len(block))
                            block = bytearray()
            if block:
                file.pwrite(block, out.size_bytes - len(block))
            file.datasync()
        out.add_time_entry()
        for index in (out.offset_index, out.time_index):
            index.write()
            index.sync()
        group.size_bytes = out.size_bytes

    def _note_remaining(self, group: CompactedGroup, header: BatchHeader, batch: bytes | memoryview) -> None:
        marker = marker_of(header, batch) if header.is_control else None
        entry = self._remaining.passed(header, marker)
        if entry is not None:
            group.aborted.append(entry)

    def _cleaned(self, scanned: ScannedBatch) -> bytes | memoryview | None:
        _, header, batch, intact = scanned
        if header.base_offset >= self.cleaned_upto:
            return batch
        try:
            if not intact:
                self._transactions.passed(header)
                return batch
            if header.is_control:
                return self._cleaned_marker(header, batch)
            self._transactions.passed(header)
            keeps = _keeps_nothing if self._transactions.is_aborted(header) else self._keeps
            return clean_batch(batch, header, keeps, self.now_ms, self.config.delete_retention_ms, self.last_batches)
        except KafkaError:
            # Keep a batch that does not parse.
            return batch

    def _cleaned_marker(self, header: BatchHeader, batch: memoryview) -> bytes | memoryview | None:
        if marker_of(header, batch) is None or not self._transactions.passed_marker(header):
            return batch
        return clean_marker(batch, header, self.now_ms, self.config.delete_retention_ms, self.last_batches)


def _keeps_nothing(offset: int, key: bytes | None) -> bool:
    return False


class SwapUnfinished(OSError):
    """The replacement can be neither completed nor undone now. The next open of the folder completes it."""


def replace_segments(disk: Disk, folder: str, groups: Sequence[CompactedGroup]) -> list[str]:
    """Replace each group's old segments by its compacted one; return the files that can now be removed.

    After an OSError the old segments are in place again, and the compacted ones are .cleaned files. Raises
    SwapUnfinished if that fails as well.
    """
    replacement = _Replacement(disk, folder, groups)
    try:
        replacement.commit()
        try:
            replacement.complete()
        except OSError:
            # The replacement is durable, so continue: the error may have passed.
            replacement.complete()
    except OSError as error:
        try:
            replacement.undo()
        except OSError as second:
            raise SwapUnfinished(error.errno, f"{error.strerror}, then {second.strerror or second}") from error
        raise
    return [path + ".deleted" for path in replacement.retired]


@dataclass(slots=True)
class _Replacement:
    """One replacement of all groups.

    A failed sync of the folder may be repeated: a file system journals names, and stops if it cannot write its journal.
    """

    disk: Disk
    folder: str
    groups: Sequence[CompactedGroup]
    retired: dict[str, None] = field(default_factory=dict)
    """Files of the old segments that were renamed to .deleted, or that such an attempt failed for."""
    is_retired: bool = False
    placed: int = 0
    """How many compacted segments are in place."""

    @property
    def _swaps(self) -> list[tuple[str, str]]:
        return [
            (group.old[0].path, f"{self.folder}/{group.old[0].base_offset:020d}-{group.next_base:020d}.swap")
            for group in self.groups
            if group.has_successor
        ]

    def commit(self) -> None:
        for path, swap in self._swaps:
            _rename(self.disk, path + ".cleaned", swap)
        self.disk.sync_dir(self.folder)

    def complete(self) -> None:
        """Retire the old segments and put the compacted ones in their place. Continues after an error."""
        disk = self.disk
        if not self.is_retired:
            for segment in (segment for group in self.groups for segment in group.old):
                for suffix in (*INDEX_SUFFIXES, ".log"):
                    self._retire(segment_path(self.folder, segment.base_offset, suffix))
            # The old names must be gone before the new one exists, or a crash could leave both.
            disk.sync_dir(self.folder)
            self.is_retired = True
        for path, swap in self._swaps[self.placed :]:
            _rename(disk, swap, path)
            self.placed += 1
            for suffix in INDEX_SUFFIXES:
                index = path.removesuffix(".log") + suffix
                with suppress(OSError):  # lookups without an index take longer
                    disk.rename(index + ".cleaned", index)

    def _retire(self, path: str) -> None:
        if self.disk.exists(path):
            self.retired[path] = None
            self.disk.rename(path, path + ".deleted")

    def undo(self) -> None:
        if self.placed:
            raise OSError(EINPROGRESS, "some segments are replaced already")
        disk = self.disk
        for path in self.retired:
            if not disk.exists(path):
                disk.rename(path + ".deleted", path)
        # The old names must be durable before the swaps are gone, or a crash could lose both.
        disk.sync_dir(self.folder)
        for path, swap in self._swaps:
            _rename(disk, swap, path + ".cleaned")
        disk.sync_dir(self.folder)


def _rename(disk: Disk, old: str, new: str) -> None:
    """Rename a file, unless an earlier attempt did that although it failed."""
    try:
        disk.rename(old, new)
    except FileNotFoundError:
        if not disk.exists(new):
            raise


def finish_swaps(disk: Disk, folder: str) -> int:
    """Complete or undo what a crash interrupted; return the number of completed replacements."""
    names = disk.listdir(folder)
    swaps = [name for name in names if name.endswith(".swap")]
    for name in swaps:
        first, _, next_base = name.removesuffix(".swap").partition("-")
        for other in names:
            stem = other.removesuffix(".log")
            if other.endswith(".log") and stem.isdigit() and int(first) <= int(stem) < int(next_base):
                _remove_indexes(disk, folder, int(stem))
                disk.remove(f"{folder}/{other}")
    if swaps:
        disk.sync_dir(folder)
    for name in swaps:
        first = name.partition("-")[0]
        disk.rename(f"{folder}/{name}", segment_path(folder, int(first)))
    for name in names:
        if name.endswith((".cleaned", ".deleted")):
            disk.remove(f"{folder}/{name}")
    if swaps:
        disk.sync_dir(folder)
    return len(swaps)


def _remove_indexes(disk: Disk, folder: str, base_offset: int) -> None:
    remove_files(disk, (segment_path(folder, base_offset, suffix) for suffix in INDEX_SUFFIXES))
