"""One consumer group (KIP-848): its members, epochs and assignments, and the records that store them.

`heartbeats` has the rules for members of the new protocol, `classic_members` those for members of the classic protocol,
and `migration` turns a group of one kind into one of the other.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chronik.groups.any_group import AnyGroup, GroupState
from chronik.groups.consumer_member import STATIC_LEAVE_EPOCH, ConsumerMember, MemberState
from chronik.groups.consumer_records import (
    Kind,
    ResolvedExpression,
    current_record,
    epoch_record,
    expression_record,
    member_record,
    partitions_record,
    target_record,
    tombstone,
)
from chronik.groups.group import Group
from chronik.groups.records import CONSUMER_PROTOCOL_TYPE, GroupMetadata, Record
from chronik.groups.step import Action, Moment
from chronik.groups.topics import Assignment, Topic, TopicIdPartition
from chronik.wire.errors import ErrorCode

NOTHING: Assignment = frozenset()


@dataclass(slots=True)
class GroupImage:
    """The state of a consumer group that is in the log.

    Invariants: `owners` has each partition that a member owns, assigned or still to be revoked, and no partition has
    two owners; `static_members` mirrors `members`. Change members only through `put` and `remove`.
    """

    epoch: int = 0
    """Rises with each change of members, subscriptions or topics."""
    assignment_epoch: int = 0
    """The group epoch for which `target` was computed."""
    members: dict[str, ConsumerMember] = field(default_factory=dict)
    static_members: dict[str, str] = field(default_factory=dict)
    target: dict[str, Assignment] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    """The subscribed topics that exist."""
    expressions: dict[str, ResolvedExpression] = field(default_factory=dict)
    owners: dict[TopicIdPartition, str] = field(default_factory=dict)

    def copy(self) -> "GroupImage":
        return GroupImage(
            self.epoch,
            self.assignment_epoch,
            dict(self.members),
            dict(self.static_members),
            dict(self.target),
            dict(self.topics),
            dict(self.expressions),
            dict(self.owners),
        )

    def put(self, member: ConsumerMember) -> None:
        before = self.members.get(member.member_id)
        if before is None or before.current is not member.current:
            self._release(before)
            for partition in member.current.assigned | member.current.revoking:
                self.owners[partition] = member.member_id
        self.members[member.member_id] = member
        if member.metadata.instance_id is not None:
            self.static_members[member.metadata.instance_id] = member.member_id

    def remove(self, member_id: str) -> None:
        member = self.members.pop(member_id)
        self._release(member)
        self.target.pop(member_id, None)
        instance_id = member.metadata.instance_id
        if instance_id is not None and self.static_members.get(instance_id) == member_id:
            del self.static_members[instance_id]

    def _release(self, member: ConsumerMember | None) -> None:
        if member is None:
            return
        for partition in member.current.assigned | member.current.revoking:
            if self.owners.get(partition) == member.member_id:
                del self.owners[partition]

    def is_free_for(self, member_id: str) -> Callable[[TopicIdPartition], bool]:
        """Return whether no other member owns a partition."""
        return lambda partition: self.owners.get(partition, member_id) == member_id

    def topics_of(self, member: ConsumerMember) -> tuple[str, ...]:
        """The names of all topics that the member subscribes to, by name or by expression; perhaps repeated."""
        resolved = self.expressions.get(member.metadata.expression)
        return member.metadata.topics if resolved is None else (*member.metadata.topics, *resolved.topics)

    @property
    def state(self) -> GroupState:
        if not self.members:
            return GroupState.EMPTY
        if self.epoch > self.assignment_epoch:
            return GroupState.ASSIGNING
        reconciled = (each.current.is_reconciled_to(self.assignment_epoch) for each in self.members.values())
        return GroupState.STABLE if all(reconciled) else GroupState.RECONCILING

    def preferred_assignor(self, default: str) -> str:
        """The assignor that most members request."""
        votes = Counter(each.metadata.assignor for each in self.members.values() if each.metadata.assignor)
        return max(sorted(votes), key=votes.__getitem__, default=default)

    def waits_for_others(self, member: ConsumerMember) -> bool:
        """Whether other members still own partitions of the member's target."""
        is_free = self.is_free_for(member.member_id)
        missing = self.target.get(member.member_id, NOTHING) - member.current.assigned
        return not all(is_free(partition) for partition in missing)


