"""The judge of goals, and how rows are made of repetitions."""

from __future__ import annotations

import pytest

from bench.rows import compared_row, judge, merged, own_row

PEER = "Apache Kafka"
CONTRACT = {"workload", "metric", "unit", "chronik", "peer", "peer_name", "ratio", "goal", "met", "limit"}


def test_a_goal_is_missed_by_the_smallest_step_beyond_it() -> None:
    assert judge(">= 1.0", 1.0)
    assert not judge(">= 1.0", 0.999)
    assert judge("<= 0.2", 0.2)
    assert not judge("<= 0.2", 0.201)


@pytest.mark.parametrize("goal", ["", "1.0", "> 1.0", "about 1", ">=1.0"])
def test_a_goal_that_cannot_be_read_is_an_error_and_never_met(goal: str) -> None:
    with pytest.raises(ValueError):
        judge(goal, 1.0)


def test_the_ratio_is_that_of_the_medians_and_one_outlier_does_not_move_it() -> None:
    row = compared_row("produce", "records", "1/s", [100, 90, 1], [50, 60, 900], PEER, ">= 1.0")
    assert (row["chronik"], row["peer"], row["ratio"], row["met"]) == (90, 60, 1.5, True)
    assert (row["chronik_spread"], row["peer_spread"], row["repetitions"]) == ([1, 100], [50, 900], 3)


def test_a_slower_chronik_misses_a_goal_on_speed_and_meets_one_on_cost() -> None:
    assert not compared_row("produce", "records", "1/s", [90.0], [100.0], PEER, ">= 1.0")["met"]
    assert compared_row("produce", "CPU", "ms/MB", [90.0], [100.0], PEER, "<= 1.0")["met"]


def test_a_peer_of_zero_is_no_success() -> None:
    row = compared_row("produce", "CPU", "ms/MB", [1.0], [0.0], PEER, "<= 1.0")
    assert row["ratio"] is None
    assert not row["met"]


def test_every_row_has_the_fields_that_scripts_rely_on() -> None:
    assert own_row("start", "ready after", "s", 0.5, "<= 1.0").keys() == CONTRACT
    assert compared_row("start", "ready after", "s", [1.0], [2.0], PEER, "<= 1.0").keys() >= CONTRACT


def test_a_new_measurement_replaces_its_row_and_leaves_the_others_where_they_are() -> None:
    old = [own_row("a", "m", "s", 1.0, "<= 2.0"), own_row("b", "m", "s", 1.0, "<= 2.0")]
    rows = merged(old, [own_row("a", "m", "s", 3.0, "<= 2.0"), own_row("c", "m", "s", 1.0, "<= 2.0")])
    assert [(row["workload"], row["chronik"], row["met"]) for row in rows] == [
        ("a", 3.0, False),
        ("b", 1.0, True),
        ("c", 1.0, True),
    ]


def test_rows_against_two_peers_do_not_replace_each_other() -> None:
    both = [compared_row("a", "m", "s", [1.0], [2.0], peer, "<= 1.0") for peer in (PEER, "another")]
    assert len(merged([], both)) == 2


def test_a_limit_is_kept_for_as_long_as_its_goal_is_missed() -> None:
    old = [own_row("a", "m", "s", 3.0, "<= 2.0") | {"limit": "the disk"}]
    assert merged(old, [own_row("a", "m", "s", 4.0, "<= 2.0")])[0]["limit"] == "the disk"
    assert merged(old, [own_row("a", "m", "s", 1.0, "<= 2.0")])[0]["limit"] is None
