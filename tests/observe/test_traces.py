"""The trace ring: bounded, readable from any position, and explicit about the events that it dropped."""

from __future__ import annotations

import json
from types import SimpleNamespace

from chronik.observe.traces import (
    FetchServed,
    PartitionTrace,
    Trace,
    TraceRing,
    decode_trace,
    encode_trace,
)


def ring_of(capacity: int) -> tuple[TraceRing, SimpleNamespace]:
    counter = SimpleNamespace(traces_dropped=0)
    return TraceRing(7, capacity, lambda: 1_000.5, counter), counter


def numbers(events: list[Trace]) -> list[int]:
    return [event.n for event in events]


def test_every_kind_of_event_survives_a_json_round_trip() -> None:
    ring, _ = ring_of(100)
    trace = PartitionTrace(ring, "orders", 2)
    trace.fetch_started(1, "client", 5, 500, 1)
    trace.watermark_seen(1, 5, 9)
    trace.no_data(1)
    trace.data_available(1, 70)
    trace.fetch_served(1, None, 5, 70, 6, "NOT_LEADER_OR_FOLLOWER", 0.0125)
    trace.appended("p", 5, 6, 140, -1)
    trace.acknowledged("p", 5, 6, -1, 0.25)
    trace.forwarded("p", 3, 140)
    trace.rejected("p", "NOT_ENOUGH_REPLICAS", "1 is in sync, 2 are needed")
    trace.watermark_updated(5, 7, "replica-fetch")
    trace.isr_changed((1, 2, 3), (1, 2), 1, 4)
    events, after = ring.read(0, 100)
    assert after == 11
    for event in events:
        fields = json.loads(encode_trace(event))
        assert decode_trace(encode_trace(event)) == event
        assert fields["kind"] == event.kind
        assert (fields["time_ms"], fields["node"], fields["topic"], fields["partition"]) == (1_000.5, 7, "orders", 2)
    assert [json.loads(encode_trace(event))["kind"] for event in events] == [
        "fetch-started",
        "watermark-seen",
        "no-data",
        "data-available",
        "fetch-served",
        "produce-appended",
        "produce-acknowledged",
        "produce-forwarded",
        "produce-rejected",
        "watermark-updated",
        "isr-changed",
    ]
    served = events[4]
    assert isinstance(served, FetchServed)
    assert served.elapsed_ms == 12.5


def test_reading_resumes_at_its_position_and_returns_only_requested_events() -> None:
    ring, _ = ring_of(100)
    one, two = PartitionTrace(ring, "a", 0), PartitionTrace(ring, "a", 1)
    other = PartitionTrace(ring, "b", 0)
    for fetch in range(4):
        for trace in (one, two, other):
            trace.no_data(fetch)
    first, after = ring.read(0, 2, "a", 0)
    assert numbers(first) == [1, 4]
    rest, after = ring.read(after, 100, "a", 0)
    assert numbers(rest) == [7, 10]
    assert ring.read(after, 100) == ([], 12)
    assert numbers(ring.read(0, 100, "b")[0]) == [3, 6, 9, 12]


def test_the_ring_overwrites_the_oldest_events_and_counts_unread_ones() -> None:
    ring, counter = ring_of(4)
    trace = PartitionTrace(ring, "a", 0)
    for fetch in range(4):
        trace.no_data(fetch)
    assert numbers(ring.take(3)) == [1, 2, 3]
    for fetch in range(3):
        trace.no_data(fetch)
    assert counter.traces_dropped == 0
    trace.no_data(8)
    assert counter.traces_dropped == 1, "event 4 was overwritten before anybody took it"
    assert numbers(ring.read(0, 100)[0]) == [5, 6, 7, 8]
    assert numbers(ring.take(100)) == [5, 6, 7, 8]
    assert ring.take(100) == []
    ring.drop(4)
    assert counter.traces_dropped == 5


def test_a_reader_with_a_position_of_an_earlier_process_starts_over() -> None:
    ring, _ = ring_of(4)
    PartitionTrace(ring, "a", 0).no_data(1)
    assert numbers(ring.read(500, 10)[0]) == [1]


def test_a_watermark_event_has_the_acks_of_the_last_produce_only_on_the_leader() -> None:
    ring, _ = ring_of(4)
    trace = PartitionTrace(ring, "a", 0)
    trace.acks = 1
    trace.watermark_updated(0, 1, "sync")
    trace.watermark_updated(0, 1, "leader")
    acks = [json.loads(encode_trace(event))["acks"] for event in ring.read(0, 9)[0]]
    assert acks == [1, None]
