"""The high watermark is the end of what all in-sync replicas have acknowledged, and it never decreases."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.replication.leader import ENDS_SEEN_MAX, JOIN_WAIT_MS_MAX, PartitionLeader, ProposedIsr

LAG_MS = 3_000
LIVE = {1: 10, 2: 20, 3: 30}
HEARD_MS = dict.fromkeys((1, 2, 3), 1 << 40)


def leader_of(
    isr: Sequence[int] = (1, 2, 3),
    *,
    replicas: Sequence[int] = (1, 2, 3),
    end: int = 0,
    watermark: int = 0,
    min_insync: int = 1,
    durable_end: int | None = None,
    start: int = 0,
) -> PartitionLeader:
    return PartitionLeader(
        1,
        5,
        replicas=replicas,
        isr=isr,
        partition_epoch=0,
        min_insync_replicas=min_insync,
        log_end_offset=end,
        durable_end=end if durable_end is None else durable_end,
        high_watermark=watermark,
        log_start_offset=start,
        now_ms=0,
        lag_ms_max=LAG_MS,
    )


def fetched(
    leader: PartitionLeader, replica: int, offset: int, *, end: int = 100, now_ms: int = 1, start: int = 0
) -> bool:
    return leader.replica_fetched(replica, LIVE[replica], offset, end, now_ms, LIVE, start)


def test_watermark_follows_the_only_replica() -> None:
    leader = leader_of((1,), replicas=(1,), end=5)
    assert leader.high_watermark == 5
    assert leader.acknowledge_durable(7)
    assert leader.high_watermark == 7


def test_watermark_waits_for_the_slowest_in_sync_replica() -> None:
    leader = leader_of((1, 2), replicas=(1, 2), end=10, watermark=3)
    assert leader.high_watermark == 3
    assert not leader.acknowledge_durable(12)
    assert fetched(leader, 2, 11)
    assert leader.high_watermark == 11


def test_a_new_leader_commits_nothing_before_every_in_sync_replica_has_fetched() -> None:
    leader = leader_of(end=10, watermark=4)
    fetched(leader, 2, 10)
    assert leader.high_watermark == 4
    assert not leader.has_reached_its_epoch
    fetched(leader, 3, 10)
    assert leader.high_watermark == 10
    assert leader.has_reached_its_epoch


def test_watermark_waits_for_the_leaders_own_synced_end_offset() -> None:
    leader = leader_of((1, 2), replicas=(1, 2), end=10, durable_end=6, watermark=0)
    fetched(leader, 2, 10)
    assert leader.high_watermark == 6


def test_a_fetch_by_a_node_without_a_replica_does_not_advance_the_watermark() -> None:
    leader = leader_of((1,), replicas=(1,), end=4, watermark=4)
    assert not leader.replica_fetched(9, 1, 100, 100, 0, {9: 1}, 0)
    assert leader.high_watermark == 4


def test_a_leader_must_be_in_sync() -> None:
    with pytest.raises(ValueError, match="without being in sync"):
        leader_of((2,), end=0)


def test_watermark_waits_for_a_replica_that_is_being_added_to_the_isr() -> None:
    leader = leader_of((1, 2), end=10, watermark=10)
    fetched(leader, 2, 10, end=10)
    fetched(leader, 3, 10, end=10)
    proposed = leader.check_isr(10, 1, LIVE, HEARD_MS)
    assert proposed == ProposedIsr(5, 0, ((1, 10), (2, 20), (3, 30)))
    leader.acknowledge_durable(12)
    fetched(leader, 2, 12, end=12)
    assert leader.high_watermark == 10
    fetched(leader, 3, 12, end=12)
    assert leader.high_watermark == 12


def test_watermark_waits_for_a_replica_until_its_removal_is_committed() -> None:
    leader = leader_of(end=10, watermark=0)
    fetched(leader, 2, 10, end=10, now_ms=LAG_MS + 1)
    proposed = leader.check_isr(10, LAG_MS + 2, LIVE, {})
    assert proposed is not None
    assert [replica for replica, _ in proposed.isr] == [1, 2]
    assert leader.high_watermark == 0
    leader.isr.ended(0, True, LAG_MS + 3)
    leader.configured(1)
    assert leader.high_watermark == 0
    assert leader.partition_changed((1, 2, 3), (1, 2), 1, LAG_MS + 4)
    assert leader.high_watermark == 10


def test_watermark_does_not_advance_while_too_few_replicas_are_in_sync() -> None:
    leader = leader_of((1,), end=5, watermark=2, min_insync=2)
    assert not leader.has_enough_replicas
    assert not leader.acknowledge_durable(9)
    assert leader.high_watermark == 2
    fetched(leader, 2, 9, end=9)
    assert leader.partition_changed((1, 2, 3), (1, 2), 1, 2)
    assert leader.high_watermark == 9


def test_a_topic_with_fewer_replicas_than_min_insync_needs_all_its_replicas() -> None:
    leader = leader_of((1,), replicas=(1,), end=5, min_insync=2)
    assert leader.has_enough_replicas
    assert leader.high_watermark == 5


def test_a_replica_that_lost_records_holds_the_watermark_without_lowering_it() -> None:
    leader = leader_of((1, 2), replicas=(1, 2), end=10)
    fetched(leader, 2, 10)
    leader.acknowledge_durable(20)
    assert leader.replica_fetched(2, 21, 6, 20, 2, LIVE, 0) is False
    assert leader.high_watermark == 10
    assert leader.durable_end_of(2) == 6


def test_a_fetch_from_an_earlier_incarnation_is_ignored() -> None:
    leader = leader_of((1, 2), replicas=(1, 2), end=10)
    leader.replica_fetched(2, 21, 4, 10, 1, LIVE, 0)
    assert leader.is_stale(2, 20)
    leader.replica_fetched(2, 20, 10, 10, 2, LIVE, 0)
    assert leader.high_watermark == 4


def test_a_replica_joins_the_isr_only_with_all_committed_records_and_the_epoch_start() -> None:
    leader = leader_of((1,), end=10, watermark=10)
    fetched(leader, 2, 9)
    assert not leader.may_join(2, LIVE)
    fetched(leader, 2, 10)
    assert leader.may_join(2, LIVE)
    assert not leader.may_join(2, {1: 10})
    assert not leader.may_join(2, {1: 10, 2: 21})


def test_a_replica_that_keeps_up_can_join_the_isr_under_constant_writes() -> None:
    leader = leader_of((1,), end=100, watermark=100)
    end = 100
    fetched(leader, 2, end, end=end)
    for now_ms in range(2, 10):
        end += 10
        leader.acknowledge_durable(end)
        if leader.may_join(2, LIVE):
            return
        fetched(leader, 2, end - 10, end=end, now_ms=now_ms)
    pytest.fail("it is always one fetch behind")


class SlowReplica:
    """Replica 2 receives each record at once, and syncs in rounds of `sync_ms`: each covers what came before it."""

    def __init__(self, leader: PartitionLeader, sync_ms: int) -> None:
        self.leader = leader
        self.sync_ms = sync_ms
        self.durable = self.syncing = 100

    def fetch_at(self, now_ms: int, end: int) -> None:
        if now_ms % self.sync_ms == 0:
            self.durable, self.syncing = self.syncing, end
        fetched(self.leader, 2, self.durable, end=end, now_ms=now_ms)


def test_a_replica_that_fetches_ahead_of_slow_syncs_keeps_up() -> None:
    """Its durable end always lags two syncs behind, and it fetches a hundred times in each."""
    leader = leader_of((1, 2), replicas=(1, 2), end=100, watermark=100)
    replica = SlowReplica(leader, sync_ms=1_000)
    for now_ms in range(0, 20_000, 10):
        replica.fetch_at(now_ms, end=100 + now_ms)
        assert proposed_isr(leader, now_ms, end=100 + now_ms) is None, now_ms
    assert leader.durable_end_of(2) == replica.durable


def test_a_replica_that_receives_records_and_syncs_none_leaves_the_isr() -> None:
    leader = leader_of((1, 2), replicas=(1, 2), end=100, watermark=100)
    for now_ms in range(0, LAG_MS, 10):
        fetched(leader, 2, 100, end=100 + now_ms, now_ms=now_ms)
        if proposed_isr(leader, now_ms, end=100 + now_ms) == [1]:
            return
    pytest.fail("it is still in sync")


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40), st.integers(0, 60)), max_size=60))
def test_caught_up_times_never_claim_more_than_is_durable(steps: list[tuple[int, int, int]]) -> None:
    """At its caught-up time, the leader's log ended at or below what the replica now has durably."""
    leader = leader_of((1, 2), replicas=(1, 2), end=0)
    now_ms, end, durable = 1, 0, 0
    ends = {now_ms: end}
    for pause_ms, appended, synced in steps:
        now_ms, end = now_ms + pause_ms, end + appended
        durable = min(end, durable + synced)
        ends[now_ms] = end
        leader.replica_fetched(2, 20, durable, end, now_ms, LIVE, 0)
        caught_up_ms = leader._others[2].caught_up_ms
        assert caught_up_ms not in ends or ends[caught_up_ms] <= durable
        assert len(leader._others[2].leader_ends) <= ENDS_SEEN_MAX


