"""Threads whose jobs are done in steps: the loop and other jobs run between the disk operations of a job.

Each job is a greenlet. A disk operation switches back to the simulation, which continues the job when the time of the
operation has passed. If the process dies meanwhile, its jobs are never continued: no `finally` block of them runs.

Jobs may hold locks across steps. So the locks of storage are replaced by `SteppedLock`, for which other jobs wait in
virtual time. The loop must not wait for a lock: that is a violation.

Only scenarios with steps import this module: greenlet is not a dependency of the product.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from greenlet import greenlet

from chronik.storage import commit_log, folder
from chronik.storage.syncing import FlushJob
from chronik.testing.sim.threads import HANDOVER_S, Job, SimExecutor
from chronik.testing.sim.world import SimulationFault, World

if TYPE_CHECKING:
    from chronik.testing.sim.host import Process

STARVED_SHARE = 0.4
STARVED_S_MAX = 30e-3
STARVED_JOB_S_MAX = 0.3
"""How often a job is starved: others have the interpreter for up to this long after each of its operations, and for up
to this long in total."""
MODULES_WITH_LOCKS = (commit_log, folder)
"""Modules of storage that create a `Lock`. `FlushJob` has one too."""


class SteppedThread:
    """A job that has begun."""

    def __init__(self, job: Job, starved_s: float) -> None:
        self.job = job
        self.starved_s = starved_s
        """How long others will have the interpreter before this job is treated as any other."""
        self._greenlet = greenlet(job.outcome)

    def run(self) -> Callable[[], None] | None:
        """Run until the next step, and return None; at the end of the job return its outcome."""
        resolve: Callable[[], None] | None = self._greenlet.switch()
        return resolve

    def leave(self) -> None:
        """Return to the simulation, from within the job. It continues here with the next `run`."""
        self._greenlet.parent.switch(None)

    def bury(self) -> None:
        """End the job when the run is over, whatever its code does with the exception."""
        for _ in range(100):
            if self._greenlet.dead:
                break
            try:
                self._greenlet.throw()
            except BaseException:
                continue


class SteppedExecutor(SimExecutor):
    """Invariant: at most one job runs at a time, and it runs in `_current`."""

    def __init__(self, process: Process, threads: int) -> None:
        super().__init__(process, threads)
        self._steps = process.world.random(f"{process.name}:steps")
        self._current: SteppedThread | None = None
        self._begun: dict[SteppedThread, None] = {}
        """Jobs that have not ended. Those of a dead process stay here: a greenlet that is freed runs its cleanup."""

    def _carry_out(self, job: Job) -> None:
        is_starved = self._steps.random() < STARVED_SHARE
        thread = SteppedThread(job, self._steps.random() * STARVED_JOB_S_MAX if is_starved else 0.0)
        self._begun[thread] = None
        self._run(thread)

    def _run(self, thread: SteppedThread) -> None:
        """Do the next step of the job, unless the process has died."""
        process, world = self._process, self._world
        if not process.is_running:
            process.when_continued(lambda: self._run(thread))
            return
        device = process.host.disk
        if device.is_hanging:
            device.when_healed(lambda: self._run(thread))
            return
        world.trace("step", process.serial)
        world.running, world.in_thread, self._current = process, True, thread
        try:
            resolve = thread.run()
        finally:
            world.running, world.in_thread, self._current = None, False, None
        if resolve is not None:
            del self._begun[thread]
            self._done(thread.job, resolve)

    def step(self, *, ends_within: bool = False) -> None:
        if self._current is None or not self._charged_s:
            return
        pause_s = self._charged_s * self._steps.random() if ends_within else self._charged_s
        self._charged_s -= pause_s
        if self._current.starved_s > 0:
            starved_s = self._steps.random() * STARVED_S_MAX
            self._current.starved_s -= starved_s
            pause_s += starved_s
        self._pause(pause_s)

    def _pause(self, seconds: float) -> None:
        """Let other code run for this long."""
        thread, left_s = self._current, self._charged_s
        assert thread is not None
        self._world.after(seconds, self._run, thread)
        thread.leave()
        self._charged_s = left_s

    def wait(self, waiting: deque[Callable[[], None]]) -> None:
        """Wait until the call that this adds to `waiting` is made."""
        thread, left_s = self._current, self._charged_s
        assert thread is not None
        waiting.append(lambda: self._world.after(self._steps.random() * HANDOVER_S, self._run, thread))
        thread.leave()
        self._charged_s = left_s

    def abandon(self) -> None:
        if self._current is not None:
            self._current.leave()

    def bury(self) -> None:
        begun, self._begun = self._begun, {}
        for thread in begun:
            thread.bury()


class SteppedLock:
    """A `threading.Lock`: jobs wait for it in virtual time, in the order of their requests."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_held = False
        self._waiting: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        if not self._is_held:
            self._is_held = True
            return
        process = self._world.running
        if process is None or not process.is_alive:
            return  # when the run is over
        executor = process.executor
        if not self._world.in_thread or not isinstance(executor, SteppedExecutor):
            fault = f"the loop of {process.name} waits for a lock that a thread holds"
            self._world.violated(fault)
            raise SimulationFault(fault)
        executor.wait(self._waiting)

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._is_held = False


@contextmanager
def stepped_locks(world: World) -> Iterator[None]:
    """Replace the locks of storage within the block."""
    init = FlushJob.__init__

    def init_with_lock(job: FlushJob, *args: Any, **kwargs: Any) -> None:
        init(job, *args, **{"lock": SteppedLock(world), **kwargs})

    with ExitStack() as replaced:
        for module in MODULES_WITH_LOCKS:
            replaced.enter_context(patch.object(module, "Lock", partial(SteppedLock, world)))
        replaced.enter_context(patch.object(FlushJob, "__init__", init_with_lock))
        yield
