"""Pre-vote, check-quorum, votes refused while a leader is alive, the lease, and leadership transfer."""

from __future__ import annotations

from tests.raft.harness import SETTINGS, Cluster, founded, stored_log
from tests.raft.solo import Solo, bodies

from chronik.raft.messages import AppendReply, Heartbeat, HeartbeatReply, TimeoutNow, VoteReply, VoteRequest
from chronik.raft.ready import Reason, Refused, RoleChanged, RoleKind

TIMEOUT_MS = SETTINGS.election_timeout_ms
BEAT_MS = SETTINGS.heartbeat_interval_ms

# Pre-vote


def test_a_pre_vote_changes_neither_the_term_nor_the_vote() -> None:
    solo = Solo()
    solo.now_ms += TIMEOUT_MS
    assert bodies(solo.hear(2, 2, VoteRequest(1, 1, is_pre_vote=True))) == [VoteReply(True, is_pre_vote=True)]
    assert bodies(solo.hear(3, 2, VoteRequest(1, 1, is_pre_vote=True))) == [VoteReply(True, is_pre_vote=True)]
    assert (solo.node.term, solo.store.stored.hard_state.vote) == (1, None)


def test_a_reconnected_node_does_not_disturb_the_leader() -> None:
    cluster = Cluster(seed=1)
    leader = cluster.elect()
    cluster.converge()
    other = next(each for each in cluster.hosts if each != leader.node_id)
    cluster.cut_off(other)
    cluster.run_for(20 * TIMEOUT_MS)
    cluster.heal()
    cluster.run_for(5 * TIMEOUT_MS)
    assert cluster.leader is leader
    assert {host.node.term for host in cluster.running if host.node is not None} == {leader.term}


def test_a_node_repeats_its_pre_vote_request_without_raising_the_term() -> None:
    solo = Solo()
    solo.wait(20 * TIMEOUT_MS)
    asked = [message for message in solo.sent if message.target == 2]
    assert len(asked) > 5
    assert {message.term for message in asked} == {2}
    assert solo.node.term == 1


# Votes while a leader is alive


def test_a_node_refuses_votes_while_it_hears_from_a_leader() -> None:
    solo = Solo()
    solo.hear(2, 2, Heartbeat(0, 1))
    solo.now_ms += TIMEOUT_MS - 1
    assert solo.hear(3, 3, VoteRequest(9, 9)) == []
    assert solo.hear(3, 3, VoteRequest(9, 9, is_pre_vote=True)) == []
    assert solo.node.term == 2
    solo.now_ms += 1
    assert bodies(solo.hear(3, 3, VoteRequest(9, 9))) == [VoteReply(True)]


def test_a_leader_that_hears_from_a_majority_ignores_vote_requests() -> None:
    solo = Solo()
    solo.lead()
    assert solo.hear(3, 9, VoteRequest(9, 9)) == []
    assert solo.node.is_leader


def test_a_node_votes_at_once_in_an_election_that_the_leader_requested() -> None:
    solo = Solo()
    solo.hear(2, 2, Heartbeat(0, 1))
    assert bodies(solo.hear(3, 3, VoteRequest(9, 9, is_transfer=True))) == [VoteReply(True)]


def test_a_restarted_node_refuses_votes_for_one_election_timeout() -> None:
    solo = Solo()
    solo.hear(2, 2, Heartbeat(0, 1))
    again = solo.restarted()
    again.now_ms += TIMEOUT_MS - 1
    assert again.hear(3, 3, VoteRequest(9, 9)) == []
    again.now_ms += 1
    assert bodies(again.hear(3, 3, VoteRequest(9, 9))) == [VoteReply(True)]


# Check-quorum and the lease


def test_a_leader_without_answers_from_a_majority_steps_down() -> None:
    solo = Solo()
    solo.lead()
    solo.wait(TIMEOUT_MS)
    assert solo.node.role is RoleKind.FOLLOWER
    assert RoleChanged(RoleKind.FOLLOWER, 2, None) in solo.events


def test_a_sole_voter_leads_on_after_a_pause() -> None:
    solo = Solo(stored_log(1, [1], founded((1,))))
    solo.wait(4 * TIMEOUT_MS)
    term = solo.node.term
    assert solo.node.is_leader
    solo.now_ms += 10 * TIMEOUT_MS
    solo.wait(0)
    assert solo.node.is_leader and solo.node.term == term
    assert (solo.node.leader_lease_until_ms or 0) > solo.now_ms


def test_a_leader_with_answers_from_a_majority_stays_the_leader() -> None:
    solo = Solo()
    solo.lead()
    for _ in range(20):
        solo.wait(BEAT_MS)
        solo.beat(3)
    assert solo.node.is_leader


def test_a_lease_starts_at_the_start_of_the_acknowledged_heartbeat_round() -> None:
    solo = Solo()
    solo.lead()
    start_ms = solo.now_ms
    solo.wait(BEAT_MS)
    solo.now_ms += 30
    solo.beat(2)
    assert solo.node.leader_lease_until_ms == start_ms + BEAT_MS + SETTINGS.lease_ms


