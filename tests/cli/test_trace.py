"""`chronik trace tail`: a readable line for each event, from all nodes that are available."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from chronik.cli import trace
from chronik.doctor.chronik_nodes import TracePages
from chronik.observe.traces import PartitionTrace, Trace, TraceRing


def ring_of(node: int) -> tuple[TraceRing, list[float]]:
    clock_ms = [1_000.0]
    return TraceRing(node, 100, lambda: clock_ms[0], SimpleNamespace(traces_dropped=0)), clock_ms


def test_trace_tail_prints_a_line_for_each_kind_of_event() -> None:
    ring, _ = ring_of(2)
    hooks = PartitionTrace(ring, "orders", 1)
    hooks.fetch_started(4, "reader", 10, 500, 1)
    hooks.watermark_seen(4, 10, 12)
    hooks.no_data(4)
    hooks.data_available(4, 90)
    hooks.fetch_served(4, "reader", 10, 90, 12, None, 0.0042)
    hooks.fetch_served(5, "reader", 10, 0, -1, "NOT_LEADER_OR_FOLLOWER", 0.001)
    hooks.appended("writer", 10, 11, 90, -1)
    hooks.acknowledged("writer", 10, 11, -1, 0.0031)
    hooks.forwarded("writer", 3, 90)
    hooks.rejected("writer", "NOT_ENOUGH_REPLICAS", "1 is in sync, 2 are needed")
    hooks.acks = -1
    hooks.watermark_updated(10, 12, "replica-fetch")
    hooks.isr_changed((1, 2, 3), (1, 2), 1, 7)
    lines = [trace.line_of(event) for event in ring.read(0, 100)[0]]
    assert all(" node 2 orders-1 " in line for line in lines)
    assert [" ".join(line.split()[4:]) for line in lines] == [
        "fetch-started #4 reader from 10, waits up to 500 ms for 1 bytes",
        "watermark-seen #4 watermark 10, log end 12",
        "no-data #4 waits",
        "data-available #4 90 bytes",
        "fetch-served #4 reader from 10: 90 bytes, watermark 12 after 4.2 ms",
        "fetch-served #5 reader from 10: NOT_LEADER_OR_FOLLOWER after 1.0 ms",
        "produce-appended writer 10 to 11, 90 bytes, acks=-1",
        "produce-acknowledged writer 10 to 11, acks=-1, after 3.1 ms",
        "produce-forwarded writer to node 3, 90 bytes",
        "produce-rejected writer NOT_ENOUGH_REPLICAS: 1 is in sync, 2 are needed",
        "watermark-updated 10 to 12 by replica-fetch, acks=-1",
        "isr-changed 1, 2, 3 to 1, 2, leader 1 in epoch 7",
    ]


class Enough(Exception):
    """Ends the tail when the test has seen enough."""


def test_trace_tail_sorts_events_by_time_and_retries_a_node_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rings = {1: ring_of(1), 2: ring_of(2)}
    away: set[int] = set()

    async def addresses(*_: object) -> dict[int, str]:
        return {node: str(node) for node in rings}

    async def ask(self: TracePages, **question: int) -> Sequence[Trace]:
        node, before = int(self.address), self.answers
        self.answers, self.reason = node not in away, "gone"
        self.has_changed = self.answers is not before
        if not self.answers:
            return ()
        found, self._after = rings[node][0].read(self._after, 100)
        return found

    monkeypatch.setattr(trace, "_addresses", addresses)
    monkeypatch.setattr(TracePages, "_request", ask)
    seen: list[tuple[int, int]] = []

    def happen(node: int, time_ms: float) -> None:
        ring, clock_ms = rings[node]
        clock_ms[0] = time_ms
        PartitionTrace(ring, "t", 0).no_data(int(time_ms))

    happen(2, 5)
    happen(1, 6)
    pauses = 0

    async def pause(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 1:
            away.add(1)
            happen(1, 8)
            happen(2, 7)
        elif pauses == 2:
            away.clear()
            happen(2, 9)
        elif pauses == 4:
            raise Enough

    with pytest.raises(Enough):
        asyncio.run(
            trace.follow("ignored", "t", None, lambda event: seen.append((event.node, int(event.time_ms))), pause)
        )
    assert seen == [(2, 5), (1, 6), (2, 7), (1, 8), (2, 9)]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["chronik: node 1 does not answer: gone", "chronik: node 1 answers again"]
