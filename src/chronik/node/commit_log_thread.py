"""The thread that writes the commit log; the loop waits for each write for at most a millisecond.

A durable write takes about 0.1 ms on a fast disk. If the loop did something else meanwhile, this thread and the loop
would contend for the interpreter, and each would wait for a processor to notice the other: then a write takes 0.5 ms
(docs/design.md). While the loop waits here, this thread has both at once. The limit keeps the loop responsive on a
disk that is slow or hangs: after a wait that was too short, the loop does not wait for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, TypeVar

T = TypeVar("T")

WAIT_S_MAX: Final = 0.001
PAUSE_S: Final = 0.1
"""How long the loop does not wait after a write that took longer: it loses 1 % of its time on a slow disk."""


class _Call:
    """One call, and the future of its outcome. `run` runs in the thread, everything else on the loop."""

    __slots__ = ("_error", "_guard", "_has_ended", "_is_left", "_outcome", "ended", "future", "work")

    def __init__(self, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future
        self.ended = Lock()
        """Released at the end of `run`, unless the loop has left."""
        self.ended.acquire()
        self._guard = Lock()
        self._has_ended = False
        self._is_left = False
        self._outcome: Any = None
        self._error: BaseException | None = None

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._outcome = self.work()
        except BaseException as error:
            self._error = error
        with self._guard:
            self._has_ended = True
            is_left = self._is_left
        if not is_left:
            self.ended.release()
            return
        with suppress(RuntimeError):  # The loop is closed: the disk answers after the node has ended.
            loop.call_soon_threadsafe(self.complete)

    def leave(self) -> bool:
        """Let the thread complete the call, unless it has ended meanwhile; return whether it will."""
        with self._guard:
            self._is_left = not self._has_ended
            return self._is_left

    def complete(self) -> None:
        if self.future.cancelled():
            return
        if self._error is None:
            self.future.set_result(self._outcome)
        else:
            self.future.set_exception(self._error)


class CommitLogThread:
    """Calls run one after another. Owned by the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._waits_from_s = loop.time()
        Thread(target=self._run, name=name, daemon=True).start()

    @property
    def waits(self) -> bool:
        """Whether the next call waits for its outcome."""
        return self._loop.time() >= self._waits_from_s

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in the thread. The future is done already if that took less than WAIT_S_MAX."""
        future: asyncio.Future[T] = self._loop.create_future()
        call = _Call(work, future)
        self._calls.put(call)
        if self.waits and not call.ended.acquire(timeout=WAIT_S_MAX):
            self._waits_from_s = self._loop.time() + PAUSE_S
        if not call.leave():
            call.complete()
        return future

    def close(self) -> None:
        """Let the thread end after the calls that it has."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run(self._loop)
