"""A node that requests votes: first it asks whether it would get them, then it requests them in a new term.

The pre-vote changes no state anywhere. So a node that was partitioned can return without disturbing a leader that the
other nodes hear from, however often it timed out.
"""

from __future__ import annotations

from chronik.raft.messages import Message, VoteReply, VoteRequest
from chronik.raft.ready import RoleKind
from chronik.raft.state import RaftState, ToCandidate, ToFollower, ToLeader, Transition


class Candidate:
    """Invariant: `_answers` holds replies of voters, each from the store that the membership names."""

    def __init__(self, state: RaftState, transition: ToCandidate) -> None:
        self.kind = RoleKind.PRE_CANDIDATE if transition.is_pre_vote else RoleKind.CANDIDATE
        self._state = state
        self._is_pre_vote = transition.is_pre_vote
        self.deadline_ms = state.now_ms + state.election_timeout_ms()
        self._answers: dict[int, bool] = {}
        if not transition.is_pre_vote:
            state.enter_term(state.term + 1, state.node_id)
        request = VoteRequest(state.log.last_index, state.log.last_term, transition.is_pre_vote, transition.is_transfer)
        for voter in state.membership.voters:
            if voter.node_id == state.node_id:
                continue
            if transition.is_pre_vote:
                state.send(voter.node_id, voter.store, request, term=self._election_term)
            else:
                state.send_after(voter.node_id, voter.store, request)

    @property
    def _election_term(self) -> int:
        return self._state.term + 1 if self._is_pre_vote else self._state.term

    def started(self) -> Transition | None:
        """Answer this node's own pre-vote; its own vote is valid only once it is durable."""
        return self._answered(self._state.node_id, True) if self._is_pre_vote else None

    def persisted(self) -> Transition | None:
        if self._is_pre_vote or not self._state.is_state_durable:
            return None
        return self._answered(self._state.node_id, True)

    def tick(self) -> Transition | None:
        return ToCandidate(is_pre_vote=True) if self._state.now_ms >= self.deadline_ms else None

    def receive(self, message: Message) -> Transition | None:
        body = message.body
        if not isinstance(body, VoteReply) or body.is_pre_vote != self._is_pre_vote:
            return None
        if message.term != (self._election_term if body.is_granted else self._state.term):
            return None
        if not self._state.membership.is_voter(message.source, message.source_store):
            return None
        return self._answered(message.source, body.is_granted)

    def _answered(self, node_id: int, is_granted: bool) -> Transition | None:
        self._answers.setdefault(node_id, is_granted)
        membership = self._state.membership
        granted = [each for each, is_granted in self._answers.items() if is_granted]
        if membership.has_majority(granted):
            return ToCandidate(is_pre_vote=False) if self._is_pre_vote else ToLeader()
        refusals = len(self._answers) - len(granted)
        return ToFollower(self._state.term) if refusals * 2 >= len(membership.voters) else None
