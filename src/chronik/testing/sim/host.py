"""A machine, and the processes that run on it one after the other.

The machine has the clocks, the disk and the network address; these outlive every process. A process has a loop and
threads. It ends by itself, by SIGKILL (the page cache survives, the kernel closes its sockets), or by a power failure
of the machine (unsynced data is lost, and peers are not notified).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chronik.testing.sim.disk import SimDisk
from chronik.testing.sim.loop import SimLoop
from chronik.testing.sim.threads import SimExecutor
from chronik.testing.sim.world import World

if TYPE_CHECKING:
    from chronik.testing.sim.network import Network

EPOCH_MS = 1_750_000_000_000
"""The wall clock at the start of a run, without the offset of a machine."""
CLOCK_DRIFT_MAX = 200e-6
CLOCK_OFFSET_S_MAX = 1e6
WALL_OFFSET_MS_MAX = 400


@dataclass(slots=True)
class Clock:
    """A machine's monotonic and wall clocks: both run slightly fast or slow, and start at any value.

    Invariant: `monotonic_s` never goes backwards; `wall_ms` may jump.
    """

    world: World
    rate: float = 1.0
    offset_s: float = 0.0
    wall_offset_ms: int = 0

    def monotonic_s(self) -> float:
        return self.offset_s + self.world.now * self.rate

    def run_at(self, rate: float) -> None:
        """Change the rate of both clocks from now on; neither jumps."""
        gained_s = self.world.now * (self.rate - rate)
        self.offset_s += gained_s
        self.wall_offset_ms += round(gained_s * 1000)
        self.rate = rate

    def world_s(self, monotonic_s: float) -> float:
        """Return the world time at which this clock shows `monotonic_s`."""
        return (monotonic_s - self.offset_s) / self.rate

    def wall_ms(self) -> int:
        return EPOCH_MS + self.wall_offset_ms + int(self.world.now * self.rate * 1000)


class Crashed(BaseException):
    """The process is dead. Not an Exception, so that no code catches it and continues."""


class Process:
    """One incarnation of a program. `is_alive` until it ends; `is_running` while it is alive and not paused."""

    def __init__(self, host: Host, number: int, threads: int) -> None:
        self.host = host
        self.world = host.world
        self.name = f"{host.name}.{number}"
        self.serial = host.world.next_serial()
        self.is_alive = True
        self.is_paused = False
        self.executor = host.executor_type(self, threads)
        self.loop = SimLoop(self)  # type: ignore[abstract]  # as much of a loop as node code uses
        self._held: list[Callable[[], None]] = []

    @property
    def is_running(self) -> bool:
        return self.is_alive and not self.is_paused

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Start the program. An exception that it raises is a violation and ends the simulation."""
        task = self.loop.create_task(main, name=f"{self.name}:main")

        def ended(_: object) -> None:
            if self.is_alive and not task.cancelled() and task.exception() is not None:
                error = task.exception()
                self.world.violated(f"{self.name} ended with {type(error).__name__}: {error}")

        task.add_done_callback(ended)

    def check_alive(self) -> None:
        if not self.is_alive:
            if self.world.in_thread:
                self.executor.abandon()
            raise Crashed(self.name)

    def charge(self, seconds: float) -> None:
        """Add this much time to the code that runs now in this process."""
        if self.world.in_thread:
            self.executor.charge(seconds)
        else:
            self.loop.charge(seconds)

    def step(self, *, ends_within: bool = False) -> None:
        """Let time pass within a thread's job: all that was charged, or with `ends_within` a part of it."""
        if self.world.in_thread:
            self.executor.step(ends_within=ends_within)

    def reached(self, point: str) -> None:
        """Pass a crash point. The nemesis may strike here; raise `Crashed` if the process is then dead."""
        self.check_alive()
        self.reached_outside(point)
        self.check_alive()

    def reached_outside(self, point: str) -> None:
        """Pass a crash point outside the process's own code."""
        if self.host.on_crash_point is not None:
            self.host.on_crash_point(self.host, point)

    def when_continued(self, call: Callable[[], None]) -> None:
        """Call when the paused process resumes; never, if it ends instead."""
        if self.is_alive:
            self._held.append(call)

    def pause(self) -> None:
        """SIGSTOP."""
        self.is_paused = True

    def resume(self) -> None:
        """SIGCONT."""
        if not self.is_paused:
            return
        self.is_paused = False
        if self.is_alive:
            held, self._held = self._held, []
            for call in held:
                self.world.after(0.0, call)
            self.loop.continue_after_pause()

    def end(self) -> None:
        """End the process: its code never runs again."""
        self.is_alive = False
        self._held = []
        self.loop.die()


class Host:
    """A machine. Its random properties are drawn when it is created."""

    def __init__(self, world: World, network: Network, name: str, address: str) -> None:
        random = world.random(f"{name}:machine")
        self.world = world
        self.network = network
        self.name = name
        self.address = address
        self.clock = Clock(
            world,
            rate=1.0 + random.uniform(-CLOCK_DRIFT_MAX, CLOCK_DRIFT_MAX),
            offset_s=random.uniform(0.0, CLOCK_OFFSET_S_MAX),
            wall_offset_ms=random.randint(-WALL_OFFSET_MS_MAX, WALL_OFFSET_MS_MAX),
        )
        self.disk = SimDisk(self, random)
        self.is_powered = True
        self.boots = 1
        self.process: Process | None = None
        self.on_crash_point: Callable[[Host, str], None] | None = None
        self.executor_type: type[SimExecutor] = SimExecutor
        self._processes: list[Process] = []
        network.add(self)

    def start(self, program: Callable[[Process], Coroutine[Any, Any, None]], threads: int = 4) -> Process:
        """Start a program on the machine. No other program may be running."""
        assert self.is_powered and (self.process is None or not self.process.is_alive)
        process = Process(self, len(self._processes) + 1, threads)
        self._processes.append(process)
        self.process = process
        process.run(program(process))
        return process

    def kill(self) -> None:
        """Send SIGKILL to the program, if one is running."""
        process = self.process
        if process is not None and process.is_alive:
            process.end()
            self.network.process_ended(self)
            self.disk.process_ended()

    def power_off(self) -> None:
        """Cut the power: data that is not durable is lost, and peers are not notified."""
        if self.process is not None:
            self.process.end()
        self.is_powered = False
        self.network.machine_lost(self)
        self.disk.process_ended()
        self.disk.root.lose_power(self.disk.random)

    def power_on(self) -> None:
        self.is_powered = True
        self.boots += 1
        self.network.machine_back(self)

    def pause(self) -> None:
        if self.process is not None:
            self.process.pause()

    def resume(self) -> None:
        if self.process is not None:
            self.process.resume()

    def bury(self) -> None:
        """End all processes and close their coroutines when the run is over."""
        for process in self._processes:
            process.end()
        for process in self._processes:
            process.executor.bury()
            process.loop.bury()


def release(hosts: Iterable[Host]) -> None:
    """Free the dead processes of these machines now, and ignore what their tasks raise while they are freed."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        for host in hosts:
            host.bury()
        gc.collect()
    finally:
        sys.unraisablehook = hook
