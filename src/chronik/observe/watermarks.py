"""Watermark lag: how far high watermarks are behind their log ends, how often to sample, and what to log.

A sample every 5 s has no measurable cost, but is too slow when something is wrong. Once a lag exceeds 100 records or is
older than 1 s, the interval is 500 ms until there is no lag at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

CALM_INTERVAL_S = 5.0
ALERT_INTERVAL_S = 0.5
ALERT_LAG_RECORDS = 100
ALERT_AGE_S = 1.0
LOGGED_LAG_RECORDS = 10

Key = tuple[str, int]


class WatermarkPosition(NamedTuple):
    """A partition that this node leads, at the time of a sample."""

    topic: str
    partition: int
    log_end_offset: int
    high_watermark: int


class WatermarkLag(NamedTuple):
    """A lag to log. `age_s` is a lower bound on how long the oldest record above the watermark has been there."""

    topic: str
    partition: int
    log_end_offset: int
    high_watermark: int
    lag: int
    age_s: float


@dataclass(slots=True)
class _Lagging:
    """A partition whose watermark lags. Every record below `mark` existed at `marked_s`."""

    mark: int
    marked_s: float
    is_logged: bool = False


class WatermarkMonitor:
    """Pure: takes positions with their time; returns the lags to log and the next interval.

    Invariant: `_lagging` has exactly the partitions whose watermark lagged at the last sample.
    """

    def __init__(self) -> None:
        self.is_alert = False
        self._lagging: dict[Key, _Lagging] = {}
        self._sampled_s = 0.0

    def sample(self, positions: Iterable[WatermarkPosition], now_s: float) -> list[WatermarkLag]:
        """Sample all partitions; return the lags to log, each once until it is 0 again."""
        lagging: dict[Key, _Lagging] = {}
        lags: list[WatermarkLag] = []
        is_large = False
        for topic, partition, end, watermark in positions:
            lag = end - watermark
            if lag <= 0:
                continue
            known = self._lagging.get((topic, partition)) or _Lagging(end, now_s)
            if watermark >= known.mark:
                # All records below the mark are committed now: the lagging records came later.
                known.mark, known.marked_s = end, now_s
            lagging[(topic, partition)] = known
            age_s = now_s - known.marked_s
            is_large = is_large or lag > ALERT_LAG_RECORDS or age_s > ALERT_AGE_S
            if lag > LOGGED_LAG_RECORDS and not known.is_logged:
                known.is_logged = True
                lags.append(WatermarkLag(topic, partition, end, watermark, lag, age_s))
        self._lagging = lagging
        self._sampled_s = now_s
        self.is_alert = is_large or (self.is_alert and bool(lagging))
        return lags

    @property
    def interval_s(self) -> float:
        return ALERT_INTERVAL_S if self.is_alert else CALM_INTERVAL_S

    def age_s(self, topic: str, partition: int) -> float:
        """How long the partition's watermark had lagged at the last sample; 0 if it did not."""
        known = self._lagging.get((topic, partition))
        return 0.0 if known is None else self._sampled_s - known.marked_s
