"""Deadlines of many waits that mostly end before them: coarse buckets instead of a timer each."""

from __future__ import annotations

import asyncio
from typing import Protocol

TICK_S = 0.05


class Wait(Protocol):
    """Something that may still be waiting when its time is up."""

    @property
    def is_over(self) -> bool: ...

    def deadline_passed(self) -> None: ...


class Deadlines:
    """Calls `deadline_passed` at most two ticks late on every wait that is not over by then.

    A wait that ends in time costs one list entry and no timer. Owned by the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buckets: dict[int, list[Wait]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0

    def add(self, timeout_ms: int, wait: Wait) -> None:
        now_s = self._loop.time()
        if self._timer is None:
            self._last_tick = int(now_s / TICK_S)
            self._timer = self._loop.call_later(TICK_S, self._tick)
        tick = int((now_s + timeout_ms / 1000) / TICK_S) + 1
        self._buckets.setdefault(max(tick, self._last_tick + 1), []).append(wait)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        now_tick = int(self._loop.time() / TICK_S)
        for tick in [tick for tick in self._buckets if tick <= now_tick]:
            for wait in self._buckets.pop(tick):
                if not wait.is_over:
                    wait.deadline_passed()
        self._last_tick = now_tick
        if self._buckets:
            self._timer = self._loop.call_later(TICK_S, self._tick)
        else:
            self._timer = None
