"""Traces: the fetches, produces and watermark changes of a topic, step by step.

Off unless a topic's config `chronik.trace` is true. An event is a struct tagged by `kind`; its JSON is the same over
HTTP, in the topic `__chronik_traces` and in the pipeline. Fields may be added, never renamed. Every event has its
sequence number `n` on the node, the wall time `time_ms`, the node, the topic and the partition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

import msgspec

from chronik.wire.errors import ErrorCode

Why: TypeAlias = Literal["append", "sync", "replica-fetch", "isr-change", "leader"]
"""What raised a watermark; on a follower it is `leader`, which sent the new watermark."""


class TraceEvent(msgspec.Struct, frozen=True, gc=False, tag_field="kind"):
    n: int
    time_ms: float
    node: int
    topic: str
    partition: int

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class FetchStarted(TraceEvent, frozen=True, gc=False, tag="fetch-started"):
    """A consumer fetches from `offset`. `fetch` numbers the fetch on this node; its other events carry it too."""

    fetch: int
    client_id: str | None
    offset: int
    max_wait_ms: int
    min_bytes: int


class WatermarkSeen(TraceEvent, frozen=True, gc=False, tag="watermark-seen"):
    """The partition's watermark and log end when the fetch read them."""

    fetch: int
    high_watermark: int
    log_end_offset: int


class NoData(TraceEvent, frozen=True, gc=False, tag="no-data"):
    """There was not enough data: the fetch waits."""

    fetch: int


class DataAvailable(TraceEvent, frozen=True, gc=False, tag="data-available"):
    fetch: int
    bytes: int


class FetchServed(TraceEvent, frozen=True, gc=False, tag="fetch-served"):
    """The response to the fetch, after `elapsed_ms`. `error` is Kafka's name of the error, or null."""

    fetch: int
    client_id: str | None
    offset: int
    bytes: int
    high_watermark: int
    error: str | None
    elapsed_ms: float


class ProduceAppended(TraceEvent, frozen=True, gc=False, tag="produce-appended"):
    client_id: str | None
    base_offset: int
    last_offset: int
    bytes: int
    acks: int


class ProduceAcknowledged(TraceEvent, frozen=True, gc=False, tag="produce-acknowledged"):
    client_id: str | None
    base_offset: int
    last_offset: int
    acks: int
    elapsed_ms: float


class ProduceForwarded(TraceEvent, frozen=True, gc=False, tag="produce-forwarded"):
    """A batch that reached a node that is not the leader, forwarded to node `to`."""

    client_id: str | None
    to: int
    bytes: int


class ProduceRejected(TraceEvent, frozen=True, gc=False, tag="produce-rejected"):
    client_id: str | None
    error: str
    reason: str


class WatermarkUpdated(TraceEvent, frozen=True, gc=False, tag="watermark-updated"):
    """`acks` is that of the last produce that this leader appended; null on a follower, or if there was none."""

    old: int
    new: int
    acks: int | None
    why: Why


class IsrChanged(TraceEvent, frozen=True, gc=False, tag="isr-changed"):
    old: tuple[int, ...]
    new: tuple[int, ...]
    leader: int
    leader_epoch: int


Trace: TypeAlias = (
    FetchStarted
    | WatermarkSeen
    | NoData
    | DataAvailable
    | FetchServed
    | ProduceAppended
    | ProduceAcknowledged
    | ProduceForwarded
    | ProduceRejected
    | WatermarkUpdated
    | IsrChanged
)

encode_trace: Callable[[Trace], bytes] = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[Trace] = msgspec.json.Decoder(Trace)


def decode_trace(data: bytes | str) -> Trace:
    """Decode an event; ValueError if the text is not one. A function, because Spark sends it to its workers."""
    return _decoder.decode(data)


class TracePage(msgspec.Struct, frozen=True):
    """The response of `/api/traces`, as far as readers need it. `next` is the `after` of the next request."""

    events: tuple[Trace, ...]
    next: int
    node: int = -1
    dropped: int = 0


decode_page: Callable[[bytes], TracePage] = msgspec.json.Decoder(TracePage).decode
"""Decode a page; ValueError if the text is not one."""


class DropCounter(Protocol):
    """Counts lost events: the node's metrics."""

    traces_dropped: int


