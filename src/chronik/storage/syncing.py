"""Making a log durable: the work of one sync in a thread, the checkpoint it may write, and the record of its end.

The file `synced-end` in the log's folder holds the log's durable end and is written after each sync. The file itself is
not synced: after a kill it is exact, after a power loss it may be older, or missing. So a log that ends below it has
lost records that may have been acknowledged. Nothing else shows that: the recovery points are some seconds old. Before
a log is truncated on purpose, the file is lowered durably.

A sync may leave the segments to a later flush and write what it covers to the commit log (see `commit_log`). Then the
commit log proves the log's end until that flush.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from errno import EIO
from threading import Lock
from typing import Final, NamedTuple, Protocol

from chronik.storage.aborted import Summary
from chronik.storage.commit_log import Entry, LogFrames
from chronik.storage.config import LogConfig
from chronik.storage.disk import Disk, remove_files, write_file_atomic
from chronik.storage.epochs import LeaderEpochs
from chronik.storage.producers import ProducerStates
from chronik.storage.segment import LogSegment, SharedFile, segment_path
from chronik.storage.small_files import read_numbers, write_numbers
from chronik.storage.snapshot import Snapshot, encode_snapshot

EPOCHS_NAME: Final = "leader-epoch-checkpoint"
SYNCED_END_NAME: Final = "synced-end"
SNAPSHOTS_KEPT: Final = 2
LATE_CHECKPOINTS_MAX: Final = 4
"""A checkpoint of a log with entries in the commit log waits for the flush of its segments, but not until this many
times the appended bytes after which it is due: acknowledgments would wait for it."""
UNSYNCED_FILES_MAX: Final = 8
"""Closed segments that may wait for a sync; beyond that, each roll syncs the oldest itself."""


class Syncable(Protocol):
    """The parts of a log that a checkpoint needs."""

    config: LogConfig
    log_end_offset: int
    synced_end_offset: int
    producers: ProducerStates
    epochs: LeaderEpochs
    frames: LogFrames | None

    def write_aborted(self) -> Mapping[int, Summary] | None:
        """Write the indexes of aborted transactions; return what they hold, by segment, or None if that fails."""


class Checkpoint(NamedTuple):
    """Everything that lets recovery start at `offset`; written after all data below that offset was synced."""

    offset: int
    snapshot: bytes
    epochs: bytes
    index_paths: Sequence[str]
    outdated_offsets: Sequence[int]
    """Snapshots that can be removed once this one exists."""


class Appended(NamedTuple):
    """The bytes [start, end) of the active segment: everything that is not yet durable, and an entry could cover."""

    frames: LogFrames
    shared: SharedFile
    base_offset: int
    start: int
    end: int


@dataclass(eq=False)
class SyncJob:
    """One sync of one log. A thread calls `run`, which touches only files; then the loop calls `Log.synced`.

    If `appended` is set, `entry` may be written to the commit log instead; then `framed` is called.
    """

    disk: Disk
    folder: str
    files: Sequence[SharedFile]
    folders: Sequence[str]
    end_offset: int
    generation: int
    active_end: tuple[int, int] | None = None
    """Base offset and size of the active segment, if the job covers it."""
    is_direct: bool = True
    """Whether `run` is or will be called. Set by the loop."""
    checkpoint: Checkpoint | None = None
    checkpointed: bool = False
    appended: Appended | None = None
    entry: Entry | None = None
    frame_serial: int | None = None
    """The commit log's file that has the entry, if the segments were not synced."""

    @property
    def entry_bytes(self) -> int:
        """The size of the data for the commit log; 0 if only a sync of the segments will do."""
        return 0 if self.appended is None else self.appended.end - self.appended.start

    def read_entry(self) -> Entry | None:
        """Set and return `entry`: what the commit log has to hold. Return None if the segment is not in memory.

        The loop calls this, because a thread would wait for the interpreter after each read. `appended` must be set.
        """
        assert self.appended is not None
        frames, shared, base_offset, start, end = self.appended
        data = shared.file.pread_cached(start, end - start)
        if data is not None and len(data) == end - start:
            self.entry = Entry(frames.log, base_offset, start, self.end_offset, data)
        return self.entry

    def framed(self, serial: int) -> None:
        """Note that the commit log has the entry, so that the segments need no sync now."""
        self.frame_serial, self.entry = serial, None

    def run(self) -> None:
        """Sync the files. After an OSError it is unknown which data is durable."""
        try:
            for shared in self.files:
                shared.file.datasync()
            for folder in self.folders:
                self.disk.sync_dir(folder)
        finally:
            for shared in self.files:
                shared.release()
        with suppress(OSError):
            # The data is durable; `synced-end` merely keeps an older value.
            note_synced_end(self.disk, self.folder, self.end_offset)
        if self.checkpoint is not None:
            try:
                write_checkpoint(self.disk, self.folder, self.checkpoint)
                self.checkpointed = True
            except OSError:
                # The data is durable; recovery starts at the previous checkpoint until one succeeds.
                return


