"""The event loop of a node: its clock includes the time in which the machine is suspended.

A node compares its lease, and the controller its brokers' sessions, with `loop.time()`. Event loops use
CLOCK_MONOTONIC, which stops while a machine sleeps: a laptop or a virtual machine that wakes up after minutes would
find its lease valid while another node leads. CLOCK_BOOTTIME does not stop, and costs the same to read.

Timers still use the system's own clock, so a timer that was set before a suspension may fire late. No safety property
depends on timers: the node compares its lease with the clock when it sends the answer. uvloop keeps its own clock for
timers, set from differences of `time()`, so the same holds there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from chronik.cli.errors import CliError


def new_event_loop(kind: str) -> asyncio.AbstractEventLoop:
    """Return a loop of the configured kind, with the clock that includes suspension if the system has one (Linux)."""
    make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    base: Any = asyncio.SelectorEventLoop
    if kind == "uvloop":
        try:
            import uvloop
        except ImportError:
            raise CliError('uvloop is not installed: install it, or set loop = "asyncio"') from None
        make, base = uvloop.new_event_loop, uvloop.Loop
    if hasattr(time, "CLOCK_BOOTTIME"):
        # Avoid a Python function in between: the clock is read several times per request.
        clock = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
        make = cast(Any, type(base.__name__, (base,), {"time": clock}))
    return make()
