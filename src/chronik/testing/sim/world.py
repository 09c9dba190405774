"""The simulated world: one heap of events, the virtual clock, randomness by purpose, a hash of all that happened."""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from struct import Struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chronik.testing.sim.host import Process

NOTES_KEPT = 300
_ENTRY = Struct("<dIqq")


class SimulationFault(Exception):
    """The simulation itself cannot go on: a rule that node code must keep was broken, or nothing moves any more."""


class World:
    """Events happen one at a time in the order of their virtual time, then of their scheduling.

    Invariant: everything that happens follows from `seed`; `trace_hash` tells two runs apart that differ anywhere.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.events = 0
        self.running: Process | None = None
        """Whose code runs right now: in an iteration of its loop, or in one of its threads."""
        self.in_thread = False
        self.violation: str | None = None
        """The first thing that went wrong; the run ends there."""
        self.notes: deque[str] = deque(maxlen=NOTES_KEPT)
        self.print_note: Callable[[str], None] | None = None
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._hash = blake2b(digest_size=16)
        self._kinds: dict[str, int] = {}
        self._serial = 0

    # -- events --------------------------------------------------------------------------------------------------------

    def at(self, when_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call at a virtual time, or now if that is over."""
        self._scheduled += 1
        heapq.heappush(self._heap, (max(when_s, self.now), self._scheduled, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, call, *args)

    def run(self, until_s: float, is_over: Callable[[], bool] | None = None, events_max: int | None = None) -> bool:
        """Let things happen until `is_over`, or until the time; tells whether it is over. Stops at a violation."""
        heap = self._heap
        while self.violation is None:
            if is_over is not None and is_over():
                return True
            if events_max is not None and self.events >= events_max:
                return False
            if not heap or heap[0][0] > until_s:
                self.now = max(self.now, until_s)
                return False
            when_s, _, call, args = heapq.heappop(heap)
            self.now = when_s
            self.events += 1
            call(*args)
        return False

    # -- chance and identity -------------------------------------------------------------------------------------------

    def random(self, purpose: str) -> Random:
        """A stream of its own for each purpose: a draw more for one does not shift the others."""
        return Random(f"{self.seed}:{purpose}")

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    # -- what happened -------------------------------------------------------------------------------------------------

    def trace(self, kind: str, number: int = 0, other: int = 0) -> None:
        """Take an event into the hash. Only numbers that follow from the seed: no addresses, no hashes of objects."""
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = zlib.crc32(kind.encode())
        self._hash.update(_ENTRY.pack(self.now, known, number, other))

    @property
    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    def note(self, text: str) -> None:
        """A line for the person who reads the report of a failure. Part of the hash too."""
        self.trace("note", zlib.crc32(text.encode()))
        line = f"{self.now:10.6f}  {text}"
        self.notes.append(line)
        if self.print_note is not None:
            self.print_note(line)

    def violated(self, what: str) -> None:
        """A promise was broken: the run ends after this event."""
        if self.violation is None:
            self.note(f"VIOLATION: {what}")
            self.violation = what
