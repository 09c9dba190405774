"""The write path of a log: appending, rolling, syncing and closing, and how it handles disk failures.

A full or failing disk makes the log read-only. After a second the next append tries again; if it succeeds, the log is
writable. A failed append leaves nothing behind. A log whose sync hangs is read-only until the sync ends. A failed sync
is never retried: the kernel may have dropped the dirty pages, so a second sync would succeed without writing them.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from chronik.storage.config import LogConfig
from chronik.storage.disk import Buffer, Disk
from chronik.storage.epochs import LeaderEpochs
from chronik.storage.errors import StorageError, storage_error
from chronik.storage.producers import ProducerStates
from chronik.storage.recovery import LoadedLog, RecoveryReport
from chronik.storage.segment import RELATIVE_OFFSET_MAX, LogSegment
from chronik.storage.segments import Segments
from chronik.storage.syncing import LogSyncs, SyncJob
from chronik.storage.tail import Tail
from chronik.wire.batch import BatchHeader, read_batch_header, stamp_append_time
from chronik.wire.errors import ErrorCode, KafkaError

__all__ = ["AppendResult", "LogWriter"]

PROBE_MS: Final = 1000
"""How long after a failed write the log accepts another attempt."""

_INT64: Final = Struct(">q")
_INT32: Final = Struct(">i")
_EPOCH_AT: Final = 12


class AppendResult(NamedTuple):
    """The offsets of the appended records, and their log append time (-1: they keep their own timestamps)."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int


