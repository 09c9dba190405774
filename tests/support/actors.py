"""Threads that run one at a time, from one step to the next, in an order that a test chooses. A test can kill them.

`step` is called where another process could act in between: before and after an access to a table or its catalog. In a
thread that is no actor it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore, Thread, current_thread
from typing import Any

import pytest

WAIT_S_MAX = 60


class Killed(BaseException):
    """What a kill looks like from inside: no handler of errors sees it, and nothing is cleaned up afterwards."""


class Actor:
    """One piece of work in a thread of its own."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name = name
        self.at = "start"
        self.is_done = False
        self.error: BaseException | None = None
        self.lose_next_answer = False
        self._work = work
        self._is_killed = False
        self._may_run, self._has_paused = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.actor = self  # type: ignore[attr-defined]
        self._thread.start()

    def resume(self) -> None:
        """Run to the next step, or to the end."""
        self._may_run.release()
        assert self._has_paused.acquire(timeout=WAIT_S_MAX), f"{self.name} hangs after {self.at}"
        if self.is_done and self.error is not None and not isinstance(self.error, Killed):
            raise self.error

    def kill(self) -> None:
        self._is_killed = True
        self.resume()
        assert self.is_done, f"{self.name} survives at {self.at}"

    def step(self, name: str) -> None:
        if self._is_killed:
            raise Killed
        self.at = name
        self._has_paused.release()
        self._may_run.acquire()
        if self._is_killed:
            raise Killed

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if not self._is_killed:
                self._work()
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._has_paused.release()


def acting() -> Actor | None:
    return getattr(current_thread(), "actor", None)


def step(name: str) -> None:
    actor = acting()
    if actor is not None:
        actor.step(name)


def make_steps(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, lose: Callable[[Any], Any] | None = None
) -> None:
    """Make a function a step: before it and, if it changes anything, after it.

    `lose`: what a caller gets whose call took effect and whose answer is lost. It gets the result, or raises.
    """
    original = getattr(owner, name)

    def stepped(*arguments: Any, **named: Any) -> Any:
        actor = acting()
        if actor is None:
            return original(*arguments, **named)
        actor.step(f"before {name}")
        result = original(*arguments, **named)
        if lose is not None:
            if actor.lose_next_answer:
                actor.lose_next_answer = False
                result = lose(result)
            actor.step(f"after {name}")
        return result

    monkeypatch.setattr(owner, name, stepped)
