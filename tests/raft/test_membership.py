"""Members join, leave, and return with an empty disk, one voter at a time."""

from __future__ import annotations

import pytest
from tests.raft.harness import SETTINGS, Cluster, founded, store_id, stored_log
from tests.raft.solo import THREE, Solo, bodies

from chronik.raft.membership import (
    REMOVED_MAX,
    AddLearner,
    Member,
    Membership,
    MembershipChange,
    MembershipError,
    MembershipHistory,
    Promote,
    Remove,
    decode_membership,
    encode_membership,
)
from chronik.raft.messages import AppendReply, Heartbeat, Hello, HelloReply, VoteReply, VoteRequest
from chronik.raft.ready import MembershipChanged, NodeIdTaken, ProposalId, Reason, Refused, RoleKind
from chronik.raft.store import Entry, EntryKind, StoredState

TIMEOUT_MS = SETTINGS.election_timeout_ms

# The membership as a value


def test_a_majority_is_more_than_half_of_the_voters() -> None:
    four = founded((1, 2, 3, 4), learners=(5, 6, 7))
    assert not four.has_majority([1, 2, 5, 6, 7])
    assert four.has_majority([1, 2, 3])
    assert not Membership().has_majority([])
    assert four.majority_value({1: 9, 2: 7, 3: 5, 4: 3}.__getitem__) == 5
    assert founded((1, 2, 3)).majority_value({1: 9, 2: 7, 3: 5}.__getitem__) == 7


def test_each_membership_change_affects_at_most_one_vote() -> None:
    added: list[MembershipChange] = [AddLearner(4, store_id(4)), AddLearner(2, store_id(22))]
    for change in (*added, Remove(1), Remove(3)):
        after = THREE.after(change)
        assert abs(len(after.voters) - len(THREE.voters)) <= 1
        assert sum(voter not in THREE.voters for voter in after.voters) == 0
    learners = founded((1, 2), learners=(3,))
    assert learners.after(Promote(3)) == THREE


def test_a_member_with_a_new_store_becomes_a_learner() -> None:
    after = THREE.after(AddLearner(2, store_id(22), "elsewhere"))
    assert after.member(2) == Member(2, store_id(22), False, "elsewhere")
    assert not after.is_voter(2, store_id(2))


@pytest.mark.parametrize(
    ("membership", "change"),
    [
        (THREE, AddLearner(2, store_id(2))),
        (THREE, Promote(2)),
        (THREE, Promote(9)),
        (THREE, Remove(9)),
        (founded((1,), learners=(2,)), Remove(1)),
    ],
)
def test_invalid_membership_changes_are_refused(membership: Membership, change: Promote) -> None:
    with pytest.raises(MembershipError):
        membership.after(change)


def test_removed_stores_are_remembered_until_they_are_added_again() -> None:
    after = THREE.after(Remove(3)).after(AddLearner(2, store_id(22)))
    assert after.removed == (store_id(3), store_id(2))
    assert after.after(AddLearner(3, store_id(3))).removed == (store_id(2),)


def test_the_list_of_removed_stores_is_bounded() -> None:
    membership = THREE
    for number in range(REMOVED_MAX + 50):
        membership = membership.after(AddLearner(9, store_id(1_000 + number)))
    assert len(membership.removed) == REMOVED_MAX
    assert membership.removed[-1] == store_id(1_000 + REMOVED_MAX + 48)


def test_a_membership_round_trips_through_its_encoding() -> None:
    membership = THREE.after(AddLearner(4, store_id(4), "host:1")).after(Remove(1))
    assert decode_membership(encode_membership(membership)) == membership
    with pytest.raises(ValueError, match=r"."):
        decode_membership(b"\x01nonsense")


def test_a_membership_change_takes_effect_at_its_entry_and_is_reverted_with_it() -> None:
    history = MembershipHistory(0, THREE)
    history.append(5, THREE.after(Remove(3)))
    assert history.at(4) == THREE
    assert history.at(5) == history.current
    assert not history.cut_from(6)
    assert history.cut_from(5)
    assert history.current == THREE


# Changes through the log


def led(membership: Membership = THREE) -> Solo:
    solo = Solo(stored_log(1, [1], membership))
    solo.lead()
    return solo


def refusal(result: ProposalId | Refused) -> Reason | None:
    return result.reason if isinstance(result, Refused) else None


