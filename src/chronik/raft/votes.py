"""How a node answers a request for its vote, whatever its role.

It answers whoever asks, member or not in its own membership: a log that lags does not know the members of today.
"""

from __future__ import annotations

from chronik.raft.messages import Message, VoteReply, VoteRequest
from chronik.raft.state import RaftState


def answer_vote_request(state: RaftState, message: Message, request: VoteRequest) -> bool:
    """Grants or refuses; tells whether a vote was given, as against a pre-vote. The answer waits for the disk."""
    is_newer = message.term > state.term
    is_free = state.vote in (None, message.source) and state.leader is None
    may_vote = (request.is_pre_vote and is_newer) or (message.term == state.term and is_free)
    is_granted = may_vote and state.log.is_up_to_date(request.last_index, request.last_term)
    if is_granted and not request.is_pre_vote:
        state.vote = message.source
    reply = VoteReply(is_granted, request.is_pre_vote)
    term = message.term if is_granted else state.term
    state.send_after(message.source, message.source_store, reply, term=term)
    return is_granted and not request.is_pre_vote
