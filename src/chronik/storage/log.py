"""One partition's log.

Files in its folder: `NNN.log` segments of batches with `NNN.index` and `NNN.timeindex` (see `index`), `NNN.snapshot`
(see `snapshot`), `leader-epoch-checkpoint` (see `epochs`), `log-start-offset` (see `recovery`), `cleaner-offset` (see
`swap`), `synced-end` (see `synced_end`). NNN is an offset in 20 digits.
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
    """One partition's log: a folder of segments, the last of which is written.

    Invariant: log_start_offset <= log_end_offset and synced_end_offset <= log_end_offset; offsets grow without reuse;
    what `append` returned is readable at once, and after a crash if it lay below `synced_end_offset`.

    Owned by the loop. Threads run only the jobs it hands out (`SyncJob`, `ReadJob`, `DeletionJob`, `CompactionJob`, the
    lookups by time), and `open` and `close`; `truncate_to` and `truncate_fully` block too and need that no job runs.
    An idle log holds no file open, and its first segment is made by the first append.
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
        """Open a log, its folder made where missing. Blocks: for a thread. `recovery` says what was found.

        `recovery_point` is an offset below which the caller knows the data to have been durable; `clean`, that the last
        shutdown was. Neither is needed for a right result: they decide how damage is judged, and what is checked.
        """
        return Log(disk, folder, config, load_log(disk, folder, config, now_ms, recovery_point, clean))

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, offset: int, max_bytes: int, upto_offset: int, *, min_one_batch: bool = True) -> ReadResult | None:
        """Whole batches from the one with `offset` on, all below `upto_offset`, of at most `max_bytes`.

        The first is whole even if it is larger, with `min_one_batch`. None if that would take a search or wait for the
        disk: then run `read_job`. Raises OFFSET_OUT_OF_RANGE.
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
        # Just written, so in the page cache: no need to ask for that.
        return ReadResult(active.file.pread(start, end - start) if end > start else b"", next_offset)

    def read_job(self, offset: int, max_bytes: int, upto_offset: int, *, min_one_batch: bool = True) -> ReadJob:
        """The same read for a thread: called there once, it returns the batches."""
        if offset < self.log_start_offset or offset > self.log_end_offset:
            raise self._out_of_range(offset)
        return self._segments.read_job(offset, max_bytes, upto_offset, min_one_batch, self.log_end_offset)

    def headers_job(self, offset: int, to_offset: int, upto_offset: int, headers_max: int) -> HeadersJob:
        """For a thread: the headers of the batches that hold any of [offset, to_offset), all below `upto_offset`.

        No batch is read beyond its header, and no CRC checked.
        """
        if offset < self.log_start_offset or offset > self.log_end_offset:
            raise self._out_of_range(offset)
        return self._segments.headers_job(offset, to_offset, min(upto_offset, self.log_end_offset), headers_max)

    def bytes_between(self, offset: int, upto_offset: int) -> int:
        """About how many bytes the batches from `offset` to `upto_offset` have; exact near the end of the log."""
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
        """For a thread: the first record at or behind `timestamp_ms`."""
        lookup = self._time_lookup(upto_offset)
        return lambda: lookup.first_at_or_after(timestamp_ms)

    def max_timestamp_job(self, upto_offset: int | None = None) -> Callable[[], TimestampOffset | None]:
        """For a thread: the first of the records with the largest timestamp."""
        return self._time_lookup(upto_offset).largest

    def offset_for_timestamp(self, timestamp_ms: int, upto_offset: int | None = None) -> TimestampOffset | None:
        """`offset_for_timestamp_job`, at once."""
        return self.offset_for_timestamp_job(timestamp_ms, upto_offset)()

    def max_timestamp(self, upto_offset: int | None = None) -> TimestampOffset | None:
        """`max_timestamp_job`, at once."""
        return self.max_timestamp_job(upto_offset)()

    def _time_lookup(self, upto_offset: int | None) -> TimeLookup:
        start = self.log_start_offset
        end = self.log_end_offset if upto_offset is None else upto_offset
        closed = [s.base_offset for s in self._segments.all[self._segments.index_of(start) : -1]]
        active = self._active.view() if self._active is not None else None
        return TimeLookup(self.disk, self.folder, closed, active, start, end)

    # -- leader epochs -------------------------------------------------------------------------------------------------

    def start_epoch(self, epoch: int) -> None:
        """A leader epoch begins at the log's end. Durable with the first batch that it writes."""
        self.epochs.assign(epoch, self.log_end_offset)

    def epoch_of(self, offset: int) -> int:
        """The leader epoch of the record at `offset`; -1 where unknown."""
        return self.epochs.epoch_of(offset)

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """The largest epoch up to `epoch`, and the offset behind its last record; (-1, -1) for one not yet known."""
        return self.epochs.end_offset(epoch, self.log_end_offset)

    # -- removing ------------------------------------------------------------------------------------------------------

    def increment_log_start(self, offset: int) -> DeletionJob:
        """Records below `offset` are gone for readers (DeleteRecords); run the job in a thread to make that durable."""
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
        """Drop segments that are too old or too many, all of whose records lie below `upto_offset` (the watermark).

        Run the job in a thread to remove the files. The active segment goes too if it is too old: a new one, empty,
        takes its place, and where that cannot be made it stays. A log that failed for good is left as it is.
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
                # Most likely the disk is full: all the more reason to remove the others.
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
        """Drop every batch that reaches to `offset` or above (a follower on its leader's word). Blocks.

        Durable when it returns. The log may end below `offset` where that lies inside a batch.
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
            # The start lay inside the batch that went.
            self.log_start_offset = self.log_end_offset
            start = encode_value(str(self.log_start_offset))
            write_file_atomic(self.disk, f"{self.folder}/{START_NAME}", start)
        self._truncated()

    def truncate_fully(self, new_start_offset: int) -> None:
        """Drop everything and go on, empty, at `new_start_offset`. Blocks; durable when it returns."""
        lower_synced_end(self.disk, self.folder, 0)
        self.log_start_offset = self.log_end_offset = new_start_offset
        if self.disk.exists(f"{self.folder}/{START_NAME}"):
            self.disk.remove(f"{self.folder}/{START_NAME}")
        self._remove_last(0)
        self._active = self._segments.begin(new_start_offset)
        # The folder may be as new as its first segment.
        for folder in (self.folder, self.folder.rpartition("/")[0] or "/"):
            self.disk.sync_dir(folder)
        # There is nothing that could be lost, whether the log goes on above or below where it was.
        self.synced_end_offset = new_start_offset
        self._truncated()

    def _remove_last(self, first: int) -> None:
        """Remove the segments from `first` on, and the snapshots that tell of them.

        Durably, before anything else changes: were one to come back with its snapshot, it would be believed.
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
        """The base offsets of all segments but the active one."""
        return [segment.base_offset for segment in self._segments.all[:-1]]

    def closed_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments.all[:-1])

    def scrub(self, base_offset: int) -> SegmentScrub | None:
        """Re-read a closed segment, step by step in a thread; None if the log has it no more.

        Ask `has_scrubbed` before each step, and before its result is used.
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
        """Whether the segment is still closed and as it was: retention, compaction or a truncation may have come."""
        segments = self._segments.all
        at = self._segments.index_of(scrub.segment.base_offset)
        return at + 1 < len(segments) and segments[at] is scrub.segment

    def rebuild_indexes_job(self, scrub: SegmentScrub) -> Callable[[], LogSegment]:
        """For a thread: rebuild both indexes of a scrubbed segment; then call `indexes_rebuilt` with its result.

        Readers may come meanwhile: they check each entry that they use.
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

        Returns the folders that were made: none if there is nothing at or after `offset`. Durable when it returns. A
        log that was read-only because of its damage can be appended to again. Blocks, with no job running. An OSError
        leaves the log read-only, since it is half done; the next start recovers it.
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
            # Of an earlier segment the chain of batches is broken as well: nothing that is left can be relied on.
            folders += self.set_aside_from(self._segments.all[0].base_offset, data_path, now_ms)
        if self.is_broken:
            self.is_broken = self.read_only = self.read_only_forever = False
            self.read_only_reason = ""
        return folders

    # -- compaction ----------------------------------------------------------------------------------------------------

    def compaction_job(self, now_ms: int, upto_offset: int) -> CompactionJob | None:
        """The next pass over closed segments below `upto_offset` (the watermark), if it is worth it; for a thread.

        Then call `finish_compaction`, also if it failed. One at a time: None while one runs.
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
        """Put the job's segments in place of those it read, if they are still there; remove the old ones by the job."""
        self._compaction = None
        segments = self._segments
        groups = job.usable_groups(segments.all)
        replacements = [
            # The first segment stays even when empty: its name says where the log starts.
            Replacement(group.bases, group.next_base, group.size_bytes > 0 or group.old[0] is segments.all[0])
            for group in groups
        ]
        deleted: list[str] = []
        if replacements:
            try:
                deleted = replace_segments(self.disk, self.folder, replacements)
            except OSError as error:
                # Half done on disk: only opening the log anew can tell what is there.
                self._fail_for_good(f"compaction failed: {error}")
                raise storage_error("compaction", error) from error
        for group, (bases, _, has_successor) in zip(groups, replacements, strict=True):
            fresh = LogSegment(self.disk, self.folder, bases[0], group.size_bytes) if has_successor else None
            segments.replace(group.old, fresh)
        if job.is_done:
            self._cleaned_upto = max(self._cleaned_upto, job.cleaned_upto)
        return job.cleanup(deleted, groups, lambda: self._cleaned_upto)