def test_a_membership_change_takes_effect_as_soon_as_it_is_appended() -> None:
    solo = led()
    assert isinstance(solo.node.propose_membership(AddLearner(4, store_id(4)), solo.now_ms), ProposalId)
    assert solo.node.membership.member(4) is not None
    count = len(solo.sent)
    solo.settle()
    assert bodies(solo.sent[count:], 4), "the learner is spoken to at once"


def test_only_one_membership_change_may_be_uncommitted_at_a_time() -> None:
    solo = led()
    solo.node.propose_membership(AddLearner(4, store_id(4)), solo.now_ms)
    assert refusal(solo.node.propose_membership(Remove(3), solo.now_ms)) is Reason.CHANGE_IN_FLIGHT
    solo.settle()
    solo.acknowledge(2)
    assert refusal(solo.node.propose_membership(Remove(3), solo.now_ms)) is None


def test_a_leader_refuses_membership_changes_before_it_commits_in_its_term() -> None:
    """Otherwise two successive leaders could start from the same membership, with majorities that do not overlap."""
    solo = Solo()
    solo.lead(establish=False)
    assert refusal(solo.node.propose_membership(Remove(3), solo.now_ms)) is Reason.NOT_ESTABLISHED


def test_a_learner_is_promoted_only_when_it_has_caught_up() -> None:
    solo = led(founded((1, 2, 3), learners=(4,)))
    for _ in range(SETTINGS.promotion_lag_entries_max + 1):
        solo.propose()
    solo.acknowledge(2)
    assert refusal(solo.node.propose_membership(Promote(4), solo.now_ms)) is Reason.NOT_CAUGHT_UP
    solo.acknowledge(4)
    assert refusal(solo.node.propose_membership(Promote(4), solo.now_ms)) is None


def test_an_invalid_membership_change_is_refused_with_the_reason() -> None:
    solo = led()
    result = solo.node.propose_membership(Promote(2), solo.now_ms)
    assert isinstance(result, Refused)
    assert (result.reason, result.detail) == (Reason.INVALID, "node 2 is already a voter")


def test_a_membership_change_is_reverted_when_the_next_leader_overwrites_it() -> None:
    solo = led()
    proposal = solo.node.propose_membership(Remove(3), solo.now_ms)
    assert isinstance(proposal, ProposalId)
    solo.settle()
    assert solo.node.membership.member(3) is None
    solo.append(9, (proposal.index - 1, 2), (Entry(proposal.index, 9, EntryKind.NO_OP, b""),))
    assert solo.node.membership == THREE
    assert solo.events[-1] == MembershipChanged(THREE, True)


def test_a_node_reports_a_committed_membership_change() -> None:
    solo = led()
    solo.node.propose_membership(Remove(3), solo.now_ms)
    solo.settle()
    solo.acknowledge(2)
    assert solo.events[-1] == MembershipChanged(THREE.after(Remove(3)), True)


def test_a_removed_leader_commits_its_removal_without_its_own_vote_and_steps_down() -> None:
    solo = led()
    solo.node.propose_membership(Remove(1), solo.now_ms)
    solo.settle()
    solo.acknowledge(2)
    assert solo.node.is_leader, "of nodes 2 and 3 both are needed"
    solo.acknowledge(3)
    assert solo.node.role is RoleKind.FOLLOWER
    assert solo.node.next_deadline_ms() is not None, "it says hello, and stands for no election"
    solo.wait(5 * TIMEOUT_MS)
    assert solo.node.role is RoleKind.FOLLOWER


def test_a_node_may_be_elected_to_commit_its_own_removal() -> None:
    """Of two nodes, the one that is being removed has the longer log, so the other node cannot win."""
    membership = founded((1, 2))
    solo = led(membership)
    solo.node.propose_membership(Remove(1), solo.now_ms)
    solo.settle()
    again = solo.restarted()
    again.stand()
    again.hear(2, again.node.term + 1, VoteReply(True, is_pre_vote=True))
    again.hear(2, again.node.term, VoteReply(True))
    assert again.node.is_leader
    again.acknowledge(2)
    assert again.node.role is RoleKind.FOLLOWER


