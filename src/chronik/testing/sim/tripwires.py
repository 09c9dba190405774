"""Traps for what node code may not do: read the real clock, use real randomness, start threads, open sockets.

During a run, these functions raise when simulated code calls them. All other code gets the real functions, including
other threads of the process: for example those of a client that an earlier test left open.
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
    """Arm the traps within the block."""
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
