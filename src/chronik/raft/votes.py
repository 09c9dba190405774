"""How a node of any role answers a vote request.

It also answers nodes that are not in its own membership: a lagging log does not know the current members.
"""

from __future__ import annotations

from chronik.raft.messages import Message, VoteReply, VoteRequest
from chronik.raft.state import RaftState


def answer_vote_request(state: RaftState, message: Message, request: VoteRequest) -> bool:
    """Grant or refuse; return whether a real vote, not a pre-vote, was given."""
    is_newer = message.term > state.term
    is_free = state.vote in (None, message.source) and state.leader is None
    may_vote = (request.is_pre_vote and is_newer) or (message.term == state.term and is_free)
    is_granted = may_vote and state.log.is_up_to_date(request.last_index, request.last_term)
    reply = VoteReply(is_granted, request.is_pre_vote)
    if is_granted and request.is_pre_vote:
        # A pre-vote binds nobody, so there is nothing to wait for.
        state.send(message.source, message.source_store, reply, term=message.term)
        return False
    if is_granted:
        state.vote = message.source
    state.send_after(message.source, message.source_store, reply)
    return is_granted