def test_watermark_waits_only_briefly_for_a_joining_replica_that_died() -> None:
    leader = leader_of((1,), end=100, watermark=100)
    fetched(leader, 2, 100, end=100, now_ms=10)
    leader.acknowledge_durable(120)
    assert leader.high_watermark == 100
    leader.check_isr(120, 11 + JOIN_WAIT_MS_MAX, {1: 10}, {})
    assert leader.high_watermark == 120


def test_an_idle_replica_that_still_fetches_stays_in_sync() -> None:
    leader = leader_of((1, 2), replicas=(1, 2), end=10)
    fetched(leader, 2, 10, end=10)
    for now_ms in range(500, 60_000, 500):
        assert leader.check_isr(10, now_ms, LIVE, {2: now_ms - 300}) is None
    assert leader.check_isr(12, 60_500, LIVE, {2: 60_400}) is None
    assert leader.check_isr(12, 60_000 + LAG_MS + 1_000, LIVE, {2: 60_400}) is not None


def proposed_isr(leader: PartitionLeader, now_ms: int, end: int = 1_000) -> list[int] | None:
    proposed = leader.check_isr(end, now_ms, LIVE, dict.fromkeys(LIVE, now_ms))
    return None if proposed is None else [replica for replica, _ in proposed.isr]


