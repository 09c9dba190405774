"""How a node answers a request for its vote, whatever its role.

It answers whoever asks, member or not in its own membership: a log that lags does not know the members of today.
"""

from __future__ import annotations

from chronik.raft.messages import Message, VoteReply, VoteRequest
from chronik.raft.state import RaftState


def answer_vote_request(state: RaftState, message: Message, request: VoteRequest) -> bool:
    """Grants or refuses; tells whether a vote was given, as against a pre-vote."""
    is_newer = message.term > state.term
    is_free = state.vote in (None, message.source) and state.leader is None
    may_vote = (request.is_pre_vote and is_newer) or (message.term == state.term and is_free)
    is_granted = may_vote and state.log.is_up_to_date(request.last_index, request.last_term)
    reply = VoteReply(is_granted, request.is_pre_vote)
    if is_granted and request.is_pre_vote:
        # It binds nobody, so there is nothing to wait for.
        state.send(message.source, message.source_store, reply, term=message.term)
        return False
    if is_granted:
        state.vote = message.source
    state.send_after(message.source, message.source_store, reply)
    return is_granted