def test_a_reply_to_an_old_heartbeat_round_does_not_renew_the_lease() -> None:
    solo = Solo()
    solo.lead()
    solo.wait(BEAT_MS)
    solo.beat(2)
    lease_ms = solo.node.leader_lease_until_ms
    solo.wait(BEAT_MS)
    solo.hear(3, 2, HeartbeatReply(1))
    assert solo.node.leader_lease_until_ms == lease_ms


def test_a_leader_has_no_lease_before_it_commits_an_entry_of_its_term() -> None:
    solo = Solo()
    solo.lead(establish=False)
    solo.beat(2)
    assert solo.node.leader_lease_until_ms is None
    solo.acknowledge(2)
    assert solo.node.leader_lease_until_ms is not None


def test_winning_an_election_alone_grants_no_lease() -> None:
    solo = Solo()
    solo.lead(establish=False)
    solo.acknowledge(2)
    assert solo.node.leader_lease_until_ms is None


def test_a_lease_ends_before_the_election_timeout_despite_clock_drift() -> None:
    slowest = SETTINGS.lease_ms / (1 - SETTINGS.clock_drift_percent / 100)
    fastest = TIMEOUT_MS / (1 + SETTINGS.clock_drift_percent / 100)
    assert slowest < fastest


def test_a_leader_that_resumes_after_a_long_pause_has_no_lease() -> None:
    cluster = Cluster(seed=2)
    leader = cluster.elect()
    cluster.pause(leader.node_id, 3 * TIMEOUT_MS)
    cluster.run_until(lambda: cluster.leader is not None and cluster.leader is not leader)
    lease_ms = leader.leader_lease_until_ms
    assert lease_ms is not None
    assert lease_ms < cluster.hosts[leader.node_id].local_ms(cluster.now_ms)


# Leadership transfer


def test_a_leadership_transfer_does_not_wait_for_an_election_timeout() -> None:
    cluster = Cluster(seed=3)
    leader = cluster.elect()
    cluster.converge()
    target = next(each for each in cluster.hosts if each != leader.node_id)
    assert cluster.transfer(leader.node_id, target) is None
    cluster.run_until(lambda: cluster.node(target).is_leader, limit_ms=TIMEOUT_MS / 4)
    assert leader.role is RoleKind.FOLLOWER


def test_a_lagging_transfer_target_receives_the_missing_entries_first() -> None:
    solo = Solo()
    solo.lead()
    solo.propose()
    assert solo.node.transfer_leadership(3, solo.now_ms) is None
    solo.settle()
    assert TimeoutNow() not in bodies(solo.sent)
    sent = solo.acknowledge(3)
    assert bodies(sent, 3)[-1] == TimeoutNow()


def test_a_transfer_without_a_target_chooses_the_most_up_to_date_voter() -> None:
    solo = Solo()
    solo.lead()
    solo.acknowledge(3, index=1)
    solo.node.transfer_leadership(None, solo.now_ms)
    solo.settle()
    assert bodies(solo.sent, 2)[-1] == TimeoutNow()


def test_a_leader_refuses_proposals_during_a_leadership_transfer() -> None:
    solo = Solo()
    solo.lead()
    solo.node.transfer_leadership(3, solo.now_ms)
    assert solo.node.propose(b"x", solo.now_ms) == Refused(Reason.TRANSFERRING)


def test_a_leader_keeps_leading_if_the_transfer_target_does_not_catch_up_in_time() -> None:
    solo = Solo()
    solo.lead()
    solo.node.transfer_leadership(3, solo.now_ms)
    for _ in range(SETTINGS.transfer_timeout_ms // BEAT_MS):
        solo.wait(BEAT_MS)
        solo.beat(2)
    assert solo.node.is_leader
    solo.propose()
    assert solo.node.leader_lease_until_ms is not None


def test_a_leader_that_sent_timeout_now_has_no_lease_and_steps_down() -> None:
    solo = Solo()
    solo.lead()
    solo.node.transfer_leadership(2, solo.now_ms)
    solo.settle()
    assert bodies(solo.sent)[-1] == TimeoutNow()
    solo.beat(2)
    assert solo.node.leader_lease_until_ms is None
    for _ in range(SETTINGS.transfer_timeout_ms // BEAT_MS):
        solo.wait(BEAT_MS)
        solo.beat(2)
    assert not solo.node.is_leader


def test_leadership_is_transferred_only_to_other_voters() -> None:
    solo = Solo(stored_log(1, [1], founded((1, 2, 3), learners=(4,))))
    solo.lead()
    for target in (1, 4, 9):
        refused = solo.node.transfer_leadership(target, solo.now_ms)
        assert refused is not None and refused.reason is Reason.INVALID


def test_a_node_that_receives_timeout_now_starts_an_election_at_once() -> None:
    solo = Solo()
    solo.hear(2, 2, Heartbeat(0, 1))
    sent = solo.hear(2, 2, TimeoutNow())
    assert bodies(sent, 3) == [VoteRequest(1, 1, is_transfer=True)]
    assert (solo.node.role, solo.node.term) == (RoleKind.CANDIDATE, 3)


def test_a_timeout_now_of_an_earlier_term_is_rejected() -> None:
    solo = Solo()
    solo.hear(2, 5, Heartbeat(0, 1))
    (reply,) = solo.hear(3, 4, TimeoutNow())
    assert reply.body == AppendReply(0, is_rejected=True)
    assert solo.node.role is RoleKind.FOLLOWER