class LogWriter:
    """The write half of a `Log`. Owned by the event loop."""

    def __init__(self, disk: Disk, folder: str, config: LogConfig, loaded: LoadedLog) -> None:
        self.disk = disk
        self.folder = folder
        self.config = config
        self.recovery: RecoveryReport | None = loaded.report if loaded.report.is_notable else None
        self.log_start_offset = loaded.log_start_offset
        self.log_end_offset = loaded.log_end_offset
        self.synced_end_offset = loaded.log_end_offset
        self.producers: ProducerStates = loaded.producers
        self.epochs: LeaderEpochs = loaded.epochs
        self.read_only = loaded.is_broken
        """No appends for now: the disk is full or failing. A later append tries again, unless `read_only_forever`."""
        self.read_only_forever = loaded.is_broken
        """A sync failed, or durable data is damaged: only reopening the log can help."""
        self.read_only_reason = "durable data is damaged" if loaded.is_broken else ""
        self.is_broken = loaded.is_broken
        """The folder has unreachable segments after the log's end: see `Log.set_aside_from`."""
        self._segments = Segments(disk, folder, loaded.segments)
        self._active: LogSegment | None = self._segments.active
        self._tail = Tail()
        self._syncs = LogSyncs(disk, folder, loaded.snapshots, loaded.last_batch_crc, loaded.report.scanned_bytes)
        self._probe_at_ms = 0
        self._is_stalled = False
        self._has_garbage = False

    def configure(self, config: LogConfig) -> None:
        """Apply new settings from the next append on."""
        self.config = config
        self.producers.expiration_ms = config.producer_expiration_ms

    @property
    def size_bytes(self) -> int:
        return self._segments.size_bytes

    @property
    def segment_count(self) -> int:
        return len(self._segments.all)

    # -- appending -----------------------------------------------------------------------------------------------------

    def append(
        self, records: Buffer, batches: Sequence[tuple[int, BatchHeader]], leader_epoch: int, now_ms: int
    ) -> AppendResult:
        """Append as leader: write offsets and epoch into the batches, in place if the buffer is writable.

        `batches` is the result of `check_batches` for `records`. If it raises StorageError, the log is unchanged.
        """
        if self.read_only:
            self._check_writable(now_ms)
        view = records if isinstance(records, memoryview) else memoryview(records)
        if view.readonly:
            view = memoryview(bytearray(view))
        append_time_ms = -1
        if self.config.log_append_time:
            append_time_ms = now_ms
            batches = _stamp_times(view, batches, now_ms)
        base_offset = offset = self.log_end_offset
        for start, header in batches:
            _INT64.pack_into(view, start, offset)
            _INT32.pack_into(view, start + _EPOCH_AT, leader_epoch)
            offset += header[6] + 1
        self._write(view, batches, base_offset, offset, now_ms, append_time_ms)
        if leader_epoch > self.epochs.latest:
            self.epochs.assign(leader_epoch, base_offset)
        return AppendResult(base_offset, offset - 1, append_time_ms)

    def append_as_follower(
        self, records: Buffer, batches: Sequence[tuple[int, BatchHeader]], now_ms: int
    ) -> AppendResult:
        """Append the leader's batches unchanged. They must follow the log's end; gaps come from compaction."""
        if self.read_only:
            self._check_writable(now_ms)
        offset = self.log_end_offset
        for _, header in batches:
            if header.base_offset < offset:
                raise KafkaError(
                    ErrorCode.unknown_server_error, f"batch at {header.base_offset} does not continue a log to {offset}"
                )
            offset = header.next_offset
        view = records if isinstance(records, memoryview) else memoryview(records)
        self._write(view, batches, None, offset, now_ms, -1)
        for _, header in batches:
            self.epochs.assign(header.partition_leader_epoch, header.base_offset)
        return AppendResult(batches[0][1].base_offset, offset - 1, -1)

    def _write(
        self,
        records: memoryview,
        batches: Sequence[tuple[int, BatchHeader]],
        base_offset: int | None,
        end_offset: int,
        now_ms: int,
        append_time_ms: int,
    ) -> None:
        """Write one block of batches. If `base_offset` is set, the caller assigned offsets from there on."""
        size_bytes = len(records)
        config = self.config
        segment = self._active
        try:
            if (
                segment is None
                or segment.size_bytes + size_bytes > config.segment_bytes
                or end_offset - segment.base_offset > RELATIVE_OFFSET_MAX
                or self._is_due(segment, now_ms)
            ):
                segment = self._next_segment()
            position = segment.size_bytes
            end = position + size_bytes
            if end > segment.allocated_bytes:
                self._allocate(segment, end)
            segment.file.pwrite(records, position)
        except OSError as error:
            raise self._append_failed(error, now_ms) from error
        interval = config.index_interval_bytes
        offset = base_offset
        for start, header in batches:
            at = header[0] if offset is None else offset
            delta = header[6]
            self._tail.append(at, position + start)
            segment.note_batch(position + start, at + delta, header[1], header[8], interval)
            if header[9] >= 0 and not header.is_control:
                self.producers.record(header, at, now_ms, append_time_ms)
            if offset is not None:
                offset += delta + 1
        if segment.first_append_ms is None:
            segment.first_append_ms = now_ms
        segment.size_bytes = end
        self._segments.size_bytes += size_bytes
        self._syncs.appended(size_bytes, batches[-1][1][4])
        self.log_end_offset = end_offset

    def _is_due(self, segment: LogSegment, now_ms: int) -> bool:
        """Return whether the segment is old enough to be closed."""
        begun_ms = segment.first_append_ms
        return begun_ms is not None and segment.size_bytes > 0 and now_ms - begun_ms >= self.config.segment_ms

    def _allocate(self, segment: LogSegment, end: int) -> None:
        """Preallocate ahead of the end: double the size, within bounds. If that fails, just try the write."""
        config = self.config
        ahead = min(max(end, config.preallocate_bytes_min), config.preallocate_bytes_max)
        wanted = max(end, min(end + ahead, config.segment_bytes))
        try:
            segment.file.allocate(wanted)
            segment.allocated_bytes = wanted
        except OSError:
            segment.allocated_bytes = end

    def _check_writable(self, now_ms: int) -> None:
        # If the wall clock was set back, do not delay the probe by that much.
        is_too_early = 0 < self._probe_at_ms - now_ms <= PROBE_MS
        if self.read_only_forever or self._is_stalled or is_too_early:
            raise StorageError(f"the log is read-only: {self.read_only_reason}")
        if self._has_garbage and self._active is not None:
            try:
                self._active.file.truncate(self._active.size_bytes)
            except OSError as error:
                raise self._append_failed(error, now_ms) from error
            self._has_garbage = False
        # The append that follows is the probe.
        self.read_only = False

    def _append_failed(self, error: OSError, now_ms: int) -> StorageError:
        """Make the log read-only, and cut a partial append off the file, now or before the next write."""
        failure = storage_error("append", error)
        self.read_only = True
        self.read_only_reason = failure.message
        self._probe_at_ms = now_ms + PROBE_MS
        active = self._active
        if active is not None and active.is_open:
            try:
                active.file.truncate(active.size_bytes)
                active.allocated_bytes = active.size_bytes
                self._has_garbage = False
            except OSError:
                self._has_garbage = True
        return failure

    def roll_if_needed(self, now_ms: int) -> bool:
        """Close the active segment if it is old enough. Appends do this too; this is for logs without appends."""
        if self._active is None or self.read_only or not self._is_due(self._active, now_ms):
            return False
        self.roll(now_ms)
        return True

    def roll(self, now_ms: int) -> None:
        """Close the active segment and start the next one at the log's end. Raises StorageError on failure."""
        try:
            self._next_segment()
        except OSError as error:
            raise self._append_failed(error, now_ms) from error

    def _next_segment(self) -> LogSegment:
        """Return the active segment if it is still empty, otherwise a new one."""
        active = self._active
        if active is not None and active.size_bytes == 0 and active.base_offset == self.log_end_offset:
            return active
        fresh = self._segments.begin(self.log_end_offset)
        if active is not None:
            active.finish()
        self._active = fresh
        self._tail.clear()
        try:
            self._syncs.rolled(active, self.config.checkpoint_bytes)
        except OSError as error:
            self._fail_for_good("a sync failed")
            raise storage_error("sync", error) from error
        return fresh

    # -- syncing -------------------------------------------------------------------------------------------------------

    def sync_job(self) -> SyncJob | None:
        """Return a sync of everything appended so far. Run it in a thread, then call `synced` or `sync_failed`.

        None if nothing needs a sync, if the log failed permanently, or while a job runs: call again when that job ends.
        """
        if self.read_only_forever:
            return None
        return self._syncs.job(self, self._active)

    def synced(self, job: SyncJob) -> None:
        """Record that the job succeeded: the data that it covers is durable."""
        if self._syncs.finished(job) and job.end_offset > self.synced_end_offset:
            self.synced_end_offset = job.end_offset

    def sync_failed(self, job: SyncJob) -> None:
        """Stop appends: the sync failed. The kernel may have dropped the pages, so a second sync proves nothing."""
        self._syncs.finished(job)
        self._fail_for_good("a sync failed")

    def stall(self) -> None:
        """Stop appends until `resume`: a sync hangs, so no append could become durable."""
        self.read_only = self._is_stalled = True
        if not self.read_only_forever:
            self.read_only_reason = "the disk does not answer"

    def resume(self) -> None:
        """Allow appends again: the sync ended, and its outcome was recorded."""
        self._is_stalled = False
        self.read_only = self.read_only_forever or self._has_garbage

    def _fail_for_good(self, reason: str) -> None:
        self.read_only = self.read_only_forever = True
        self.read_only_reason = reason

    def close(self) -> bool:
        """Make everything durable and close the files. Blocks: call it in a thread, with no job running.

        Return whether the log was closed cleanly, so that the next open needs no scan.
        """
        is_clean = not self.read_only_forever
        if is_clean and self._active is not None:
            try:
                if self._has_garbage:
                    self._active.file.truncate(self._active.size_bytes)
                self._active.finish()
                job = self._syncs.job(self, self._active, checkpoint=True)
                if job is not None:
                    job.run()
                    is_clean = job.checkpointed
                    self.synced(job)
            except OSError as error:
                is_clean = False
                self.read_only_reason = f"closing failed: {error}"
        self._fail_for_good("the log is closed" if is_clean else self.read_only_reason or "no checkpoint was written")
        self._segments.close()
        self._syncs.close()
        return is_clean


def _stamp_times(
    records: memoryview, batches: Sequence[tuple[int, BatchHeader]], now_ms: int
) -> list[tuple[int, BatchHeader]]:
    """Set the append time in every batch that does not have it yet."""
    stamped: list[tuple[int, BatchHeader]] = []
    for start, header in batches:
        if header.log_append_time and header.max_timestamp == now_ms:
            stamped.append((start, header))
        else:
            stamp_append_time(records, start, now_ms)
            stamped.append((start, read_batch_header(records, start)))
    return stamped
