"""A small world for tests of the simulator itself: some machines, and coroutines that run on them."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from chronik.testing.sim.disk import ProcessDisk
from chronik.testing.sim.host import Host, Process
from chronik.testing.sim.network import Network
from chronik.testing.sim.world import World

T = TypeVar("T")
DEADLINE_S = 10_000.0


class Machines:
    """A world with machines `a`, `b`, ... ; each runs one process that does nothing by itself."""

    def __init__(self, seed: int = 1, count: int = 2) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.hosts = [
            Host(self.world, self.network, chr(ord("a") + number), f"10.0.0.{number + 1}") for number in range(count)
        ]
        for host in self.hosts:
            host.start(_idle)

    def process(self, number: int = 0) -> Process:
        process = self.hosts[number].process
        assert process is not None
        return process

    def disk(self, number: int = 0) -> ProcessDisk:
        return ProcessDisk(self.process(number))

    def begin(self, main: Coroutine[Any, Any, None], number: int = 0) -> None:
        process = self.process(number)
        process.loop.call_soon_threadsafe(lambda: process.run(main))

    def run(self, main: Coroutine[Any, Any, T], number: int = 0) -> T:
        """Run a coroutine on a machine until it is done, and raise its exception here."""
        process = self.process(number)
        outcome: list[T | Exception] = []

        async def observed() -> None:
            try:
                outcome.append(await main)
            except Exception as error:
                outcome.append(error)

        process.loop.call_soon_threadsafe(lambda: process.run(observed()))
        self.world.run(self.world.now + DEADLINE_S, lambda: bool(outcome))
        if not outcome:
            raise AssertionError(f"not done within {DEADLINE_S:g} s; violation: {self.world.violation}")
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def pass_time(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    def restart(self, number: int = 0) -> None:
        host = self.hosts[number]
        if not host.is_powered:
            host.power_on()
        host.start(_idle)

    def bury(self) -> None:
        for host in self.hosts:
            host.bury()


async def _idle(process: Process) -> None:
    """Do nothing; work is added later."""
