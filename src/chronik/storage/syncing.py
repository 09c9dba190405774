"""Making a log durable: the work of one sync in a thread, the checkpoint it may write, and the record of its end.

The file `synced-end` in the log's folder holds the log's durable end and is written after each sync. The file itself is
not synced: after a kill it is exact, after a power loss it may be older, or missing. So a log that ends below it has
lost records that may have been acknowledged. Nothing else shows that: the recovery points are some seconds old. Before
a log is truncated on purpose, the file is lowered durably.
"""

from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Final, NamedTuple, Protocol

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
UNSYNCED_FILES_MAX: Final = 8
"""Closed segments that may wait for a sync; beyond that, each roll syncs the oldest itself."""


class Syncable(Protocol):
    """The parts of a log that a checkpoint needs."""

    config: LogConfig
    log_end_offset: int
    synced_end_offset: int
    producers: ProducerStates
    epochs: LeaderEpochs


class Checkpoint(NamedTuple):
    """Everything that lets recovery start at `offset`; written after all data below that offset was synced."""

    offset: int
    snapshot: bytes
    epochs: bytes
    index_paths: Sequence[str]
    outdated_offsets: Sequence[int]
    """Snapshots that can be removed once this one exists."""


class SyncJob:
    """One sync of one log. A thread calls `run`, which touches only files; then the loop calls `Log.synced`."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        files: Sequence[SharedFile],
        folders: Sequence[str],
        end_offset: int,
        generation: int,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.end_offset = end_offset
        self.generation = generation
        self.checkpoint = checkpoint
        self.checkpointed = False
        self._disk = disk
        self._folder = folder
        self._files = files
        self._folders = folders

    def run(self) -> None:
        """Sync the files. After an OSError it is unknown which data is durable."""
        try:
            for shared in self._files:
                shared.file.datasync()
            for folder in self._folders:
                self._disk.sync_dir(folder)
        finally:
            for shared in self._files:
                shared.release()
        with suppress(OSError):
            # The data is durable; `synced-end` merely keeps an older value.
            note_synced_end(self._disk, self._folder, self.end_offset)
        if self.checkpoint is not None:
            try:
                self._write_checkpoint(self.checkpoint)
                self.checkpointed = True
            except OSError:
                # The data is durable; recovery starts at the previous checkpoint until one succeeds.
                return

    def _write_checkpoint(self, checkpoint: Checkpoint) -> None:
        disk = self._disk
        for path in checkpoint.index_paths:
            try:
                file = disk.open(path)
            except FileNotFoundError:
                # Retention or compaction removed the segment in the meantime.
                continue
            with closing(file):
                file.datasync()
        write_file_atomic(disk, f"{self._folder}/{EPOCHS_NAME}", checkpoint.epochs)
        write_file_atomic(disk, segment_path(self._folder, checkpoint.offset, ".snapshot"), checkpoint.snapshot)
        remove_files(disk, (segment_path(self._folder, offset, ".snapshot") for offset in checkpoint.outdated_offsets))


class LogSyncs:
    """Tracks which data of a log is not yet durable, and when the next checkpoint is due. Owned by the event loop.

    Invariant: at most one job runs. A job's data is durable only if the log was not truncated in the meantime.
    """

    __slots__ = (
        "_bytes_since_checkpoint",
        "_disk",
        "_files",
        "_folder",
        "_folders",
        "_generation",
        "_indexes",
        "_last_batch_crc",
        "_running",
        "snapshots",
    )

    def __init__(
        self, disk: Disk, folder: str, snapshots: Sequence[int], last_batch_crc: int, bytes_since_checkpoint: int
    ) -> None:
        self._disk = disk
        self._folder = folder
        self.snapshots = list(snapshots)
        self._last_batch_crc = last_batch_crc
        self._bytes_since_checkpoint = bytes_since_checkpoint
        self._generation = 0
        self._running: SyncJob | None = None
        self._files: list[SharedFile] = []
        self._folders: list[str] = []
        self._indexes: list[str] = []

    def appended(self, size_bytes: int, crc: int) -> None:
        self._bytes_since_checkpoint += size_bytes
        self._last_batch_crc = crc

    def rolled(self, closed: LogSegment | None, checkpoint_bytes: int) -> None:
        """Note that a new segment follows `closed`. Raises OSError if too many files wait and syncing one fails."""
        if closed is None:
            # The log's folder may be as new as its first segment.
            self._folders = [self._folder, self._folder.rpartition("/")[0] or "/"]
            return
        if self._folder not in self._folders:
            self._folders.append(self._folder)
        if len(self._files) >= UNSYNCED_FILES_MAX:
            oldest = self._files.pop(0)
            try:
                oldest.file.datasync()
            finally:
                oldest.release()
        self._files.append(closed.shared.acquire())
        self._indexes += [closed.offset_index.path, closed.time_index.path]
        # Recovery should not have to scan closed segments.
        self._bytes_since_checkpoint = max(self._bytes_since_checkpoint, checkpoint_bytes)

    def truncated(self, end_offset: int) -> None:
        """Note that the log now ends at `end_offset`, and remove snapshots above it."""
        self._generation += 1
        outdated = (offset for offset in self.snapshots if offset > end_offset)
        remove_files(self._disk, (segment_path(self._folder, offset, ".snapshot") for offset in outdated))
        self.snapshots = [offset for offset in self.snapshots if offset <= end_offset]
        self._bytes_since_checkpoint = 0

    def job(self, log: Syncable, active: LogSegment | None, *, checkpoint: bool = False) -> SyncJob | None:
        """Return a sync of everything not yet durable; None if there is nothing to sync or a job runs."""
        has_unsynced = log.synced_end_offset < log.log_end_offset
        if self._running is not None or active is None:
            return None
        if not (has_unsynced or self._files or self._folders or checkpoint):
            return None
        files = self._files
        if has_unsynced or checkpoint:
            files = [*files, active.shared.acquire()]
        job = SyncJob(self._disk, self._folder, files, self._folders, log.log_end_offset, self._generation, None)
        self._files, self._folders = [], []
        if checkpoint or self._bytes_since_checkpoint >= log.config.checkpoint_bytes:
            job.checkpoint = self._checkpoint(log, active)
            self._bytes_since_checkpoint = 0
        self._running = job
        return job

    def close(self) -> None:
        for shared in self._files:
            shared.release()
        self._files = []

    def finished(self, job: SyncJob) -> bool:
        """Note that the job ended; return whether the log was not truncated since the job started."""
        if self._running is job:
            self._running = None
        is_current = job.generation == self._generation
        checkpoint = job.checkpoint
        if checkpoint is not None and not job.checkpointed:
            self._indexes = [*checkpoint.index_paths, *self._indexes]
        elif checkpoint is not None and is_current:
            self.snapshots = [
                offset
                for offset in self.snapshots
                if offset not in checkpoint.outdated_offsets and offset != checkpoint.offset
            ]
            self.snapshots.append(checkpoint.offset)
        return is_current

    def _checkpoint(self, log: Syncable, active: LogSegment) -> Checkpoint | None:
        if not active.offset_index.try_write() or not active.time_index.try_write():
            return None
        offset = log.log_end_offset
        max_timestamp, max_timestamp_offset = active.largest_timestamp()
        snapshot = Snapshot(
            offset,
            active.base_offset,
            active.size_bytes,
            active.last_batch_position if active.size_bytes else -1,
            self._last_batch_crc if active.size_bytes else 0,
            max_timestamp,
            max_timestamp_offset,
            active.offset_index.written_count,
            active.time_index.written_count,
            active.unindexed_bytes,
            -1 if active.first_append_ms is None else active.first_append_ms,
            list(log.producers.items()),
        )
        indexes, self._indexes = self._indexes, []
        others = [other for other in self.snapshots if other != offset]
        return Checkpoint(
            offset,
            encode_snapshot(snapshot),
            log.epochs.encode(),
            [*indexes, active.offset_index.path, active.time_index.path],
            others[: 1 - SNAPSHOTS_KEPT],
        )


def read_synced_end(disk: Disk, folder: str) -> int:
    """Return the offset; 0 if the file is missing or damaged."""
    (offset,) = read_numbers(disk, f"{folder}/{SYNCED_END_NAME}", 1) or (0,)
    return offset


def note_synced_end(disk: Disk, folder: str, offset: int) -> None:
    """Record that the log is durable up to `offset`."""
    write_numbers(disk, f"{folder}/{SYNCED_END_NAME}", offset, durably=False)


def lower_synced_end(disk: Disk, folder: str, offset: int) -> None:
    """Lower the recorded end durably before the log is truncated to `offset`."""
    if read_synced_end(disk, folder) > offset:
        write_numbers(disk, f"{folder}/{SYNCED_END_NAME}", offset, durably=True)
