"""How a node without a cluster finds or founds its cluster. The package docstring explains the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from chronik.raft.entries import Entry, EntryKind
from chronik.raft.membership import Member, Membership, encode_membership
from chronik.raft.messages import Hello, HelloReply, Message
from chronik.raft.state import RaftState

GENESIS_TERM = 1
"""The term of a cluster's first entry. No node leads in it."""


class Introduction:
    """Sends hellos while this node has no cluster; the founder writes the first entry once all founders are empty.

    Invariant: `_blank` holds peers that reported to *this* store that theirs was empty.
    """

    def __init__(self, state: RaftState, seeds: Sequence[int], founders: tuple[int, ...]) -> None:
        self._state = state
        self._seeds = seeds
        self._founders = founders
        self._blank: dict[int, Member] = {}
        self._met: dict[int, UUID] = {}
        self._next_hello_ms = state.now_ms

    @property
    def deadline_ms(self) -> int | None:
        """When the next hello is due.

        A learner that hears from no leader also sends hellos: the change that added it may have been reverted.
        """
        state = self._state
        if state.is_blank:
            return self._next_hello_ms
        if state.may_campaign:
            return None
        return max(self._next_hello_ms, state.heard_ms + state.settings.election_timeout_ms)

    def tick(self) -> bool:
        """Send hellos if they are due; return whether this node has just founded the cluster."""
        state = self._state
        deadline_ms = self.deadline_ms
        if deadline_ms is None or state.now_ms < deadline_ms:
            return False
        self._next_hello_ms = state.now_ms + state.settings.hello_interval_ms
        known = [member.node_id for member in state.membership.members]
        for target in sorted({*self._seeds, *known} - {state.node_id}):
            state.send(target, None, Hello(state.node_id, state.store_id, state.address))
        return self._found()

    def is_ghost(self, message: Message) -> bool:
        """Return whether the message comes from a store that its node has lost: never join what it founded."""
        met = self._met.get(message.source)
        return self._state.is_blank and met is not None and met != message.source_store

    def hello(self, message: Message, hello: Hello) -> None:
        """Answer a node with an empty store: this store is empty too. Only that store receives the reply.

        A node that may only join does not reply: a cluster must not be founded with it.
        """
        if hello.is_relayed:
            return
        self._met[hello.node_id] = hello.store
        if not self._founders:
            return
        self._state.send(hello.node_id, hello.store, HelloReply(self._state.address))

    def reply(self, message: Message, reply: HelloReply) -> bool:
        """Note a founder's reply; return whether this node has just founded the cluster."""
        self._blank[message.source] = Member(message.source, message.source_store, True, reply.address)
        return self._found()

    def _found(self) -> bool:
        """Found the cluster. Only the founder with the lowest id may, so that there is exactly one first entry."""
        state = self._state
        if not state.is_blank or not self._founders or state.node_id != min(self._founders):
            return False
        own = Member(state.node_id, state.store_id, True, state.address)
        members = [own if node_id == state.node_id else self._blank.get(node_id) for node_id in sorted(self._founders)]
        found = [member for member in members if member is not None]
        if len(found) < len(members):
            return False
        state.enter_term(max(state.term, GENESIS_TERM), state.vote)
        state.append([Entry(1, GENESIS_TERM, EntryKind.MEMBERSHIP, encode_membership(Membership(tuple(found))))])
        return True