@dataclass(eq=False)
class FlushJob:
    """Syncs the segments that have entries in the commit log. A thread calls `run`; then the loop calls `Log.flushed`
    or `Log.flush_failed`.

    Appends and their syncs continue meanwhile. Other changes of the log first call `LogSyncs.end_flush`.
    """

    disk: Disk
    folder: str
    files: Sequence[SharedFile]
    end_offset: int
    checkpoint: Checkpoint | None = None
    checkpointed: bool = False
    is_outdated: bool = False
    """The log may have changed: nothing but the segments may be written. Guarded by `lock`."""
    lock: Lock = field(default_factory=Lock)

    def run(self) -> None:
        """After an OSError, only the commit log is known to hold the records."""
        for shared in self.files:
            shared.file.datasync()
        with self.lock, suppress(OSError):
            # The data is durable: without these files, recovery reads more of it.
            if self.is_outdated:
                return
            if self.end_offset > read_synced_end(self.disk, self.folder):
                note_synced_end(self.disk, self.folder, self.end_offset)
            if self.checkpoint is not None:
                write_checkpoint(self.disk, self.folder, self.checkpoint)
                self.checkpointed = True


def write_checkpoint(disk: Disk, folder: str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, durably. The data below its offset is durable."""
    for path in checkpoint.index_paths:
        try:
            file = disk.open(path)
        except FileNotFoundError:
            # Retention or compaction removed the segment in the meantime.
            continue
        with closing(file):
            file.datasync()
    write_file_atomic(disk, f"{folder}/{EPOCHS_NAME}", checkpoint.epochs)
    write_file_atomic(disk, segment_path(folder, checkpoint.offset, ".snapshot"), checkpoint.snapshot)
    remove_files(disk, (segment_path(folder, offset, ".snapshot") for offset in checkpoint.outdated_offsets))


@dataclass(slots=True, eq=False)
class LogSyncs:
    """Tracks which data of a log is not yet durable, and when the next checkpoint is due. Owned by the event loop.

    Invariant: at most one job runs. A job's data is durable only if the log was not truncated in the meantime.
    """

    disk: Disk
    folder: str
    snapshots: list[int]
    last_batch_crc: int
    bytes_since_checkpoint: int
    _generation: int = 0
    _running: SyncJob | None = None
    _files: list[SharedFile] = field(default_factory=list)
    _folders: list[str] = field(default_factory=list)
    _indexes: list[str] = field(default_factory=list)
    _durable_end: tuple[int, int] = (-1, -1)
    """Base offset and end of the durable part of the active segment, once this process has synced that segment."""
    _framed: dict[SharedFile, None] = field(default_factory=dict)
    """The files of segments with entries in the commit log that no sync covers yet."""
    _flushing: FlushJob | None = None
    """The last flush, until its outcome is known or no longer matters."""
    has_failed: bool = False
    """A sync of a segment failed: only the commit log may have what its entries cover."""

    def appended(self, size_bytes: int, crc: int) -> None:
        self.bytes_since_checkpoint += size_bytes
        self.last_batch_crc = crc

    def rolled(self, closed: LogSegment | None, checkpoint_bytes: int) -> None:
        """Note that a new segment follows `closed`. Raises OSError if too many files wait and syncing one fails."""
        if closed is None:
            # The log's folder may be as new as its first segment.
            self._folders = [self.folder, self.folder.rpartition("/")[0] or "/"]
            return
        if self.folder not in self._folders:
            self._folders.append(self.folder)
        if len(self._files) >= UNSYNCED_FILES_MAX:
            oldest = self._files.pop(0)
            try:
                oldest.file.datasync()
            finally:
                oldest.release()
        self._files.append(closed.shared.acquire())
        self._indexes += [closed.offset_index.path, closed.time_index.path, closed.aborted.path]
        # Recovery should not have to scan closed segments.
        self.request_checkpoint(checkpoint_bytes)

    def request_checkpoint(self, checkpoint_bytes: int) -> None:
        """Write a checkpoint with the next sync."""
        self.bytes_since_checkpoint = max(self.bytes_since_checkpoint, LATE_CHECKPOINTS_MAX * checkpoint_bytes)

    def index_changed(self, path: str, checkpoint_bytes: int) -> None:
        """Sync the index file of a closed segment again, and write a checkpoint with the next sync."""
        self._indexes.append(path)
        self.request_checkpoint(checkpoint_bytes)

    def truncated(self, end_offset: int) -> None:
        """Note that the log now ends at `end_offset`, and remove snapshots above it."""
        self._generation += 1
        self._durable_end = (-1, -1)
        self._forget_framed()
        outdated = (offset for offset in self.snapshots if offset > end_offset)
        remove_files(self.disk, (segment_path(self.folder, offset, ".snapshot") for offset in outdated))
        self.snapshots = [offset for offset in self.snapshots if offset <= end_offset]
        self.bytes_since_checkpoint = 0

    def job(self, log: Syncable, active: LogSegment | None, *, checkpoint: bool = False) -> SyncJob | None:
        """Return a sync of everything not yet durable; None if there is nothing to sync or a job runs."""
        has_unsynced = log.synced_end_offset < log.log_end_offset
        if self._running is not None or active is None:
            return None
        if not (has_unsynced or self._files or self._folders or checkpoint):
            return None
        files, active_end = self._files, None
        if has_unsynced or checkpoint:
            files = [*files, active.shared.acquire()]
            active_end = active.base_offset, active.size_bytes
        job = SyncJob(self.disk, self.folder, files, self._folders, log.log_end_offset, self._generation, active_end)
        base_offset, start = self._durable_end
        needs_segments = checkpoint or self._files or self._folders or base_offset != active.base_offset
        can_frame = log.frames is not None and has_unsynced and not needs_segments and start < active.size_bytes
        self._files, self._folders = [], []
        due_bytes = log.config.checkpoint_bytes * (LATE_CHECKPOINTS_MAX if can_frame and self._framed else 1)
        is_flushing = self._flushing is not None and self._flushing.checkpoint is not None
        if checkpoint or (self.bytes_since_checkpoint >= due_bytes and not is_flushing):
            job.checkpoint = self._checkpoint(log, active)
            self.bytes_since_checkpoint = 0
        elif can_frame and log.frames is not None:
            job.appended = Appended(log.frames, files[-1], base_offset, start, active.size_bytes)
        self._running = job
        return job

    def sync_now(self, active: LogSegment | None) -> None:
        """Sync all segments that have entries in the commit log. Blocks; no job may be running."""
        if self.has_failed:
            raise OSError(EIO, "an earlier sync failed")
        for shared in (*self._files, *([] if active is None else [active.shared])):
            shared.file.datasync()

    def flush_job(self, log: Syncable, active: LogSegment | None) -> FlushJob | None:
        """Return a sync of the segments that have entries in the commit log, None if no segment has.

        It writes a checkpoint if that is due. Raises OSError if a sync has failed: then the commit log must keep the
        entries.
        """
        if self.has_failed:
            raise OSError(EIO, "an earlier sync failed")
        if not self._framed:
            return None
        job = FlushJob(self.disk, self.folder, list(self._framed), log.synced_end_offset)
        self._framed = {}
        is_due = self.bytes_since_checkpoint >= log.config.checkpoint_bytes
        can_checkpoint = self._running is None or not self._running.is_direct
        if is_due and can_checkpoint and active is not None and not self._files and active.shared in job.files:
            job.checkpoint = self._checkpoint(log, active)
            self.bytes_since_checkpoint = 0
        self._flushing = job
        return job

    def end_flush(self) -> None:
        """Let a flush write nothing but segments from now on. Blocks while it is writing a checkpoint."""
        job = self._flushing
        if job is not None:
            with job.lock:
                job.is_outdated = True
            self._flush_ended(job)

    def _flush_ended(self, job: FlushJob) -> None:
        if job is not self._flushing:
            return
        self._flushing = None
        checkpoint = job.checkpoint
        if checkpoint is not None and job.checkpointed:
            self._note_checkpoint(checkpoint)
        elif checkpoint is not None:
            self._indexes = [*checkpoint.index_paths, *self._indexes]

    def flushed(self, job: FlushJob) -> bool:
        """Note that the flush succeeded; return whether that is certain.

        A failed sync is reported only once, perhaps to a sync of the same file that is still running.
        """
        self._flush_ended(job)
        is_certain = not self.has_failed and (self._running is None or not self._running.is_direct)
        for shared in job.files:
            if is_certain:
                shared.release()
            else:
                self._frame(shared)
        return is_certain

    def _frame(self, shared: SharedFile) -> None:
        """Keep this reference until the file is synced."""
        if shared in self._framed:
            shared.release()
        else:
            self._framed[shared] = None

    def _forget_framed(self) -> None:
        for shared in self._framed:
            shared.release()
        self._framed = {}

    def close(self) -> None:
        for shared in self._files:
            shared.release()
        self._files = []
        if self._framed:
            # The log could not be closed cleanly, which syncs it.
            self.has_failed = True
            self._forget_framed()

    def durable(self, job: SyncJob) -> None:
        """Note that a job succeeded, and that the log was not truncated since it started."""
        if job.active_end is not None:
            self._durable_end = job.active_end
            if job.frame_serial is None:
                # It synced the active segment and, before or now, all closed ones.
                self._forget_framed()

    def finished(self, job: SyncJob) -> bool:
        """Note that the job ended; return whether the log was not truncated since the job started."""
        if self._running is job:
            self._running = None
        if job.frame_serial is not None and job.appended is not None:
            self._frame(job.appended.shared)
        is_current = job.generation == self._generation
        checkpoint = job.checkpoint
        if checkpoint is not None and not job.checkpointed:
            self._indexes = [*checkpoint.index_paths, *self._indexes]
        elif checkpoint is not None and is_current:
            self._note_checkpoint(checkpoint)
        return is_current

    def _note_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.snapshots = [
            offset
            for offset in self.snapshots
            if offset not in checkpoint.outdated_offsets and offset != checkpoint.offset
        ]
        self.snapshots.append(checkpoint.offset)

    def _checkpoint(self, log: Syncable, active: LogSegment) -> Checkpoint | None:
        if not active.offset_index.try_write() or not active.time_index.try_write():
            return None
        aborted = log.write_aborted()
        if aborted is None:
            return None
        offset = log.log_end_offset
        max_timestamp, max_timestamp_offset = active.largest_timestamp()
        snapshot = Snapshot(
            offset,
            active.base_offset,
            active.size_bytes,
            active.last_batch_position if active.size_bytes else -1,
            self.last_batch_crc if active.size_bytes else 0,
            max_timestamp,
            max_timestamp_offset,
            active.offset_index.written_count,
            active.time_index.written_count,
            active.unindexed_bytes,
            -1 if active.first_append_ms is None else active.first_append_ms,
            list(log.producers.items()),
            list(log.producers.transactions.ended()),
            aborted,
        )
        indexes, self._indexes = self._indexes, []
        others = [other for other in self.snapshots if other != offset]
        return Checkpoint(
            offset,
            encode_snapshot(snapshot),
            log.epochs.encode(),
            [*indexes, active.offset_index.path, active.time_index.path, active.aborted.path],
            others[: 1 - SNAPSHOTS_KEPT],
        )


def read_synced_end(disk: Disk, folder: str) -> int:
    """Return the offset; 0 if the file is missing or damaged."""
    (offset,) = read_numbers(disk, f"{folder}/{SYNCED_END_NAME}", 1) or (0,)
    return offset


def note_synced_end(disk: Disk, folder: str, offset: int, *, durably: bool = False) -> None:
    """Record that the log is durable up to `offset`."""
    write_numbers(disk, f"{folder}/{SYNCED_END_NAME}", offset, durably=durably)
    if durably:
        disk.sync_dir(folder)


def lower_synced_end(disk: Disk, folder: str, offset: int) -> None:
    """Lower the recorded end durably before the log is truncated to `offset`."""
    if read_synced_end(disk, folder) > offset:
        write_numbers(disk, f"{folder}/{SYNCED_END_NAME}", offset, durably=True)
