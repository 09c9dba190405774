"""An asyncio event loop on virtual time: one for each process.

Callbacks run in the order in which they were scheduled, as asyncio guarantees. Time varies as on a real machine: an
iteration takes 2-60 microseconds plus its disk operations; timers fire slightly late, and sometimes very late.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from chronik.testing.sim.world import SimulationFault

if TYPE_CHECKING:
    from chronik.testing.sim.host import Process

T = TypeVar("T")

ITERATION_S_MIN = 2e-6
ITERATION_S_SPREAD = 58e-6
TIMER_LATE_S = 100e-6
TIMER_VERY_LATE_S = 20e-3
TIMER_VERY_LATE_SHARE = 0.01
CLOCK_RESOLUTION_S = 1e-9


class SimTask(asyncio.Task[T]):
    """A task whose hash follows from its creation order, not from its address.

    asyncio keeps tasks in sets (TaskGroup, wait) and iterates over them.
    """

    def __init__(
        self, serial: int, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], name: str | None, **more: Any
    ) -> None:
        self._serial = serial
        super().__init__(coro, name=name or f"task-{serial}", **more)

    def __hash__(self) -> int:
        return self._serial

    def __eq__(self, other: object) -> bool:
        return self is other


class SimLoop(asyncio.AbstractEventLoop):
    """Runs the code of one process. When the process dies, everything that is scheduled is dropped."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.world = process.world
        self._serial = process.serial
        self._clock = process.host.clock
        self._random = process.world.random(f"{process.name}:loop")
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_count = 0
        self._armed_s: float | None = None
        self._is_scheduled = False
        self._is_iterating = False
        self._busy_until_s = 0.0
        self._charged_s = 0.0
        self._tasks: list[asyncio.Task[Any]] = []
        self._task_count = 0

    # -- running -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Schedule an iteration: something is ready."""
        if not self._is_scheduled and self.process.is_running:
            self._is_scheduled = True
            self.world.at(self._busy_until_s, self._iterate)

    def charge(self, seconds: float) -> None:
        """Add this much time to the current iteration."""
        self._charged_s += seconds

    def charge_until(self, world_s: float) -> None:
        """Extend the current iteration at least until this world time."""
        self._charged_s = max(self._charged_s, world_s - self.process.world.now)

    def _iterate(self) -> None:
        self._is_scheduled = False
        if not self.process.is_running:
            return
        self._take_due_timers()
        ready = self._ready
        if not ready:
            self._arm_timer()
            return
        world = self.world
        count = len(ready)
        world.trace("iteration", self._serial, count)
        self._charged_s = ITERATION_S_MIN + self._random.random() * ITERATION_S_SPREAD
        world.running = self.process
        self._is_iterating = True
        events._set_running_loop(self)
        try:
            for _ in range(count):
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
                    if not self.process.is_running:
                        break
        finally:
            events._set_running_loop(None)
            self._is_iterating = False
            world.running = None
        self._busy_until_s = world.now + self._charged_s
        if ready:
            self.wake()
        self._arm_timer()

    def _take_due_timers(self) -> None:
        timers = self._timers
        due_s = self.time() + CLOCK_RESOLUTION_S
        while timers and (timers[0][0] <= due_s or timers[0][2].cancelled()):
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                self._ready.append(handle)

    def _arm_timer(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers or not self.process.is_running:
            return
        first_s = timers[0][0]
        if self._armed_s is not None and self._armed_s <= first_s:
            return
        self._armed_s = first_s
        late_s = self._random.random() * TIMER_LATE_S
        if self._random.random() < TIMER_VERY_LATE_SHARE:
            late_s = self._random.random() * TIMER_VERY_LATE_S
        self.world.at(max(self.world.now, self._clock.world_s(first_s)) + late_s, self._timer_due, first_s)

    def _timer_due(self, armed_s: float) -> None:
        if self._armed_s == armed_s:
            self._armed_s = None
        self.wake()

    def continue_after_pause(self) -> None:
        self._armed_s = None
        self.wake()
        self._arm_timer()

    def die(self) -> None:
        """Drop everything that is scheduled: the process is dead."""
        self._ready.clear()
        self._timers.clear()

    def bury(self) -> None:
        """Close every pending coroutine when the run is over, so that the interpreter does not warn about it."""
        self.die()
        for task in self._tasks:
            if task.done():
                continue
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            for _ in range(100):
                try:
                    coroutine.close()
                    break
                except BaseException:
                    # It awaited during cleanup, or touched the dead process: try again from its new position.
                    continue
        self._tasks.clear()

    # -- scheduling ----------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._clock.monotonic_s()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self.world.in_thread:
            self._refuse("call_soon")
        return self.call_soon_threadsafe(callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if self.process.is_alive:
            self._ready.append(handle)
            if not self._is_iterating:
                self.wake()
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self.world.in_thread:
            self._refuse("call_at")
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if self.process.is_alive:
            self._timer_count += 1
            heapq.heappush(self._timers, (when, self._timer_count, handle))
            handle._scheduled = True  # type: ignore[attr-defined]
            if not self._is_iterating:
                self._arm_timer()
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Required by asyncio. Cancelled timers are dropped when they reach the top of the heap."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        if self.world.in_thread:
            self._refuse("create_task")
        if not self.process.is_alive:
            coro.close()
            self.process.check_alive()
        self._task_count += 1
        task = SimTask(self._task_count, coro, name, loop=self, context=context)
        self._tasks.append(task)
        if len(self._tasks) % 1024 == 0:
            self._tasks = [known for known in self._tasks if not known.done()]
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        if executor is not self.process.executor:
            self._refuse("run_in_executor with another executor than the environment's")
        future: asyncio.Future[T] = self.create_future()
        self.process.executor.start(future, func, args)
        return future

    # -- network -------------------------------------------------------------------------------------------------------

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str,
        port: int,
        *,
        backlog: int = 100,
        start_serving: bool = True,
        **unsupported: Any,
    ) -> asyncio.AbstractServer:
        _refuse_options("create_server", unsupported)
        server = self.process.host.network.bind(self.process, protocol_factory, host, port)
        if start_serving:
            await server.start_serving()
        return server

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, **unsupported: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        _refuse_options("create_connection", unsupported)
        transport = await self.process.host.network.connect(self.process, host, port)
        protocol = protocol_factory()
        transport.attach(protocol)
        return transport, protocol

    # -- asyncio interface ---------------------------------------------------------------------------------------------

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_iterating

    def is_closed(self) -> bool:
        return not self.process.is_alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report a violation: a callback of node code raised. Exceptions from dead processes are ignored."""
        error = context.get("exception")
        if not self.process.is_alive or (error is not None and not isinstance(error, Exception)):
            return
        if "never retrieved" in context.get("message", ""):
            # Reported when the interpreter frees the future, which is not a simulated event.
            return
        self.world.violated(f"{self.process.name}: {context.get('message')}: {error!r}")

    def _refuse(self, what: str) -> NoReturn:
        fault = f"{self.process.name}: {what} is not allowed here"
        # Recorded as well as raised: the caller may catch every exception.
        self.world.violated(fault)
        raise SimulationFault(fault)


def _refuse_options(call: str, options: dict[str, Any]) -> None:
    given = sorted(name for name, value in options.items() if value is not None)
    if given:
        raise SimulationFault(f"{call} with {', '.join(given)} is not simulated")
