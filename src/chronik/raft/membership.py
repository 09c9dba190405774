"""The members of the cluster: voters and learners, each identified by its node id and store id.

A change is one entry that holds the whole next membership. On each node it takes effect when it is appended, and is
reverted if that entry is cut from the log. Two successive memberships differ by at most one voter, so any majority of
one overlaps any majority of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias
from uuid import UUID

import msgspec


class MembershipError(ValueError):
    """The membership does not allow the change; the message says why."""


class Member(msgspec.Struct, frozen=True):
    """One node with one store. `address` is for its peers; Raft itself does not read it."""

    node_id: int
    store: UUID
    is_voter: bool
    address: str = ""


class AddLearner(msgspec.Struct, frozen=True):
    """Add a new node, or one that returned with an empty store and so is no longer a voter."""

    node_id: int
    store: UUID
    address: str = ""


class Promote(msgspec.Struct, frozen=True):
    """Give a learner a vote."""

    node_id: int


class Remove(msgspec.Struct, frozen=True):
    node_id: int


MembershipChange: TypeAlias = AddLearner | Promote | Remove


REMOVED_MAX = 100
"""How many of the latest removed stores are remembered."""


class Membership(msgspec.Struct, frozen=True):
    """The members by node id, and the removed stores, which may not join by themselves."""

    members: tuple[Member, ...] = ()
    removed: tuple[UUID, ...] = ()

    def member(self, node_id: int) -> Member | None:
        return next((member for member in self.members if member.node_id == node_id), None)

    @property
    def voters(self) -> list[Member]:
        return [member for member in self.members if member.is_voter]

    def is_voter(self, node_id: int, store: UUID) -> bool:
        member = self.member(node_id)
        return member is not None and member.is_voter and member.store == store

    def has_majority(self, node_ids: Collection[int]) -> bool:
        """Return whether these nodes hold more than half of the votes; False if there are no voters."""
        voters = self.voters
        return sum(voter.node_id in node_ids for voter in voters) * 2 > len(voters)

    def majority_value(self, value_of: Callable[[int], int]) -> int:
        """Return the highest value that a majority of the voters has reached; 0 without voters."""
        values = sorted((value_of(voter.node_id) for voter in self.voters), reverse=True)
        return values[len(values) // 2] if values else 0

    def after(self, change: MembershipChange) -> Membership:
        """Return the membership after the change; MembershipError if it is not allowed."""
        member = self.member(change.node_id)
        if isinstance(change, AddLearner):
            if member is not None and member.store == change.store:
                raise MembershipError(f"node {change.node_id} is already a member")
            return self._with(Member(change.node_id, change.store, False, change.address), change.node_id)
        if member is None:
            raise MembershipError(f"node {change.node_id} is not a member")
        if isinstance(change, Promote):
            if member.is_voter:
                raise MembershipError(f"node {change.node_id} is already a voter")
            return self._with(msgspec.structs.replace(member, is_voter=True), change.node_id)
        return self._with(None, change.node_id)

    def _with(self, member: Member | None, node_id: int) -> Membership:
        """Return the membership with `member` in place of any member with that node id."""
        members = [each for each in self.members if each.node_id != node_id]
        removed = [each.store for each in self.members if each.node_id == node_id]
        if member is not None:
            members.append(member)
        if not any(each.is_voter for each in members):
            raise MembershipError("the last voter cannot be removed")
        stores = [each.store for each in members]
        gone = [store for store in (*self.removed, *removed) if store not in stores]
        return Membership(tuple(sorted(members, key=lambda each: each.node_id)), tuple(gone[-REMOVED_MAX:]))


encode_membership: Callable[[Membership], bytes] = msgspec.msgpack.Encoder().encode
"""Encode the membership as msgpack maps keyed by field name: the data of a membership entry."""
decode_membership: Callable[[bytes], Membership] = msgspec.msgpack.Decoder(Membership).decode
"""Decode a membership; ValueError if the bytes are invalid."""


class MembershipHistory:
    """The memberships of the log: that of its snapshot, and one for each membership entry after it.

    Invariant: indexes increase; the last one is in effect, whether it is committed or not.
    """

    __slots__ = ("_memberships",)

    def __init__(self, index: int, membership: Membership) -> None:
        self._memberships = [(index, membership)]

    @property
    def current(self) -> Membership:
        return self._memberships[-1][1]

    @property
    def index(self) -> int:
        return self._memberships[-1][0]

    def at(self, index: int) -> Membership:
        """Return the membership in effect once the log is applied up to `index`."""
        return next(membership for start, membership in reversed(self._memberships) if start <= index)

    def append(self, index: int, membership: Membership) -> None:
        self._memberships.append((index, membership))

    def cut_from(self, index: int) -> bool:
        """Revert the changes of entries from `index` on; return whether there were any."""
        count = len(self._memberships)
        while len(self._memberships) > 1 and self._memberships[-1][0] >= index:
            self._memberships.pop()
        return len(self._memberships) < count

    def forget_before(self, index: int) -> None:
        """Drop the memberships that ended before `index`: the log now starts after it."""
        while len(self._memberships) > 1 and self._memberships[1][0] <= index:
            self._memberships.pop(0)

    def may_campaign(self, node_id: int, store: UUID, commit_index: int) -> bool:
        """Return whether this node may request votes: as a voter, or while its own removal is not committed yet.

        In the latter case it may be the only node that can win: its log is longer than the remaining voters' logs.
        """
        if self.current.is_voter(node_id, store):
            return True
        if self.index <= commit_index or len(self._memberships) < 2:
            return False
        return self._memberships[-2][1].is_voter(node_id, store)
