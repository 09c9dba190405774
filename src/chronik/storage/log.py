"""One partition's log.

Files in its folder: `NNN.log` segments of batches with `NNN.index` and `NNN.timeindex` (see `index`) and `NNN.txnindex`
(see `aborted`), `NNN.snapshot` (see `snapshot`), `leader-epoch-checkpoint` (see `epochs`), `log-start-offset` (see
`recovery`), `cleaner-offset` (see `compaction`), `synced-end` (see `syncing`). NNN is an offset with 20 digits.

A full or failing disk makes the log read-only. After a second the next append tries again; if it succeeds, the log is
writable. A failed append leaves nothing behind. A log whose sync hangs is read-only until the sync ends. A failed sync
is never retried: the kernel may have dropped the dirty pages, so a second sync would succeed without writing them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from errno import EIO
from itertools import pairwise
from struct import Struct
from typing import Final

from chronik.storage.aborted import SUFFIX as ABORTED_SUFFIX
from chronik.storage.aborted import AbortedJob, Summary, aborted, derive_last, search
from chronik.storage.batches import header_at
from chronik.storage.commit_log import LogFrames
from chronik.storage.compaction import CLEANER_NAME, CompactionJob, SwapUnfinished, replace_segments
from chronik.storage.config import LogConfig
from chronik.storage.disk import Buffer, Disk, StorageError, read_file, remove_files, storage_error
from chronik.storage.epochs import LeaderEpochs
from chronik.storage.folder import set_aside
from chronik.storage.producers import AppendResult, ProducerState, ProducerStates
from chronik.storage.reading import HeadersJob, ReadJob, ReadResult
from chronik.storage.recovery import START_NAME, LoadedLog, RecoveryReport, load_log
from chronik.storage.scrubbing import SegmentScrub
from chronik.storage.segment import RELATIVE_OFFSET_MAX, LogSegment, segment_path
from chronik.storage.segments import DeletionJob, NumberFile, Segments
from chronik.storage.small_files import write_number
from chronik.storage.snapshot import restore_producers, usable_snapshot
from chronik.storage.syncing import FlushJob, LogSyncs, SyncJob, lower_synced_end
from chronik.storage.tail import Tail
from chronik.storage.times import TimeLookup, TimestampOffset
from chronik.storage.transactions import marker_of
from chronik.wire.batch import (
    CONTROL,
    BatchHeader,
    check_batches,
    read_batch_header,
    read_marker,
    stamp_append_time,
)
from chronik.wire.errors import ErrorCode, KafkaError

PROBE_MS: Final = 1000
"""How long after a failed write the log accepts another attempt."""

UNFINISHED: Final = "segments are half replaced; check the disk, then restart the node, which replaces them"

_INT64: Final = Struct(">q")
_INT32: Final = Struct(">i")
_EPOCH_AT: Final = 12
_SET_ASIDE_ORDER: Final = {".snapshot": 0, ".index": 1, ".timeindex": 1, ABORTED_SUFFIX: 1, ".log": 2}


class Log:
    """One partition's log: a folder of segments. Only the last segment is written to.

    Invariant: log_start_offset <= log_end_offset and synced_end_offset <= log_end_offset. Offsets increase and are not
    reused. Appended records are readable at once; records below `synced_end_offset` also survive a crash.

    Owned by the event loop. Threads run only `open`, `close` and the jobs that the loop creates (`SyncJob`, `ReadJob`,
    `DeletionJob`, `CompactionJob`, lookups by time). `truncate_to` and `truncate_fully` also block, and require that no
    job is running. An idle log holds no file open. The first append creates the first segment.
    """

    def __init__(self, disk: Disk, folder: str, config: LogConfig, loaded: LoadedLog) -> None:
        self.disk = disk
        self.folder = folder
        self.config = config
        self.frames: LogFrames | None = None
        """The commit log, if syncs may use it. Its entries of this log are valid until `_leave_commit_log`."""
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
        """The folder has unreachable segments after the log's end: see `set_aside_from`."""
        self._segments = Segments(disk, folder, loaded.segments)
        self._active: LogSegment | None = self._segments.active
        self._tail = Tail()
        self._syncs = LogSyncs(disk, folder, loaded.snapshots, loaded.last_batch_crc, loaded.report.scanned_bytes)
        self._probe_at_ms = 0
        self._is_stalled = False
        self._has_garbage = False
        self._cleaned_upto = loaded.cleaned_upto
        self._compaction: CompactionJob | None = None
        self._last_aborted_offset = self._find_last_aborted()
        """No abort marker is above it; the one there may have been removed since."""

    @staticmethod
    def open(
        disk: Disk,
        folder: str,
        config: LogConfig,
        now_ms: int,
        recovery_point: int | None = None,
        clean: bool = False,
    ) -> "Log":
        """Open a log and create its folder if it is missing. Blocks: call it in a thread. `recovery` has the report.

        The caller knows that data below `recovery_point` was durable. `clean` means that the last shutdown was clean.
        The result is correct without either: they decide how to judge damage and what to check.
        """
        return Log(disk, folder, config, load_log(disk, folder, config, now_ms, recovery_point, clean))

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

    def append_marker(self, marker: bytes, leader_epoch: int, now_ms: int) -> AppendResult:
        """Append as leader the control batch that ends a producer's transaction (see `encode_marker`).

        Raises INVALID_PRODUCER_EPOCH or TRANSACTION_COORDINATOR_FENCED if the log has a marker or batch of a later
        epoch. A marker for a producer without a transaction here is appended too: it fences the producer's old epochs.
        """
        records = memoryview(bytearray(marker))
        batches = check_batches(records, len(records), from_producer=False)
        self.producers.check_marker(batches[0][1], read_marker(records))
        return self.append(records, batches, leader_epoch, now_ms)

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
        expected = self.log_end_offset
        for start, header in batches:
            at = header[0] if offset is None else offset
            delta = header[6]
            if at != expected:
                # Compaction on the leader left a gap: reads in it need the index.
                self._tail.clear()
            expected = at + delta + 1
            self._tail.append(at, position + start)
            segment.note_batch(position + start, at + delta, header[1], header[8], interval)
            if header[9] >= 0:
                if header[5] & CONTROL:
                    self._note_marker(segment, header, records[start : start + header[1]], at, now_ms)
                else:
                    self.producers.record(header, at, now_ms, append_time_ms)
            if offset is not None:
                offset += delta + 1
        if segment.first_append_ms is None:
            segment.first_append_ms = now_ms
        segment.size_bytes = end
        self._segments.size_bytes += size_bytes
        self._syncs.appended(size_bytes, batches[-1][1][4])
        self.log_end_offset = end_offset

    def _note_marker(
        self, segment: LogSegment, header: BatchHeader, batch: memoryview, offset: int, now_ms: int
    ) -> None:
        marker = marker_of(header, batch)
        if marker is None:
            return
        ended = self.producers.end_transaction(header, marker, offset, now_ms)
        entry = aborted(header.producer_id, marker, ended)
        if entry is not None:
            segment.aborted.append(entry)
            self._last_aborted_offset = max(self._last_aborted_offset, entry.last_offset)

    def _is_due(self, segment: LogSegment, now_ms: int) -> bool:
        begun_ms = segment.first_append_ms
        return begun_ms is not None and segment.size_bytes > 0 and now_ms - begun_ms >= self.config.segment_ms

    def _allocate(self, segment: LogSegment, end: int) -> None:
        """Preallocate ahead of the end: double the size, within bounds. If that fails, just try the write."""
        config = self.config
        ahead = min(max(end, config.preallocate_bytes_min), config.preallocate_bytes_max)
        allocated = max(end, min(end + ahead, config.segment_bytes))
        try:
            segment.file.allocate(allocated)
            segment.allocated_bytes = allocated
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

    def close_segment(self, base_offset: int, now_ms: int) -> None:
        """Close this segment if it is the active one: only closed segments can be scrubbed. Raises StorageError."""
        if self._active is not None and self._active.base_offset == base_offset and not self.read_only_forever:
            self.roll(now_ms)

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
            self._syncs.has_failed = True
            self._fail_permanently("a sync failed")
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
        if self._syncs.finished(job):
            self._syncs.durable(job)
            self.synced_end_offset = max(self.synced_end_offset, job.end_offset)

    def sync_failed(self, job: SyncJob) -> None:
        """Stop appends: the sync failed. The kernel may have dropped the pages, so a second sync proves nothing."""
        self._syncs.finished(job)
        self._syncs.has_failed = True
        self._fail_permanently("a sync failed")

    def flush_job(self) -> FlushJob | None:
        """Return a sync of the segments whose entries in the commit log will be overwritten; None if all are synced.

        Run it in a thread, then call `flushed` or `flush_failed`. Raises OSError if an earlier sync failed.
        """
        return self._syncs.flush_job(self, self._active)

    def flushed(self, job: FlushJob) -> bool:
        """Record that the flush succeeded; return False if it has to be repeated."""
        return self._syncs.flushed(job)

    def flush_failed(self, job: FlushJob) -> None:
        """Stop appends, as after a failed sync. What the commit log covers is durable."""
        for shared in job.files:
            shared.release()
        self._syncs.has_failed = True
        self._fail_permanently("a sync failed")

    def _leave_commit_log(self) -> None:
        """Make the segments durable and the commit log's entries void, before the segments change. Blocks."""
        self._syncs.end_flush()
        if self.frames is not None and self.frames.exist:
            self._syncs.sync_now(self._active)
            self.frames.void()

    def stall(self) -> None:
        """Stop appends until `resume`: a sync hangs, so no append could become durable."""
        self.read_only = self._is_stalled = True
        if not self.read_only_forever:
            self.read_only_reason = "the disk does not answer"

    def resume(self) -> None:
        """Allow appends again: the sync ended, and its outcome was recorded."""
        self._is_stalled = False
        self.read_only = self.read_only_forever or self._has_garbage

    def _fail_permanently(self, reason: str) -> None:
        self.read_only = self.read_only_forever = True
        self.read_only_reason = reason

    def close(self) -> bool:
        """Make everything durable and close the files. Blocks: call it in a thread, with no job running.

        Return whether the log was closed cleanly, so that the next open needs no scan.
        """
        is_clean = not self.read_only_forever
        self._syncs.end_flush()
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
        self._fail_permanently(
            "the log is closed" if is_clean else self.read_only_reason or "no checkpoint was written"
        )
        self._segments.close()
        self._syncs.close()
        return is_clean

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, offset: int, max_bytes: int, upto_offset: int, *, min_one_batch: bool = True) -> ReadResult | None:
        """Return whole batches, starting with the one that contains `offset`, all below `upto_offset`.

        The batches have at most `max_bytes`; with `min_one_batch` the first is returned even if it is larger. Return
        None if the read needs a search or disk I/O: then run `read_job`. Raises OFFSET_OUT_OF_RANGE.
        """
        end_offset = self.log_end_offset
        if offset < self.log_start_offset or offset > end_offset:
            raise self._out_of_range(offset)
        active = self._active
        if offset >= upto_offset or offset == end_offset or active is None:
            return ReadResult(b"", offset)
        span = self._tail.span(offset, max_bytes, upto_offset, end_offset, active.size_bytes, min_one_batch)
        if span is None:
            return self._segments.read_cached(offset, max_bytes, min(upto_offset, end_offset), min_one_batch)
        start, end, next_offset = span
        # These bytes were just written, so they are in the page cache.
        data = active.file.pread(start, end - start) if end > start else b""
        # Bypass NamedTuple's constructor, which is Python code.
        return tuple.__new__(ReadResult, (data, next_offset))

    def read_job(self, offset: int, max_bytes: int, upto_offset: int, *, min_one_batch: bool = True) -> ReadJob:
        """Return the same read as a job. A thread calls it once; it returns the batches."""
        if offset < self.log_start_offset or offset > self.log_end_offset:
            raise self._out_of_range(offset)
        may_have_gap = self._may_have_gap_after(self._segments.index_of(offset))
        return self._segments.read_job(
            offset, max_bytes, upto_offset, min_one_batch, self.log_end_offset, may_have_gap=may_have_gap
        )

    def read_limit(self, offset: int) -> int:
        """Return an offset that no single read from `offset` reaches beyond."""
        return self._segments.read_limit(offset, self.log_end_offset)

    def headers_job(self, offset: int, to_offset: int, upto_offset: int, headers_max: int) -> HeadersJob:
        """Return a job that reads the headers of the batches that overlap [offset, to_offset), all below `upto_offset`.

        The job reads only the headers and checks no CRC. Run it in a thread.
        """
        if offset < self.log_start_offset or offset > self.log_end_offset:
            raise self._out_of_range(offset)
        return self._segments.headers_job(offset, to_offset, min(upto_offset, self.log_end_offset), headers_max)

    def bytes_between(self, offset: int, upto_offset: int) -> int:
        """Estimate the size of the batches from `offset` to `upto_offset`; exact near the end of the log."""
        if offset >= upto_offset or self._active is None:
            return 0
        end_offset = self.log_end_offset
        span = self._tail.span(offset, 1 << 62, upto_offset, end_offset, self._active.size_bytes, True)
        if span is not None:
            return span.end - span.start
        return self._segments.bytes_between(offset, upto_offset, end_offset)

    def _out_of_range(self, offset: int) -> KafkaError:
        return KafkaError(
            ErrorCode.offset_out_of_range,
            f"offset {offset} is not within {self.log_start_offset} to {self.log_end_offset}",
        )

    # -- transactions --------------------------------------------------------------------------------------------------

    def last_stable_offset(self, high_watermark: int, visible_end: int | None = None) -> int:
        """Return the end of what read_committed consumers may read.

        It is the first offset of the earliest transaction that is open or whose marker is not below the watermark, or
        `visible_end` if there is none (by default the watermark).
        """
        end = high_watermark if visible_end is None else visible_end
        first = self.producers.transactions.first_unstable(high_watermark)
        return end if first is None else min(end, max(first, self.log_start_offset))

    def open_transactions(self) -> Iterator[tuple[int, ProducerState]]:
        """Yield the id and state of each producer with an open transaction, by the transaction's first offset."""
        return self.producers.open_transactions()

    @property
    def undecided_from(self) -> int | None:
        """The first offset of the earliest open transaction, None if there is none."""
        first = next(self.producers.transactions.first_offsets(), None)
        return None if first is None else max(first, self.log_start_offset)

    def aborted_job(self, offset: int, upto_offset: int, *, opens: bool = True) -> AbortedJob | None:
        """Return a job for a thread that finds the aborted transactions that overlap [offset, upto_offset).

        None if there are none. Create it together with the read of the same range: compaction removes the entries of
        transactions whose records it removes. Call or close the job: it holds files open. Both this method and the job
        may raise AbortedIndexDamaged. Without `opens`, the job opens the files, and the caller prevents compaction.
        """
        if offset > self._last_aborted_offset or offset >= upto_offset:
            return None
        segments = self._segments.all[self._segments.index_of(offset) :]
        return search((segment.aborted for segment in segments), offset, upto_offset, opens=opens)

    def write_aborted(self) -> Mapping[int, Summary] | None:
        """Write the indexes of aborted transactions; return what they hold, by segment, or None if that fails."""
        if self._last_aborted_offset < 0:
            return {}
        indexes = {segment.base_offset: segment.aborted for segment in self._segments.all if segment.aborted.count}
        is_written = all(index.try_write() for index in indexes.values())
        return {base_offset: index.summary for base_offset, index in indexes.items()} if is_written else None

    def _find_last_aborted(self) -> int:
        """Return the offset of the last abort marker in the indexes, -1 if there is none."""
        for segment in reversed(self._segments.all):
            if segment.aborted.last is not None:
                return segment.aborted.last.last_offset
        return -1

    # -- lookups by time -----------------------------------------------------------------------------------------------

    def offset_for_timestamp_job(
        self, timestamp_ms: int, upto_offset: int | None = None
    ) -> Callable[[], TimestampOffset | None]:
        """Return a job for a thread: find the first record with a timestamp of at least `timestamp_ms`."""
        lookup = self._time_lookup(upto_offset)
        return lambda: lookup.first_at_or_after(timestamp_ms)

    def max_timestamp_job(self, upto_offset: int | None = None) -> Callable[[], TimestampOffset | None]:
        """Return a job for a thread: find the first record that has the largest timestamp."""
        return self._time_lookup(upto_offset).largest

    def _time_lookup(self, upto_offset: int | None) -> TimeLookup:
        start = self.log_start_offset
        end = self.log_end_offset if upto_offset is None else upto_offset
        closed = [s.base_offset for s in self._segments.all[self._segments.index_of(start) : -1]]
        active = self._active.view() if self._active is not None else None
        return TimeLookup(self.disk, self.folder, closed, active, start, end)

    # -- leader epochs -------------------------------------------------------------------------------------------------

    def start_epoch(self, epoch: int) -> None:
        """Start a leader epoch at the log's end. It becomes durable with the first batch written in it."""
        self.epochs.assign(epoch, self.log_end_offset)

    def epoch_of(self, offset: int) -> int:
        """Return the leader epoch of the record at `offset`, or -1 if it is unknown."""
        return self.epochs.epoch_of(offset)

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the largest epoch up to `epoch` and its end offset, or (-1, -1) if `epoch` is newer than all known."""
        return self.epochs.end_offset(epoch, self.log_end_offset)

    # -- deletion and truncation ---------------------------------------------------------------------------------------

    def increment_log_start(self, offset: int) -> DeletionJob:
        """Hide records below `offset` from readers (DeleteRecords). Run the job in a thread to make that durable."""
        if offset > self.log_end_offset:
            raise self._out_of_range(offset)
        if self.read_only_forever:
            raise StorageError(f"the log is read-only: {self.read_only_reason}")
        self.log_start_offset = max(self.log_start_offset, offset)
        count = 0
        while count + 1 < self.segment_count and self._segments.all[count + 1].base_offset <= self.log_start_offset:
            count += 1
        return self._delete_first(count, is_start_set=True)

    def apply_retention(self, now_ms: int, upto_offset: int) -> DeletionJob | None:
        """Drop segments that exceed the retention time or size and lie wholly below `upto_offset` (the high watermark).

        Run the job in a thread to remove the files. If the active segment is too old, a new empty segment replaces it;
        if that cannot be created, the active segment stays. A log that failed permanently is left unchanged.
        """
        self.producers.expire(now_ms)
        if self.read_only_forever:
            return None
        count = self._count_deletable(now_ms, upto_offset)
        if count == 0:
            return None
        if count == self.segment_count:
            try:
                self.roll(now_ms)
            except StorageError:
                # Most likely the disk is full: all the more reason to remove the other segments.
                count -= 1
        return self._delete_first(count) if count else None

    def _count_deletable(self, now_ms: int, upto_offset: int) -> int:
        """Return how many of the first segments can be deleted: all if the active one is too old as well.

        A segment with a record at or above `upto_offset` stays. Records without timestamps do not expire.
        """
        config, segments = self.config, self._segments.all
        excess_bytes = self.size_bytes - config.retention_bytes
        for count, segment in enumerate(segments):
            is_active = segment is segments[-1]
            next_base = self.log_end_offset if is_active else segments[count + 1].base_offset
            if next_base > upto_offset or (is_active and segment.size_bytes == 0):
                return count
            is_below_start = next_base <= self.log_start_offset and not is_active
            is_excess = config.cleanup_delete and config.retention_bytes >= 0 and excess_bytes >= segment.size_bytes
            if not is_below_start and not is_excess and not self._is_expired(segment, now_ms):
                return count
            excess_bytes -= segment.size_bytes
        return len(segments)

    def _is_expired(self, segment: LogSegment, now_ms: int) -> bool:
        if not self.config.cleanup_delete or self.config.retention_ms < 0:
            return False
        largest, _ = segment.largest_timestamp()
        return 0 <= largest < now_ms - self.config.retention_ms

    def _delete_first(self, count: int, is_start_set: bool = False) -> DeletionJob:
        removed = self._segments.remove(0, count)
        if removed:
            self.log_start_offset = max(self.log_start_offset, self._segments.all[0].base_offset)
        self.epochs.start_at(self.log_start_offset)
        start_file = NumberFile(f"{self.folder}/{START_NAME}", lambda: self.log_start_offset)
        return DeletionJob(
            self.disk,
            self.folder,
            [path for segment in removed for path in segment.paths()],
            segments=len(removed),
            size_bytes=sum(segment.size_bytes for segment in removed),
            number_file=start_file if is_start_set else None,
        )

    def end_after_truncation(self, offset: int) -> int:
        """Return where `truncate_to(offset)` would end the log: at `offset`, or before it. Blocks."""
        if offset >= self.log_end_offset:
            return self.log_end_offset
        if offset <= self.log_start_offset:
            return offset
        return _end_below(self._segments.all[self._segments.index_of(offset)], offset)[0]

    def truncate_to(self, offset: int) -> None:
        """Drop every batch that reaches `offset` or above (a follower truncating to match its leader). Blocks.

        Durable when it returns. The log ends after the last batch that remains: below `offset`, if that lies inside a
        batch or in a gap.
        """
        if offset >= self.log_end_offset:
            return
        if offset <= self.log_start_offset:
            self.truncate_fully(offset)
            return
        self._leave_commit_log()
        index = self._segments.index_of(offset)
        segment = self._segments.all[index]
        end_offset, position = _end_below(segment, offset)
        lower_synced_end(self.disk, self.folder, end_offset)
        self.log_end_offset = end_offset
        self._remove_last(index + 1)
        if position is not None:
            self._segments.cut_active(position, self.log_end_offset - 1)
        else:
            segment.resume()
        if not segment.aborted.cut_after(self.log_end_offset - 1):
            segment.aborted.replace(derive_last(self.disk, self._paths_upto(index)))
        self._active = segment
        segment.file.datasync()
        if self.log_end_offset < self.log_start_offset:
            # The log start offset was inside the removed batch.
            self.log_start_offset = self.log_end_offset
            write_number(self.disk, f"{self.folder}/{START_NAME}", self.log_start_offset)
        self._truncated()

    def truncate_fully(self, new_start_offset: int) -> None:
        """Drop everything and restart the log, empty, at `new_start_offset`. Blocks; durable when it returns."""
        self._leave_commit_log()
        lower_synced_end(self.disk, self.folder, 0)
        self.log_start_offset = self.log_end_offset = new_start_offset
        remove_files(self.disk, [f"{self.folder}/{START_NAME}"])
        self._remove_last(0)
        self._active = self._segments.begin(new_start_offset)
        # The folder may be as new as its first segment.
        for folder in (self.folder, self.folder.rpartition("/")[0] or "/"):
            self.disk.sync_dir(folder)
        # The log is empty, so nothing can be lost, whether the new start is above or below the old end.
        self.synced_end_offset = new_start_offset
        self._truncated()

    def _remove_last(self, first: int) -> None:
        """Remove the segments from `first` on, and the snapshots that describe them.

        This is durable before anything else changes: recovery would trust a segment that reappeared with its snapshot.
        The newest segment is removed first: a crash leaves a log without a hole.
        """
        self._syncs.truncated(self.log_end_offset)
        for segment in reversed(self._segments.remove(first, self.segment_count)):
            remove_files(self.disk, reversed(segment.paths()))
        self.disk.sync_dir(self.folder)

    def _truncated(self) -> None:
        active = self._active
        self._tail.clear()
        self._has_garbage = False
        self.synced_end_offset = min(self.synced_end_offset, self.log_end_offset)
        self.epochs.truncate_to(self.log_end_offset)
        if self._cleaned_upto > self.log_end_offset:
            self._cleaned_upto = self.log_end_offset
            write_number(self.disk, f"{self.folder}/{CLEANER_NAME}", self._cleaned_upto)
        if active is not None and active.last_batch_position >= 0:
            last = header_at(active.file, active.last_batch_position, active.size_bytes)
            self._syncs.appended(0, last.crc if last is not None else 0)
        self.producers = self._rebuild_producers()

    def _paths_upto(self, index: int) -> list[tuple[str, int]]:
        return [(segment.path, segment.size_bytes) for segment in self._segments.all[: index + 1]]

    def _rebuild_producers(self) -> ProducerStates:
        """Return the producer state at the log's end, from the last snapshot and the batches after it. Blocks.

        Each producer's last-seen time is kept: a batch's own timestamp is the client's.
        """
        snapshot = None
        if self._syncs.snapshots:
            path = segment_path(self.folder, self._syncs.snapshots[-1], ".snapshot")
            snapshot = usable_snapshot(read_file(self.disk, path) or b"", self._cleaned_upto)
        first_base = self._segments.all[0].base_offset
        producers = restore_producers(snapshot, self.config.producer_expiration_ms, first_base)
        start = snapshot.offset if snapshot is not None else 0
        for segment in self._segments.all[self._segments.index_of(start) :]:
            with segment.brief_view() as view:
                for position, header in view.walk(view.position_near(start)):
                    if header.producer_id < 0 or header.base_offset < start:
                        continue
                    known = self.producers.get(header.producer_id)
                    seen_ms = header.max_timestamp if known is None else known.last_seen_ms
                    if not header.is_control:
                        append_time_ms = header.max_timestamp if header.log_append_time else -1
                        producers.record(header, header.base_offset, seen_ms, append_time_ms)
                        continue
                    marker = marker_of(header, view.shared.file.pread(position, header.size_bytes))
                    if marker is not None:
                        producers.end_transaction(header, marker, header.base_offset, seen_ms)
        return producers

    # -- damage --------------------------------------------------------------------------------------------------------

    def closed_segments(self) -> list[int]:
        return [segment.base_offset for segment in self._segments.all[:-1]]

    def closed_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments.all[:-1])

    def scrub(self, base_offset: int) -> SegmentScrub | None:
        """Return a scrub that re-reads a closed segment in steps, in a thread; None if the log no longer has it.

        Call `still_has` before each step and before using the result.
        """
        segments = self._segments.all
        index = self._segments.index_of(base_offset)
        if index + 1 >= len(segments) or segments[index].base_offset != base_offset:
            return None
        next_base = segments[index + 1].base_offset
        may_have_gap = self._may_have_gap_after(index)
        epochs = LeaderEpochs(self.epochs.entries())
        segments[index].aborted.try_write()
        return SegmentScrub(self.disk, segments[index], next_base, may_have_gap=may_have_gap, epochs=epochs)

    def _may_have_gap_after(self, index: int) -> bool:
        """Return whether compaction may have left a gap between this segment's last batch and its end."""
        segments = self._segments.all
        end = segments[index + 1].base_offset if index + 1 < len(segments) else self.log_end_offset
        return self.config.cleanup_compact or end <= self._cleaned_upto

    def still_has(self, scrub: SegmentScrub) -> bool:
        """Return whether the segment is still closed and not changed by retention, compaction or truncation."""
        return any(segment is scrub.segment for segment in self._segments.all[:-1])

    def rebuild_indexes_job(self, scrub: SegmentScrub) -> Callable[[], LogSegment]:
        """Return a job for a thread that rebuilds the indexes of a scrubbed segment.

        Pass its result to `indexes_rebuilt`. Concurrent reads are safe: readers check each entry that they use. The
        index of aborted transactions is written later.
        """
        segment = scrub.segment
        index = self._segments.index_of(segment.base_offset)
        paths = self._paths_upto(index)
        scrub.derived_from = self._segments.all[: index + 1]
        fresh = LogSegment(self.disk, self.folder, segment.base_offset, segment.size_bytes)
        interval = self.config.index_interval_bytes

        def rebuild() -> LogSegment:
            try:
                fresh.rebuild_indexes(interval)
                if scrub.has_bad_aborted:
                    fresh.aborted.reset(derive_last(self.disk, paths))
            finally:
                fresh.release()
            return fresh

        return rebuild

    def indexes_rebuilt(self, scrub: SegmentScrub, fresh: LogSegment) -> bool:
        """Use the rebuilt indexes, as far as the log still has the segments that they were derived from.

        Return whether nothing is left to rebuild: an earlier segment may have been replaced or removed meanwhile.
        """
        if not self.still_has(scrub):
            return True
        scrub.segment.offset_index, scrub.segment.time_index = fresh.offset_index, fresh.time_index
        if not scrub.has_bad_aborted:
            return True
        present = {id(segment) for segment in self._segments.all}
        if not all(id(segment) in present for segment in scrub.derived_from):
            return False
        scrub.segment.aborted = fresh.aborted
        self._last_aborted_offset = max(self._last_aborted_offset, self._find_last_aborted())
        self._syncs.index_changed(fresh.aborted.path, self.config.checkpoint_bytes)
        if not fresh.aborted.count:
            # No later write would replace the bad file.
            remove_files(self.disk, [fresh.aborted.path])
        return True

    def set_aside_from(self, offset: int, data_path: str, now_ms: int) -> list[str]:
        """Move the segment that should hold `offset` and all later ones to `set-aside/`; the log ends before them.

        Return the folders that were created: none if nothing is at or after `offset`. Durable when it returns. A log
        that was read-only because of its damage becomes writable again. Blocks; no job may be running. An OSError
        means the move is half done and leaves the log read-only; the next start recovers it.
        """
        index = self._segments.index_of(offset)
        if not self._segments.all or (offset >= self.log_end_offset and not self.is_broken):
            return []
        base_offset = self._segments.all[index].base_offset
        end = max(base_offset, self.log_start_offset)
        name = f"{self.folder.rpartition('/')[2]}-{base_offset}"
        paths = _files_from(self.disk, self.folder, base_offset, end)
        self._leave_commit_log()
        lower_synced_end(self.disk, self.folder, end)
        self._segments.remove(index, self.segment_count)
        self._active = None
        self.log_end_offset = end
        try:
            folders = [set_aside(self.disk, data_path, paths, name, now_ms)]
            self._syncs.truncated(end)
            self._active = self._segments.begin(end)
            self.disk.sync_dir(self.folder)
            self._truncated()
        except OSError as error:
            self._fail_permanently(f"damaged segments could not be set aside: {error}")
            raise
        except KafkaError:
            # An earlier segment's chain of batches is broken too: no remaining segment can be trusted.
            folders += self.set_aside_from(self._segments.all[0].base_offset, data_path, now_ms)
        if self.is_broken:
            self.is_broken = self.read_only = self.read_only_forever = False
            self.read_only_reason = ""
        return folders

    # -- compaction ----------------------------------------------------------------------------------------------------

    def compaction_job(self, now_ms: int, upto_offset: int) -> CompactionJob | None:
        """Return the next pass over closed segments below `upto_offset` (the high watermark), if enough is dirty.

        It ends before segments that are too new or not synced, and before the last stable offset. Run the job in a
        thread, then call `finish_compaction`, even after a failure. Return None while a job runs.
        """
        config = self.config
        if not config.cleanup_compact or self._compaction is not None or self.read_only_forever:
            return None
        # Compaction leaves gaps, which recovery accepts only in what was durable.
        upto_offset = min(self.last_stable_offset(upto_offset), self.synced_end_offset)
        cleanable: list[LogSegment] = []
        next_base = 0
        dirty_bytes = 0
        for segment, following in pairwise(self._segments.all):
            if following.base_offset > upto_offset:
                break
            is_dirty = following.base_offset > self._cleaned_upto
            if is_dirty and config.min_compaction_lag_ms > 0:
                largest, _ = segment.largest_timestamp()
                if largest > now_ms - config.min_compaction_lag_ms:
                    break
            cleanable.append(segment)
            next_base = following.base_offset
            dirty_bytes += segment.size_bytes if is_dirty else 0
        total_bytes = sum(segment.size_bytes for segment in cleanable)
        if dirty_bytes == 0 or dirty_bytes / total_bytes < config.min_cleanable_ratio:
            return None
        dirty_from = max(self._cleaned_upto, self.log_start_offset)
        self._compaction = CompactionJob(
            self.disk,
            self.folder,
            cleanable,
            next_base,
            config,
            now_ms,
            dirty_from,
            self.producers.last_batches(),
            self.aborted_job(cleanable[0].base_offset, next_base, opens=False),
            self._release_closed(cleanable, next_base),
        )
        return self._compaction

    def _release_closed(self, segments: Sequence[LogSegment], next_base: int) -> Callable[[], None]:
        """Return a job for a thread: no entry in the commit log changes these closed segments, or what replaces them.

        Until they are replaced, they have to be durable without the entries.
        """
        frames, syncs, paths = self.frames, self._syncs, [segment.path for segment in segments]

        def release() -> None:
            if frames is None or not frames.exist:
                return
            for path in paths:
                with suppress(FileNotFoundError), closing(self.disk.open(path)) as file:
                    file.datasync()  # unless retention removed it
            if syncs.has_failed:
                raise OSError(EIO, "a sync failed")
            frames.void(next_base)

        return release

    def finish_compaction(self, job: CompactionJob) -> DeletionJob:
        """Replace the segments that the job read, if they still exist. The returned job removes files, in any case.

        If a passing error prevents it, the old segments stay in use and `job.swap_error` is set. Raises StorageError if
        the disk does not even allow that: the log is then read-only until it is reopened.
        """
        self._compaction = None
        groups = job.usable_groups(self._segments.all)
        deleted: list[str] = []
        if groups:
            try:
                deleted = replace_segments(self.disk, self.folder, groups)
            except SwapUnfinished as error:
                self._fail_permanently(f"compaction failed: {error.strerror}")
                raise storage_error(UNFINISHED, error) from error
            except OSError as error:
                groups, job.is_done, job.swap_error = [], False, error
        for group in groups:
            base_offset = group.old[0].base_offset
            fresh = LogSegment(self.disk, self.folder, base_offset, group.size_bytes) if group.has_successor else None
            if fresh is not None:
                fresh.aborted.reset(group.aborted)
            if any(segment.aborted.count for segment in group.old):
                # Until the next checkpoint, recovery would rebuild the index.
                self._syncs.index_changed(group.old[0].aborted.path, self.config.checkpoint_bytes)
            self._segments.replace(group.old, fresh)
        if job.is_done:
            self._cleaned_upto = max(self._cleaned_upto, job.cleaned_upto)
        return job.cleanup(deleted, lambda: self._cleaned_upto)


