"""Rates over sampled windows, token buckets, and throttle times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.quotas.rates import THROTTLE_MS_MAX, SampledRate, TokenBucket, Tracked, Windows

WINDOWS = Windows()
SMALL = Windows(3, 500)
steps = st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 1_000)), min_size=1, max_size=60)


class RingOfSamples:
    """The definition, without shortcuts: a ring of samples that are reused in turn, and reset when they expire."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.ring: list[list[float]] = []
        self.current = 0

    def record(self, value: float, now_ms: float) -> None:
        if not self.ring:
            self.ring.append([now_ms, now_ms, 0.0])
        if now_ms - self.ring[self.current][0] >= self.windows.size_ms:
            self.current = (self.current + 1) % (self.windows.count + 1)
            if self.current == len(self.ring):
                self.ring.append([now_ms, now_ms, 0.0])
            else:
                self.ring[self.current] = [now_ms, now_ms, 0.0]
        self.ring[self.current][1] = now_ms
        self.ring[self.current][2] += value

    def rate(self, now_ms: float) -> float:
        for sample in self.ring:
            if now_ms - sample[1] >= self.windows.count * self.windows.size_ms:
                sample[:] = [now_ms, now_ms, 0.0]
        elapsed_ms = now_ms - min((sample[0] for sample in self.ring), default=now_ms)
        full_windows = int(elapsed_ms / self.windows.size_ms)
        if full_windows < self.windows.count - 1:
            elapsed_ms += (self.windows.count - 1 - full_windows) * self.windows.size_ms
        return sum(sample[2] for sample in self.ring) / max(elapsed_ms, 1) * 1000


@given(steps, st.sampled_from([WINDOWS, SMALL, Windows(2, 1_000)]))
def test_a_sampled_rate_is_that_of_a_ring_of_samples(steps: list[tuple[int, int]], windows: Windows) -> None:
    rate, model, now_ms = SampledRate(windows), RingOfSamples(windows), 0
    for pause_ms, value in steps:
        now_ms += pause_ms
        rate.record(value, now_ms)
        model.record(value, now_ms)
        assert rate.rate(now_ms) == pytest.approx(model.rate(now_ms))
        assert len(rate._samples) <= windows.count + 1


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=200), st.integers(100, 2_000), st.integers(0, 50))
def test_a_client_that_pauses_when_throttled_stays_within_its_quota(
    shares: list[float], limit: int, request_ms: int
) -> None:
    # Each request is within the quota of one window. Larger ones exceed it on average, as in Kafka.
    sizes = [max(1, int(share * limit * WINDOWS.size_ms / 1000)) for share in shares]
    rate, now_ms, total = SampledRate(WINDOWS), 0.0, 0
    for size in sizes:
        now_ms += request_ms
        rate.record(size, now_ms)
        total += size
        now_ms += rate.throttle_ms(limit, now_ms)
        # The burst of an idle client, a window that ends early, and half a millisecond of rounding for each request.
        assert total <= limit * (now_ms + WINDOWS.full_ms + WINDOWS.size_ms + len(sizes)) / 1000 + max(sizes)


def test_the_throttle_time_brings_the_rate_down_to_the_limit() -> None:
    rate = SampledRate(WINDOWS)
    rate.record(20_000, 0)
    # 20,000 bytes over the ten windows that are assumed at least; 1,000 per second take another ten seconds.
    assert rate.rate(0) == 2_000
    assert rate.throttle_ms(1_000, 0) == 10_000
    assert rate.throttle_ms(2_000, 0) == 0


def test_recording_a_negative_value_takes_a_response_back() -> None:
    rate = SampledRate(WINDOWS)
    rate.record(500, 10)
    rate.record(9_000, 20)
    rate.record(-9_000, 20)
    assert rate.rate(20) == pytest.approx(500 / 10.01)


def test_a_throttle_time_is_bounded_even_without_a_limit_to_divide_by() -> None:
    rate = SampledRate(WINDOWS)
    rate.record(10**12, 0)
    assert rate.throttle_ms(1, 0) == THROTTLE_MS_MAX
    assert rate.throttle_ms(0, 0) == THROTTLE_MS_MAX


@given(steps, st.integers(1, 50))
def test_a_token_bucket_holds_what_flowed_in_minus_what_was_taken(steps: list[tuple[int, int]], limit: int) -> None:
    bucket, now_ms = TokenBucket(WINDOWS), 1_000_000.0
    full = limit * 11.0
    tokens = full
    for pause_ms, count in steps:
        now_ms += pause_ms
        tokens = min(full, tokens + limit * pause_ms / 1000) - count
        bucket.take(count, limit, now_ms)
        expected_ms = 0 if tokens >= 0 else min(THROTTLE_MS_MAX, -tokens / limit * 1000)
        assert math.isclose(bucket.throttle_ms(limit, now_ms), expected_ms, abs_tol=1)


def test_tracked_buckets_are_bounded_and_idle_ones_are_dropped() -> None:
    tracked = Tracked[int, list[int]](list, idle_ms=1_000, tracked_max=3)
    for key in range(5):
        tracked.use(key, key).append(key)
    assert len(tracked) == 3
    assert tracked.use(2, 5) == [2], "the most recently used buckets are kept"
    assert tracked.use(0, 6) == [], "the least recently used ones are not"
    tracked.use(9, 2_000)
    assert len(tracked) == 1
