"""Positions, their shares of a micro-batch, and ranges as tasks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.planner import Position, limited
from chronik.pipeline.source.ranges import RecordRange, split

partitions = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 5))
sizes = st.dictionaries(partitions, st.tuples(st.integers(0, 10**12), st.integers(0, 10**6)), min_size=1)


def test_equal_positions_have_equal_json() -> None:
    one = Position({("b", 0): 1, ("a", 10): 2, ("a", 2): 3}, {"a": "x", "b": ""})
    other = Position({("a", 2): 3, ("a", 10): 2, ("b", 0): 1}, {"b": "", "a": "x"})
    assert json.dumps(one.to_json("h:1", "g")) == json.dumps(other.to_json("h:1", "g"))
    assert Position.from_json(json.loads(json.dumps(one.to_json("h:1", "g")))) == one


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"t": {"0": 5}}, "was not written by this source"),
        ({"version": 1, "topics": {"t": 3}}, "was not written by this source"),
        ({"version": 2, "topics": {}}, "another version of chronik"),
    ],
)
def test_a_checkpoint_of_another_source_or_version_is_rejected(written: dict[str, object], said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        Position.from_json(written)


@given(sizes, st.integers(1, 10**7))
def test_a_micro_batch_fills_its_limit_and_never_exceeds_it(
    ranges: dict[tuple[str, int], tuple[int, int]], rows_max: int
) -> None:
    start = {place: begin for place, (begin, _) in ranges.items()}
    end = {place: begin + size for place, (begin, size) in ranges.items()}
    found = limited(start, end, rows_max)
    assert found.keys() == end.keys()
    assert all(start[place] <= found[place] <= end[place] for place in end)
    assert sum(found[place] - start[place] for place in end) == min(rows_max, sum(size for _, size in ranges.values()))


@given(sizes, st.integers(0, 40), st.just(0) | st.integers(1000, 10**5))
def test_splits_cover_each_offset_once(
    ranges: dict[tuple[str, int], tuple[int, int]], parts_min: int, rows_max: int
) -> None:
    wanted = [RecordRange(*place, begin, begin + size) for place, (begin, size) in ranges.items()]
    parts = split(wanted, parts_min, rows_max)
    assert all(part.start < part.stop for part in parts)
    assert all(not rows_max or part.stop - part.start <= rows_max for part in parts)
    for whole in wanted:
        own = [part for part in parts if part[:2] == whole[:2]]
        edges = [whole.start, *(part.stop for part in own)]
        assert [part.start for part in own] == edges[:-1]
        assert edges[-1] == whole.stop


def test_ranges_are_split_in_proportion_to_their_size() -> None:
    wanted = [RecordRange("t", 0, 0, 900), RecordRange("t", 1, 0, 100), RecordRange("t", 2, 5, 5)]
    assert [part.partition for part in split(wanted, 10)] == [0] * 9 + [1]
    assert split(wanted, 1) == wanted[:2]
