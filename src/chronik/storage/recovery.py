"""Opening a log's folder: finish what a crash interrupted, find the true end, and say what was done.

Recovery starts at the newest snapshot: everything below it was durable when it was written. From there on every batch
is read and its CRC checked; indexes, leader epochs and producers are rebuilt on the way. After a clean shutdown the
snapshot stands at the end and nothing is read.

What happens at the first bad batch depends on the recovery point, the offset up to which data was durable (and so may
have been acknowledged), as the caller knows or as `synced_end` proves:
- at or above it, the batch is what a crash leaves: the log is truncated there, as Kafka does, and the report says so;
- below it, acknowledged data is damaged, and nothing is thrown away. Where only the batch's content is bad and the next
  batch follows, it is kept: consumers that check CRCs meet it, as they do in Kafka when a disk rots. Where the chain of
  batches is broken, the log opens up to there for reading only, and its files stay as they are until a person decides:
  restore the folder, or accept the loss by opening it with a recovery point at or below the damage.
"""

from dataclasses import dataclass, field

from chronik.storage.batches import header_at, walk_headers
from chronik.storage.config import LogConfig
from chronik.storage.disk import Disk, File, read_file
from chronik.storage.epochs import LeaderEpochs
from chronik.storage.producers import ProducerStates
from chronik.storage.scanning import is_zero, scan_batches, used_bytes
from chronik.storage.segment import NO_TIMESTAMP, RELATIVE_OFFSET_MAX, LogSegment, segment_path
from chronik.storage.small_files import read_number
from chronik.storage.snapshot import Snapshot, decode_snapshot, restore_producers
from chronik.storage.swap import CLEANER_NAME, finish_swaps
from chronik.storage.synced_end import read_synced_end
from chronik.storage.syncing import EPOCHS_NAME
from chronik.wire.batch import BatchHeader

__all__ = ["START_NAME", "Damage", "LoadedLog", "RecoveryReport", "load_log"]

START_NAME = "log-start-offset"
"""One number (see `small_files`): what DeleteRecords has set, where the segments do not say it. Damaged, it counts as
missing: what was deleted may be there again, which is better than the contrary."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A bad batch among data that was durable."""

    offset: int
    segment_base: int
    position: int
    chain_is_broken: bool
    """Whether what follows it could not be reached."""


@dataclass(slots=True)
class RecoveryReport:
    """What opening a log found and did, for one log line. `is_damaged` deserves a loud one."""

    folder: str
    was_clean: bool
    recovery_point: int = 0
    """Below this, data was durable."""
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
        """Whether data that was durable is bad or missing."""
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


@dataclass(slots=True)
class LoadedLog:
    """A log as found on disk; the last segment is the active one."""

    segments: list[LogSegment]
    log_start_offset: int
    log_end_offset: int
    cleaned_upto: int
    epochs: LeaderEpochs
    producers: ProducerStates
    snapshots: list[int]
    last_batch_crc: int
    is_broken: bool
    report: RecoveryReport


def load_log(
    disk: Disk, folder: str, config: LogConfig, now_ms: int, recovery_point: int | None, clean: bool
) -> LoadedLog:
    """Open the folder, made where it is missing. Blocks."""
    disk.mkdir(folder)
    durable_upto = max(recovery_point or 0, read_synced_end(disk, folder))
    return _Recovery(disk, folder, config, now_ms, durable_upto, clean).load()


