"""The rules of the paper's figure 2, and which messages a node may send before its state is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.raft.harness import SETTINGS, founded, log_of, log_terms, store_id, stored_log
from tests.raft.solo import THREE, Solo, bodies

from chronik.raft.messages import Append, AppendReply, Heartbeat, HeartbeatReply, Message, VoteReply, VoteRequest
from chronik.raft.ready import ProposalId, Reason, Refused, RoleKind
from chronik.raft.store import Entry, EntryKind, HardState, StoredState

TIMEOUT_MS = SETTINGS.election_timeout_ms


def entry(index: int, term: int) -> Entry:
    return log_of([1] * (index - 1) + [term], THREE)[index - 1]


def impatient(terms: list[int], *, term: int | None = None, vote: int | None = None) -> Solo:
    """Create a follower with this log, whose last contact with a leader is old enough for it to vote."""
    solo = Solo(stored_log(1, terms, THREE, term=term, vote=vote))
    solo.now_ms += TIMEOUT_MS
    return solo


# Elections


def test_a_node_votes_for_only_one_candidate_in_a_term() -> None:
    solo = impatient([1])
    assert bodies(solo.hear(2, 2, VoteRequest(1, 1))) == [VoteReply(True)]
    assert bodies(solo.hear(3, 2, VoteRequest(1, 1))) == [VoteReply(False)]
    assert bodies(solo.hear(2, 2, VoteRequest(1, 1))) == [VoteReply(True)], "the same candidate may ask again"


def test_a_vote_survives_a_crash() -> None:
    solo = impatient([1])
    solo.hear(2, 2, VoteRequest(1, 1))
    again = solo.restarted()
    again.now_ms += TIMEOUT_MS
    assert bodies(again.hear(3, 2, VoteRequest(1, 1))) == [VoteReply(False)]


def test_a_vote_is_sent_only_once_it_is_durable() -> None:
    solo = Solo(writes=False)
    solo.now_ms += TIMEOUT_MS
    assert solo.hear(2, 2, VoteRequest(1, 1)) == []
    assert solo.persisting is not None
    assert solo.persisting.hard_state == HardState(2, 2, 0)
    assert bodies(solo.write()) == [VoteReply(True)]


def test_a_candidate_requests_votes_only_once_its_own_vote_is_durable() -> None:
    solo = Solo(writes=False)
    solo.stand()
    assert solo.hear(2, 2, VoteReply(True, is_pre_vote=True)) == []
    assert solo.node.role is RoleKind.CANDIDATE
    assert bodies(solo.write(), 3) == [VoteRequest(1, 1)]


@pytest.mark.parametrize(
    ("last_index", "last_term", "is_granted"),
    [(3, 3, True), (2, 3, False), (4, 3, True), (1, 4, True), (9, 2, False)],
    ids=["equal", "shorter", "longer", "later term", "longer of an earlier term"],
)
def test_a_node_votes_only_for_a_candidate_with_an_up_to_date_log(
    last_index: int, last_term: int, is_granted: bool
) -> None:
    solo = impatient([1, 2, 3])
    assert bodies(solo.hear(2, 4, VoteRequest(last_index, last_term))) == [VoteReply(is_granted)]


def test_a_candidate_of_an_earlier_term_receives_the_current_term() -> None:
    solo = impatient([1], term=5)
    (reply,) = solo.hear(2, 4, VoteRequest(9, 4))
    assert (reply.term, reply.body) == (5, VoteReply(False))


def test_a_candidate_with_a_majority_leads_and_appends_a_no_op_entry() -> None:
    solo = Solo()
    solo.stand()
    solo.hear(2, 2, VoteReply(True, is_pre_vote=True))
    assert solo.node.role is RoleKind.CANDIDATE
    sent = solo.hear(2, 2, VoteReply(True))
    assert solo.node.is_leader
    (no_op,) = (body.entries[0] for body in bodies(sent, 3) if isinstance(body, Append))
    assert no_op == Entry(2, 2, EntryKind.NO_OP, b"")


def test_a_majority_of_refusals_ends_the_candidacy() -> None:
    solo = Solo()
    solo.stand()
    solo.hear(2, 1, VoteReply(False, is_pre_vote=True))
    solo.hear(3, 1, VoteReply(False, is_pre_vote=True))
    assert solo.node.role is RoleKind.FOLLOWER
    assert solo.node.term == 1


def test_an_election_without_a_result_is_repeated() -> None:
    solo = Solo()
    solo.stand()
    solo.hear(2, 2, VoteReply(True, is_pre_vote=True))
    assert (solo.node.role, solo.node.term) == (RoleKind.CANDIDATE, 2)
    sent = solo.wait(2 * TIMEOUT_MS)
    assert VoteRequest(1, 1, is_pre_vote=True) in bodies(sent, 3)
    assert solo.node.term == 2, "the term does not grow while nobody answers"


def test_a_sole_voter_leads_as_soon_as_its_vote_is_durable() -> None:
    solo = Solo(stored_log(1, [1, 1], founded((1,))), writes=False)
    solo.wait(0)
    assert solo.node.role is RoleKind.CANDIDATE
    solo.write()
    assert solo.node.is_leader
    assert solo.node.commit_index == 0
    solo.write()
    assert solo.node.commit_index == 3


def test_election_timeouts_are_randomized() -> None:
    deadlines = set()
    solo = Solo()
    for _ in range(10):
        start_ms = solo.now_ms
        solo.stand()
        deadlines.add(solo.now_ms - start_ms)
        solo.hear(2, 1, VoteReply(False, is_pre_vote=True))
        solo.hear(3, 1, VoteReply(False, is_pre_vote=True))
    assert len(deadlines) > 5
    assert all(TIMEOUT_MS <= waited_ms < 2 * TIMEOUT_MS for waited_ms in deadlines)


# Terms


def test_a_leader_steps_down_on_a_reply_with_a_higher_term() -> None:
    solo = Solo()
    solo.lead()
    solo.hear(3, 9, AppendReply(0, is_rejected=True))
    assert (solo.node.role, solo.node.term, solo.node.leader) == (RoleKind.FOLLOWER, 9, None)


def test_a_leader_of_an_earlier_term_receives_the_current_term() -> None:
    solo = impatient([1], term=5)
    (reply,) = solo.append(4, (1, 1), (entry(2, 4),))
    assert (reply.term, reply.body) == (5, AppendReply(0, is_rejected=True))
    assert solo.node.last_index == 1


def test_a_candidate_follows_the_leader_of_its_own_term() -> None:
    solo = Solo()
    solo.stand()
    solo.hear(2, 2, VoteReply(True, is_pre_vote=True))
    solo.hear(3, 2, Heartbeat(0, 1))
    assert (solo.node.role, solo.node.leader) == (RoleKind.FOLLOWER, 3)


# The log


def test_an_append_that_does_not_match_the_log_is_rejected_with_a_hint() -> None:
    solo = Solo(stored_log(1, [1, 2, 2, 3, 3], THREE))
    (beyond,) = bodies(solo.append(5, (9, 4), (entry(10, 5),)))
    assert beyond == AppendReply(9, True, hint_index=5, hint_term=3)
    (differs,) = bodies(solo.append(5, (5, 2), (entry(6, 5),)))
    assert differs == AppendReply(5, True, hint_index=3, hint_term=2)
    assert log_terms(solo.node) == [1, 2, 2, 3, 3]


def test_conflicting_entries_are_truncated_with_all_later_entries() -> None:
    solo = Solo(stored_log(1, [1, 2, 2, 2], THREE))
    assert bodies(solo.append(3, (2, 2), (entry(3, 3),))) == [AppendReply(3)]
    assert log_terms(solo.node) == [1, 2, 3]
    assert [each.term for each in solo.store.stored.entries] == [1, 2, 3]


def test_an_append_that_arrives_late_truncates_nothing() -> None:
    solo = Solo()
    solo.append(2, (1, 1), (entry(2, 2), entry(3, 2), entry(4, 2)))
    assert bodies(solo.append(2, (1, 1), (entry(2, 2),))) == [AppendReply(2)]
    assert log_terms(solo.node) == [1, 2, 2, 2]


def test_an_append_is_acknowledged_only_once_it_is_durable() -> None:
    solo = Solo(writes=False)
    solo.append(2, (1, 1), (entry(2, 2),))
    assert bodies(solo.sent) == []
    solo.append(2, (2, 2), (entry(3, 2),))
    assert bodies(solo.write()) == [AppendReply(2)], "the second one came after the write began"
    assert bodies(solo.write()) == [AppendReply(3)]


def test_a_follower_commits_only_entries_that_the_append_proves_to_match() -> None:
    solo = Solo(stored_log(1, [1, 2, 2, 2], THREE))
    solo.append(3, (1, 1), (entry(2, 2),), commit=4)
    assert solo.node.commit_index == 2


def test_entries_are_applied_once_they_are_committed_and_durable_locally() -> None:
    solo = Solo(writes=False)
    solo.append(2, (1, 1), (entry(2, 2),), commit=2)
    assert [each.index for each in solo.committed] == [1]
    solo.write()
    assert [each.index for each in solo.committed] == [1, 2]


# Leaders


def test_a_leader_sends_its_entries_before_it_has_written_them() -> None:
    solo = Solo()
    solo.lead()
    solo.writes = False
    count = len(solo.sent)
    solo.propose(b"a")
    assert [body.entries[0].data for body in bodies(solo.sent[count:], 2) if isinstance(body, Append)] == [b"a"]


def test_a_leader_counts_its_own_entries_only_once_they_are_durable() -> None:
    solo = Solo(stored_log(1, [1], founded((1, 2, 3, 4, 5))))
    solo.stand()
    for peer in (2, 3):
        solo.hear(peer, 2, VoteReply(True, is_pre_vote=True))
    for peer in (2, 3):
        solo.hear(peer, 2, VoteReply(True))
    solo.writes = False
    for peer in (2, 3):
        solo.acknowledge(peer)
    assert solo.node.commit_index == 2
    proposal = solo.propose()
    solo.acknowledge(2)
    solo.acknowledge(3)
    assert solo.node.commit_index == 2, "two of five, and the leader has not written"
    solo.write()
    assert solo.node.commit_index == proposal.index


def test_an_entry_is_committed_when_a_majority_has_it() -> None:
    solo = Solo()
    solo.lead()
    proposal = solo.propose(b"a")
    assert solo.node.commit_index < proposal.index
    solo.acknowledge(3)
    assert solo.node.commit_index == proposal.index
    assert (solo.committed[-1].index, solo.committed[-1].term) == (proposal.index, proposal.term)


def test_an_acknowledgement_from_another_store_does_not_count() -> None:
    solo = Solo()
    solo.lead()
    proposal = solo.propose()
    solo.hear(3, solo.node.term, AppendReply(proposal.index), store=77)
    assert solo.node.commit_index < proposal.index


def test_a_vote_from_another_store_does_not_count() -> None:
    solo = Solo()
    solo.stand()
    solo.hear(2, 2, VoteReply(True, is_pre_vote=True))
    solo.hear(2, 2, VoteReply(True), store=77)
    assert solo.node.role is RoleKind.CANDIDATE


def test_a_message_for_another_store_is_ignored() -> None:
    solo = Solo(StoredState(store_id(77), entries=log_of([1], THREE)))
    count = len(solo.sent)
    solo.node.step(Message(2, store_id(2), 1, store_id(1), 5, Heartbeat(0, 1)), solo.now_ms)
    solo.settle()
    assert (solo.node.term, len(solo.sent)) == (0, count)


def test_a_leader_sends_heartbeats_while_a_write_is_in_progress() -> None:
    solo = Solo()
    solo.lead()
    solo.writes = False
    solo.propose()
    assert solo.writing is not None
    sent = solo.wait(SETTINGS.heartbeat_interval_ms)
    assert any(isinstance(body, Heartbeat) for body in bodies(sent, 2))


def test_a_follower_answers_heartbeats_while_a_write_is_in_progress() -> None:
    solo = Solo(stored_log(1, [1], THREE, term=2))
    solo.writes = False
    solo.append(2, (1, 1), (entry(2, 2),))
    assert solo.writing is not None
    assert bodies(solo.hear(2, 2, Heartbeat(1, 7))) == [HeartbeatReply(7)]


def test_a_heartbeat_of_a_new_term_is_answered_only_once_the_term_is_durable() -> None:
    solo = Solo(writes=False)
    assert solo.hear(2, 5, Heartbeat(0, 7)) == []
    assert bodies(solo.write()) == [HeartbeatReply(7)]


# Proposals


def test_a_follower_refuses_a_proposal_and_names_the_leader() -> None:
    solo = Solo()
    assert solo.node.propose(b"x", solo.now_ms) == Refused(Reason.NOT_LEADER, None)
    solo.hear(2, 2, Heartbeat(0, 1))
    assert solo.node.propose(b"x", solo.now_ms) == Refused(Reason.NOT_LEADER, 2)


def test_a_proposal_is_open_after_leadership_loss_and_dropped_when_overwritten() -> None:
    solo = Solo()
    solo.lead()
    proposal = solo.propose()
    solo.hear(3, 9, AppendReply(0, is_rejected=True))
    assert solo.dropped == []
    solo.append(9, (proposal.index - 1, proposal.term), (entry(proposal.index, 9),))
    assert solo.dropped == [proposal]


def test_an_open_proposal_may_still_be_committed_after_leadership_loss() -> None:
    solo = Solo()
    solo.lead()
    proposal = solo.propose(b"kept")
    solo.hear(3, 9, AppendReply(0, is_rejected=True))
    solo.append(9, (proposal.index, proposal.term), (entry(proposal.index + 1, 9),), commit=proposal.index)
    assert solo.dropped == []
    assert solo.committed[-1] == Entry(proposal.index, proposal.term, EntryKind.COMMAND, b"kept")


def test_a_leader_refuses_proposals_beyond_its_limits_of_uncommitted_entries() -> None:
    solo = Solo(settings=replace(SETTINGS, uncommitted_entries_max=3, uncommitted_bytes_max=1_000, entry_bytes_max=600))
    solo.lead()
    large = solo.node.propose(b"x" * 601, solo.now_ms)
    assert isinstance(large, Refused) and large.reason is Reason.TOO_LARGE
    solo.propose(b"x" * 600)
    more = solo.node.propose(b"x" * 600, solo.now_ms)
    assert isinstance(more, Refused) and more.reason is Reason.BUSY
    solo.propose()
    solo.propose()
    more = solo.node.propose(b"x", solo.now_ms)
    assert isinstance(more, Refused) and more.reason is Reason.BUSY
    solo.acknowledge(2)
    assert isinstance(solo.node.propose(b"x" * 600, solo.now_ms), ProposalId)
