"""Group commit: one fdatasync for everything that waits.

Each partition belongs to a lane. While a lane's sync runs in a thread, appends to its partitions gather; when it is
done, one further sync covers all of them. Nothing waits for a timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from chronik.node.environment import Environment
from chronik.observe.metrics import Metrics

if TYPE_CHECKING:
    from chronik.storage.log import Log, SyncJob

LANES = 4


class Synced(Protocol):
    """Who asks for syncs: a partition."""

    log: Log
    sync_lane: int

    def sync_done(self) -> None: ...

    def sync_failed(self, job: SyncJob, error: Exception) -> None: ...


class Syncer:
    """Invariant: a partition that asked is synced by a sync that starts after it asked. Owned by the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, env: Environment, metrics: Metrics) -> None:
        self._lanes = [_Lane(loop, env, metrics) for _ in range(LANES)]
        self._next_lane = 0

    def next_lane(self) -> int:
        """The lane for a new partition."""
        self._next_lane = (self._next_lane + 1) % LANES
        return self._next_lane

    def request(self, partition: Synced) -> None:
        """Sync what this partition has appended, soon; its `sync_done` or `sync_failed` is called."""
        self._lanes[partition.sync_lane].request(partition)

    async def settled(self) -> None:
        """Wait until every sync that runs or was asked for by now is over, whatever is asked for meanwhile."""
        for lane in self._lanes:
            await lane.settled()


class _Lane:
    def __init__(self, loop: asyncio.AbstractEventLoop, env: Environment, metrics: Metrics) -> None:
        self._loop = loop
        self._env = env
        self._metrics = metrics
        self._dirty: dict[Synced, None] = {}
        self._running = False
        self._rounds_done = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    def request(self, partition: Synced) -> None:
        self._dirty[partition] = None
        if not self._running:
            self._running = True
            # Not at once: all that this turn of the loop appends shares the sync.
            self._loop.call_soon(self._start)

    async def settled(self) -> None:
        if self._running:
            waiter: asyncio.Future[None] = self._loop.create_future()
            # The round that runs now does not cover what became dirty since it started; the one after it does.
            self._waiters.append((self._rounds_done + 2, waiter))
            await waiter

    def _start(self) -> None:
        jobs: list[tuple[Synced, SyncJob]] = []
        for partition in self._dirty:
            job = partition.log.sync_job()
            if job is not None:
                jobs.append((partition, job))
        self._dirty = {}
        if not jobs:
            self._stop()
            return
        started_s = self._loop.time()
        done = self._loop.run_in_executor(self._env.executor, _run_jobs, [job for _, job in jobs])
        done.add_done_callback(lambda future: self._finished(jobs, future, started_s))

    def _finished(
        self,
        jobs: list[tuple[Synced, SyncJob]],
        future: asyncio.Future[list[Exception | None]],
        started_s: float,
    ) -> None:
        self._metrics.fsync.observe(self._loop.time() - started_s)
        failure = future.exception() if not future.cancelled() else asyncio.CancelledError()
        outcomes: list[Exception | None]
        if failure is None:
            outcomes = future.result()
        else:
            outcomes = [RuntimeError(f"sync did not run: {failure!r}")] * len(jobs)
        for (partition, job), error in zip(jobs, outcomes, strict=True):
            if error is None:
                partition.log.synced(job)
                partition.sync_done()
            else:
                partition.sync_failed(job, error)
        self._rounds_done += 1
        self._wake(self._rounds_done)
        if self._dirty:
            self._start()
        else:
            self._stop()

    def _stop(self) -> None:
        self._running = False
        self._wake(None)

    def _wake(self, rounds_done: int | None) -> None:
        waiting = []
        for needed, waiter in self._waiters:
            if waiter.done():
                continue
            if rounds_done is None or needed <= rounds_done:
                waiter.set_result(None)
            else:
                waiting.append((needed, waiter))
        self._waiters = waiting


def _run_jobs(jobs: list[SyncJob]) -> list[Exception | None]:
    """Runs in a thread: touches files only. One failure does not keep the others from their sync."""
    outcomes: list[Exception | None] = []
    for job in jobs:
        outcomes.append(_outcome(job.run))
    return outcomes


def _outcome(run: Callable[[], object]) -> Exception | None:
    try:
        run()
    except Exception as error:
        return error
    return None
