"""Opening a log's folder: finish what a crash interrupted, find the true end, and report what was done.

Recovery starts at the newest snapshot: everything below it was durable when it was written. From there it reads every
batch, checks its CRC, and rebuilds indexes, leader epochs and producer state. After a clean shutdown the snapshot is at
the log's end, so nothing is read.

The recovery point is the offset below which data was durable, and so may have been acknowledged. The caller knows it,
or `synced_end` proves it. It decides what happens at the first bad batch:
- At or above it, the batch is a leftover of a crash: the log is truncated there, as in Kafka, and the report says so.
- Below it, acknowledged data is damaged, and nothing is discarded. If only the batch's content is bad and the next
  batch follows, the batch stays: consumers that check CRCs detect it, as they do in Kafka when a disk corrupts data. If
  the chain of batches is broken, the log opens read-only up to there. Its files stay until an operator decides: restore
  the folder, or accept the loss by opening the log with a recovery point at or below the damage.
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


@dataclass(slots=True)
class RecoveryReport:
    """What opening a log found and did, for one log line. `is_damaged` deserves a prominent one."""

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


@dataclass(slots=True)
class LoadedLog:
    """A log as loaded from disk; the last segment is the active one."""

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
    """Open the folder and create it if it is missing. Blocks."""
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
        """The last gap in the scanned segment: the position before it, and the offset expected there."""

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
            # DeleteRecords removed this segment, but its files were not deleted yet.
            self._remove(segments.pop(0))
        self.cleaned_upto = read_number(self.disk, f"{self.folder}/{CLEANER_NAME}") or 0
        snapshots, snapshot = self._newest_snapshot(names, segments)
        epochs = LeaderEpochs.decode(read_file(self.disk, f"{self.folder}/{EPOCHS_NAME}") or b"")
        if epochs is not None:
            self.epochs = epochs
        elif snapshot is not None:
            # The epochs below the snapshot are unknown: read all batches again to find them.
            self.report.rebuilt_epochs = True
            snapshot = None
        self.producers = restore_producers(snapshot, self.config.producer_expiration_ms)
        end_offset, is_broken = self._recover(segments, snapshot)
        if segments:
            log_start = max(log_start, segments[0].base_offset)
        if is_broken:
            log_start = min(log_start, end_offset)
        if log_start > end_offset:
            # The log lost its tail, down to below the offset set by DeleteRecords.
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
        """Return the offsets of all valid snapshots, and the newest snapshot that belongs to this log."""
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
            # Retention removed its segment; its producer state is still valid.
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
        # Epochs up to the snapshot were durable; read later ones from the batches.
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
                    # What follows belongs before the gap: the batch after it has a wrong offset, which no CRC covers.
                    position, offset = self.gap
                return self._broken(segments, at, position, offset), True
            self._truncate(segments, at, position, offset)
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
        active.let_go()
        return offset, False

    def _broken(self, segments: list[LogSegment], at: int, position: int, offset: int) -> int:
        """End the log at `position` of segment `at` for now, and touch no file."""
        segment = segments[at]
        self.report.damages.append(Damage(offset, segment.base_offset, position, chain_is_broken=True))
        del segments[at + 1 :]
        segment.size_bytes = position
        segment.let_go()
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
        """Return whether the next segment still continues a closed segment below the snapshot."""
        return end[1] == next_base or (end[1] < next_base and self._may_have_gaps(next_base))

    def _may_have_gaps(self, offset: int) -> bool:
        """Return whether compaction may have removed records before `offset`."""
        return self.config.cleanup_compact or offset <= self.cleaned_upto

    def _scan_segment(
        self, segment: LogSegment, offset: int, resumed: Snapshot | None, next_base: int | None
    ) -> tuple[int, int, str | None]:
        """Read a segment from the snapshot's position, or all of it, and rebuild its indexes.

        Return its end, the next offset, and the reason why the log cannot continue after it: None if it can.
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
                # Either compaction, here or on the leader, left a gap, or this batch's offset is wrong.
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
                    # Use the current time: the batch's timestamp is the client's, and could make the producer expire.
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
        """Make a segment that has a successor durable, with its indexes: the next snapshot relies on that."""
        segment.finish()
        segment.file.datasync()
        for index in (segment.offset_index, segment.time_index):
            if self.disk.exists(index.path):
                index.sync()
        segment.let_go()

    def _why_not_next(self, position: int, file_bytes: int, offset: int, next_base: int) -> str | None:
        """Return why the next segment does not continue this one; None if it does."""
        if next_base == offset:
            return None
        if next_base > offset and position == file_bytes and self._may_have_gaps(next_base):
            return None
        return "gap"

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
        """Return whether a batch with a bad CRC was durable and its successor is in place."""
        if header.next_offset > self.recovery_point:
            return False
        following = header_at(file, at + header.size_bytes, end)
        if following is not None:
            return following.base_offset == header.next_offset
        return header.next_offset in (next_base, self.recovery_point)

    def _truncate(self, segments: list[LogSegment], at: int, position: int, offset: int) -> None:
        """End the log at `position` of segment `at`; remove later segments, newest first."""
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
        """Restart the log, empty, at `offset`."""
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
