"""The clock that measures age: the wall clock, as long as it does not jump.

Age decides what is permanently deleted: records (retention and compaction), producer state, and committed offsets. If
the wall clock were set forward by a day by mistake, a day too much would be deleted at once. Record timestamps do not
use this clock: they show the wall clock as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from chronik.observe.logging import Logger

JUMP_MS = 10 * 60 * 1000
"""How much the wall clock may gain or lose between two readings, relative to the machine's monotonic clock."""

AGREES_S = 24 * 60 * 60.0
"""After this long without another jump the new time is accepted."""


class Jump(NamedTuple):
    """A jump. `ahead_ms` is the wall clock's lead over the machine's monotonic clock since the jump."""

    ahead_ms: int
    since_s: float


class AgeClock:
    """Invariant: until a jump is accepted, `now_ms` stays within JUMP_MS of the time continued from before the jump.

    A clock that jumps back to its earlier time is accepted at once. So is the time that it shows when the node starts.
    Owned by the loop.
    """

    def __init__(self, own_s: Callable[[], float], wall_ms: Callable[[], int], log: Logger) -> None:
        """`own_s` is a monotonic clock: `loop.time`."""
        self._own_s = own_s
        self._wall_ms = wall_ms
        self._log = log
        self._ahead_ms = wall_ms() - int(own_s() * 1000)
        self._jump: Jump | None = None

    def now_ms(self) -> int:
        """Return the wall clock's time if it is accepted, otherwise the time it would show without its jump."""
        own_s = self._own_s()
        own_ms = int(own_s * 1000)
        self._look(self._wall_ms() - own_ms, own_s)
        return own_ms + self._ahead_ms

    def _look(self, ahead_ms: int, own_s: float) -> None:
        jump = self._jump
        if abs(ahead_ms - self._ahead_ms) <= JUMP_MS:
            if jump is not None:
                self._log.info("wall_clock_back")
            self._jump = None
            self._ahead_ms = ahead_ms
        elif jump is None or abs(ahead_ms - jump.ahead_ms) > JUMP_MS:
            self._jump = Jump(ahead_ms, own_s)
            self._log.error(
                "wall_clock_jumped",
                by_s=(ahead_ms - self._ahead_ms) // 1000,
                then=f"deletion by age uses the old time for {AGREES_S / 3600:.0f} hours: correct the clock, "
                "or restart the node if the clock is correct now",
            )
        elif own_s - jump.since_s >= AGREES_S:
            self._log.warning("wall_clock_believed", by_s=(ahead_ms - self._ahead_ms) // 1000)
            self._jump = None
            self._ahead_ms = ahead_ms
