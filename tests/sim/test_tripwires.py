"""Simulated code that uses the real clock, real randomness, real threads or a real disk is caught."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections.abc import Callable

import pytest
from tests.sim.machines import Machines

from chronik.testing.sim.tripwires import tripwires
from chronik.testing.sim.world import SimulationFault

FORBIDDEN: dict[str, Callable[[], object]] = {
    "time.time": lambda: time.time(),
    "time.monotonic": lambda: time.monotonic(),
    "random.random": lambda: random.random(),
    "uuid.uuid4": lambda: uuid.uuid4(),
    "os.urandom": lambda: os.urandom(4),
    "Thread.start": lambda: threading.Thread(target=print).start(),
    "os.fsync": lambda: os.fsync(0),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_simulated_code_cannot_use_the_real_clock_randomness_threads_or_disk(machines: Machines, name: str) -> None:
    async def main() -> None:
        FORBIDDEN[name]()

    with tripwires(machines.world), pytest.raises(SimulationFault):
        machines.run(main())
    assert name in (machines.world.violation or "")


def test_code_outside_the_simulation_can_use_the_real_clock_and_randomness(machines: Machines) -> None:
    with tripwires(machines.world):
        assert time.time() > 0 and len(os.urandom(4)) == 4
    assert machines.world.violation is None


def test_another_thread_can_use_the_real_clock_while_simulated_code_runs(machines: Machines) -> None:
    asked, seen = threading.Event(), threading.Event()

    def other() -> None:
        asked.wait()
        if time.time() > 0:
            seen.set()

    thread = threading.Thread(target=other)
    thread.start()

    async def main() -> None:
        asked.set()
        assert seen.wait(10)

    with tripwires(machines.world):
        machines.run(main())
    thread.join()
    assert machines.world.violation is None