class TraceRing:
    """The latest events of one node in a bounded ring: new events replace the oldest. Owned by the loop.

    Invariant: `_events[(n - 1) % capacity]` is event n for the last `capacity` numbers. `taken` is the number of the
    last event that was taken for the topic or dropped. Overwriting a later event counts it as dropped.
    """

    def __init__(self, node_id: int, capacity: int, wall_ms: Callable[[], float], counter: DropCounter) -> None:
        self.node_id = node_id
        self.topics: frozenset[str] = frozenset()
        """The traced topics, so that one lookup shows whether tracing is needed."""
        self.taken = 0
        self.last_n = 0
        self._capacity = capacity
        self.wall_ms = wall_ms
        self._counter = counter
        self._events: list[Trace] = []
        self._fetches = 0

    def next_fetch(self) -> int:
        self._fetches += 1
        return self._fetches

    def add(self, event: Trace) -> None:
        """Add event number `last_n` + 1."""
        events = self._events
        self.last_n = n = event.n
        if len(events) < self._capacity:
            events.append(event)
            return
        if n - self._capacity > self.taken:
            self.taken = n - self._capacity
            self._counter.traces_dropped += 1
        events[(n - 1) % self._capacity] = event

    def read(
        self, after: int, limit: int, topic: str | None = None, partition: int | None = None
    ) -> tuple[list[Trace], int]:
        """Return up to `limit` events with a number above `after`, oldest first, and the `after` of the next call.

        If `after` is above the last number, it comes from a previous process: reading starts at the oldest event.
        """
        oldest = self.last_n - len(self._events)
        at = oldest if after > self.last_n else max(after, oldest)
        events: list[Trace] = []
        while at < self.last_n and len(events) < limit:
            event = self._events[at % self._capacity]
            at += 1
            if (topic is None or event.topic == topic) and (partition is None or event.partition == partition):
                events.append(event)
        return events, at

    def take(self, limit: int) -> list[Trace]:
        """Return the next events for the topic and mark them as taken."""
        events, self.taken = self.read(self.taken, limit)
        return events

    def drop(self, count: int) -> None:
        """Count taken events that could not be delivered."""
        self._counter.traces_dropped += count


class PartitionTrace:
    """The hooks of one traced partition. An untraced partition has none: the request path checks only for that."""

    __slots__ = ("_ring", "acks", "partition", "topic")

    def __init__(self, ring: TraceRing, topic: str, partition: int) -> None:
        self._ring = ring
        self.topic = topic
        self.partition = partition
        self.acks: int | None = None
        """The acks of the last produce."""

    def _stamp(self) -> tuple[int, float, int, str, int]:
        """Return the fields that every event begins with."""
        ring = self._ring
        return ring.last_n + 1, ring.wall_ms(), ring.node_id, self.topic, self.partition

    # -- produce -------------------------------------------------------------------------------------------------------

    def appended(self, client_id: str | None, base_offset: int, last_offset: int, size_bytes: int, acks: int) -> None:
        self._ring.add(ProduceAppended(*self._stamp(), client_id, base_offset, last_offset, size_bytes, acks))

    def acknowledged(
        self, client_id: str | None, base_offset: int, last_offset: int, acks: int, elapsed_s: float
    ) -> None:
        elapsed_ms = milliseconds(elapsed_s)
        self._ring.add(ProduceAcknowledged(*self._stamp(), client_id, base_offset, last_offset, acks, elapsed_ms))

    def forwarded(self, client_id: str | None, to: int, size_bytes: int) -> None:
        self._ring.add(ProduceForwarded(*self._stamp(), client_id, to, size_bytes))

    def rejected(self, client_id: str | None, error: str, reason: str) -> None:
        self._ring.add(ProduceRejected(*self._stamp(), client_id, error, reason))

    # -- fetch ---------------------------------------------------------------------------------------------------------

    def fetch_started(self, fetch: int, client_id: str | None, offset: int, max_wait_ms: int, min_bytes: int) -> None:
        self._ring.add(FetchStarted(*self._stamp(), fetch, client_id, offset, max_wait_ms, min_bytes))

    def watermark_seen(self, fetch: int, high_watermark: int, log_end_offset: int) -> None:
        self._ring.add(WatermarkSeen(*self._stamp(), fetch, high_watermark, log_end_offset))

    def no_data(self, fetch: int) -> None:
        self._ring.add(NoData(*self._stamp(), fetch))

    def data_available(self, fetch: int, size_bytes: int) -> None:
        self._ring.add(DataAvailable(*self._stamp(), fetch, size_bytes))

    def fetch_served(
        self,
        fetch: int,
        client_id: str | None,
        offset: int,
        size_bytes: int,
        high_watermark: int,
        error: str | None,
        elapsed_s: float,
    ) -> None:
        elapsed_ms = milliseconds(elapsed_s)
        answer = size_bytes, high_watermark, error, elapsed_ms
        self._ring.add(FetchServed(*self._stamp(), fetch, client_id, offset, *answer))

    # -- partition -----------------------------------------------------------------------------------------------------

    def watermark_updated(self, old: int, new: int, why: Why) -> None:
        acks = None if why == "leader" else self.acks
        self._ring.add(WatermarkUpdated(*self._stamp(), old, new, acks, why))

    def isr_changed(self, old: tuple[int, ...], new: tuple[int, ...], leader: int, leader_epoch: int) -> None:
        self._ring.add(IsrChanged(*self._stamp(), old, new, leader, leader_epoch))


def error_name(code: int) -> str:
    """Return Kafka's spelling, such as NOT_LEADER_OR_FOLLOWER."""
    return ErrorCode(code).name.upper()


def milliseconds(seconds: float) -> float:
    """Convert to milliseconds, rounded to the microsecond: more digits would only be noise in the JSON."""
    return round(seconds * 1000, 3)
