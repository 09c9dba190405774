"""A node whose store fails or hangs: it steps down if a majority can continue without it, and does not campaign."""

from __future__ import annotations

import pytest
from tests.raft.harness import SETTINGS, Cluster, founded, stored_log
from tests.raft.solo import Solo, bodies

from chronik.raft.messages import Append, Heartbeat, TimeoutNow, VoteReply, VoteRequest
from chronik.raft.ready import ProposalId, RoleKind

TIMEOUT_MS = SETTINGS.election_timeout_ms


def leader_with_a_hung_store() -> Solo:
    solo = Solo()
    solo.lead()
    solo.writes = False
    return solo


def fail(solo: Solo) -> None:
    solo.node.storage_failed(solo.now_ms)
    solo.settle()


def test_followers_can_commit_entries_that_the_leader_has_not_written_yet() -> None:
    solo = leader_with_a_hung_store()
    first, second = solo.propose(b"first"), solo.propose(b"second")
    sent = [entry.data for body in bodies(solo.sent, 2) if isinstance(body, Append) for entry in body.entries]
    assert sent[-2:] == [b"first", b"second"], "a write that takes its time holds up neither"
    solo.acknowledge(3, second.index)
    assert solo.node.commit_index < first.index, "one of three is no majority"
    solo.acknowledge(2, second.index)
    assert solo.node.commit_index == second.index
    assert solo.node.applied_index < first.index, "here it is applied when it is durable here"


def test_a_leader_with_a_failed_store_steps_down_once_a_majority_has_its_entries() -> None:
    solo = leader_with_a_hung_store()
    proposal = solo.propose()
    fail(solo)
    assert solo.node.is_leader, "it is not known yet whether the others can do better"
    solo.acknowledge(3)
    assert solo.node.is_leader
    sent = solo.acknowledge(2)
    assert solo.node.role is RoleKind.FOLLOWER
    assert solo.node.leader_lease_until_ms is None
    assert TimeoutNow() in bodies(sent, 2), "one that has everything holds its election at once"
    assert solo.node.commit_index == proposal.index


def test_a_leader_whose_store_fails_steps_down_at_once_if_followers_have_its_entries() -> None:
    solo = leader_with_a_hung_store()
    solo.propose()
    solo.acknowledge(2)
    solo.acknowledge(3)
    assert solo.node.is_leader
    fail(solo)
    assert solo.node.role is RoleKind.FOLLOWER


def test_a_leader_with_a_failed_store_keeps_leading_if_no_majority_can_replace_it() -> None:
    solo = leader_with_a_hung_store()
    solo.propose()
    fail(solo)
    solo.acknowledge(2)
    for _ in range(20):
        solo.wait(SETTINGS.heartbeat_interval_ms)
        solo.beat(2)
    assert solo.node.is_leader
    assert solo.node.leader_lease_until_ms is not None
    solo.node.storage_recovered(solo.now_ms)
    solo.write()
    assert solo.node.is_leader
    assert solo.node.commit_index == solo.node.last_index


def test_a_sole_voter_whose_store_fails_stays_the_leader() -> None:
    solo = Solo(stored_log(1, [1], founded((1,))))
    solo.wait(0)
    solo.writes = False
    solo.propose()
    fail(solo)
    solo.wait(10 * TIMEOUT_MS)
    assert solo.node.is_leader


def test_a_node_campaigns_only_one_election_timeout_after_its_store_recovers() -> None:
    solo = Solo()
    fail(solo)
    solo.wait(20 * TIMEOUT_MS)
    assert (solo.node.role, solo.sent) == (RoleKind.FOLLOWER, [])
    solo.node.storage_recovered(solo.now_ms)
    solo.wait(TIMEOUT_MS - 1)
    assert solo.sent == []
    solo.wait(TIMEOUT_MS)
    assert VoteRequest(1, 1, is_pre_vote=True) in bodies(solo.sent)


def test_a_node_with_a_failed_store_ignores_timeout_now() -> None:
    solo = Solo()
    solo.hear(2, 2, Heartbeat(0, 1))
    fail(solo)
    assert solo.hear(2, 2, TimeoutNow()) == []
    assert (solo.node.role, solo.node.term) == (RoleKind.FOLLOWER, 2)


@pytest.mark.parametrize("is_pre_vote", [True, False])
def test_a_candidate_whose_store_fails_becomes_a_follower(is_pre_vote: bool) -> None:
    solo = Solo(writes=False)
    solo.stand()
    if not is_pre_vote:
        solo.hear(2, 2, VoteReply(True, is_pre_vote=True))
    fail(solo)
    assert solo.node.role is RoleKind.FOLLOWER
    solo.wait(10 * TIMEOUT_MS)
    assert solo.node.role is RoleKind.FOLLOWER


def test_a_new_leader_commits_within_one_timeout_while_the_old_leaders_store_hangs() -> None:
    for seed in range(20):
        cluster = Cluster(3, seed)
        old = cluster.elect()
        cluster.converge()
        cluster.sicken(old.node_id, 5_000, noticed_after_ms=500)
        proposal = cluster.propose(old.node_id)
        assert isinstance(proposal, ProposalId)
        cluster.run_for(500)
        assert proposal.index in cluster.oracle.committed, f"seed {seed}: it needs the others only"
        cluster.run_until(lambda: cluster.leader is not None and cluster.leader is not old, TIMEOUT_MS)  # noqa: B023
        for _ in range(5):
            cluster.commit(TIMEOUT_MS)
            cluster.run_for(300)
        assert not old.is_leader, f"seed {seed}: it must not lead while its store hangs"
        cluster.run_for(2_500)
        cluster.converge()