def _end_below(segment: LogSegment, offset: int) -> tuple[int, int | None]:
    """Return the end of the last batch below `offset`, and the position of the batch that reaches `offset`, if any."""
    end_offset = segment.base_offset
    with segment.view() as view:
        for at, header in view.walk(view.position_near(offset - 1)):
            if header.last_offset >= offset:
                return end_offset, at
            end_offset = header.next_offset
    return end_offset, None


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


def _files_from(disk: Disk, folder: str, base_offset: int, end_offset: int) -> list[str]:
    """Return the files of all segments from `base_offset` on, and the snapshots above `end_offset`. Blocks.

    Found by name: a damaged log may not know all of them. Snapshots come first, then segments, newest first, each after
    its indexes. So if only some files are moved, the remaining log has no hole.
    """
    files: list[tuple[bool, int, int, str]] = []
    for name in disk.listdir(folder):
        stem, dot, suffix = name.partition(".")
        kind = _SET_ASIDE_ORDER.get(dot + suffix)
        if kind is None or not stem.isdigit():
            continue
        offset, is_snapshot = int(stem), kind == 0
        if offset > end_offset if is_snapshot else offset >= base_offset:
            files.append((not is_snapshot, -offset, kind, f"{folder}/{name}"))
    return [path for *_, path in sorted(files)]
