"""When records arrived: stalls by partition, empty polls, the slowest fetch, and the rate of the first burst.

A stall is a period of 5 s or more in which a partition delivered nothing although it had records left. Partitions that
stall together (both ends within a second) count as one stall.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

STALL_S_MIN = 5.0
TOGETHER_S = 1.0


class Stall(NamedTuple):
    """A period without records; times are seconds since consumption started."""

    at_s: float
    seconds: float
    partitions: tuple[int, ...]

    @property
    def end_s(self) -> float:
        return self.at_s + self.seconds

    def figures(self) -> dict[str, Any]:
        return {"at_s": round(self.at_s, 2), "seconds": round(self.seconds, 2), "partitions": list(self.partitions)}


class Timeline:
    """The polls of one consumer, in order. Times come from a monotonic clock."""

    def __init__(self, partitions: int, started_s: float) -> None:
        self.empty_polls = 0
        self.slowest_fetch_s = 0.0
        self.seconds = 0.0
        self._started_s = started_s
        self._last_arrival_s = [started_s] * partitions
        self._gaps: list[Stall] = []
        self._arrivals: list[tuple[float, int]] = []
        self._records = 0

    def polled(self, began_s: float, ended_s: float, partitions: Collection[int], records: int) -> None:
        """Note that one poll returned `records` records from `partitions`."""
        if not records:
            self.empty_polls += 1
            return
        self.slowest_fetch_s = max(self.slowest_fetch_s, ended_s - began_s)
        self._records += records
        self._arrivals.append((ended_s, self._records))
        for partition in partitions:
            self._note_gap(partition, ended_s)
            self._last_arrival_s[partition] = ended_s

    def end(self, ended_s: float, incomplete: Iterable[int]) -> None:
        """End consumption; partitions with records left have stalled since their last record."""
        self.seconds = ended_s - self._started_s
        for partition in incomplete:
            self._note_gap(partition, ended_s)

    def stalls(self) -> list[Stall]:
        together: list[Stall] = []
        for gap in sorted(self._gaps):
            for index, stall in enumerate(together):
                if abs(stall.at_s - gap.at_s) < TOGETHER_S and abs(stall.end_s - gap.end_s) < TOGETHER_S:
                    start_s, end_s = min(stall.at_s, gap.at_s), max(stall.end_s, gap.end_s)
                    partitions = tuple(sorted({*stall.partitions, *gap.partitions}))
                    together[index] = Stall(start_s, end_s - start_s, partitions)
                    break
            else:
                together.append(gap)
        return together

    def burst_rate(self) -> float:
        """Return the records per second from the start to the last record before the first stall."""
        stalls = self.stalls()
        until_s = self._started_s + stalls[0].at_s if stalls else float("inf")
        burst = [arrival for arrival in self._arrivals if arrival[0] <= until_s]
        if not burst:
            return 0.0
        seconds = burst[-1][0] - self._started_s
        return burst[-1][1] / seconds if seconds > 0 else 0.0

    def _note_gap(self, partition: int, now_s: float) -> None:
        since_s = self._last_arrival_s[partition]
        if now_s - since_s >= STALL_S_MIN:
            self._gaps.append(Stall(since_s - self._started_s, now_s - since_s, (partition,)))
