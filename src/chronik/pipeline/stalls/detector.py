"""Find stall windows in a partition's traces, and the cause of each. Pure: events in, windows out.

A window is a period of at least `least_ms` in which the partition had undelivered records. It starts at the last
delivery, or when there was something to deliver, and ends at the next delivery. `StallDetector` takes one partition's
events in time order. It keeps only what `judge` needs of a window, not the events.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from chronik.observe.traces import (
    DataAvailable,
    FetchServed,
    FetchStarted,
    ProduceAppended,
    ProduceRejected,
    Trace,
    WatermarkSeen,
    WatermarkUpdated,
)

WATERMARK = "watermark-not-advancing"
HANG = "fetch-hang"
REJECTIONS = "leadership-rejections"
STOPPED = "consumer-stopped"
BEHIND = "partition-imbalance"
UNEXPLAINED = "unexplained"
"""The causes, named as in the doctor. If several apply, the first wins."""

LEAST_MS = 5_000.0
REJECTIONS_MIN = 2
EMPTY_MIN = 2
WATCHERS = ("chronik-doctor",)
"""Clients whose fetches deliver nothing to a consumer."""
NOT_LEADING = {
    *("NOT_LEADER_OR_FOLLOWER", "NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE"),
    *("FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH"),
}


class Window(msgspec.Struct):
    """What was observed in one window. Times are wall-clock milliseconds, or None if they have not occurred (yet)."""

    topic: str
    partition: int
    since_ms: float
    position: int
    log_end: int
    high_watermark: int
    until_ms: float | None = None
    watermark_passed_ms: float | None = None
    """When the watermark first exceeded the position, so that there was something to deliver."""
    rejections: int = 0
    rejected_with: str = ""
    fetches: int = 0
    empty_answers: int = 0
    hang_ms: float = 0.0
    hanging_since_ms: float | None = None
    slowest_ms: float = 0.0
    idle_ms: float = 0.0
    idle_since_ms: float | None = None
    client: str = ""
    """The client of the last fetch."""


class Stall(msgspec.Struct, frozen=True):
    """A window and its cause. `until_ms` is None if it lasted to the end of the traces."""

    topic: str
    partition: int
    from_ms: float
    until_ms: float | None
    seconds: float
    cause: str
    summary: str
    evidence: dict[str, int | float | str | None]


class _Fetch(msgspec.Struct):
    offset: int
    data_since_ms: float | None


class StallDetector:
    """Takes one partition's events in time order. Invariant: `_window` is set while there are unread records."""

    def __init__(self, topic: str, partition: int, least_ms: float = LEAST_MS) -> None:
        self._topic, self._partition, self._least_ms = topic, partition, least_ms
        self._log_end = -1
        self._watermark = -1
        self._position = -1
        self._client = ""
        self._now_ms = 0.0
        self._fetches: dict[tuple[int, int], _Fetch] = {}
        self._window: Window | None = None

    def feed(self, event: Trace) -> Iterator[Window]:
        """Yield the window that this event ended, if any."""
        self._now_ms = event.time_ms
        match event:
            case FetchStarted():
                self._started(event)
            case WatermarkSeen():
                self._reached(event.log_end_offset, event.high_watermark)
            case WatermarkUpdated():
                self._reached(event.new, event.new)
            case ProduceAppended():
                self._reached(event.last_offset + 1, self._watermark)
            case DataAvailable():
                self._has_data((event.node, event.fetch))
            case FetchServed():
                yield from self._served(event)
            case ProduceRejected():
                self._rejected(event.error)
        self._look()

    def finish(self) -> Iterator[Window]:
        """Yield the window that is open at the end of the traces, of any length: only `judge` knows when they end."""
        if self._window is not None:
            window = self._window
            if self._fetches:
                window.idle_since_ms = None
            waiting = [fetch.data_since_ms for fetch in self._fetches.values() if fetch.data_since_ms is not None]
            window.hanging_since_ms = max(min(waiting), window.since_ms) if waiting else None
            yield self._closed(None)

    # Events.

    def _started(self, event: FetchStarted) -> None:
        if event.client_id in WATCHERS:
            return
        self._idle_ends()
        self._client = event.client_id or ""
        self._position = event.offset
        data_since = event.time_ms if self._watermark > event.offset else None
        self._fetches[event.node, event.fetch] = _Fetch(event.offset, data_since)
        if self._window is not None:
            self._window.fetches += 1
            self._window.client = self._client
            if self._position >= self._log_end:
                self._window = None  # the records were delivered, but that trace was lost

    def _served(self, event: FetchServed) -> Iterator[Window]:
        fetch = self._fetches.pop((event.node, event.fetch), None)
        if event.client_id in WATCHERS:
            return
        self._reached(event.high_watermark, event.high_watermark)
        window = self._window
        if event.error is not None:
            self._rejected(event.error)
        elif window is not None and fetch is not None and fetch.data_since_ms is not None:
            took_ms = event.time_ms - max(fetch.data_since_ms, window.since_ms)
            window.hang_ms += took_ms
            window.slowest_ms = max(took_ms, window.slowest_ms)
            window.empty_answers += not event.bytes
        if event.bytes and event.error is None:
            # Assume that everything up to the watermark was delivered, until the next fetch shows otherwise.
            self._position = max(self._position, event.high_watermark)
            if window is not None:
                if event.time_ms - window.since_ms >= self._least_ms:
                    yield self._closed(event.time_ms)
                self._window = None
        if self._window is not None and not self._fetches and self._window.idle_since_ms is None:
            self._window.idle_since_ms = event.time_ms

    def _reached(self, log_end: int, watermark: int) -> None:
        self._log_end = max(self._log_end, log_end, watermark)
        if watermark > self._watermark:
            self._watermark = watermark
            for key, fetch in self._fetches.items():
                if watermark > fetch.offset:
                    self._has_data(key)

    def _has_data(self, key: tuple[int, int]) -> None:
        fetch = self._fetches.get(key)
        if fetch is not None and fetch.data_since_ms is None:
            fetch.data_since_ms = self._now_ms

    def _rejected(self, error: str) -> None:
        if self._window is not None and error in NOT_LEADING:
            self._window.rejections += 1
            self._window.rejected_with = error

    # Window.

    def _look(self) -> None:
        window = self._window
        if window is None:
            # Records are unread only once a consumer has fetched. Before that, there may be no consumer.
            if self._position < 0 or self._log_end <= self._position:
                return
            reached = self._position, self._log_end, self._watermark
            window = self._window = Window(self._topic, self._partition, self._now_ms, *reached, client=self._client)
            window.idle_since_ms = None if self._fetches else self._now_ms
        window.position, window.log_end, window.high_watermark = self._position, self._log_end, self._watermark
        if window.watermark_passed_ms is None and self._watermark > self._position:
            window.watermark_passed_ms = self._now_ms

    def _idle_ends(self) -> None:
        if self._window is not None and self._window.idle_since_ms is not None:
            self._window.idle_ms += self._now_ms - self._window.idle_since_ms
            self._window.idle_since_ms = None

    def _closed(self, until_ms: float | None) -> Window:
        window = self._window
        assert window is not None
        window.until_ms = until_ms
        if until_ms is not None:
            self._idle_ends()
        self._window = None
        return window


