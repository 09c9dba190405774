"""Delays of failed authentications, by address."""

from __future__ import annotations

from chronik.node.serving.failure_delays import (
    ADDRESSES_MAX,
    CHECKS_PER_ADDRESS_MAX,
    FORGET_S,
    NETWORK_BITS,
    FailureDelays,
)

MAX_S = 10


def delays_of(delay_ms: int = 1_000, pending_max: int = 1) -> FailureDelays:
    return FailureDelays(delay_ms, MAX_S * 1_000, pending_max)


def fail(delays: FailureDelays, address: str, now_s: float) -> float:
    assert delays.begin(address, now_s) == 0
    return delays.end(address, now_s, has_failed=True)


def test_delay_doubles_after_a_few_failures_up_to_a_bound() -> None:
    delays = delays_of()
    assert [delays.failed("a", 0.0) for _ in range(9)] == [1, 1, 1, 2, 4, 8, MAX_S, MAX_S, MAX_S]
    assert [delays.failed("a", 0.0) for _ in range(100)][-1] == MAX_S


def test_no_delay_stays_none_and_a_long_one_does_not_shrink() -> None:
    none, long = delays_of(0), delays_of(60_000)
    assert {fail(none, "a", 0.0) for _ in range(20)} == {0}
    assert {long.failed("a", 0.0) for _ in range(20)} == {60}


def test_address_waits_until_a_failure_is_no_longer_pending() -> None:
    delays = delays_of(pending_max=2)
    assert fail(delays, "a", 0.0) == 1
    assert fail(delays, "a", 0.25) == 1
    assert delays.begin("a", 0.5) == 0.5
    assert delays.begin("a", 0.75) == 0.25
    assert fail(delays, "a", 1.0) == 1
    assert delays.begin("a", 1.0) == 0.25


def test_right_password_neither_delays_nor_clears_failures() -> None:
    delays = delays_of(pending_max=2)
    for _ in range(5):
        delays.failed("a", 0.0)
    assert delays.begin("a", 100.0) == 0
    assert delays.end("a", 100.0, has_failed=False) == 0
    assert fail(delays, "a", 100.0) == 8


def test_passwords_that_are_being_checked_take_the_place_of_failures() -> None:
    delays = delays_of()
    assert [delays.begin("a", 0.0) for _ in range(CHECKS_PER_ADDRESS_MAX)] == [0] * CHECKS_PER_ADDRESS_MAX
    assert delays.begin("a", 0.0) > 0
    assert delays.begin("b", 0.0) == 0
    for _ in range(CHECKS_PER_ADDRESS_MAX):
        delays.end("a", 0.0, has_failed=True)
    # With failures, one at a time.
    assert delays.begin("a", 20.0) == 0
    assert delays.begin("a", 20.0) > 0


def test_addresses_have_their_own_delays_and_a_network_of_ipv6_shares_one() -> None:
    delays = delays_of()
    for _ in range(5):
        delays.failed("a", 0.0)
    assert fail(delays, "b", 0.0) == 1
    assert delays.failed("a", 0.0) == 8
    assert NETWORK_BITS == 64
    fail(delays, "2001:db8::1", 0.0)
    assert delays.begin("2001:db8::ffff", 0.0) == 1
    assert delays.begin("2001:db8:0:1::1", 0.0) == 0


def test_failures_are_forgotten_after_a_while() -> None:
    delays = delays_of()
    for _ in range(5):
        delays.failed("a", 0.0)
    assert fail(delays, "a", FORGET_S - 1) == 8
    assert fail(delays, "a", 2 * FORGET_S) == 1


def test_table_of_addresses_is_bounded_and_forgets_the_oldest() -> None:
    delays = delays_of()
    for _ in range(5):
        delays.failed("active", 0.0)
    for number in range(2 * ADDRESSES_MAX):
        fail(delays, f"stranger-{number}", 1.0)
        if number % 1_000 == 0:
            last_s = delays.failed("active", 1.0)
    assert len(delays) == ADDRESSES_MAX
    assert last_s == MAX_S
    assert delays.begin(f"stranger-{number}", 1.0) == 1
    assert delays.begin("stranger-0", 1.0) == 0
