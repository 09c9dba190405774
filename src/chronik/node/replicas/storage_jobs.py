"""Which jobs of one log run in threads, so that a truncation can have the log for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class StorageJobs:
    """Invariant: while `is_exclusive`, no job begins; and one that needs the log for itself runs alone.

    Whoever hands work on a log to a thread begins a job and ends it on the loop. Owned by the loop.
    """

    __slots__ = ("_running", "_waiters", "is_exclusive")

    def __init__(self) -> None:
        self.is_exclusive = False
        self._running = 0
        self._waiters: list[asyncio.Future[None]] = []

    def begin(self) -> bool:
        """Whether a job may run now; then `end` follows it."""
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
        """For a job that was begun: ends it however it turns out."""
        try:
            yield
        finally:
            self.end()

    async def ended(self) -> None:
        """Wait until no job runs."""
        while self._running:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    async def begin_exclusive(self) -> None:
        """Let no job begin, and wait for those that run. `end_exclusive` follows."""
        self.is_exclusive = True
        await self.ended()
        self._running = 1

    def end_exclusive(self) -> None:
        self.is_exclusive = False
        self.end()