def records_between(group_id: str, old: GroupImage, new: GroupImage) -> Iterator[Record]:
    """Return the records that lead from one image to the other, in the order in which Kafka writes and reads them."""
    for member_id in [each for each in old.members if each not in new.members]:
        yield from _member_tombstones(group_id, member_id)
    for expression in [each for each in old.expressions if each not in new.expressions]:
        yield tombstone(Kind.EXPRESSION, group_id, expression)
    for expression, resolved in new.expressions.items():
        if old.expressions.get(expression) != resolved:
            yield expression_record(group_id, expression, resolved)
    changed = [each for each in new.members.values() if old.members.get(each.member_id) is not each]
    for member in changed:
        before = old.members.get(member.member_id)
        if before is None or before.metadata != member.metadata:
            yield member_record(group_id, member.member_id, member.metadata)
    if old.topics != new.topics:
        yield partitions_record(group_id, new.topics.values())
    if old.epoch != new.epoch:
        yield epoch_record(Kind.GROUP, group_id, new.epoch)
    for member_id, target in new.target.items():
        if old.target.get(member_id) != target:
            yield target_record(group_id, member_id, target)
    if old.assignment_epoch != new.assignment_epoch:
        yield epoch_record(Kind.TARGET, group_id, new.assignment_epoch)
    # A partition's old owner comes before its new owner.
    for member in sorted(changed, key=lambda each: _gains(old.members.get(each.member_id), each)):
        before = old.members.get(member.member_id)
        if before is None or before.current != member.current:
            yield current_record(group_id, member.member_id, member.current)


def _gains(before: ConsumerMember | None, after: ConsumerMember) -> bool:
    held = NOTHING if before is None else before.current.assigned | before.current.revoking
    return not after.current.assigned <= held


def _member_tombstones(group_id: str, member_id: str) -> Iterator[Record]:
    yield tombstone(Kind.CURRENT_MEMBER, group_id, member_id)
    yield tombstone(Kind.TARGET_MEMBER, group_id, member_id)
    yield tombstone(Kind.MEMBER, group_id, member_id)


class WaitingReply(NamedTuple):
    """The answer to a request, which is sent once the change is durable; `refused` is the same with an error."""

    token: int
    values: dict[str, Any]
    refused: dict[str, Any]


class QueuedRequest(NamedTuple):
    """A request that waits for a write of the group; then it is handled as if it had just arrived."""

    token: int
    refuse: Callable[[ErrorCode, str], dict[str, Any]]
    """Returns the response with an error."""
    run: Callable[[Moment], list[Action]]


