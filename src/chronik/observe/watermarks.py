"""How far watermarks stand behind the ends of their logs: what is sampled, how often, and what is said about it.

A look every 5 s costs nothing that could be measured. When something is wrong that is too seldom: from the moment that
a lag is above 100 records or 1 s old, until there is none at all, it is every 500 ms.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

CALM_INTERVAL_S = 5.0
ALERT_INTERVAL_S = 0.5
ALERT_LAG_RECORDS = 100
ALERT_AGE_S = 1.0
LOGGED_LAG_RECORDS = 10

Key = tuple[str, int]


class WatermarkPosition(NamedTuple):
    """A partition that this node leads, at the moment of a sample."""

    topic: str
    partition: int
    log_end_offset: int
    high_watermark: int


class WatermarkLag(NamedTuple):
    """A lag worth a line. `age_s` is how long the oldest record beyond the watermark has been seen there, at least."""

    topic: str
    partition: int
    log_end_offset: int
    high_watermark: int
    lag: int
    age_s: float


class _Behind:
    """One partition since its watermark was first seen behind. What lay below `mark` was there at `marked_s`."""

    __slots__ = ("is_told", "mark", "marked_s")

    def __init__(self, mark: int, now_s: float) -> None:
        self.mark = mark
        self.marked_s = now_s
        self.is_told = False


class WatermarkMonitor:
    """Pure: positions and their time in, what to say and when to look again out.

    Invariant: `_behind` has exactly the partitions whose watermark stood behind at the last sample.
    """

    def __init__(self) -> None:
        self.is_alert = False
        self._behind: dict[Key, _Behind] = {}
        self._sampled_s = 0.0

    def sample(self, positions: Iterable[WatermarkPosition], now_s: float) -> list[WatermarkLag]:
        """Takes a look at all partitions; the lags that are to be logged, each once until it is 0 again."""
        behind: dict[Key, _Behind] = {}
        told: list[WatermarkLag] = []
        is_large = False
        for topic, partition, end, watermark in positions:
            lag = end - watermark
            if lag <= 0:
                continue
            known = self._behind.get((topic, partition)) or _Behind(end, now_s)
            if watermark >= known.mark:
                # All that lay there at the mark is committed by now: what is behind came later.
                known.mark, known.marked_s = end, now_s
            behind[(topic, partition)] = known
            age_s = now_s - known.marked_s
            is_large = is_large or lag > ALERT_LAG_RECORDS or age_s > ALERT_AGE_S
            if lag > LOGGED_LAG_RECORDS and not known.is_told:
                known.is_told = True
                told.append(WatermarkLag(topic, partition, end, watermark, lag, age_s))
        self._behind = behind
        self._sampled_s = now_s
        self.is_alert = is_large or (self.is_alert and bool(behind))
        return told

    @property
    def interval_s(self) -> float:
        """Until the next sample."""
        return ALERT_INTERVAL_S if self.is_alert else CALM_INTERVAL_S

    def age_s(self, topic: str, partition: int) -> float:
        """How long the partition's watermark had been behind at the last sample; 0 where it was not."""
        known = self._behind.get((topic, partition))
        return 0.0 if known is None else self._sampled_s - known.marked_s