class _Recovery:
    """One run of `load_log`."""

    def __init__(
        self, disk: Disk, folder: str, config: LogConfig, now_ms: int, recovery_point: int, clean: bool
    ) -> None:
        self.disk = disk
        self.folder = folder
        self.config = config
        self.now_ms = now_ms
        self.recovery_point = recovery_point
        self.clean = clean
        self.report = RecoveryReport(folder, clean, recovery_point)
        self.epochs = LeaderEpochs()
        self.producers = ProducerStates(config.producer_expiration_ms)
        self.last_batch_crc = 0
        self.cleaned_upto = 0
        self.gap: tuple[int, int] | None = None
        """The last gap in the segment that was scanned: its position, and the offset that was next."""

    def load(self) -> LoadedLog:
        self.report.finished_swaps = finish_swaps(self.disk, self.folder)
        names = self.disk.listdir(self.folder)
        segments = [
            LogSegment(self.disk, self.folder, int(name[:-4]), self.disk.size(f"{self.folder}/{name}"))
            for name in names
            if name.endswith(".log") and name[:-4].isdigit()
        ]
        self._remove_orphans(names, segments)
        log_start = read_number(self.disk, f"{self.folder}/{START_NAME}") or 0
        while len(segments) > 1 and segments[1].base_offset <= log_start:
            # DeleteRecords had removed it, but for its files.
            self._remove(segments.pop(0))
        self.cleaned_upto = read_number(self.disk, f"{self.folder}/{CLEANER_NAME}") or 0
        snapshots, snapshot = self._newest_snapshot(names, segments)
        epochs = LeaderEpochs.decode(read_file(self.disk, f"{self.folder}/{EPOCHS_NAME}") or b"")
        if epochs is not None:
            self.epochs = epochs
        elif snapshot is not None:
            # Which epochs lie below the snapshot is not known: all batches are read again to find them.
            self.report.rebuilt_epochs = True
            snapshot = None
        self.producers = restore_producers(snapshot, self.config.producer_expiration_ms)
        end_offset, is_broken = self._recover(segments, snapshot)
        if segments:
            log_start = max(log_start, segments[0].base_offset)
        if is_broken:
            log_start = min(log_start, end_offset)
        if log_start > end_offset:
            # The tail was lost down to below what DeleteRecords had removed.
            self._start_over(segments, log_start)
            end_offset = log_start
        if end_offset < self.recovery_point and not self.report.damages:
            self.report.ends_below_recovery_point = True
        self.epochs.truncate_to(end_offset)
        self.epochs.start_at(log_start)
        self.producers.expire(self.now_ms)
        kept = [offset for offset in snapshots if offset <= end_offset]
        for offset in snapshots:
            if offset > end_offset and not is_broken:
                self.disk.remove(segment_path(self.folder, offset, ".snapshot"))
        return LoadedLog(
            segments,
            log_start,
            end_offset,
            self.cleaned_upto,
            self.epochs,
            self.producers,
            kept,
            self.last_batch_crc,
            is_broken,
            self.report,
        )

    def _remove_orphans(self, names: list[str], segments: list[LogSegment]) -> None:
        bases = {segment.base_offset for segment in segments}
        for name in names:
            stem, _, suffix = name.partition(".")
            is_index = suffix in ("index", "timeindex") and stem.isdigit() and int(stem) not in bases
            if is_index or suffix == "tmp" or name.endswith(".tmp"):
                self.disk.remove(f"{self.folder}/{name}")

    def _newest_snapshot(self, names: list[str], segments: list[LogSegment]) -> tuple[list[int], Snapshot | None]:
        """All snapshots' offsets, and the newest one that belongs to this log."""
        found = [int(name[:-9]) for name in names if name.endswith(".snapshot") and name[:-9].isdigit()]
        offsets: list[int] = []
        newest: Snapshot | None = None
        for offset in reversed(found):
            path = segment_path(self.folder, offset, ".snapshot")
            snapshot = decode_snapshot(read_file(self.disk, path) or b"")
            if snapshot is None or not self._belongs(snapshot, segments):
                self.disk.remove(path)
                continue
            offsets.insert(0, offset)
            newest = newest or snapshot
        return offsets, newest

    def _belongs(self, snapshot: Snapshot, segments: list[LogSegment]) -> bool:
        if not segments or snapshot.segment_base < segments[0].base_offset:
            # Its segment was removed by retention; what it says of producers is still true.
            return not segments or snapshot.offset <= segments[0].base_offset
        for segment in segments:
            if segment.base_offset == snapshot.segment_base:
                break
        else:
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
        segment.let_go()
        return belongs

    def _recover(self, segments: list[LogSegment], snapshot: Snapshot | None) -> tuple[int, bool]:
        """Scan from the snapshot on; returns the log's end, and whether durable data is out of reach."""
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
        # A snapshot says which epochs were durable; those above it are read from the batches.
        self.epochs.truncate_to(offset)
        for at in range(first):
            self._check_indexes(segments[at])
            end = self._end_of(segments[at])
            if not self._goes_on_at(segments[at + 1].base_offset, end):
                return self._broken(segments, at, *end), True
        touched = False
        for at in range(first, len(segments)):
            segment = segments[at]
            next_base = segments[at + 1].base_offset if at + 1 < len(segments) else None
            before = self.report.scanned_batches
            position, offset, reason = self._scan_segment(segment, offset, resumed if at == first else None, next_base)
            touched = touched or self.report.scanned_batches > before or reason is not None
            if reason is None:
                continue
            lowest = min(self._lowest_left(segment, position, offset), offset if next_base is None else next_base)
            if min(offset, lowest) < self.recovery_point:
                if self.gap is not None and self.gap[1] <= lowest < offset:
                    # What follows belongs before the gap: the batch behind it has a wrong offset, which no CRC covers.
                    position, offset = self.gap
                return self._broken(segments, at, position, offset), True
            self._truncate(segments, at, position, offset)
            break
        active = segments[-1]
        if touched:
            # What was found may be in the page cache only; from here on it counts as durable.
            active.file.datasync()
        if touched or not active.size_bytes:
            # So may be names: the process may have been killed when it had begun a segment, and not yet synced its
            # folder. What is appended there now is synced without looking at names again.
            self.disk.sync_dir(self.folder)
            self.disk.sync_dir(self.folder.rpartition("/")[0] or "/")
        active.let_go()
        return offset, False

    def _broken(self, segments: list[LogSegment], at: int, position: int, offset: int) -> int:
        """The log ends at `position` of segment `at` for now, and no file is touched."""
        segment = segments[at]
        self.report.damages.append(Damage(offset, segment.base_offset, position, chain_is_broken=True))
        del segments[at + 1 :]
        segment.size_bytes = position
        segment.let_go()
        return offset

    def _lowest_left(self, segment: LogSegment, position: int, offset: int) -> int:
        """The lowest offset that the data from `position` on has a claim to, by the segment's name or a whole batch."""
        if position == 0:
            return segment.base_offset
        for _, header, _, intact in scan_batches(segment.file, position, segment.file.size()):
            return header.base_offset if intact else offset
        return offset

    def _end_of(self, segment: LogSegment) -> tuple[int, int]:
        """Where a closed segment's batches end, and the offset behind them, from its last index entry on."""
        view = segment.view()
        try:
            entry = view.offsets.last()
            position = entry[1] if entry is not None and view.is_right(*entry) else 0
            end, offset = position, segment.base_offset
            for at, header in walk_headers(segment.file, position, segment.size_bytes):
                end, offset = at + header.size_bytes, header.next_offset
            return end, offset
        finally:
            view.release()
            segment.let_go()

    def _goes_on_at(self, next_base: int, end: tuple[int, int]) -> bool:
        """Whether a closed segment below the snapshot is followed by the next one, as it was when that was written."""
        return end[1] == next_base or (end[1] < next_base and self._may_have_gaps(next_base))

    def _may_have_gaps(self, offset: int) -> bool:
        """Whether compaction may have removed what lies before `offset`."""
        return self.config.cleanup_compact or offset <= self.cleaned_upto

    def _scan_segment(
        self, segment: LogSegment, offset: int, resumed: Snapshot | None, next_base: int | None
    ) -> tuple[int, int, str | None]:
        """Read a segment from the snapshot's position, or all of it, rebuilding its indexes.

        Returns its end, the next offset, and why the log cannot go on behind it: None if it can.
        """
        file_bytes = segment.size_bytes
        self.gap = None
        position = self._resume(segment, resumed)
        if position == file_bytes and (next_base is None or next_base == offset):
            if next_base is not None:
                self._close(segment)
            return position, offset, None
        file = segment.file
        interval = self.config.index_interval_bytes
        reason: str | None = None
        segment.unchecked_to = position
        for at, header, _, intact in scan_batches(file, position, file_bytes):
            if header.base_offset > offset:
                # A gap that compaction left here or at the leader; or else this batch's offset lies.
                self.gap = position, offset
            if header.base_offset < offset or header.last_offset - segment.base_offset > RELATIVE_OFFSET_MAX:
                reason = "offsets"
                break
            if not intact and not self._is_rotten(file, at, header, file_bytes, next_base):
                reason = "crc"
                break
            if intact:
                self.epochs.assign(header.partition_leader_epoch, header.base_offset)
                if header.producer_id >= 0 and not header.is_control:
                    append_time = header.max_timestamp if header.log_append_time else -1
                    # Seen now: the batch's own time is the client's, and may make the producer look long gone.
                    self.producers.record(header, header.base_offset, self.now_ms, append_time)
            else:
                segment.unchecked_to = at + header.size_bytes
                self.report.damages.append(Damage(header.base_offset, segment.base_offset, at, chain_is_broken=False))
            timestamp = header.max_timestamp if intact else NO_TIMESTAMP
            segment.note_batch(at, header.last_offset, header.size_bytes, timestamp, interval)
            if segment.first_append_ms is None:
                segment.first_append_ms = min(self.now_ms, max(timestamp, 0)) or self.now_ms
            self.report.scanned_batches += 1
            self.report.scanned_bytes += header.size_bytes
            self.last_batch_crc = header.crc
            position, offset = at + header.size_bytes, header.next_offset
        segment.size_bytes = position
        segment.allocated_bytes = file_bytes
        if reason is None and not is_zero(file, position, file_bytes):
            reason = "torn"
        if reason is None and next_base is not None:
            reason = self._why_not_next(position, file_bytes, offset, next_base)
            if reason is None:
                self._close(segment)
        return position, offset, reason

    def _close(self, segment: LogSegment) -> None:
        """A segment with a successor: make durable what was read, its indexes too, as the next snapshot will claim."""
        segment.finish()
        segment.file.datasync()
        for index in (segment.offset_index, segment.time_index):
            if self.disk.exists(index.path):
                index.sync()
        segment.let_go()

    def _why_not_next(self, position: int, file_bytes: int, offset: int, next_base: int) -> str | None:
        """Whether the next segment continues this one."""
        if next_base == offset:
            return None
        if next_base > offset and position == file_bytes and self._may_have_gaps(next_base):
            return None
        return "gap"

    def _resume(self, segment: LogSegment, snapshot: Snapshot | None) -> int:
        """Put the segment into the state of the snapshot; returns where to go on."""
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
        segment.offset_index.cut(0)
        segment.time_index.cut(0)
        segment.max_timestamp, segment.max_timestamp_offset = NO_TIMESTAMP, -1
        for position, header in walk_headers(segment.file, 0, upto):
            interval = self.config.index_interval_bytes
            segment.note_batch(position, header.last_offset, header.size_bytes, header.max_timestamp, interval)
            self.last_batch_crc = header.crc
        if snapshot is not None and snapshot.first_append_ms >= 0:
            segment.first_append_ms = snapshot.first_append_ms
        return upto

    def _is_rotten(self, file: File, at: int, header: BatchHeader, end: int, next_base: int | None) -> bool:
        """Whether a batch with a bad CRC is one that was durable, with its successor in its place."""
        if header.next_offset > self.recovery_point:
            return False
        following = header_at(file, at + header.size_bytes, end)
        if following is not None:
            return following.base_offset == header.next_offset
        return header.next_offset in (next_base, self.recovery_point)

    def _truncate(self, segments: list[LogSegment], at: int, position: int, offset: int) -> None:
        """End the log at `position` of segment `at`; what comes later goes, the newest first."""
        segment = segments[at]
        file_bytes = segment.file.size()
        self.report.truncated_at_offset = offset
        self.report.truncated_bytes += used_bytes(segment.file, position, file_bytes)
        for later in reversed(segments[at + 1 :]):
            self.report.removed_segments += 1
            self.report.truncated_bytes += later.size_bytes
            self._remove(later)
        del segments[at + 1 :]
        segment.file.truncate(position)
        segment.size_bytes = segment.allocated_bytes = position

    def _remove(self, segment: LogSegment) -> None:
        segment.let_go()
        for path in segment.paths():
            if self.disk.exists(path):
                self.disk.remove(path)

    def _start_over(self, segments: list[LogSegment], offset: int) -> None:
        """The log goes on, empty, at `offset`."""
        fresh = LogSegment.create(self.disk, self.folder, offset)
        self.disk.sync_dir(self.folder)
        for segment in segments:
            if segment.base_offset != offset:
                self._remove(segment)
        self.disk.sync_dir(self.folder)
        segments[:] = [fresh]
        self.last_batch_crc = 0

    def _check_indexes(self, segment: LogSegment) -> None:
        """Rebuild the indexes of a closed segment where they are missing, cut off, or (after a crash) wrong."""
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
        segment.let_go()

    def _reaches_the_end(self, segment: LogSegment) -> bool:
        view = segment.view()
        try:
            entry = view.offsets.last()
            if entry is not None and not view.is_right(*entry):
                return False
            unindexed_bytes = segment.size_bytes - (entry[1] if entry is not None else 0)
            return unindexed_bytes <= self.config.index_interval_bytes + 2 * self.config.max_batch_bytes
        finally:
            view.release()
