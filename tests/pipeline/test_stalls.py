"""Stall windows and their causes, over traces as brokers write them."""

from __future__ import annotations

import pytest
from tests.pipeline.support_traces import START_MS, Story, consuming, stopped_consumer

from chronik.observe.traces import FetchServed
from chronik.pipeline.stalls.detector import Stall


def causes(stalls: list[Stall]) -> list[str]:
    return [stall.cause for stall in stalls]


def test_continuous_consumption_has_no_stall() -> None:
    assert consuming(30).stalls() == []


def test_a_topic_with_nothing_to_read_has_no_stall() -> None:
    story = consuming(3)
    for second in range(3, 40):
        story.fetch(second, 3, 3)
    assert story.stalls() == []


def test_records_that_no_consumer_ever_fetched_are_not_a_stall() -> None:
    assert Story().produced(0, 1).produced(60, 2).stalls() == []


def test_a_stuck_watermark_is_the_cause() -> None:
    story = consuming(3)
    for second in range(3, 20):
        story.produced(second, second + 1, watermark=3)
        story.fetch(second + 0.5, 3, 3)
    story.produced(20, 21)
    story.fetch(20.1, 3, 21, size=1000)
    (stall,) = story.stalls()
    assert (stall.cause, round(stall.seconds)) == ("watermark-not-advancing", 17)
    assert "stayed at 3 while the log grew to 21" in stall.summary
    assert stall.from_ms == START_MS + 3000
    assert stall.until_ms == START_MS + 20_100


def test_a_fetch_that_hangs_is_the_cause() -> None:
    story = consuming(3)
    story.produced(3, 10)
    hanging = story.asked(3.1, 3, 10)
    story.answered(13.1, hanging, 3, 10, size=700)
    (stall,) = story.stalls()
    assert (stall.cause, stall.evidence["slowest_fetch_ms"]) == ("fetch-hang", 10_000)


def test_a_fetch_that_hangs_at_the_end_of_the_traces_is_an_open_stall() -> None:
    story = consuming(3)
    story.produced(3, 10)
    story.asked(3.1, 3, 10)
    (stall,) = story.stalls(now_s=20)
    assert (stall.cause, stall.until_ms, round(stall.seconds)) == ("fetch-hang", None, 17)


def test_empty_fetches_despite_readable_records_are_a_fetch_hang() -> None:
    story = consuming(3)
    story.produced(3, 10)
    for second in range(3, 15):
        story.answered(second + 0.2, story.asked(second + 0.1, 3, 10), 3, 10)
        story.asked(second + 0.25, 3, 10)
    assert causes(story.stalls()) == ["fetch-hang"]


def test_rejected_fetches_are_the_cause() -> None:
    story = consuming(3)
    story.produced(3, 10)
    for second in range(3, 12):
        story.fetch(second + 0.1, 3, 10, error="NOT_LEADER_OR_FOLLOWER")
    story.fetch(12, 3, 10, size=700)
    (stall,) = story.stalls()
    assert (stall.cause, stall.evidence["rejections"]) == ("leadership-rejections", 9)
    assert "NOT_LEADER_OR_FOLLOWER" in stall.summary


def test_a_consumer_that_sends_no_more_fetches_has_stopped() -> None:
    (stall,) = stopped_consumer().stalls(now_s=30)
    assert (stall.cause, stall.until_ms, stall.evidence["client"]) == ("consumer-stopped", None, "c")
    assert stall.evidence["unread"] == 7


def test_a_consumer_that_resumed_had_stopped() -> None:
    (stall,) = stopped_consumer().fetch(25, 3, 10, size=700).stalls()
    assert (stall.cause, stall.seconds) == ("consumer-stopped", 22)


def test_a_consumer_that_reads_only_other_partitions_is_an_imbalance() -> None:
    assert causes(stopped_consumer().stalls(now_s=30, others=12)) == ["partition-imbalance"]


@pytest.mark.parametrize(("back_s", "count"), [(7.9, 0), (8.1, 1)])
def test_a_pause_above_five_seconds_is_a_stall(back_s: float, count: int) -> None:
    assert len(stopped_consumer().fetch(back_s, 3, 10, size=700).stalls()) == count


def test_fetches_of_the_doctor_do_not_end_a_stall() -> None:
    story = stopped_consumer()
    for second in range(4, 20):
        number = story.asked(second, 3, 10, client="chronik-doctor")
        n, time_ms, node, topic, partition = story.head(second + 0.1)
        story.events.append(
            FetchServed(n, time_ms, node, topic, partition, number, "chronik-doctor", 3, 700, 10, None, 100.0)
        )
    assert causes(story.stalls()) == ["consumer-stopped"]


def test_two_stalls_are_two_windows() -> None:
    story = stopped_consumer().fetch(25, 3, 10, size=700)
    story.produced(40, 11)
    story.fetch(50, 10, 11, size=100)
    found = story.stalls()
    assert [(stall.from_ms - START_MS, stall.seconds) for stall in found] == [(3000, 22), (40_000, 10)]
