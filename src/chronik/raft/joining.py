"""The nodes that request to join this leader, and the membership change that it should propose next.

    change = node.suggested_change(voters_max=3)
    if change is not None:
        node.propose_membership(change, now_ms)

In this order: a member that returned with an empty store becomes a learner with the new one, since its vote is missing
until then; a learner that has caught up gets a vote while there are too few voters; a new node becomes a learner.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from chronik.raft.leader import Leader
from chronik.raft.membership import AddLearner, MembershipChange, Promote
from chronik.raft.messages import Hello
from chronik.raft.ready import NodeIdTaken
from chronik.raft.state import RaftState

JOINERS_MAX = 100
"""The maximum number of joining nodes that a leader remembers."""

JOINER_HELLOS = 5
"""A joiner that misses this many hellos is down, or has joined."""


class Joiner(NamedTuple):
    """A node that belongs to no cluster and has sent a hello to this leader."""

    change: AddLearner
    heard_ms: int


class Joiners:
    """The nodes that recently asked to join, and those whose id was taken, so that each is reported once."""

    __slots__ = ("_joiners", "_state", "_taken")

    def __init__(self, state: RaftState) -> None:
        self._state = state
        self._joiners: dict[int, Joiner] = {}
        self._taken: dict[UUID, None] = {}

    def clear(self) -> None:
        self._joiners.clear()
        self._taken.clear()

    def hello(self, hello: Hello, leader: Leader) -> None:
        if leader.is_in_use(hello.node_id, hello.store):
            if hello.store not in self._taken and len(self._taken) < JOINERS_MAX:
                self._taken[hello.store] = None
                self._state.events.append(NodeIdTaken(hello.node_id, hello.store))
            return
        self._forget_old()
        if hello.node_id in self._joiners or len(self._joiners) < JOINERS_MAX:
            change = AddLearner(hello.node_id, hello.store, hello.address)
            self._joiners[hello.node_id] = Joiner(change, self._state.now_ms)

    def suggest_change(self, leader: Leader, voters_max: int) -> MembershipChange | None:
        """Return None if no change is needed, or if it is not allowed now."""
        change = self._next_change(leader, voters_max)
        return change if change is not None and leader.refusal(change) is None else None

    def _next_change(self, leader: Leader, voters_max: int) -> MembershipChange | None:
        self._forget_old()
        membership = self._state.membership
        asking = [change for change in self._asking() if not leader.is_in_use(change.node_id, change.store)]
        for change in asking:
            if membership.member(change.node_id) is not None:
                return change
        if len(membership.voters) < voters_max:
            for member in membership.members:
                if not member.is_voter and leader.is_caught_up(member.node_id):
                    return Promote(member.node_id)
        return asking[0] if asking else None

    def _asking(self) -> list[AddLearner]:
        """Return the joiners whose current store is neither a member's nor a removed one."""
        changes = [self._joiners[node_id].change for node_id in sorted(self._joiners)]
        membership = self._state.membership
        known = [member.store for member in membership.members] + list(membership.removed)
        return [change for change in changes if change.store not in known]

    def _forget_old(self) -> None:
        horizon_ms = self._state.now_ms - JOINER_HELLOS * self._state.settings.hello_interval_ms
        for node_id in [each for each, joiner in self._joiners.items() if joiner.heard_ms < horizon_ms]:
            del self._joiners[node_id]