def test_learners_do_not_start_elections() -> None:
    solo = Solo(stored_log(4, [1], founded((1, 2, 3), learners=(4,))), node_id=4)
    sent = solo.wait(10 * TIMEOUT_MS)
    assert not any(isinstance(body, VoteRequest) for body in bodies(sent))


def test_a_cluster_grows_from_one_voter_to_three() -> None:
    cluster = Cluster(1, seed=1)
    cluster.elect()
    for node_id in (2, 3, 4):
        cluster.add_host(node_id)
    cluster.run_until(lambda: len(cluster.node(1).membership.voters) == 3)
    cluster.run_until(lambda: len(cluster.node(1).membership.members) == 4)
    cluster.commit()
    cluster.converge()
    assert [member.is_voter for member in cluster.node(1).membership.members] == [True, True, True, False]


# Founding


def test_the_lowest_founder_creates_the_cluster_when_all_stores_are_empty() -> None:
    cluster = Cluster(seed=2)
    leader = cluster.elect()
    stores = {host.node_id: host.store.stored.store_id for host in cluster.running}
    assert {member.node_id: member.store for member in leader.membership.voters} == stores
    assert all(cluster.oracle.committed[1].kind is EntryKind.MEMBERSHIP for _ in cluster.hosts)


def test_a_cluster_waits_for_all_its_founders() -> None:
    cluster = Cluster(seed=3)
    cluster.crash(3)
    cluster.run_for(5_000)
    assert cluster.leader is None
    cluster.start(3)
    cluster.elect()


def test_a_lone_founder_leads_at_once() -> None:
    cluster = Cluster(1, seed=4)
    cluster.elect(limit_ms=20)


def test_a_founder_creates_the_cluster_only_when_all_founders_have_answered() -> None:
    founder = Solo(StoredState(store_id(11)), founders=(1, 2))
    founder.hear(2, 0, HelloReply("host-2"))
    assert founder.node.membership.member(2) is not None
    late = Solo(StoredState(store_id(12)), founders=(1, 2, 3))
    late.hear(2, 0, HelloReply("host-2"))
    assert late.node.membership == Membership(), "node 3 has not answered"


def test_only_the_lowest_founder_creates_the_cluster() -> None:
    second = Solo(StoredState(store_id(2)), node_id=2, founders=(1, 2))
    second.hear(1, 0, HelloReply("host-1"))
    assert second.node.membership == Membership()


def test_an_empty_node_ignores_delayed_messages_from_a_lost_store() -> None:
    solo = Solo(StoredState(store_id(2)), node_id=2, founders=(1, 2, 3))
    solo.hear(1, 0, Hello(1, store_id(12), "host-1"), store=12)
    assert solo.hear(1, 2, VoteRequest(1, 1), store=11) == []
    assert bodies(solo.hear(1, 2, VoteRequest(1, 1), store=12)) == [VoteReply(True)]


# Lost stores


def test_a_voter_with_an_empty_disk_returns_as_a_learner_until_it_has_caught_up() -> None:
    cluster = Cluster(seed=5)
    leader = cluster.elect()
    for _ in range(10):
        cluster.commit()
    lost = next(each for each in cluster.hosts if each != leader.node_id)
    cluster.wipe(lost)
    store = cluster.hosts[lost].store.stored.store_id
    roles: list[bool] = []

    def is_voter_again() -> bool:
        member = leader.membership.member(lost)
        if member is not None and member.store == store:
            roles.append(member.is_voter)
        return leader.membership.is_voter(lost, store)

    cluster.run_until(is_voter_again)
    assert roles[0] is False
    cluster.converge()


def test_a_founder_with_an_empty_disk_rejoins_the_cluster_that_it_created() -> None:
    cluster = Cluster(seed=6)
    cluster.elect()
    cluster.commit()
    cluster.wipe(1)
    cluster.run_until(lambda: cluster.node(1).commit_index == cluster.oracle.last_committed)
    assert cluster.node(1).membership.member(1) is not None


def test_a_voter_that_lost_its_store_cannot_elect_a_node_lacking_committed_entries() -> None:
    """An entry is committed on 1 and 2, not on 3. Then 2 loses its disk and 1 is down: no node may lead."""
    cluster = Cluster(seed=7)
    cluster.tends_membership = False
    leader = cluster.elect()
    cluster.converge()
    lost, lagging = (each for each in cluster.hosts if each != leader.node_id)
    cluster.cut_off(lagging)
    cluster.commit()
    cluster.crash(leader.node_id)
    cluster.wipe(lost)
    cluster.heal()
    cluster.run_for(20 * TIMEOUT_MS)
    assert cluster.leader is None
    cluster.start(leader.node_id)
    cluster.tends_membership = True
    cluster.commit()
    cluster.converge()


