"""One partition's log.

Files in its folder: `NNN.log` segments of batches with `NNN.index` and `NNN.timeindex` (see `index`), `NNN.snapshot`
(see `snapshot`), `leader-epoch-checkpoint` (see `epochs`), `log-start-offset` (see `recovery`), `cleaner-offset` (see
`swap`), `synced-end` (see `synced_end`). NNN is an offset with 20 digits.
"""

from collections.abc import Callable

from chronik.storage.batches import header_at
from chronik.storage.compaction import CompactionJob, plan_compaction
from chronik.storage.config import LogConfig
from chronik.storage.deletion import DeletionJob, NumberFile, segments_to_delete
from chronik.storage.disk import Disk, write_file_atomic
from chronik.storage.epochs import LeaderEpochs
from chronik.storage.errors import StorageError, StorageFull, storage_error
from chronik.storage.headers import HeadersJob, HeadersResult
from chronik.storage.producers import Duplicate
from chronik.storage.reading import ReadJob, ReadResult
from chronik.storage.recovery import START_NAME, LoadedLog, RecoveryReport, load_log
from chronik.storage.scrubbing import SegmentScrub
from chronik.storage.segment import LogSegment
from chronik.storage.set_aside import set_aside
from chronik.storage.small_files import encode_value
from chronik.storage.swap import Replacement, replace_segments
from chronik.storage.synced_end import lower_synced_end
from chronik.storage.syncing import SyncJob
from chronik.storage.times import TimeLookup, TimestampOffset
from chronik.storage.truncation import files_from, rebuild_producers, remove_segments
from chronik.storage.writing import AppendResult, LogWriter
from chronik.wire.errors import ErrorCode, KafkaError

__all__ = [
    "AppendResult",
    "CompactionJob",
    "DeletionJob",
    "Duplicate",
    "HeadersJob",
    "HeadersResult",
    "Log",
    "LogConfig",
    "ReadJob",
    "ReadResult",
    "RecoveryReport",
    "SegmentScrub",
    "StorageError",
    "StorageFull",
    "SyncJob",
    "TimestampOffset",
]


