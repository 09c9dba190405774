"""Deadlines for many waits that mostly end early: one queue per timeout length instead of one timer per wait."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import timedelta
from typing import Protocol

TICK_S = 0.05
WAIT_MS_MIN = 1_000
"""Clients that do not want to wait pass a timeout of 0. The work takes milliseconds, so they still get its outcome."""

WAIT_MS_MAX = 300_000


def bounded_wait_s(wait: timedelta) -> float:
    """Return how long an admin request may wait, given its timeout."""
    return min(max(wait / timedelta(milliseconds=1), WAIT_MS_MIN), WAIT_MS_MAX) / 1000


class Wait(Protocol):
    """A wait that may reach its deadline."""

    @property
    def is_over(self) -> bool: ...

    def deadline_passed(self) -> None: ...


class Deadlines:
    """Calls `deadline_passed`, at most two ticks late, on every wait that is not over by its deadline.

    Waits of equal length expire in the order in which they began, so each queue is sorted. Finished waits at the front
    of a queue are dropped when the next one is added, so the queues hold little more than the active waits. Owned by
    the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[int, deque[tuple[float, Wait]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def add(self, timeout_ms: int, wait: Wait) -> None:
        queue = self._queues.get(timeout_ms)
        if queue is None:
            queue = self._queues[timeout_ms] = deque()
            if self._timer is None:
                self._timer = self._loop.call_later(TICK_S, self._tick)
        while queue and queue[0][1].is_over:
            queue.popleft()
        queue.append((self._loop.time() + timeout_ms / 1000, wait))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        now_s = self._loop.time()
        for timeout_ms, queue in list(self._queues.items()):
            while queue and (queue[0][1].is_over or queue[0][0] <= now_s):
                _, wait = queue.popleft()
                if not wait.is_over:
                    wait.deadline_passed()
            if not queue:
                del self._queues[timeout_ms]
        self._timer = self._loop.call_later(TICK_S, self._tick) if self._queues else None
