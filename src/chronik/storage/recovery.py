"""Opening a log's folder: finish what a crash interrupted, find the true end, and report what was done.

Recovery starts at the newest snapshot: everything below it was durable when it was written. From there it reads every
batch, checks its CRC, and rebuilds indexes, leader epochs and producer state. After a clean shutdown the snapshot is at
the log's end, so nothing is read.

The recovery point is the offset below which data was durable, and so may have been acknowledged. The caller knows it,
or the file `synced-end` proves it (see `syncing`). It decides what happens at the first bad batch:
- At or above it, the batch is a leftover of a crash: the log is truncated there, as in Kafka, and the report says so.
- Below it, acknowledged data is damaged, and nothing is discarded. If only the batch's content is bad and the next
  batch follows, the batch stays: consumers that check CRCs detect it, as they do in Kafka when a disk corrupts data. If
  the chain of batches is broken, the log opens read-only up to there. Its files stay until an operator decides: restore
  the folder, or accept the loss by opening the log with a recovery point at or below the damage.

`survey_log` finds the end of a log whose node is stopped, by the same rules and without changing anything.
"""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from chronik.storage.aborted import EMPTY, TransactionScan, aborted
from chronik.storage.batches import header_at, is_intact, is_zero, scan_batches, used_bytes, walk_headers
from chronik.storage.compaction import CLEANER_NAME, finish_swaps
from chronik.storage.config import LogConfig
from chronik.storage.disk import Disk, File, read_file, remove_files
from chronik.storage.epochs import UNDEFINED, LeaderEpochs
from chronik.storage.producers import ProducerStates
from chronik.storage.segment import NO_TIMESTAMP, RELATIVE_OFFSET_MAX, LogSegment, segment_path
from chronik.storage.small_files import read_number
from chronik.storage.snapshot import Snapshot, restore_producers, usable_snapshot
from chronik.storage.syncing import EPOCHS_NAME, read_synced_end
from chronik.storage.transactions import marker_of
from chronik.wire.batch import BatchHeader

MAX_OFFSET: Final = (1 << 63) - 1
START_NAME: Final = "log-start-offset"
"""One number (see `small_files`): the log start set by DeleteRecords, if the segments do not imply it. A damaged file
is treated as missing: deleted records may reappear, which is better than hiding records."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A bad batch in data that was durable."""

    offset: int
    segment_base: int
    position: int
    chain_is_broken: bool
    """Whether the data after the batch is unreachable."""
    transaction: str = ""
    """If the batch ends a transaction: how it was used."""


@dataclass(slots=True)
class RecoveryReport:
    """What opening a log found and did, for one log line, which is an error if `is_damaged`."""

    folder: str
    was_clean: bool
    recovery_point: int = 0
    """Data below this offset was durable."""
    snapshot_offset: int | None = None
    scanned_batches: int = 0
    scanned_bytes: int = 0
    truncated_at_offset: int | None = None
    truncated_bytes: int = 0
    removed_segments: int = 0
    rebuilt_indexes: int = 0
    rebuilt_epochs: bool = False
    finished_swaps: int = 0
    ends_below_recovery_point: bool = False
    damages: list[Damage] = field(default_factory=list)

    @property
    def is_damaged(self) -> bool:
        """Return whether data that was durable is bad or missing."""
        return bool(self.damages) or self.ends_below_recovery_point

    @property
    def is_notable(self) -> bool:
        return bool(
            self.is_damaged
            or self.scanned_batches
            or self.truncated_bytes
            or self.removed_segments
            or self.rebuilt_indexes
            or self.finished_swaps
        )


def load_log(
    disk: Disk, folder: str, config: LogConfig, now_ms: int, recovery_point: int | None, clean: bool
) -> "LoadedLog":
    """Open the folder and create it if it is missing. Blocks."""
    disk.mkdir(folder)
    durable_upto = max(recovery_point or 0, read_synced_end(disk, folder))
    loaded = LoadedLog(disk, folder, config, now_ms, durable_upto, clean)
    loaded.load()
    return loaded


