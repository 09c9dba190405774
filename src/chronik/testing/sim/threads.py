"""The threads of a process: jobs that wait for a free thread, take virtual time, and touch files only.

A job does its work at one instant between its start and its end; the loop gets the result at the end. A crash may come
before the work, after it, or (at a disk operation) within it. Jobs do not interleave with each other or with the loop,
except in a `SteppedExecutor` (module `steps`). While the device hangs, no job does its work: each job occupies its
thread until the device recovers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from chronik.testing.sim.world import SimulationFault

if TYPE_CHECKING:
    from chronik.testing.sim.host import Process

HANDOVER_S = 150e-6
"""The longest time to wake a thread, and also for the thread to wake the loop."""


class Job(NamedTuple):
    future: asyncio.Future[Any]
    call: Callable[..., Any]
    args: tuple[Any, ...]

    def outcome(self) -> Callable[[], None]:
        """Do the work; return a call that passes its result or its exception to the future."""
        try:
            return partial(self.future.set_result, self.call(*self.args))
        except SimulationFault:
            raise
        except BaseException as error:
            return partial(self.future.set_exception, error)


class SimExecutor(Executor):
    """Invariant: at most `threads` jobs have begun and not ended; other jobs wait in order."""

    def __init__(self, process: Process, threads: int) -> None:
        self._process = process
        self._world = process.world
        self._random = process.world.random(f"{process.name}:threads")
        self._idle = threads
        self._waiting: deque[Job] = deque()
        self._charged_s = 0.0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        raise SimulationFault("threads are used by loop.run_in_executor only")

    def charge(self, seconds: float) -> None:
        """Add this much time to the job that runs now."""
        self._charged_s += seconds

    def step(self, *, ends_within: bool = False) -> None:
        """Let time pass within the job that runs now: in this class it passes at the end of the job.

        It is the time that was charged, or with `ends_within` a part of it.
        """

    def abandon(self) -> None:
        """Never continue the job that runs now, if that is possible: its process is dead."""

    def bury(self) -> None:
        """Free the jobs that never ended, when the run is over."""

    def start(self, future: asyncio.Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._process.reached("job.submitted")
        self._waiting.append(Job(future, call, args))
        self._begin()

    def _begin(self) -> None:
        while self._idle and self._waiting:
            self._idle -= 1
            # The work happens between start and end: part of the device's time passes before it.
            before_s = self._random.random() * (HANDOVER_S + self._process.host.disk.sync_s)
            self._world.after(before_s, self._work, self._waiting.popleft())

    def _work(self, job: Job) -> None:
        if not self._process.is_running:
            self._process.when_continued(lambda: self._work(job))
            return
        device = self._process.host.disk
        if device.is_hanging:
            device.when_healed(lambda: self._work(job))
            return
        if job.future.cancelled():
            self._ended()
            return
        self._world.trace("job", self._process.serial)
        self._charged_s = self._random.random() * HANDOVER_S
        self._carry_out(job)

    def _carry_out(self, job: Job) -> None:
        """Do all the work of the job now."""
        world = self._world
        world.running, world.in_thread = self._process, True
        try:
            resolve = job.outcome()
        finally:
            world.running, world.in_thread = None, False
        self._done(job, resolve)

    def _done(self, job: Job, resolve: Callable[[], None]) -> None:
        if self._process.is_alive:
            self._world.after(self._charged_s, self._report, job.future, resolve)
            self._process.reached_outside("job.done")

    def _report(self, future: asyncio.Future[Any], resolve: Callable[[], None]) -> None:
        if not self._process.is_running:
            self._process.when_continued(lambda: self._report(future, resolve))
            return
        self._process.loop.call_soon_threadsafe(_unless_cancelled, future, resolve)
        self._ended()
        self._process.reached_outside("job.reported")

    def _ended(self) -> None:
        self._idle += 1
        self._begin()


def _unless_cancelled(future: asyncio.Future[Any], resolve: Callable[[], None]) -> None:
    if not future.cancelled():
        resolve()