def test_a_node_whose_admission_was_reverted_requests_it_again() -> None:
    """The leader that added the node is lost with the change. The node has entries by now, but is not a member."""
    cluster = Cluster(seed=8)
    leader = cluster.elect()
    cluster.converge()
    cluster.add_host(4)
    cluster.cut_off(leader.node_id, 4)
    cluster.run_until(lambda: cluster.node(4).last_index > 0)
    cluster.heal()
    cluster.cut_off(leader.node_id)
    cluster.run_until(lambda: cluster.leader is not None and cluster.leader is not leader)
    cluster.run_until(lambda: cluster.leader is not None and cluster.leader.membership.member(4) is not None)
    cluster.commit()
    cluster.run_until(lambda: cluster.node(4).commit_index == cluster.oracle.last_committed)


def test_a_removed_node_does_not_rejoin_by_itself() -> None:
    cluster = Cluster(5, seed=9)
    leader = cluster.elect()
    target = next(each for each in cluster.hosts if each != leader.node_id)
    assert isinstance(cluster.change(leader.node_id, Remove(target)), ProposalId)
    cluster.run_for(20 * TIMEOUT_MS)
    assert cluster.leader is leader
    assert leader.membership.member(target) is None


def test_a_node_id_with_a_responsive_store_is_not_assigned_to_another_store() -> None:
    solo = led()
    solo.hear(2, 0, Hello(2, store_id(22), "elsewhere"), store=22)
    solo.hear(2, 0, Hello(2, store_id(22), "elsewhere"), store=22)
    assert solo.events.count(NodeIdTaken(2, store_id(22))) == 1
    assert solo.node.suggested_change(3) is None
    assert refusal(solo.node.propose_membership(AddLearner(2, store_id(22)), solo.now_ms)) is Reason.STORE_IN_USE


def test_a_follower_relays_a_hello_to_the_leader_only_once() -> None:
    solo = Solo()
    solo.hear(2, 2, Heartbeat(0, 1))
    (relayed,) = solo.hear(4, 0, Hello(4, store_id(4), "host-4"))
    assert (relayed.target, relayed.body) == (2, Hello(4, store_id(4), "host-4", is_relayed=True))
    assert solo.hear(3, 0, Hello(4, store_id(4), "host-4", is_relayed=True)) == []


# Suggested changes


def test_the_first_suggested_change_readds_a_voter_that_lost_its_store() -> None:
    solo = led(founded((1, 2, 3), learners=(4,)))
    solo.acknowledge(4)
    solo.hear(5, 0, Hello(5, store_id(5), "e"))
    solo.hear(3, 0, Hello(3, store_id(33), "c"), store=33)
    assert solo.node.suggested_change(5) == AddLearner(3, store_id(33), "c")


def test_promoting_a_learner_is_suggested_while_there_are_too_few_voters() -> None:
    solo = led(founded((1, 2, 3), learners=(4,)))
    assert solo.node.suggested_change(5) is None, "it has not caught up"
    solo.acknowledge(4)
    assert solo.node.suggested_change(3) is None
    assert solo.node.suggested_change(5) == Promote(4)


def test_adding_a_new_node_is_suggested_until_the_node_becomes_silent() -> None:
    solo = led()
    solo.hear(5, 0, Hello(5, store_id(5), "e"))
    assert solo.node.suggested_change(3) == AddLearner(5, store_id(5), "e")
    for _ in range(20):
        solo.wait(SETTINGS.heartbeat_interval_ms)
        solo.beat(2)
    assert solo.node.suggested_change(3) is None


def test_no_change_is_suggested_during_a_transfer_or_without_leadership() -> None:
    solo = led()
    solo.hear(5, 0, Hello(5, store_id(5), "e"))
    solo.node.transfer_leadership(2, solo.now_ms)
    assert solo.node.suggested_change(3) is None
    solo.hear(3, 9, AppendReply(0, is_rejected=True))
    assert solo.node.suggested_change(3) is None