class Log(LogWriter):
    """One partition's log: a folder of segments. Only the last segment is written to.

    Invariant: log_start_offset <= log_end_offset and synced_end_offset <= log_end_offset. Offsets increase and are not
    reused. Appended records are readable at once; records below `synced_end_offset` also survive a crash.

    Owned by the event loop. Threads run only `open`, `close` and the jobs that the loop creates (`SyncJob`, `ReadJob`,
    `DeletionJob`, `CompactionJob`, lookups by time). `truncate_to` and `truncate_fully` also block, and require that no
    job is running. An idle log holds no file open. The first append creates the first segment.
    """

    def __init__(self, disk: Disk, folder: str, config: LogConfig, loaded: LoadedLog) -> None:
        super().__init__(disk, folder, config, loaded)
        self._cleaned_upto = loaded.cleaned_upto
        self._compaction: CompactionJob | None = None

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
        return ReadResult(active.file.pread(start, end - start) if end > start else b"", next_offset)

    def read_job(self, offset: int, max_bytes: int, upto_offset: int, *, min_one_batch: bool = True) -> ReadJob:
        """Return the same read as a job. A thread calls it once; it returns the batches."""
        if offset < self.log_start_offset or offset > self.log_end_offset:
            raise self._out_of_range(offset)
        return self._segments.read_job(offset, max_bytes, upto_offset, min_one_batch, self.log_end_offset)

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

    # -- lookups by time (blocking) ------------------------------------------------------------------------------------

    def offset_for_timestamp_job(
        self, timestamp_ms: int, upto_offset: int | None = None
    ) -> Callable[[], TimestampOffset | None]:
        """Return a job for a thread: find the first record with a timestamp of at least `timestamp_ms`."""
        lookup = self._time_lookup(upto_offset)
        return lambda: lookup.first_at_or_after(timestamp_ms)

    def max_timestamp_job(self, upto_offset: int | None = None) -> Callable[[], TimestampOffset | None]:
        """Return a job for a thread: find the first record that has the largest timestamp."""
        return self._time_lookup(upto_offset).largest

    def offset_for_timestamp(self, timestamp_ms: int, upto_offset: int | None = None) -> TimestampOffset | None:
        """Run `offset_for_timestamp_job` now."""
        return self.offset_for_timestamp_job(timestamp_ms, upto_offset)()

    def max_timestamp(self, upto_offset: int | None = None) -> TimestampOffset | None:
        """Run `max_timestamp_job` now."""
        return self.max_timestamp_job(upto_offset)()

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
        count = segments_to_delete(
            self._segments.all, self.config, now_ms, upto_offset, self.log_start_offset, self.log_end_offset
        )
        if count == 0:
            return None
        if count == self.segment_count:
            try:
                self.roll(now_ms)
            except StorageError:
                # Most likely the disk is full: all the more reason to remove the other segments.
                count -= 1
        return self._delete_first(count) if count else None

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

    def truncate_to(self, offset: int) -> None:
        """Drop every batch that reaches `offset` or above (a follower truncating to match its leader). Blocks.

        Durable when it returns. If `offset` lies inside a batch, the log ends below `offset`.
        """
        if offset >= self.log_end_offset:
            return
        if offset <= self.log_start_offset:
            self.truncate_fully(offset)
            return
        at = self._segments.index_of(offset)
        segment = self._segments.all[at]
        view = segment.view()
        try:
            found = view.find(offset)
        finally:
            view.release()
        end_offset = min(offset, found[1].base_offset) if found is not None else offset
        lower_synced_end(self.disk, self.folder, end_offset)
        self.log_end_offset = end_offset
        self._remove_last(at + 1)
        if found is not None:
            self._segments.cut_active(found[0], self.log_end_offset - 1)
        else:
            segment.resume()
        self._active = segment
        segment.file.datasync()
        if self.log_end_offset < self.log_start_offset:
            # The log start offset was inside the removed batch.
            self.log_start_offset = self.log_end_offset
            start = encode_value(str(self.log_start_offset))
            write_file_atomic(self.disk, f"{self.folder}/{START_NAME}", start)
        self._truncated()

    def truncate_fully(self, new_start_offset: int) -> None:
        """Drop everything and restart the log, empty, at `new_start_offset`. Blocks; durable when it returns."""
        lower_synced_end(self.disk, self.folder, 0)
        self.log_start_offset = self.log_end_offset = new_start_offset
        if self.disk.exists(f"{self.folder}/{START_NAME}"):
            self.disk.remove(f"{self.folder}/{START_NAME}")
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
        """
        self._syncs.truncated(self.log_end_offset)
        remove_segments(self.disk, self._segments.remove(first, self.segment_count))
        self.disk.sync_dir(self.folder)

    def _truncated(self) -> None:
        active = self._active
        self._tail.clear()
        self._has_garbage = False
        self.synced_end_offset = min(self.synced_end_offset, self.log_end_offset)
        self.epochs.truncate_to(self.log_end_offset)
        if active is not None and active.last_batch_position >= 0:
            last = header_at(active.file, active.last_batch_position, active.size_bytes)
            self._syncs.appended(0, last.crc if last is not None else 0)
        self.producers = rebuild_producers(
            self.disk, self.folder, self._segments.all, self._syncs.snapshots, self.config, self.producers
        )

    # -- damage --------------------------------------------------------------------------------------------------------

    def closed_segments(self) -> list[int]:
        """Return the base offsets of all segments except the active one."""
        return [segment.base_offset for segment in self._segments.all[:-1]]

    def closed_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments.all[:-1])

    def scrub(self, base_offset: int) -> SegmentScrub | None:
        """Return a scrub that re-reads a closed segment in steps, in a thread; None if the log no longer has it.

        Call `has_scrubbed` before each step and before using the result.
        """
        segments = self._segments
        at = segments.index_of(base_offset)
        if at + 1 >= len(segments.all) or segments.all[at].base_offset != base_offset:
            return None
        next_base = segments.all[at + 1].base_offset
        may_have_gap = self.config.cleanup_compact or next_base <= self._cleaned_upto
        epochs = LeaderEpochs(self.epochs.entries())
        return SegmentScrub(self.disk, segments.all[at], next_base, may_have_gap=may_have_gap, epochs=epochs)

    def has_scrubbed(self, scrub: SegmentScrub) -> bool:
        """Return whether the segment is still closed and not changed by retention, compaction or truncation."""
        segments = self._segments.all
        at = self._segments.index_of(scrub.segment.base_offset)
        return at + 1 < len(segments) and segments[at] is scrub.segment

    def rebuild_indexes_job(self, scrub: SegmentScrub) -> Callable[[], LogSegment]:
        """Return a job for a thread that rebuilds both indexes of a scrubbed segment.

        Pass its result to `indexes_rebuilt`. Concurrent reads are safe: readers check each entry that they use.
        """
        segment = scrub.segment
        fresh = LogSegment(self.disk, self.folder, segment.base_offset, segment.size_bytes)
        interval = self.config.index_interval_bytes

        def rebuild() -> LogSegment:
            try:
                fresh.rebuild_indexes(interval)
            finally:
                fresh.let_go()
            return fresh

        return rebuild

    def indexes_rebuilt(self, scrub: SegmentScrub, fresh: LogSegment) -> None:
        if self.has_scrubbed(scrub):
            scrub.segment.offset_index, scrub.segment.time_index = fresh.offset_index, fresh.time_index

    def set_aside_from(self, offset: int, data_path: str, now_ms: int) -> list[str]:
        """Move the segment that should hold `offset` and all later ones to `set-aside/`; the log ends before them.

        Return the folders that were created: none if nothing is at or after `offset`. Durable when it returns. A log
        that was read-only because of its damage becomes writable again. Blocks; no job may be running. An OSError
        means the move is half done and leaves the log read-only; the next start recovers it.
        """
        at = self._segments.index_of(offset)
        if not self._segments.all or (offset >= self.log_end_offset and not self.is_broken):
            return []
        base_offset = self._segments.all[at].base_offset
        end = max(base_offset, self.log_start_offset)
        name = f"{self.folder.rpartition('/')[2]}-{base_offset}"
        paths = files_from(self.disk, self.folder, base_offset, end)
        lower_synced_end(self.disk, self.folder, end)
        self._segments.remove(at, self.segment_count)
        self._active = None
        self.log_end_offset = end
        self._cleaned_upto = min(self._cleaned_upto, end)
        try:
            folders = [set_aside(self.disk, data_path, paths, name, now_ms)]
            self._syncs.truncated(end)
            self._active = self._segments.begin(end)
            self.disk.sync_dir(self.folder)
            self._truncated()
        except OSError as error:
            self._fail_for_good(f"damaged segments could not be set aside: {error}")
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
        """Return the next pass over closed segments below `upto_offset` (the high watermark), if it is worthwhile.

        Run the job in a thread, then call `finish_compaction`, even after a failure. Return None while a job runs.
        """
        if not self.config.cleanup_compact or self._compaction is not None or self.read_only_forever:
            return None
        self._compaction = plan_compaction(
            self.disk,
            self.folder,
            self._segments.all,
            self.config,
            now_ms,
            upto_offset,
            self.log_start_offset,
            self._cleaned_upto,
            self.producers.last_offsets(),
        )
        return self._compaction

    def finish_compaction(self, job: CompactionJob) -> DeletionJob:
        """Replace the segments that the job read, if they still exist. The returned job removes the old files."""
        self._compaction = None
        segments = self._segments
        groups = job.usable_groups(segments.all)
        replacements = [
            # The first segment stays even if empty: its name records the log start.
            Replacement(group.bases, group.next_base, group.size_bytes > 0 or group.old[0] is segments.all[0])
            for group in groups
        ]
        deleted: list[str] = []
        if replacements:
            try:
                deleted = replace_segments(self.disk, self.folder, replacements)
            except OSError as error:
                # Half done on disk: only reopening the log can determine the state.
                self._fail_for_good(f"compaction failed: {error}")
                raise storage_error("compaction", error) from error
        for group, (bases, _, has_successor) in zip(groups, replacements, strict=True):
            fresh = LogSegment(self.disk, self.folder, bases[0], group.size_bytes) if has_successor else None
            segments.replace(group.old, fresh)
        if job.is_done:
            self._cleaned_upto = max(self._cleaned_upto, job.cleaned_upto)
        return job.cleanup(deleted, groups, lambda: self._cleaned_upto)
