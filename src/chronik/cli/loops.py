"""The event loop of a node: its clock counts the time in which the machine is suspended.

A node compares its lease, and the controller its brokers' sessions, with `loop.time()`. CLOCK_MONOTONIC, which loops
use, stops while a machine sleeps: a laptop or a virtual machine that wakes up after minutes would find its lease valid,
while another node leads. CLOCK_BOOTTIME counts on, and costs the same to read.

Timers still run out by the system's own count, so one that was set before may fire late after a suspension. No safety
rests on that: what a lease allows is compared with the clock when the answer is given. uvloop keeps a clock of its own
for its timers, set from differences of `time()`, so the same holds there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from chronik.cli.errors import CliError


def new_event_loop(kind: str) -> asyncio.AbstractEventLoop:
    """A loop of the configured kind, with the clock that does not stop if the system has one (Linux)."""
    make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    base: Any = asyncio.SelectorEventLoop
    if kind == "uvloop":
        try:
            import uvloop
        except ImportError:
            raise CliError('uvloop is not installed: install it, or set loop = "asyncio"') from None
        make, base = uvloop.new_event_loop, uvloop.Loop
    if hasattr(time, "CLOCK_BOOTTIME"):
        # Without a Python function in between: the clock is read several times for each request.
        clock = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
        make = cast(Any, type(base.__name__, (base,), {"time": clock}))
    return make()
