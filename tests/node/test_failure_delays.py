"""Delays of failed authentications, by address."""

from __future__ import annotations

from chronik.node.serving.failure_delays import ADDRESSES_MAX, DELAY_MS_MAX, FORGET_S, FailureDelays


def test_delay_doubles_after_a_few_failures_up_to_a_bound() -> None:
    delays = FailureDelays(1_000)
    assert [delays.failed("a", 0.0) for _ in range(9)] == [1, 1, 1, 2, 4, 8, 10, 10, 10]
    assert [delays.failed("a", 0.0) for _ in range(100)][-1] == DELAY_MS_MAX / 1000


def test_addresses_have_their_own_delays() -> None:
    delays = FailureDelays(1_000)
    for _ in range(5):
        delays.failed("a", 0.0)
    assert delays.failed("b", 0.0) == 1
    assert delays.failed("a", 0.0) == 8


def test_failures_are_forgotten_after_a_while() -> None:
    delays = FailureDelays(1_000)
    for _ in range(5):
        delays.failed("a", 0.0)
    assert delays.failed("a", FORGET_S) == 8
    assert delays.failed("a", 2 * FORGET_S + 1) == 1


def test_table_of_addresses_is_bounded_and_forgets_the_oldest() -> None:
    delays = FailureDelays(1_000)
    for _ in range(5):
        delays.failed("active", 0.0)
    for number in range(2 * ADDRESSES_MAX):
        delays.failed(f"stranger-{number}", 1.0)
        if number % 1_000 == 0:
            last_s = delays.failed("active", 1.0)
    assert len(delays) == ADDRESSES_MAX
    assert last_s == DELAY_MS_MAX / 1000


def test_no_delay_stays_none_and_a_long_one_does_not_shrink() -> None:
    none, long = FailureDelays(0), FailureDelays(60_000)
    assert {none.failed("a", 0.0) for _ in range(20)} == {0}
    assert {long.failed("a", 0.0) for _ in range(20)} == {60}
