"""Landed offsets as ranges, compared with a plain set."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.support.landing import records

from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.source.ranges import RecordRange, from_rows, to_row

Batch = tuple[int, list[int]]
batches = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 40), min_size=1, max_size=12)), max_size=8)


@given(batches, batches, st.lists(st.integers(0, 45), min_size=1))
def test_ranges_skip_exactly_the_landed_offsets(some: list[Batch], more: list[Batch], offsets: list[int]) -> None:
    landed = LandedOffsets.of(records(*batch) for batch in some)
    union = landed.merged_with([LandedOffsets.of(records(*batch) for batch in more)])
    expected = {(partition, offset) for partition, numbers in some + more for offset in numbers}
    for partition in range(3):
        fresh = union.without(records(partition, offsets)).column("offset").to_pylist()
        assert fresh == [offset for offset in offsets if (partition, offset) not in expected]
        ranges = union.ranges(partition)
        assert {o for start, stop in ranges for o in range(start, stop)} == {o for p, o in expected if p == partition}
        assert all(stop < start for (_, stop), (start, _) in pairwise(ranges))


def test_a_range_is_unchanged_after_a_round_trip_through_spark() -> None:
    wanted = RecordRange("größe", 3, 5, 2**40)
    assert list(from_rows(to_row(wanted, "id"))) == [(wanted, "id")]
