"""One consumer group (KIP-848): its members, epochs and assignments, and the records that store them.

`heartbeats` has the rules for members of the new protocol, `classic_members` those for members of the classic protocol,
and `migration` turns a group of one kind into one of the other.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from chronik.groups.any_group import GroupKind, GroupState
from chronik.groups.consumer_member import STATIC_LEAVE_EPOCH, ConsumerMember, MemberState
from chronik.groups.consumer_records import (
    ResolvedExpression,
    current_record,
    expression_record,
    member_record,
    partitions_record,
)
from chronik.groups.group import Group
from chronik.groups.image_group import ImageGroup
from chronik.groups.image_records import Kind, epoch_record, target_record, tombstone
from chronik.groups.records import (
    CONSUMER_PROTOCOL_TYPE,
    GroupMetadata,
    Record,
    write_group_key,
    write_group_value,
)
from chronik.groups.step import Step
from chronik.groups.topics import Assignment, Topic, TopicIdPartition

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
        if before is not None and before.metadata.instance_id != member.metadata.instance_id:
            self._release_instance(before)
        self.members[member.member_id] = member
        if member.metadata.instance_id is not None:
            self.static_members[member.metadata.instance_id] = member.member_id

    def remove(self, member_id: str) -> None:
        member = self.members.pop(member_id)
        self._release(member)
        self.target.pop(member_id, None)
        self._release_instance(member)

    def _release_instance(self, member: ConsumerMember) -> None:
        instance_id = member.metadata.instance_id
        if instance_id is not None and self.static_members.get(instance_id) == member.member_id:
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
            yield target_record(Kind.TARGET_MEMBER, group_id, member_id, target)
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


@dataclass(slots=True, eq=False)
class ConsumerGroup(ImageGroup[GroupImage]):
    """A consumer group: an `ImageGroup` that may become a classic group, and back."""

    image: GroupImage = field(default_factory=GroupImage)
    durable: GroupImage = field(default_factory=GroupImage)
    stale_version: int = -1
    """The version of the metadata from which on expressions must be resolved again."""
    resolved_versions: dict[str, int] = field(default_factory=dict)
    """The version of the metadata for which each expression was last resolved."""
    origin: Group | None = None
    """The classic group that this one replaces, until that is durable."""
    successor: GroupMetadata | None = None
    """The classic group that replaces this one, until that is durable."""
    revocation_deadlines: dict[str, int] = field(default_factory=dict)
    """By member that must revoke partitions; with the rebalance timeout of the member."""
    join_deadlines: dict[str, int] = field(default_factory=dict)
    """By member of the classic protocol that was notified of a rebalance."""
    sync_deadlines: dict[str, int] = field(default_factory=dict)
    """By member of the classic protocol that has joined and not yet sent SyncGroup."""

    @property
    def base_epoch(self) -> int:
        """The epoch before this step; of a classic group that is being converted, its generation."""
        return self.durable.epoch if self.origin is None else self.origin.generation

    @property
    def state(self) -> GroupState:
        return self.durable.state

    @property
    def kind(self) -> GroupKind:
        return GroupKind.CONSUMER

    @property
    def protocol_type(self) -> str | None:
        return CONSUMER_PROTOCOL_TYPE

    @property
    def is_replaced(self) -> bool:
        return self.successor is not None

    @property
    def is_idle(self) -> bool:
        return self.origin is None and super(ConsumerGroup, self).is_idle

    @property
    def may_expire(self) -> bool:
        return self.is_idle

    def subscribed_topics(self) -> frozenset[str] | None:
        return frozenset(name for each in self.durable.members.values() for name in self.durable.topics_of(each))

    def topics_in_use(self, limit_ms: int) -> frozenset[str] | None:
        return self.subscribed_topics()

    def tombstones(self) -> list[Record]:
        records = [each for member_id in self.durable.members for each in _member_tombstones(self.group_id, member_id)]
        records += [tombstone(Kind.EXPRESSION, self.group_id, each) for each in self.durable.expressions]
        return [*records, *(tombstone(kind, self.group_id) for kind in (Kind.TARGET, Kind.PARTITIONS, Kind.GROUP))]

    # Writes

    def records_since(self, old: GroupImage) -> Iterator[Record]:
        return records_between(self.group_id, old, self.image)

    def _records(self, *, is_awaited: bool) -> list[Record]:
        if self.successor is not None:
            return [*self.tombstones(), (write_group_key(self.group_id), write_group_value(self.successor))]
        records = super(ConsumerGroup, self)._records(is_awaited=is_awaited)
        if self.origin is not None and self.origin.is_persisted:
            records = [*self.origin.tombstones(), *records]
        return records

    def revert(self, step: Step) -> None:
        super(ConsumerGroup, self).revert(step)
        self.resolved_versions.clear()
        self.restore_deadlines(step.at.now_ms, step.settings.session_timeout_of(self.group_id))

    # Timeouts

    def next_deadline_ms(self) -> int | None:
        deadlines = (
            *self.session_deadlines.values(),
            *self.revocation_deadlines.values(),
            *self.join_deadlines.values(),
            *self.sync_deadlines.values(),
            *(() if self.assignment_due_ms is None else (self.assignment_due_ms,)),
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
