"""The node's use of its commit log: which syncs it replaces, and the syncs of segments before its files are recycled.

A round that covers small appends is written to the commit log (see `storage.commit_log`) and needs one sync. All other
rounds sync the segments: large ones, the first one to a segment, and all while the commit log has no room. When a file
of the commit log is full, the segments of all logs with entries in it are synced in the background, and the file is
free again.

If the commit log fails, rounds sync the segments from then on. Once the segments of all logs with entries are synced,
the commit log no longer counts. If a segment cannot be synced, its entries stay for the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from functools import partial
from typing import Final, Protocol, TypeVar

from chronik.node.disk_watch import DiskWatch, DiskWrite
from chronik.node.runtime import Runtime
from chronik.storage.commit_log import CommitLog, frame_bytes
from chronik.storage.folder import DataFolder
from chronik.storage.syncing import FlushJob, SyncJob

ROUND_BYTES_MAX: Final = 256 * 1024
"""Above it, writing the data twice takes longer than the syncs of the segments."""
FLUSHED_AT_ONCE: Final = 16
RETRY_S: Final = 0.1
ADD_RETRY_S: Final = 10.0


async def begin_commit_log(runtime: Runtime, folder: DataFolder) -> CommitLog | None:
    """Log what the replay of the last commit log did, and begin a new one; None if the settings want none.

    A node whose disk has no room for one works without it.
    """
    config, log = runtime.config, runtime.log.bind(component="storage")
    report = folder.replayed
    if report is not None and report.damage:
        then = "replicas leave the ISR until they have caught up, as after a loss"
        log.error("commit_log_damaged", **asdict(report), then=then)
    elif report is not None:
        log.info("commit_log_replayed", **asdict(report))
    if not config.commit_log or config.durability != "synced":
        await runtime.run_blocking(folder.remove_commit_log)
        return None
    begin = partial(folder.begin_commit_log, runtime.env.new_uuid(), config.commit_log_bytes)
    try:
        return await runtime.run_blocking(begin)
    except OSError as error:
        log.warning("commit_log_not_begun", error=str(error), then="the node syncs every segment")
        return None


class Job(Protocol):
    """A sync of one log."""

    def run(self) -> None: ...


class FlushTarget(Protocol):
    """A log with entries in the commit log: a partition."""

    @property
    def can_flush(self) -> bool:
        """Whether a flush may begin now: not while a thread truncates, sets aside or closes the log."""

    def flush_job(self) -> FlushJob | None: ...

    def flushed(self, job: FlushJob) -> bool: ...

    def flush_failed(self, job: FlushJob, error: Exception) -> None: ...


Target = TypeVar("Target", bound=FlushTarget)


class _State(Enum):
    """What the commit log still does. It only moves down this list."""

    WORKING = 1
    BROKEN = 2
    """A write failed: nothing is written any more, and the segments of all logs with entries are being synced."""
    RETIRED = 3
    """All of them are synced: the commit log no longer counts."""
    STUCK = 4
    """Segments of a log could not be synced: perhaps only the commit log has what its entries cover."""


class Committer:
    """Invariant: `_logs` has every log with entries in a file of the commit log, until its segments are synced.

    Owned by the loop; files are written and synced in the executor. Only one frame is written at a time.
    """

    def __init__(self, runtime: Runtime, disk: DiskWatch, commit_log: CommitLog) -> None:
        self.commit_log = commit_log
        self._state = _State.WORKING
        self._runtime = runtime
        self._loop = runtime.loop
        self._disk = disk
        self._log = runtime.log.bind(component="storage")
        self._round_bytes_max = min(ROUND_BYTES_MAX, commit_log.file_bytes // 2)
        self._has_room = True
        self._current = 0
        self._logs: dict[int, dict[FlushTarget, None]] = {}
        """By serial of the file."""
        self._work: asyncio.Task[None] | None = None
        self._adding: asyncio.Task[None] | None = None
        self._is_closing = False

    @property
    def is_stuck(self) -> bool:
        return self._state is _State.STUCK

    def start(self) -> None:
        """Create the first file, unless earlier runs left files."""
        self._add_file()

    async def close(self) -> None:
        """End the work in the background, but not a running sync: nothing else would learn that it failed.

        If the disk does not answer, the commit log is stuck.
        """
        self._is_closing = True
        if self._adding is not None:
            self._adding.cancel()
        work, self._work = self._work, None
        if work is not None:
            try:
                await self._disk.wait(work)
            except TimeoutError:
                work.cancel()
                self._state = _State.STUCK

    # -- rounds --------------------------------------------------------------------------------------------------------

    def choose(self, jobs: Sequence[tuple[Target, SyncJob]]) -> list[tuple[Target, SyncJob]]:
        """Return the jobs to write to the commit log, none if all segments are to be synced."""
        if not self._has_room:
            return []
        chosen = [each for each in jobs if each[1].entry_bytes]
        size_bytes = frame_bytes(len(chosen), sum([job.entry_bytes for _, job in chosen]))
        if size_bytes > self._round_bytes_max:
            return []
        framed = []
        for each in chosen:
            try:
                entry = each[1].read_entry()
            except OSError:
                continue  # The sync of the segment will show what is wrong with it.
            if entry is not None:
                each[1].is_direct = False
                framed.append(each)
        return framed

    def write(self, jobs: Sequence[SyncJob]) -> int | None:
        """Write the jobs' entries; return the serial of the file, None if there is no room. Runs in a thread."""
        return self.commit_log.write([job.entry for job in jobs if job.entry is not None])

    def written(self, share: Sequence[tuple[FlushTarget, SyncJob]], done: asyncio.Future[int | None]) -> bool:
        """Take the outcome of `write`; return whether the entries are durable."""
        failure = done.exception() if not done.cancelled() else asyncio.CancelledError()
        serial = done.result() if failure is None else None
        if serial is None:
            for _, job in share:
                job.is_direct = True
            if failure is None or self.commit_log.is_broken:
                self._has_room = False
            if self.commit_log.is_broken:
                if not self.is_stuck:
                    self._state = _State.BROKEN
                then = "the node syncs every segment until it restarts"
                self._log.error("commit_log_failed", error=repr(failure), then=then)
            self._add_file()
            self.flush_filled_files()
            return False
        if serial != self._current:
            self._current = serial
            self._add_file()
        logs = self._logs.setdefault(serial, {})
        for target, job in share:
            job.framed(serial)
            logs[target] = None
        return True

    # -- files ---------------------------------------------------------------------------------------------------------

    def _add_file(self) -> None:
        """Create another file, unless there are enough."""
        if self.commit_log.wants_file and self._adding is None:
            self._adding = self._loop.create_task(self._add(), name="commit-log-file")

    async def _add(self) -> None:
        is_first = True
        try:
            while self.commit_log.wants_file:
                try:
                    await self._runtime.run_blocking(self.commit_log.add_file)
                    self._has_room = not self.commit_log.is_broken
                    return
                except OSError as error:
                    # A full disk: rounds sync the segments, or use the files that exist.
                    if is_first:
                        self._log.warning("commit_log_not_extended", error=str(error))
                    is_first = False
                    await asyncio.sleep(ADD_RETRY_S)
        finally:
            self._adding = None

    def flush_filled_files(self) -> None:
        """Sync the segments of all logs with entries in files that are full, in the background."""
        has_work = self._next() is not None or self._state is _State.BROKEN
        if has_work and self._work is None and not self.is_stuck and not self._is_closing:
            self._work = self._loop.create_task(self._flush_files(), name="commit-log-flush")

    def _next(self) -> int | None:
        """Return the oldest file whose logs are to be synced: a full one, or any if the commit log has failed."""
        serial = next(iter(self._logs), None)
        return serial if serial is not None and (serial < self._current or self._state is _State.BROKEN) else None

    async def _flush_files(self) -> None:
        try:
            while (serial := self._next()) is not None:
                if not await self._flush(self._logs[serial]):
                    return
                del self._logs[serial]
                self.commit_log.flushed_upto = serial
                self._has_room = not self.commit_log.is_broken
            if self._state is _State.BROKEN:
                await self._runtime.run_blocking(self.commit_log.retire)
                self._state = _State.RETIRED
        except OSError as error:
            self._log.error("commit_log_not_ended", error=str(error), then="the next start replays it")
        except Exception:
            self._log.exception("commit_log_not_flushed")
        finally:
            self._work = None

    async def _flush(self, logs: dict[FlushTarget, None]) -> bool:
        """Sync the segments of these logs; return whether all are durable."""
        while logs:
            if self._is_closing:
                return False
            jobs, has_failed = self._flush_jobs(logs)
            # What has begun must end, although another log has failed.
            if jobs and not await self._sync(jobs, logs):
                has_failed = True
            if has_failed:
                self._failed()
                return False
            if logs and not jobs:
                await asyncio.sleep(RETRY_S)
        return True

    def _flush_jobs(self, logs: dict[FlushTarget, None]) -> tuple[list[tuple[FlushTarget, FlushJob]], bool]:
        """Begin flushes of some logs, and remove logs that need none; also return whether a log has failed."""
        jobs: list[tuple[FlushTarget, FlushJob]] = []
        for target in list(logs):
            if len(jobs) == FLUSHED_AT_ONCE:
                break
            if not target.can_flush:
                continue
            try:
                job = target.flush_job()
            except OSError:
                return jobs, True
            if job is None:
                del logs[target]
            else:
                jobs.append((target, job))
        return jobs, False

    async def _sync(self, jobs: Sequence[tuple[FlushTarget, FlushJob]], logs: dict[FlushTarget, None]) -> bool:
        """Sync some of them, and remove those that are certainly durable; return whether none failed."""
        write = self._disk.begin(_ignore, is_vital=False)
        done = self._loop.run_in_executor(self._runtime.env.executor, run_all, [job for _, job in jobs], write)
        try:
            outcomes = await done
        finally:
            write.end()
        must_repeat = False
        for (target, job), error in zip(jobs, outcomes, strict=True):
            if error is not None:
                target.flush_failed(job, error)
            elif target.flushed(job):
                del logs[target]
            else:
                must_repeat = True
        if must_repeat:
            await asyncio.sleep(RETRY_S)
        return not any(outcomes)

    def _failed(self) -> None:
        self._state = _State.STUCK
        then = "the commit log keeps its entries for the next start"
        self._log.error("commit_log_not_flushed", reason="the segments of a log could not be synced", then=then)


def _ignore() -> None:
    return


def run_all(jobs: Sequence[Job], write: DiskWrite) -> list[Exception | None]:
    """Run the syncs, continuing after a failure; return their errors. Runs in a thread: touches files only."""
    outcomes: list[Exception | None] = []
    for job in jobs:
        try:
            job.run()
            outcomes.append(None)
        except Exception as error:
            outcomes.append(error)
        write.advance()
    return outcomes
