"""Detects a hung disk.

A hung device reports no error: its writes just do not return. So each write is watched from the moment it is passed to
a thread. A write that takes longer than `disk_timeout_ms` is late, and while a vital write is late, the disk is stuck.
A hung thread cannot be interrupted, so callers that depend on it stop waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from chronik.observe.logging import Logger

T = TypeVar("T")
NO_ANSWER = "the disk does not answer"
CHECKS = 10
"""A write is checked this often before it is late. Time in which the loop itself did not run counts as one check."""


@dataclass(slots=True, eq=False)
class DiskWrite:
    """One write, or several in one thread. That thread calls `advance` after each; only the loop uses the rest."""

    _watch: DiskWatch
    on_late: Callable[[], None]
    is_vital: bool
    checks: int = 0
    """Checks since the write last made progress."""
    is_late: bool = False
    _advances: int = 0
    _seen: int = 0

    def advance(self) -> None:
        """Record that one of several writes is done; the next one gets the full time."""
        self._advances += 1

    def end(self) -> None:
        """Mark the write as over, successful or not. Idempotent."""
        self._watch.ended(self)

    def look(self) -> None:
        self.checks = self.checks + 1 if self._seen == self._advances else 0
        self._seen = self._advances


class DiskWatch:
    """Owned by the loop. Invariant: `is_stuck` is True exactly while a vital write is late."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_ms: int, log: Logger) -> None:
        self.timeout_s = timeout_ms / 1000
        self.is_stuck = False
        self._loop = loop
        self._log = log.bind(component="storage")
        self._writes: dict[DiskWrite, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of `is_stuck`."""
        self._listeners.append(listener)

    def begin(self, on_late: Callable[[], None], *, is_vital: bool = True) -> DiskWrite:
        """Start watching a write that is passed to a thread; call `on_late` once if it is late. `end` must follow.

        If `is_vital` is False, the write may be late without the disk being stuck: no acknowledgment depends on it.
        """
        write = DiskWrite(self, on_late, is_vital)
        self._writes[write] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self.timeout_s / CHECKS, self._check)
        return write

    def ended(self, write: DiskWrite) -> None:
        self._writes.pop(write, None)
        if write.is_late:
            self._update()

    @property
    def patience_s(self) -> float:
        """How long to wait for a write from now on."""
        return 0.0 if self.is_stuck else self.timeout_s

    async def wait(self, job: asyncio.Future[T]) -> T:
        """Return the result of a job in a thread. Raise TimeoutError if the disk hangs; the thread continues."""
        await asyncio.wait([job], timeout=self.patience_s)
        if not job.done():
            raise TimeoutError(NO_ANSWER)
        return await job

    def _check(self) -> None:
        self._timer = None
        for write in list(self._writes):
            write.look()
            if write.checks > CHECKS and not write.is_late:
                write.is_late = True
                write.on_late()
        self._update()
        if self._writes:
            self._timer = self._loop.call_later(self.timeout_s / CHECKS, self._check)

    def _update(self) -> None:
        is_stuck = any(write.is_late and write.is_vital for write in self._writes)
        if is_stuck == self.is_stuck:
            return
        self.is_stuck = is_stuck
        if is_stuck:
            then = "other nodes lead until it answers"
            self._log.error("disk_stuck", timeout_ms=int(self.timeout_s * 1000), reason=NO_ANSWER, then=then)
        else:
            self._log.info("disk_recovered")
        for listener in self._listeners:
            listener()
