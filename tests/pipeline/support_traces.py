"""Hand-written traces of one partition: what was produced, requested and answered, and when."""

from __future__ import annotations

from typing import Any

from chronik.observe.traces import (
    FetchServed,
    FetchStarted,
    ProduceAppended,
    Trace,
    WatermarkSeen,
    WatermarkUpdated,
    decode_trace,
    encode_trace,
)
from chronik.pipeline.stalls.detector import Stall, StallDetector, judge

START_MS = 1_700_000_000_000.0


class Story:
    """One partition's events, each at a given second."""

    def __init__(self, topic: str = "t", partition: int = 0) -> None:
        self.topic, self.partition = topic, partition
        self.events: list[Trace] = []
        self._fetches = 0

    def head(self, at_s: float, node: int = 1) -> tuple[int, float, int, str, int]:
        return len(self.events) + 1, START_MS + at_s * 1000, node, self.topic, self.partition

    def produced(self, at_s: float, log_end: int, *, watermark: int | None = None) -> Story:
        """Append up to `log_end`; the watermark follows, unless one is given."""
        self.events.append(ProduceAppended(*self.head(at_s), "p", log_end - 1, log_end - 1, 100, 1))
        passed = log_end if watermark is None else watermark
        if passed:
            self.events.append(WatermarkUpdated(*self.head(at_s), 0, passed, 1, "append"))
        return self

    def asked(self, at_s: float, offset: int, watermark: int, log_end: int | None = None, client: str = "c") -> int:
        self._fetches += 1
        self.events.append(FetchStarted(*self.head(at_s), self._fetches, client, offset, 500, 1))
        end = watermark if log_end is None else log_end
        self.events.append(WatermarkSeen(*self.head(at_s), self._fetches, watermark, end))
        return self._fetches

    def answered(
        self, at_s: float, fetch: int, offset: int, watermark: int, size: int = 0, error: str | None = None
    ) -> Story:
        self.events.append(FetchServed(*self.head(at_s), fetch, "c", offset, size, watermark, error, 1.0))
        return self

    def fetch(self, at_s: float, offset: int, watermark: int, **answer: Any) -> Story:
        """Request, and answer at once."""
        return self.answered(at_s, self.asked(at_s, offset, watermark), offset, watermark, **answer)

    def stalls(self, *, now_s: float | None = None, others: int = 0) -> list[Stall]:
        detector = StallDetector(self.topic, self.partition)
        windows = []
        for event in sorted(self.events, key=lambda event: event.time_ms):
            windows += list(detector.feed(decode_trace(encode_trace(event))))
        windows += list(detector.finish())
        now_ms = self.events[-1].time_ms if now_s is None else START_MS + now_s * 1000
        found = [judge(window, now_ms, others=others) for window in windows]
        return [stall for stall in found if stall is not None]


def consuming(until_s: int, topic: str = "t", partition: int = 0) -> Story:
    """Return traces of a consumer that gets a record each second, at once."""
    story = Story(topic, partition)
    for second in range(until_s):
        story.produced(second, second + 1)
        story.fetch(second + 0.01, second, second + 1, size=100)
    story.asked(until_s - 0.9, until_s, until_s)
    return story


def stopped_consumer(topic: str = "t", partition: int = 0) -> Story:
    """Return traces of a consumer that has read three of ten records, and sends no more requests."""
    story = consuming(3, topic, partition)
    story.events.pop()
    story.events.pop()  # the pending fetch
    story.produced(3, 10)
    return story
