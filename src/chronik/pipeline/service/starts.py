"""Which jobs may start now.

A start runs Python workers, Spark's planner and a first micro-batch. On a small machine several starts at once slow
each other down until all of them fail, and all try again together. So jobs start one after another, in the order in
which they came. A start ends with its first micro-batch, or with its failure. One that takes longer does not hold up
others.
"""

from __future__ import annotations

from threading import Lock

START_S_MAX = 60.0


class Starts:
    """May be used in any thread. The caller hands in the time."""

    def __init__(self, at_once: int, longest_s: float = START_S_MAX) -> None:
        self._at_once = at_once
        self._longest_s = longest_s
        self._lock = Lock()
        self._waiting: list[str] = []
        self._begun: dict[str, float] = {}

    def may_begin(self, name: str, now_s: float) -> bool:
        """Return whether this job may start now. If not, it has its place in the queue, and has to call again."""
        with self._lock:
            if name not in self._waiting:
                self._waiting.append(name)
            self._begun = {each: at_s for each, at_s in self._begun.items() if now_s - at_s < self._longest_s}
            if name not in self._waiting[: max(0, self._at_once - len(self._begun))]:
                return False
            self._waiting.remove(name)
            self._begun[name] = now_s
            return True

    def end(self, name: str) -> None:
        """Note that a start has ended, or that the job does not wait for one any more."""
        with self._lock:
            self._begun.pop(name, None)
            if name in self._waiting:
                self._waiting.remove(name)
