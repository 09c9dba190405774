"""Stalls, bursts and empty polls, at times that the tests choose."""

from __future__ import annotations

from chronik.cli.verify_timeline import Timeline


def timeline(*polls: tuple[float, dict[int, int]], partitions: int = 3, end_s: float, incomplete: set[int]) -> Timeline:
    """Return polls with their end times and record counts by partition; each began when the previous one ended."""
    made = Timeline(partitions, 100.0)
    began_s = 100.0
    for ended_s, records in polls:
        made.polled(began_s, 100.0 + ended_s, set(records), sum(records.values()))
        began_s = 100.0 + ended_s
    made.end(100.0 + end_s, incomplete)
    return made


def test_a_steady_stream_has_no_stall() -> None:
    steady = timeline(*((second * 4.9, {0: 1, 1: 1, 2: 1}) for second in range(1, 5)), end_s=20.0, incomplete=set())
    assert steady.stalls() == []
    assert steady.seconds == 20.0


def test_a_wait_at_the_end_is_a_stall_of_the_incomplete_partitions() -> None:
    stuck = timeline((0.5, {0: 1000, 1: 1000, 2: 800}), end_s=60.5, incomplete={2})
    assert [stall.figures() for stall in stuck.stalls()] == [{"at_s": 0.5, "seconds": 60.0, "partitions": [2]}]


def test_partitions_that_stall_together_are_one_stall() -> None:
    stuck = timeline(
        (0.4, {0: 10}), (0.6, {1: 10, 2: 10}), (7.0, {0: 1}), (7.2, {1: 1, 2: 1}), end_s=8, incomplete=set()
    )
    assert [stall.partitions for stall in stuck.stalls()] == [(0, 1, 2)]


def test_a_partition_that_stalls_alone_is_a_separate_stall() -> None:
    moving = [(float(second), {0: 100, 1: 100}) for second in range(1, 10)]
    stuck = timeline((0.5, {0: 1, 1: 1, 2: 1}), *moving, (9.5, {2: 500}), end_s=10.0, incomplete=set())
    assert [stall.figures() for stall in stuck.stalls()] == [{"at_s": 0.5, "seconds": 9.0, "partitions": [2]}]


def test_a_pause_below_five_seconds_is_not_a_stall() -> None:
    assert timeline((1.0, {0: 1}), (5.9, {0: 1}), end_s=6.0, incomplete=set()).stalls() == []
    assert timeline((1.0, {0: 1}), (6.0, {0: 1}), end_s=6.0, incomplete=set()).stalls() != []


def test_the_burst_ends_at_the_first_stall() -> None:
    burst = timeline((0.5, {0: 3500}), (20.0, {0: 500}), end_s=20.0, incomplete=set())
    assert burst.burst_rate() == 7000.0
    assert timeline((2.0, {0: 5000}), end_s=2.0, incomplete=set()).burst_rate() == 2500.0
    assert timeline(end_s=60.0, incomplete={0, 1, 2}).burst_rate() == 0.0


def test_empty_polls_are_counted_but_not_as_fetches() -> None:
    polled = timeline((0.5, {}), (0.6, {0: 1}), (9.0, {}), (9.3, {1: 1}), end_s=9.3, incomplete=set())
    assert polled.empty_polls == 2
    assert round(polled.slowest_fetch_s, 3) == 0.3
