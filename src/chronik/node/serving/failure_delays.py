"""How long the answer to a failed authentication waits: longer with each failure of the same address.

A delay slows down an attacker that guesses passwords. It affects failures only: an address that fails can still
authenticate without a delay, so a wrong client does not lock out the right ones beside it.
"""

from __future__ import annotations

DELAY_MS_MAX = 10_000
UNCHANGED_FAILURES = 3
"""So many failures have the same delay: typing errors. Then it doubles."""
FORGET_S = 60.0
ADDRESSES_MAX = 10_000
"""Beyond this the address whose last failure is the oldest is forgotten."""


class FailureDelays:
    """Failures by address. Owned by the loop.

    Invariant: `_failures` is ordered by the time of the last failure, oldest first.
    """

    def __init__(self, delay_ms: int) -> None:
        self._delay_ms = delay_ms
        self._delay_ms_max = max(delay_ms, DELAY_MS_MAX)
        self._failures: dict[str, tuple[int, float]] = {}

    @property
    def delay_s_max(self) -> float:
        return self._delay_ms_max / 1000

    def __len__(self) -> int:
        return len(self._failures)

    def failed(self, address: str, now_s: float) -> float:
        """Record a failure; return how long its answer waits, in seconds."""
        count, last_s = self._failures.pop(address, (0, now_s))
        count = 1 if now_s - last_s > FORGET_S else count + 1
        if len(self._failures) >= ADDRESSES_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[address] = (count, now_s)
        doublings = min(max(0, count - UNCHANGED_FAILURES), 16)
        return min(self._delay_ms_max, self._delay_ms << doublings) / 1000
