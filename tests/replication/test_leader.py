"""The watermark is what every in-sync replica counts as written, and it only rises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.replication.leader import PartitionLeader


def test_watermark_follows_the_only_replica() -> None:
    leader = PartitionLeader(1, 0, (1,), counted_end=5, high_watermark=0)
    assert leader.high_watermark == 5
    assert leader.counted(1, 7)
    assert leader.high_watermark == 7


def test_watermark_waits_for_the_slowest_in_sync_replica() -> None:
    leader = PartitionLeader(1, 0, (1, 2), counted_end=10, high_watermark=3)
    assert leader.high_watermark == 3
    assert not leader.counted(1, 12)
    assert leader.counted(2, 11)
    assert leader.high_watermark == 11


def test_a_replica_outside_the_isr_moves_nothing() -> None:
    leader = PartitionLeader(1, 0, (1,), counted_end=4, high_watermark=4)
    assert not leader.counted(9, 100)
    assert leader.high_watermark == 4


def test_a_leader_must_be_in_sync() -> None:
    with pytest.raises(ValueError, match="without being in sync"):
        PartitionLeader(1, 0, (2,), counted_end=0, high_watermark=0)


@given(st.lists(st.tuples(st.sampled_from((1, 2, 3)), st.integers(0, 1000))))
def test_watermark_never_falls_and_never_passes_a_replica(reports: list[tuple[int, int]]) -> None:
    leader = PartitionLeader(1, 0, (1, 2, 3), counted_end=0, high_watermark=0)
    ends = {1: 0, 2: 0, 3: 0}
    for replica, end in reports:
        before = leader.high_watermark
        rose = leader.counted(replica, end)
        ends[replica] = max(ends[replica], end)
        assert leader.high_watermark == min(ends.values())
        assert rose == (leader.high_watermark > before)