@dataclass(slots=True, eq=False)
class LoadedLog:
    """A log as loaded from disk by `load`; the last segment is the active one."""

    disk: Disk
    folder: str
    config: LogConfig
    now_ms: int
    recovery_point: int
    clean: bool
    segments: list[LogSegment] = field(default_factory=list)
    log_start_offset: int = 0
    log_end_offset: int = 0
    cleaned_upto: int = 0
    epochs: LeaderEpochs = field(default_factory=LeaderEpochs)
    producers: ProducerStates = field(init=False)
    snapshots: list[int] = field(default_factory=list)
    last_batch_crc: int = 0
    is_broken: bool = False
    report: RecoveryReport = field(init=False)
    durable_upto: int = 0
    """Everything below it was durable, by the recovery point, the snapshots or the compaction."""
    gap: tuple[int, int] | None = None
    """The last gap in the scanned segment: the position before it, and the offset expected there."""

    def load(self) -> None:
        self.report = RecoveryReport(self.folder, self.clean, self.recovery_point)
        self.report.finished_swaps = finish_swaps(self.disk, self.folder)
        names = self.disk.listdir(self.folder)
        segments = self.segments = [
            LogSegment(self.disk, self.folder, base_offset, self.disk.size(segment_path(self.folder, base_offset)))
            for base_offset in _offsets_in(names, ".log")
        ]
        self._remove_orphans(names, segments)
        log_start = read_number(self.disk, f"{self.folder}/{START_NAME}") or 0
        while len(segments) > 1 and segments[1].base_offset <= log_start:
            # DeleteRecords removed this segment, but its files were not deleted yet.
            self._remove(segments.pop(0))
        self.cleaned_upto = read_number(self.disk, f"{self.folder}/{CLEANER_NAME}") or 0
        snapshots, snapshot = self._newest_snapshot(names, segments)
        self.durable_upto = max([self.recovery_point, self.cleaned_upto, *snapshots])
        epochs = LeaderEpochs.decode(read_file(self.disk, f"{self.folder}/{EPOCHS_NAME}") or b"")
        if epochs is not None:
            self.epochs = epochs
        elif snapshot is not None:
            # The epochs below the snapshot are unknown: read all batches again to find them.
            self.report.rebuilt_epochs = True
            snapshot = None
        first_base = segments[0].base_offset if segments else MAX_OFFSET
        self.producers = restore_producers(snapshot, self.config.producer_expiration_ms, first_base)
        end_offset, is_broken = self._recover(segments, snapshot)
        if segments:
            log_start = max(log_start, segments[0].base_offset)
        if is_broken:
            log_start = min(log_start, end_offset)
        if log_start > end_offset:
            # The log lost its tail, down to below the offset set by DeleteRecords.
            self._start_over(segments, log_start)
            self.producers.forget_transactions()
            end_offset = log_start
        if end_offset < self.recovery_point and not self.report.damages:
            self.report.ends_below_recovery_point = True
        self.epochs.truncate_to(end_offset)
        self.epochs.start_at(log_start)
        self.producers.expire(self.now_ms)
        for offset in snapshots:
            if offset > end_offset and not is_broken:
                self.disk.remove(segment_path(self.folder, offset, ".snapshot"))
        self.snapshots = [offset for offset in snapshots if offset <= end_offset]
        self.log_start_offset, self.log_end_offset, self.is_broken = log_start, end_offset, is_broken

    def _remove_orphans(self, names: list[str], segments: list[LogSegment]) -> None:
        bases = {segment.base_offset for segment in segments}
        for name in names:
            stem, _, suffix = name.partition(".")
            is_index = suffix in ("index", "timeindex", "txnindex") and stem.isdigit() and int(stem) not in bases
            if is_index or suffix == "tmp" or name.endswith(".tmp"):
                self.disk.remove(f"{self.folder}/{name}")

    def _newest_snapshot(self, names: list[str], segments: list[LogSegment]) -> tuple[list[int], Snapshot | None]:
        """Return the offsets of all valid snapshots, and the newest snapshot that belongs to this log."""
        offsets: list[int] = []
        newest: Snapshot | None = None
        for offset in reversed(_offsets_in(names, ".snapshot")):
            path = segment_path(self.folder, offset, ".snapshot")
            snapshot = usable_snapshot(read_file(self.disk, path) or b"", self.cleaned_upto)
            if snapshot is None or not self._belongs(snapshot, segments):
                self.disk.remove(path)
                continue
            offsets.insert(0, offset)
            newest = newest or snapshot
        return offsets, newest

    def _belongs(self, snapshot: Snapshot, segments: list[LogSegment]) -> bool:
        if not segments or snapshot.segment_base < segments[0].base_offset:
            # Retention removed its segment; its producer state is still valid.
            return not segments or snapshot.offset <= segments[0].base_offset
        segment = next((segment for segment in segments if segment.base_offset == snapshot.segment_base), None)
        if segment is None:
            return False
        if snapshot.last_batch_position < 0:
            return snapshot.position == 0
        header = header_at(segment.file, snapshot.last_batch_position, segment.size_bytes)
        belongs = (
            header is not None
            and header.crc == snapshot.last_batch_crc
            and header.next_offset == snapshot.offset
            and snapshot.last_batch_position + header.size_bytes == snapshot.position
        )
        segment.release()
        return belongs

    def _recover(self, segments: list[LogSegment], snapshot: Snapshot | None) -> tuple[int, bool]:
        """Scan from the snapshot on; return the log's end, and whether durable data is unreachable."""
        if not segments:
            return 0, False
        first = 0
        offset = segments[0].base_offset
        resumed: Snapshot | None = None
        if snapshot is not None and snapshot.segment_base >= offset:
            resumed = snapshot
            offset = snapshot.offset
            self.report.snapshot_offset = offset
            first = next(i for i, s in enumerate(segments) if s.base_offset == snapshot.segment_base)
            self._check_aborted(segments[: first + 1], snapshot)
        # Epochs up to the snapshot were durable; read later ones from the batches.
        self.epochs.truncate_to(offset)
        for index in range(first):
            self._check_indexes(segments[index])
            position, end_offset = self._end_of(segments[index])
            if not self._continues_at(segments[index + 1].base_offset, end_offset):
                return self._broken(segments, index, position, end_offset), True
        touched = False
        for index in range(first, len(segments)):
            segment = segments[index]
            next_base = segments[index + 1].base_offset if index + 1 < len(segments) else None
            before = self.report.scanned_batches
            position, offset, is_whole = self._scan_segment(
                segment, offset, resumed if index == first else None, next_base
            )
            touched = touched or self.report.scanned_batches > before or not is_whole
            if is_whole:
                continue
            lowest = min(self._lowest_left(segment, position, offset), offset if next_base is None else next_base)
            if min(offset, lowest) < self.recovery_point:
                if self.gap is not None and self.gap[1] <= lowest < offset:
                    # What follows belongs before the gap: the batch after it has a wrong offset, which no CRC covers.
                    position, offset = self.gap
                return self._broken(segments, index, position, offset), True
            self._truncate(segments, index, position, offset)
            break
        active = segments[-1]
        if touched:
            # The scanned data may be only in the page cache; from here on it is considered durable.
            active.file.datasync()
        if touched or not active.size_bytes:
            # File names may not be durable either: the process may have been killed after it created a segment and
            # before it synced the folder. Later syncs of appended data do not sync the folder again.
            self.disk.sync_dir(self.folder)
            self.disk.sync_dir(self.folder.rpartition("/")[0] or "/")
        active.release()
        return offset, False

    def _check_aborted(self, segments: list[LogSegment], snapshot: Snapshot) -> None:
        """Load the indexes of aborted transactions up to the snapshot; rebuild them if one is not as expected.

        Compaction may have changed them since: then one differs, or a segment is missing.
        """
        bases = {segment.base_offset for segment in segments}
        is_good = all(base in bases or base < segments[0].base_offset for base in snapshot.aborted)
        for segment in segments:
            summary = snapshot.aborted.get(segment.base_offset, EMPTY)
            if segment is not segments[-1] and segment.aborted.file_count != summary.entries:
                is_good = False
            is_good = is_good and segment.aborted.load(summary)
        if is_good:
            return
        scan = TransactionScan()
        for segment in segments:
            is_last = segment is segments[-1]
            size_bytes = snapshot.position if is_last else segment.size_bytes
            segment.aborted.replace(list(scan.passed_file(segment.file, size_bytes)))
            segment.release()
        self.report.rebuilt_indexes += 1

    def _broken(self, segments: list[LogSegment], index: int, position: int, offset: int) -> int:
        """End the log at `position` of the segment at `index` for now, and touch no file."""
        segment = segments[index]
        self.report.damages.append(Damage(offset, segment.base_offset, position, chain_is_broken=True))
        del segments[index + 1 :]
        segment.size_bytes = position
        segment.release()
        return offset

    def _lowest_left(self, segment: LogSegment, position: int, offset: int) -> int:
        """Return the lowest offset that data from `position` on may hold, by the segment's name or an intact batch."""
        if position == 0:
            return segment.base_offset
        for _, header, _, intact in scan_batches(segment.file, position, segment.file.size()):
            return header.base_offset if intact else offset
        return offset

    def _end_of(self, segment: LogSegment) -> tuple[int, int]:
        """Return a closed segment's end position and next offset, by walking on from its last index entry."""
        with segment.brief_view() as view:
            entry = view.offsets.last()
            position = entry[1] if entry is not None and view.is_correct(*entry) else 0
            end, offset = position, segment.base_offset
            for at, header in walk_headers(segment.file, position, segment.size_bytes):
                end, offset = at + header.size_bytes, header.next_offset
            return end, offset

    def _continues_at(self, next_base: int, end_offset: int) -> bool:
        """Return whether a segment at `next_base` continues one that ends at `end_offset`, possibly after a gap.

        A gap is possible if compaction may have removed the records in it: they were durable. Otherwise a power loss
        may have left the next segment, and not the end of this one.
        """
        is_compacted = next_base <= (self.durable_upto if self.config.cleanup_compact else self.cleaned_upto)
        return end_offset == next_base or (end_offset < next_base and is_compacted)

    def _scan_segment(
        self, segment: LogSegment, offset: int, resumed: Snapshot | None, next_base: int | None
    ) -> tuple[int, int, bool]:
        """Read a segment from the snapshot's position, or all of it, and rebuild its indexes.

        Return its end, the next offset, and whether the segment is whole, so that the log can continue after it.
        """
        file_bytes = segment.size_bytes
        self.gap = None
        position = self._resume(segment, resumed)
        if position == file_bytes and (next_base is None or next_base == offset):
            if next_base is not None:
                self._close(segment)
            return position, offset, True
        file = segment.file
        interval = self.config.index_interval_bytes
        is_whole = True
        for at, header, batch, intact in scan_batches(file, position, file_bytes):
            if header.base_offset > offset:
                # Either compaction, here or on the leader, left a gap, or this batch's offset is wrong.
                self.gap = position, offset
            if header.base_offset < offset or header.last_offset - segment.base_offset > RELATIVE_OFFSET_MAX:
                is_whole = False
                break
            if not intact and not self._is_rotten(file, at, header, file_bytes, next_base):
                is_whole = False
                break
            if intact:
                self.epochs.assign(header.partition_leader_epoch, header.base_offset)
                if header.producer_id >= 0:
                    self._note_producer(segment, header, batch)
            else:
                outcome = self._note_rotten_marker(segment, header, batch) if header.is_control else ""
                damage = Damage(header.base_offset, segment.base_offset, at, False, outcome)
                self.report.damages.append(damage)
            timestamp = header.max_timestamp if intact else NO_TIMESTAMP
            segment.note_batch(at, header.last_offset, header.size_bytes, timestamp, interval)
            if segment.first_append_ms is None:
                segment.first_append_ms = min(self.now_ms, max(timestamp, 0)) or self.now_ms
            self.report.scanned_batches += 1
            self.report.scanned_bytes += header.size_bytes
            self.last_batch_crc = header.crc
            position, offset = at + header.size_bytes, header.next_offset
        segment.size_bytes = segment.trusted_from = position
        segment.allocated_bytes = file_bytes
        is_whole = is_whole and is_zero(file, position, file_bytes)
        if is_whole and next_base is not None:
            # Preallocated zeros before a gap: the end of the segment is missing.
            is_whole = self._continues_at(next_base, offset) and (next_base == offset or position == file_bytes)
            if is_whole:
                self._close(segment)
        return position, offset, is_whole

    def _note_producer(self, segment: LogSegment, header: BatchHeader, batch: memoryview) -> None:
        # Use the current time: the batch's timestamp is the client's, and could make the producer expire.
        if not header.is_control:
            append_time = header.max_timestamp if header.log_append_time else -1
            self.producers.record(header, header.base_offset, self.now_ms, append_time)
            return
        marker = marker_of(header, batch)
        if marker is not None:
            ended = self.producers.end_transaction(header, marker, header.base_offset, self.now_ms)
            entry = aborted(header.producer_id, marker, ended)
            if entry is not None:
                segment.aborted.append(entry)

    def _note_rotten_marker(self, segment: LogSegment, header: BatchHeader, batch: memoryview) -> str:
        """Use a marker with a bad CRC if it fits an open transaction; return the outcome, for the report.

        Without it, the transaction would stay open, or the producer's next marker would decide it. An operator cannot
        know better, and could only abort it. Other readers of markers check no CRC either (see `aborted`).
        """
        producer_id, marker = header.producer_id, marker_of(header, batch)
        state = self.producers.get(producer_id)
        first_offset = None if state is None else state.first_offset
        # The coordinator may raise the epoch by one when it ends a transaction.
        if marker is None or state is None or first_offset is None or header.producer_epoch - state.epoch not in (0, 1):
            return (
                "this marker is unreadable: if its transaction hangs, read_committed consumers wait; find it with "
                "`chronik transaction hanging`, and abort it"
            )
        self._note_producer(segment, header, batch)
        decision = "commits" if marker.is_commit else "aborts"
        return f"this marker {decision} the transaction of producer {producer_id} from offset {first_offset} on"

    def _close(self, segment: LogSegment) -> None:
        """Make a segment that has a successor durable, with its indexes: the next snapshot relies on that."""
        segment.finish()
        segment.file.datasync()
        for index in (segment.offset_index, segment.time_index):
            if self.disk.exists(index.path):
                index.sync()
        segment.aborted.sync()
        segment.release()

    def _resume(self, segment: LogSegment, snapshot: Snapshot | None) -> int:
        """Restore the segment's state from the snapshot; return the position to resume at."""
        if snapshot is not None:
            segment.offset_index.cut(snapshot.offset_entries)
            segment.time_index.cut(snapshot.time_entries)
            counts = segment.offset_index.written_count, segment.time_index.written_count
            if counts == (snapshot.offset_entries, snapshot.time_entries):
                segment.max_timestamp = snapshot.max_timestamp
                segment.max_timestamp_offset = snapshot.max_timestamp_offset
                segment.unindexed_bytes = snapshot.unindexed_bytes
                segment.last_batch_position = snapshot.last_batch_position
                segment.first_append_ms = snapshot.first_append_ms if snapshot.first_append_ms >= 0 else None
                self.last_batch_crc = snapshot.last_batch_crc
                return snapshot.position
            self.report.rebuilt_indexes += 1
            upto = snapshot.position
        else:
            upto = 0
            segment.aborted.load(EMPTY)
        segment.clear_indexes()
        for position, header in walk_headers(segment.file, 0, upto):
            interval = self.config.index_interval_bytes
            segment.note_batch(position, header.last_offset, header.size_bytes, header.max_timestamp, interval)
            self.last_batch_crc = header.crc
        if snapshot is not None and snapshot.first_append_ms >= 0:
            segment.first_append_ms = snapshot.first_append_ms
        return upto

    def _is_rotten(self, file: File, at: int, header: BatchHeader, end: int, next_base: int | None) -> bool:
        """Return whether a batch with a bad CRC was durable and its successor is in place."""
        if header.next_offset > self.recovery_point:
            return False
        following = header_at(file, at + header.size_bytes, end)
        if following is not None:
            return following.base_offset == header.next_offset
        return header.next_offset in (next_base, self.recovery_point)

    def _truncate(self, segments: list[LogSegment], index: int, position: int, offset: int) -> None:
        """End the log at `position` of the segment at `index`; remove later segments, newest first."""
        segment = segments[index]
        file_bytes = segment.file.size()
        self.report.truncated_at_offset = offset
        self.report.truncated_bytes += used_bytes(segment.file, position, file_bytes)
        for later in reversed(segments[index + 1 :]):
            self.report.removed_segments += 1
            self.report.truncated_bytes += later.size_bytes
            self._remove(later)
        del segments[index + 1 :]
        segment.file.truncate(position)
        segment.size_bytes = segment.allocated_bytes = position

    def _remove(self, segment: LogSegment) -> None:
        segment.release()
        remove_files(self.disk, segment.paths())

    def _start_over(self, segments: list[LogSegment], offset: int) -> None:
        fresh = LogSegment.create(self.disk, self.folder, offset)
        self.disk.sync_dir(self.folder)
        for segment in segments:
            if segment.base_offset != offset:
                self._remove(segment)
        self.disk.sync_dir(self.folder)
        segments[:] = [fresh]
        self.last_batch_crc = 0

    def _check_indexes(self, segment: LogSegment) -> None:
        """Rebuild a closed segment's indexes if they are missing, truncated, or (after a crash) wrong."""
        if segment.size_bytes == 0:
            return
        try:
            offsets_bytes = self.disk.size(segment.offset_index.path)
            times_bytes = self.disk.size(segment.time_index.path)
            is_good = offsets_bytes % 8 == 0 and times_bytes % 12 == 0
        except FileNotFoundError:
            is_good = False
        if is_good and not self.clean:
            is_good = self._reaches_the_end(segment)
        if not is_good:
            segment.rebuild_indexes(self.config.index_interval_bytes)
            self.report.rebuilt_indexes += 1
        segment.release()

    def _reaches_the_end(self, segment: LogSegment) -> bool:
        with segment.view() as view:
            entry = view.offsets.last()
            if entry is not None and not view.is_correct(*entry):
                return False
            unindexed_bytes = segment.size_bytes - (entry[1] if entry is not None else 0)
            return unindexed_bytes <= self.config.index_interval_bytes + 2 * self.config.max_batch_bytes


