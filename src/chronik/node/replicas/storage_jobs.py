"""The jobs of one log that run in threads, tracked so that a truncation can have exclusive access."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class StorageJobs:
    """Invariant: while `is_exclusive`, no job begins, and the exclusive job runs alone.

    Code that hands work on a log to a thread begins and ends a job on the loop. Owned by the loop.
    """

    __slots__ = ("_running", "_waiters", "is_exclusive")

    def __init__(self) -> None:
        self.is_exclusive = False
        self._running = 0
        self._waiters: list[asyncio.Future[None]] = []

    def begin(self) -> bool:
        """Begin a job if one may run now, and return whether it may. The caller then calls `end`."""
        if self.is_exclusive:
            return False
        self._running += 1
        return True

    def end(self) -> None:
        self._running -= 1
        if not self._running:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    @contextmanager
    def running(self) -> Iterator[None]:
        """End a job that was begun, whether it succeeds or fails."""
        try:
            yield
        finally:
            self.end()

    async def ended(self) -> None:
        while self._running:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    async def begin_exclusive(self) -> None:
        """Block new jobs and wait for the running ones. The caller then calls `end_exclusive`."""
        self.is_exclusive = True
        await self.ended()
        self._running = 1

    def end_exclusive(self) -> None:
        self.is_exclusive = False
        self.end()
