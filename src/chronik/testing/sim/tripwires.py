"""Traps for what node code may not do: look at the real clock, draw from the real dice, start threads, open sockets.

While a run lasts, these functions raise when they are called from simulated code; everybody else gets the real ones,
other threads of the process among them: those of a client that a test before left open, for example.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from chronik.testing.sim.world import SimulationFault, World

TRAPPED: tuple[tuple[Any, str], ...] = (
    (time, "time"),
    (time, "time_ns"),
    (time, "monotonic"),
    (time, "monotonic_ns"),
    (time, "perf_counter"),
    (time, "perf_counter_ns"),
    (time, "sleep"),
    (random, "random"),
    (random, "randint"),
    (random, "randrange"),
    (random, "choice"),
    (random, "uniform"),
    (random, "shuffle"),
    (random, "sample"),
    (random, "getrandbits"),
    (uuid, "uuid1"),
    (uuid, "uuid4"),
    (os, "urandom"),
    (os, "getrandom"),
    (threading.Thread, "start"),
    (socket.socket, "__init__"),
    (os, "fsync"),
    (os, "fdatasync"),
)


@contextmanager
def tripwires(world: World) -> Iterator[None]:
    """Armed for as long as the block lasts."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in TRAPPED if hasattr(owner, name)]
    thread = threading.get_ident()
    for owner, name, original in originals:
        setattr(owner, name, _trap(world, thread, f"{owner.__name__}.{name}", original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _trap(world: World, thread: int, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def trapped(*args: Any, **kwargs: Any) -> Any:
        if world.running is None or threading.get_ident() != thread:
            return original(*args, **kwargs)
        fault = f"{world.running.name} called {name}"
        world.violated(fault)
        raise SimulationFault(fault)

    return trapped
