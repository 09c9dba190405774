"""Buckets, counts and sums."""

from hypothesis import given
from hypothesis import strategies as st

from chronik.observe.metrics import Histogram


def test_a_value_equal_to_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    assert histogram.cumulative() == [("1.0", 1.0), ("2.0", 1.0), ("+Inf", 1.0)]


@given(st.lists(st.floats(min_value=0, max_value=100)))
def test_the_last_bucket_contains_every_value(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    buckets = histogram.cumulative()
    assert buckets[-1] == ("+Inf", float(len(values)))
    assert [count for _, count in buckets] == sorted(count for _, count in buckets)
    assert histogram.count == len(values)
    for bound, count in buckets[:-1]:
        assert count == sum(value <= float(bound) for value in values)
