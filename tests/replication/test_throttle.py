"""The replication rate of throttled replicas, on a clock of the test's own."""

from chronik.replication.throttle import UNLIMITED, ReplicationThrottle


def test_without_a_limit_nothing_is_throttled() -> None:
    throttle = ReplicationThrottle()
    throttle.record(1 << 40, 0.0)
    assert not throttle.is_limited
    assert not throttle.is_exceeded(0.0)


def test_what_was_moved_is_paid_at_the_rate_before_more_is_moved() -> None:
    throttle = ReplicationThrottle()
    throttle.limit(1000, 10.0)
    assert not throttle.is_exceeded(10.0)
    throttle.record(3000, 10.0)
    assert throttle.is_exceeded(12.9)
    assert not throttle.is_exceeded(13.0)
    # An idle time is not saved up for a burst.
    throttle.record(1000, 1000.0)
    assert throttle.is_exceeded(1000.5)


def test_a_new_rate_applies_to_the_bytes_that_are_not_paid_yet() -> None:
    throttle = ReplicationThrottle()
    throttle.limit(1, 0.0)
    throttle.record(1001, 0.0)
    throttle.limit(1000, 1.0)
    assert throttle.is_exceeded(1.9)
    assert not throttle.is_exceeded(2.01)
    throttle.limit(0, 3.0)
    assert throttle.is_exceeded(1e9)
    throttle.limit(UNLIMITED, 1e9)
    assert not throttle.is_exceeded(1e9)