def _offsets_in(names: Iterable[str], suffix: str) -> list[int]:
    stems = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
    return [int(stem) for stem in stems if stem.isdigit()]


class LogSurvey(NamedTuple):
    """What a log's batches show; -1 for values that no batch has."""

    log_end_offset: int = 0
    last_epoch: int = UNDEFINED
    """The epoch of the last record, even if retention has removed it."""
    highest_producer_id: int = -1
    is_compacted: bool = False
    """Whether it was compacted at least once."""


def survey_log(disk: Disk, folder: str, recovery_point: int) -> LogSurvey:
    """Survey the log in `folder`. Reads all headers, and whole batches only above the recovery point. Blocks."""
    recovery_point = max(recovery_point, read_synced_end(disk, folder))
    names = disk.listdir(folder)
    bases = _offsets_in(names, ".log")
    # Compaction leaves gaps. Without it, a gap means a missing segment, and the log ends before it.
    is_compacted = CLEANER_NAME in names
    epochs = LeaderEpochs.decode(read_file(disk, f"{folder}/{EPOCHS_NAME}") or b"")
    last_epoch = UNDEFINED if epochs is None else epochs.latest
    survey = LogSurvey(bases[0] if bases else 0, last_epoch, is_compacted=is_compacted)
    for base in bases:
        if base < survey.log_end_offset or (base > survey.log_end_offset and not is_compacted):
            break
        with closing(disk.open(segment_path(folder, base))) as file:
            survey = survey._replace(log_end_offset=base)
            for at, header in walk_headers(file, 0, file.size()):
                is_durable = header.next_offset <= recovery_point
                if header.base_offset < survey.log_end_offset or not (
                    is_durable or is_intact(file.pread(at, header.size_bytes), header)
                ):
                    return survey
                survey = survey._replace(
                    log_end_offset=header.next_offset,
                    last_epoch=header.partition_leader_epoch,
                    highest_producer_id=max(survey.highest_producer_id, header.producer_id),
                )
    return survey