def judge(window: Window, now_ms: float, *, others: int = 0, least_ms: float = LEAST_MS) -> Stall | None:
    """Return the stall with its cause, or None if too short. `others`: its client's fetches of other partitions."""
    until_ms = now_ms if window.until_ms is None else window.until_ms
    length_ms = until_ms - window.since_ms
    if length_ms < least_ms:
        return None
    cause, summary = _cause(window, until_ms, length_ms / 2, others)
    evidence: dict[str, int | float | str | None] = {
        "position": window.position,
        "high_watermark": window.high_watermark,
        "log_end_offset": window.log_end,
        "unread": window.log_end - window.position,
        "client": window.client or None,
        "fetches": window.fetches,
        "rejections": window.rejections,
        "slowest_fetch_ms": round(window.slowest_ms, 1),
        "idle_s": round(_idle_ms(window, until_ms) / 1000, 1),
        "fetches_elsewhere": others,
    }
    place = window.topic, window.partition, window.since_ms, window.until_ms
    return Stall(*place, round(length_ms / 1000, 3), cause, summary, evidence)


def _cause(window: Window, until_ms: float, most_ms: float, others: int) -> tuple[str, str]:
    """Return the first cause that explains at least half of the window."""
    client = window.client or "the consumer"
    passed_ms = until_ms if window.watermark_passed_ms is None else window.watermark_passed_ms
    if passed_ms - window.since_ms >= most_ms:
        watermark = window.high_watermark if window.watermark_passed_ms is None else window.position
        return WATERMARK, (
            f"the high watermark stayed at {watermark} while the log grew to {window.log_end}: "
            "the in-sync replicas did not follow"
        )
    hang_ms = window.hang_ms
    if window.hanging_since_ms is not None:
        hang_ms += until_ms - window.hanging_since_ms
    if hang_ms >= most_ms:
        return HANG, f"fetches of {client} had records to return and were not answered for {hang_ms / 1000:.1f} s"
    if window.rejections >= REJECTIONS_MIN:
        many = f"{window.rejections} requests were rejected with {window.rejected_with}"
        return REJECTIONS, f"{many}: the nodes do not lead the partition"
    if _idle_ms(window, until_ms) >= most_ms:
        if others:
            return BEHIND, f"{client} kept fetching other partitions, but not this one"
        return STOPPED, f"{client} sent no fetch for {window.log_end - window.position} unread records"
    if window.empty_answers >= EMPTY_MIN:
        return HANG, f"{window.empty_answers} fetches of {client} returned nothing, despite records below the watermark"
    if others:
        return BEHIND, f"{client} received records of other partitions meanwhile, but not of this one"
    return UNEXPLAINED, f"{window.fetches} fetches in that time, none of which hung, was rejected or returned nothing"


def _idle_ms(window: Window, until_ms: float) -> float:
    return window.idle_ms + (0.0 if window.idle_since_ms is None else until_ms - window.idle_since_ms)
