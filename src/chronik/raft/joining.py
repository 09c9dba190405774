"""How a node without a cluster joins or founds one, and which membership change its leader should propose next.

The package docstring explains the protocol. `Introduction` is the side of the node without a cluster, `Joiners` that of
the leader:

    change = node.suggested_change(voters_max=3)
    if change is not None:
        node.propose_membership(change, now_ms)

In this order: a member that returned with an empty store becomes a learner with the new one, since its vote is missing
until then; a learner that has caught up gets a vote while there are too few voters; a new node becomes a learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from chronik.raft.leader import Leader
from chronik.raft.membership import AddLearner, Member, Membership, MembershipChange, Promote, encode_membership
from chronik.raft.messages import Hello, HelloReply, Message
from chronik.raft.ready import NodeIdTaken
from chronik.raft.state import RaftState
from chronik.raft.store import Entry, EntryKind

GENESIS_TERM = 1
"""The term of a cluster's first entry. No node leads in it."""

JOINERS_MAX = 100
"""The maximum number of joining nodes that a leader remembers."""

JOINER_HELLOS = 5
"""A joiner that misses this many hellos is down, or has joined."""


class Joiners:
    """The nodes that recently sent a hello to this leader: how to add each, and when it was heard.

    Also the stores whose node id was taken, so that each is reported once.
    """

    __slots__ = ("_joiners", "_reported", "_state")

    def __init__(self, state: RaftState) -> None:
        self._state = state
        self._joiners: dict[int, tuple[AddLearner, int]] = {}
        self._reported: dict[UUID, None] = {}

    def clear(self) -> None:
        self._joiners.clear()
        self._reported.clear()

    def hello(self, hello: Hello, leader: Leader) -> None:
        if leader.is_in_use(hello.node_id, hello.store):
            if hello.store not in self._reported and len(self._reported) < JOINERS_MAX:
                self._reported[hello.store] = None
                self._state.events.append(NodeIdTaken(hello.node_id, hello.store))
            return
        self._forget_old()
        if hello.node_id in self._joiners or len(self._joiners) < JOINERS_MAX:
            change = AddLearner(hello.node_id, hello.store, hello.address)
            self._joiners[hello.node_id] = change, self._state.now_ms

    def suggest_change(self, leader: Leader, voters_max: int) -> MembershipChange | None:
        """Return None if no change is needed, or if it is not allowed now."""
        change = self._next_change(leader, voters_max)
        return change if change is not None and leader.refusal(change) is None else None

    def _next_change(self, leader: Leader, voters_max: int) -> MembershipChange | None:
        self._forget_old()
        membership = self._state.membership
        known = [*(member.store for member in membership.members), *membership.removed]
        changes = [
            change
            for _, (change, _) in sorted(self._joiners.items())
            if change.store not in known and not leader.is_in_use(change.node_id, change.store)
        ]
        for change in changes:
            if membership.member(change.node_id) is not None:
                return change
        if len(membership.voters) < voters_max:
            for member in membership.members:
                if not member.is_voter and leader.is_caught_up(member.node_id):
                    return Promote(member.node_id)
        return changes[0] if changes else None

    def _forget_old(self) -> None:
        horizon_ms = self._state.now_ms - JOINER_HELLOS * self._state.settings.hello_interval_ms
        self._joiners = {each: joiner for each, joiner in self._joiners.items() if joiner[1] >= horizon_ms}


class Introduction:
    """Sends hellos while this node has no cluster; the founder writes the first entry once all founders are empty.

    Invariant: `_blank_founders` holds peers that reported to *this* store that theirs was empty.
    """

    def __init__(self, state: RaftState, seeds: Sequence[int], founders: tuple[int, ...]) -> None:
        self._state = state
        self._seeds = seeds
        self._founders = founders
        self._blank_founders: dict[int, Member] = {}
        self._known_stores: dict[int, UUID] = {}
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
        return self._found_cluster()

    def is_from_lost_store(self, message: Message) -> bool:
        """Return whether the message comes from a store that its node has lost: never join what it founded."""
        known = self._known_stores.get(message.source)
        return self._state.is_blank and known not in (None, message.source_store)

    def hello(self, hello: Hello) -> None:
        """Answer a node with an empty store: this store is empty too. Only that store receives the reply.

        A node that may only join does not reply: a cluster must not be founded with it.
        """
        if hello.is_relayed:
            return
        self._known_stores[hello.node_id] = hello.store
        if self._founders:
            self._state.send(hello.node_id, hello.store, HelloReply(self._state.address))

    def reply(self, message: Message, reply: HelloReply) -> bool:
        """Note a founder's reply; return whether this node has just founded the cluster."""
        self._blank_founders[message.source] = Member(message.source, message.source_store, True, reply.address)
        return self._found_cluster()

    def _found_cluster(self) -> bool:
        """Found the cluster. Only the founder with the lowest id may, so that there is exactly one first entry."""
        state = self._state
        if not state.is_blank or not self._founders or state.node_id != min(self._founders):
            return False
        own = Member(state.node_id, state.store_id, True, state.address)
        known = {**self._blank_founders, state.node_id: own}
        if any(node_id not in known for node_id in self._founders):
            return False
        members = tuple(known[node_id] for node_id in sorted(self._founders))
        state.enter_term(max(state.term, GENESIS_TERM), state.vote)
        state.append([Entry(1, GENESIS_TERM, EntryKind.MEMBERSHIP, encode_membership(Membership(members)))])
        return True
