"""The simulated world: one heap of events, the virtual clock, a random stream per purpose, a hash of all events."""

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
    """The simulation cannot continue: simulated code used something that is forbidden or not simulated."""


class World:
    """Runs events one at a time, ordered by virtual time, then by when they were scheduled.

    Invariant: everything that happens follows from `seed`; two runs that differ anywhere have different `trace_hash`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.events = 0
        self.running: Process | None = None
        """The process whose code runs now, in an iteration of its loop or in one of its threads."""
        self.in_thread = False
        self.violation: str | None = None
        """The first violation; it ends the run."""
        self.notes: deque[str] = deque(maxlen=NOTES_KEPT)
        self.print_note: Callable[[str], None] | None = None
        self.events_max: int | None = None
        """If given, the run ends after this many events."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._hash = blake2b(digest_size=16)
        self._kinds: dict[str, int] = {}
        self._serial = 0

    def at(self, when_s: float, call: Callable[..., None], *args: Any) -> None:
        """Schedule a call at a virtual time, or now if that time has passed."""
        self._scheduled += 1
        heapq.heappush(self._heap, (max(when_s, self.now), self._scheduled, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, call, *args)

    @property
    def is_cut_short(self) -> bool:
        return self.events_max is not None and self.events >= self.events_max

    def run(self, until_s: float, is_over: Callable[[], bool] | None = None) -> bool:
        """Run events until `is_over` or `until_s`; return whether `is_over`. Stop at a violation."""
        heap = self._heap
        while self.violation is None:
            if is_over is not None and is_over():
                return True
            if self.is_cut_short:
                return False
            if not heap or heap[0][0] > until_s:
                self.now = max(self.now, until_s)
                return False
            when_s, _, call, args = heapq.heappop(heap)
            self.now = when_s
            self.events += 1
            call(*args)
        return False

    def random(self, purpose: str) -> Random:
        """Return a separate stream for each purpose: an extra draw for one does not shift the others."""
        return Random(f"{self.seed}:{purpose}")

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def trace(self, kind: str, number: int = 0, other: int = 0) -> None:
        """Add an event to the hash. Pass only numbers that follow from the seed: no addresses, no object hashes."""
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = zlib.crc32(kind.encode())
        self._hash.update(_ENTRY.pack(self.now, known, number, other))

    @property
    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    def note(self, text: str) -> None:
        """Add a line for the reader of a failure report. It is part of the hash too."""
        self.trace("note", zlib.crc32(text.encode()))
        line = f"{self.now:10.6f}  {text}"
        self.notes.append(line)
        if self.print_note is not None:
            self.print_note(line)

    def violated(self, what: str) -> None:
        """Report a violated guarantee: the run ends after this event."""
        if self.violation is None:
            self.note(f"VIOLATION: {what}")
            self.violation = what