def test_a_lagging_replica_that_makes_progress_stays_in_the_isr_while_needed() -> None:
    """Found by the limits of `make soak`: under overload on slow disks, the ISR shrank to the leader every few seconds.

    Each time, all pending batches failed and their producers sent them again, so nothing was ever acknowledged.
    """
    leader = leader_of(end=1_000, watermark=0, min_insync=2)
    for now_ms in range(500, 10_000, 500):
        fetched(leader, 2, now_ms // 20, end=1_000, now_ms=now_ms)
        fetched(leader, 3, now_ms // 50, end=1_000, now_ms=now_ms)
        found = proposed_isr(leader, now_ms)
        if found is not None:
            assert (now_ms, found) == (LAG_MS + 500, [1, 2]), "the one nearest behind stays, the other goes"
            leader.partition_changed((1, 2, 3), (1, 2), 1, now_ms)
    assert leader.in_sync_replicas == (1, 2)
    assert leader.high_watermark == 475


def test_a_lagging_replica_leaves_the_isr_if_enough_replicas_keep_up() -> None:
    leader = leader_of((1, 2), replicas=(1, 2), end=1_000, min_insync=1)
    fetched(leader, 2, 10, end=1_000, now_ms=LAG_MS)
    assert proposed_isr(leader, LAG_MS + 1) == [1]


def test_a_stalled_replica_leaves_the_isr_and_rejoins_when_it_makes_progress() -> None:
    """For example a full disk: producers learn immediately that too few replicas are in sync."""
    leader = leader_of((1, 2), replicas=(1, 2), end=10, watermark=10, min_insync=2)
    for now_ms in range(500, 2 * LAG_MS, 500):
        fetched(leader, 2, 10, end=1_000, now_ms=now_ms)
    assert proposed_isr(leader, 2 * LAG_MS) == [1]
    leader.partition_changed((1, 2), (1,), 1, 2 * LAG_MS)
    fetched(leader, 2, 10, end=1_000, now_ms=2 * LAG_MS + 1)
    assert proposed_isr(leader, 2 * LAG_MS + 2) is None
    fetched(leader, 2, 11, end=1_000, now_ms=2 * LAG_MS + 3)
    assert proposed_isr(leader, 2 * LAG_MS + 4) == [1, 2]


STUCK_MS = LAG_MS * 2 // 3


def test_a_stuck_replica_leaves_the_isr_before_it_lags_if_enough_replicas_remain() -> None:
    """The replica's disk fails or hangs: it keeps fetching from the same offset, or stops fetching."""
    leader = leader_of(end=10, watermark=10, min_insync=2)
    for now_ms in range(0, STUCK_MS + 1, 500):
        fetched(leader, 2, 10 + now_ms, end=10 + now_ms, now_ms=now_ms)
        fetched(leader, 3, 10, end=10 + now_ms, now_ms=now_ms)
        assert proposed_isr(leader, now_ms, 10 + now_ms) is None
    assert proposed_isr(leader, STUCK_MS + 1, 2_000) == [1, 2]
    leader.partition_changed((1, 2, 3), (1, 2), 1, STUCK_MS + 2)
    leader.acknowledge_durable(2_000)
    fetched(leader, 3, 10, end=2_000, now_ms=STUCK_MS + 3)
    fetched(leader, 2, 2_000, end=2_000, now_ms=STUCK_MS + 4)
    assert leader.high_watermark == 2_000, "nothing waits for it to join, since it takes nothing"
    fetched(leader, 3, 2_000, end=2_000, now_ms=STUCK_MS + 500)
    assert proposed_isr(leader, STUCK_MS + 501, 2_000) == [1, 2, 3], "it comes back when it takes records again"


def test_a_stuck_replica_stays_in_the_isr_until_it_lags_if_too_few_would_remain() -> None:
    leader = leader_of((1, 2), replicas=(1, 2), end=10, watermark=10, min_insync=2)
    fetched(leader, 2, 10, end=10, now_ms=1)
    assert proposed_isr(leader, STUCK_MS + 500) is None
    assert proposed_isr(leader, LAG_MS + 2) == [1]


def test_an_idle_replica_with_all_records_is_not_stuck() -> None:
    leader = leader_of(end=10, watermark=10, min_insync=2)
    for replica in (2, 3):
        fetched(leader, replica, 10, end=10, now_ms=1)
    heard_ms = {2: 60_000, 3: 60_000}
    assert leader.check_isr(10, 60_100, LIVE, heard_ms) is None
    assert leader.check_isr(11, 60_500, LIVE, heard_ms) is None


def test_a_stall_of_the_leader_does_not_remove_replicas_from_the_isr() -> None:
    leader = leader_of((1, 2), replicas=(1, 2), end=10)
    leader.stalled(60_000)
    assert leader.check_isr(10, 60_000, LIVE, {}) is None
    assert leader.check_isr(10, 60_001 + LAG_MS, LIVE, {}) is not None


def test_a_failed_isr_proposal_is_settled_by_the_next_proposal() -> None:
    leader = leader_of((1, 2), end=10, watermark=10)
    fetched(leader, 2, 10, end=10)
    fetched(leader, 3, 10, end=10)
    assert leader.check_isr(10, 1, LIVE, HEARD_MS) is not None
    leader.isr.ended(0, False, 1)
    without_3 = {1: 10, 2: 20}
    settling = leader.check_isr(10, 1_000, without_3, HEARD_MS)
    assert settling == ProposedIsr(5, 0, ((1, -1), (2, -1)))
    assert 3 in leader.isr.maximal
    leader.partition_changed((1, 2, 3), (1, 2), 1, 1_001)
    assert leader.isr.maximal == (1, 2)


def test_a_leader_that_cannot_append_transfers_leadership_and_leaves_the_isr() -> None:
    leader = leader_of(end=10)
    proposed = leader.propose_hand_over(2, 1, LIVE, leaves=True)
    assert proposed == ProposedIsr(5, 0, ((2, -1), (3, -1)), hand_over_to=2)
    assert leader.isr.maximal == (1, 2, 3)


def test_leadership_is_transferred_only_to_a_live_isr_member() -> None:
    leader = leader_of((1, 2), end=10)
    assert leader.propose_hand_over(3, 0, LIVE) is None
    assert leader.propose_hand_over(2, 0, {1: 10}) is None
    assert leader.propose_hand_over(2, 0, LIVE) == ProposedIsr(5, 0, ((1, -1), (2, -1)), 2)
    assert not leader.isr.is_settled
    assert leader.propose_hand_over(2, 0, LIVE) is None


def test_watermark_waits_for_a_removed_replica_until_it_leaves_the_isr() -> None:
    leader = leader_of((1, 2, 3), end=10)
    leader.partition_changed((1, 2), (1, 2, 3), 1, 1)
    fetched(leader, 2, 10)
    assert leader.high_watermark == 0
    leader.partition_changed((1, 2), (1, 2), 2, 1)
    assert leader.high_watermark == 10


@given(st.lists(st.tuples(st.sampled_from((1, 2, 3)), st.integers(0, 1000))))
def test_watermark_never_falls_and_never_passes_a_replica(reports: list[tuple[int, int]]) -> None:
    leader = leader_of((1, 2, 3))
    ends = {1: 0, 2: -1, 3: -1}
    for replica, end in reports:
        before = leader.high_watermark
        if replica == 1:
            rose = leader.acknowledge_durable(end)
            ends[1] = max(ends[1], end)
        else:
            rose = fetched(leader, replica, end, end=1000)
            ends[replica] = end
        assert rose == (leader.high_watermark > before)
        assert leader.high_watermark >= before
        assert leader.high_watermark <= max(before, min(ends.values()))


def test_low_watermark_is_the_smallest_log_start_of_the_in_sync_replicas() -> None:
    leader = leader_of((1, 2), end=10, watermark=10)
    fetched(leader, 3, 10, start=0)
    assert not leader.update_low_watermark(6)
    fetched(leader, 2, 10, start=4)
    assert leader.update_low_watermark(6)
    assert leader.low_watermark == 4
    fetched(leader, 2, 10, start=9)
    assert leader.update_low_watermark(6)
    assert leader.low_watermark == 6
    assert not leader.update_low_watermark(6)


def test_low_watermark_does_not_advance_while_too_few_replicas_are_in_sync() -> None:
    leader = leader_of((1,), end=10, watermark=10, min_insync=2)
    assert not leader.update_low_watermark(6)
    leader.configured(1)
    assert leader.update_low_watermark(6)


def test_a_replica_that_still_has_deleted_records_does_not_join_the_isr() -> None:
    leader = leader_of((1, 2), end=10, watermark=10)
    fetched(leader, 2, 10, start=5)
    assert leader.update_low_watermark(5)
    fetched(leader, 3, 10, start=4)
    assert not leader.may_join(3, LIVE)
    fetched(leader, 3, 10, start=5)
    assert leader.may_join(3, LIVE)


def test_a_joining_replica_does_not_restore_records_that_an_earlier_leader_deleted() -> None:
    leader = leader_of((1, 2), end=10, watermark=10, start=5)
    fetched(leader, 3, 10, start=4)
    assert not leader.may_join(3, LIVE)
    fetched(leader, 3, 10, start=5)
    assert leader.may_join(3, LIVE)
