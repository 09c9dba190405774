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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from chronik.testing.sim.world import SimulationFault, World

TRAPPED: Mapping[Any, tuple[str, ...]] = {
    time: ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"),
    random: ("random", "randint", "randrange", "choice", "uniform", "shuffle", "sample", "getrandbits"),
    uuid: ("uuid1", "uuid4"),
    os: ("urandom", "getrandom", "fsync", "fdatasync"),
    threading.Thread: ("start",),
    socket.socket: ("__init__",),
}


@contextmanager
def tripwires(world: World) -> Iterator[None]:
    """Arm the traps within the block."""
    thread = threading.get_ident()
    with ExitStack() as armed:
        for owner, names in TRAPPED.items():
            for name in names:
                if hasattr(owner, name):
                    armed.enter_context(patch.object(owner, name, _trap(world, thread, owner, name)))
        yield


def _trap(world: World, thread: int, owner: Any, name: str) -> Callable[..., Any]:
    original = getattr(owner, name)

    def trapped(*args: Any, **kwargs: Any) -> Any:
        if world.running is None or threading.get_ident() != thread:
            return original(*args, **kwargs)
        fault = f"{world.running.name} called {owner.__name__}.{name}"
        world.violated(fault)
        raise SimulationFault(fault)

    return trapped