@dataclass(slots=True, eq=False)
class ConsumerGroup(AnyGroup):
    """A consumer group.

    `image` is what requests change; `durable` is what is known to be in the log. They differ only while a write is
    pending, and during a step. One write is pending at a time: requests that may change the group wait for it in
    `queue`, and then share the next write. If the write fails, `image` returns to `durable`. Checks of offsets,
    heartbeats of the classic protocol and descriptions read `durable`.

    Timeouts are not in the log: loading starts all of them again. A deadline of a member that has left is ignored.
    """

    image: GroupImage = field(default_factory=GroupImage)
    durable: GroupImage = field(default_factory=GroupImage)
    is_persisted: bool = False
    """Whether the log has a record of the group."""
    is_writing: bool = False
    is_uncertain: bool = False
    """Whether the last write timed out: `durable` is in the log, but perhaps not committed. The next step writes."""
    queue: list[QueuedRequest] = field(default_factory=list)
    """At most one request of each connection."""
    is_draining: bool = False
    """Whether the requests of `queue` are handled now; `conclude` comes once, after the last of them."""
    continuations: list[Callable[[], WaitingReply]] = field(default_factory=list)
    """Compute the answers of this step's requests, once the target assignment is known."""
    subscriptions_changed: bool = True
    """Whether `image.topics` must be computed again: topics or subscriptions have changed, or it was just loaded."""
    stale_version: int = -1
    """The version of the metadata from which on expressions must be resolved again."""
    resolved_versions: dict[str, int] = field(default_factory=dict)
    """The version of the metadata for which each expression was last resolved."""
    origin: Group | None = None
    """The classic group that this one replaces, until that is durable."""
    successor: GroupMetadata | None = None
    """The classic group that replaces this one, until that is durable."""
    session_deadlines: dict[str, int] = field(default_factory=dict)
    revocation_deadlines: dict[str, int] = field(default_factory=dict)
    """By member that must revoke partitions; with the rebalance timeout of the member."""
    join_deadlines: dict[str, int] = field(default_factory=dict)
    """By member of the classic protocol that was notified of a rebalance."""
    sync_deadlines: dict[str, int] = field(default_factory=dict)
    """By member of the classic protocol that has joined and not yet sent SyncGroup."""

    def change(self) -> GroupImage:
        """Return the image to change. The durable one stays as it is."""
        if self.image is self.durable:
            self.image = self.durable.copy()
        return self.image

    @property
    def base_epoch(self) -> int:
        """The epoch before this step; of a classic group that is being converted, its generation."""
        return self.durable.epoch if self.origin is None else self.origin.generation

    @property
    def state(self) -> GroupState:
        return self.durable.state

    @property
    def protocol_type(self) -> str | None:
        return CONSUMER_PROTOCOL_TYPE

    @property
    def is_hollow(self) -> bool:
        return self.may_expire and not self.is_persisted and self.offsets.is_empty

    @property
    def may_expire(self) -> bool:
        is_changing = self.is_writing or self.is_draining or self.is_deleting or self.origin is not None
        return not is_changing and not self.queue and not self.image.members

    def subscribed_topics(self) -> frozenset[str] | None:
        return frozenset(name for each in self.durable.members.values() for name in self.durable.topics_of(each))

    def topics_in_use(self, limit_ms: int) -> frozenset[str] | None:
        return self.subscribed_topics()

    def tombstones(self) -> list[Record]:
        records = [each for member_id in self.durable.members for each in _member_tombstones(self.group_id, member_id)]
        records += [tombstone(Kind.EXPRESSION, self.group_id, each) for each in self.durable.expressions]
        return [*records, *(tombstone(kind, self.group_id) for kind in (Kind.TARGET, Kind.PARTITIONS, Kind.GROUP))]

    # Timeouts

    def next_deadline_ms(self) -> int | None:
        deadlines = (
            *self.session_deadlines.values(),
            *self.revocation_deadlines.values(),
            *self.join_deadlines.values(),
            *self.sync_deadlines.values(),
        )
        # While a write is pending nothing expires; its end sets the timer again.
        return None if self.is_writing else min(deadlines, default=None)

    def expired(self, now_ms: int) -> list[ConsumerMember]:
        """Return the members with a deadline that has passed; forget the deadlines of members that have left."""
        expired: dict[str, None] = {}
        for deadlines in (
            self.session_deadlines,
            self.revocation_deadlines,
            self.join_deadlines,
            self.sync_deadlines,
        ):
            for member_id in [each for each in deadlines if each not in self.image.members]:
                del deadlines[member_id]
            expired |= {member_id: None for member_id, deadline_ms in deadlines.items() if deadline_ms <= now_ms}
        return [self.image.members[member_id] for member_id in expired]

    def forget_deadlines(self, member_id: str) -> None:
        for deadlines in (
            self.session_deadlines,
            self.revocation_deadlines,
            self.join_deadlines,
            self.sync_deadlines,
        ):
            deadlines.pop(member_id, None)

    def watch_revocation(self, member: ConsumerMember, before: ConsumerMember, now_ms: int) -> None:
        """Start the rebalance timeout of a member that owes a revocation, or stop it."""
        member_id = member.member_id
        owes = member.current.state is MemberState.UNREVOKED_PARTITIONS and member.current.epoch != STATIC_LEAVE_EPOCH
        # A member of the classic protocol has its join and sync timeouts instead.
        if not owes or member.uses_classic_protocol:
            self.revocation_deadlines.pop(member_id, None)
        elif before.current.epoch != member.current.epoch or member_id not in self.revocation_deadlines:
            self.revocation_deadlines[member_id] = now_ms + member.metadata.rebalance_timeout_ms

    def restore_deadlines(self, now_ms: int, session_timeout_ms: int) -> None:
        """Start the timeouts of all members that have none: after the group was loaded, or converted."""
        for member in self.image.members.values():
            classic = member.metadata.classic
            timeout_ms = session_timeout_ms if classic is None else classic.session_timeout_ms
            self.session_deadlines.setdefault(member.member_id, now_ms + timeout_ms)
            self.watch_revocation(member, member, now_ms)
