"""One share group (KIP-932): its members, epochs and assignments, and the records that store them.

`share_heartbeats` has the rules for members, `share_offsets` those for the state of the group's partitions.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from chronik.groups.any_group import GroupKind, GroupState
from chronik.groups.image_group import ImageGroup
from chronik.groups.image_records import Kind, epoch_record, target_record, tombstone
from chronik.groups.records import Record
from chronik.groups.share_member import ShareMember
from chronik.groups.share_records import (
    ShareGroupValue,
    share_current_record,
    share_group_record,
    share_member_record,
    share_state_record,
)
from chronik.groups.share_topics import ShareTopics
from chronik.groups.step import Step
from chronik.groups.topics import Assignment, Topic, TopicIdPartition

SHARE_PROTOCOL_TYPE = "share"


@dataclass(slots=True)
class ShareImage:
    """The state of a share group that is in the log."""

    epoch: int = 0
    """Rises with each change of members, subscriptions, topics or initialized partitions."""
    assignment_epoch: int = 0
    """The group epoch for which `target` was computed."""
    metadata_hash: int = 0
    """Of the subscribed topics; a new coordinator recognizes by it that they have changed."""
    members: dict[str, ShareMember] = field(default_factory=dict)
    target: dict[str, Assignment] = field(default_factory=dict)
    topics: ShareTopics = field(default_factory=ShareTopics)

    def copy(self) -> "ShareImage":
        return ShareImage(
            self.epoch,
            self.assignment_epoch,
            self.metadata_hash,
            dict(self.members),
            dict(self.target),
            self.topics,
        )

    @property
    def state(self) -> GroupState:
        return GroupState.STABLE if self.members else GroupState.EMPTY


@dataclass(slots=True, eq=False)
class ShareGroup(ImageGroup[ShareImage]):
    """A share group. Its progress is the state of its partitions at the share coordinators, not committed offsets."""

    image: ShareImage = field(default_factory=ShareImage)
    durable: ShareImage = field(default_factory=ShareImage)
    subscribed: dict[str, Topic] = field(default_factory=dict)
    """The subscribed topics that exist, as of the last step that computed them."""
    in_flight: frozenset[TopicIdPartition] = frozenset()
    """The partitions whose state is being written to the share coordinators."""
    operation_count: int = 0
    """The number of pending requests to the share coordinators."""

    @property
    def state(self) -> GroupState:
        return self.durable.state

    @property
    def kind(self) -> GroupKind:
        return GroupKind.SHARE

    @property
    def protocol_type(self) -> str | None:
        return SHARE_PROTOCOL_TYPE

    @property
    def is_idle(self) -> bool:
        return not self.operation_count and super(ShareGroup, self).is_idle

    @property
    def may_expire(self) -> bool:
        """As in Kafka, only a request deletes a share group: it has no offsets whose age could be measured."""
        return False

    def subscribed_topics(self) -> frozenset[str] | None:
        return frozenset(name for each in self.durable.members.values() for name in each.metadata.topics)

    def topics_in_use(self, limit_ms: int) -> frozenset[str] | None:
        return self.subscribed_topics()

    def tombstones(self) -> list[Record]:
        records = [each for member_id in self.durable.members for each in _member_tombstones(self.group_id, member_id)]
        kinds = (Kind.SHARE_STATE, Kind.SHARE_TARGET, Kind.SHARE_GROUP)
        return [*records, *(tombstone(kind, self.group_id) for kind in kinds)]

    def records_since(self, old: ShareImage) -> Iterator[Record]:
        """Return the records in the order in which Kafka writes and reads them."""
        group_id, new = self.group_id, self.image
        for member_id in [each for each in old.members if each not in new.members]:
            yield from _member_tombstones(group_id, member_id)
        changed = [(each, old.members.get(each.member_id)) for each in new.members.values()]
        changed = [(member, before) for member, before in changed if before is not member]
        for member, before in changed:
            if before is None or before.metadata != member.metadata:
                yield share_member_record(group_id, member.member_id, member.metadata)
        if (old.epoch, old.metadata_hash) != (new.epoch, new.metadata_hash):
            yield share_group_record(group_id, ShareGroupValue(new.epoch, new.metadata_hash))
        for member_id, target in new.target.items():
            if old.target.get(member_id) != target:
                yield target_record(Kind.SHARE_TARGET_MEMBER, group_id, member_id, target)
        if old.assignment_epoch != new.assignment_epoch:
            yield epoch_record(Kind.SHARE_TARGET, group_id, new.assignment_epoch)
        for member, before in changed:
            if before is None or before.current != member.current:
                yield share_current_record(group_id, member.member_id, member.current)
        if old.topics != new.topics:
            yield share_state_record(group_id, new.topics)

    # Timeouts

    def next_deadline_ms(self) -> int | None:
        # While a write is pending nothing expires; its end sets the timer again.
        due = () if self.assignment_due_ms is None else (self.assignment_due_ms,)
        return None if self.is_writing else min((*self.session_deadlines.values(), *due), default=None)

    def expired(self, now_ms: int) -> list[str]:
        """Return the members whose session has ended; forget the deadlines of members that have left."""
        for member_id in [each for each in self.session_deadlines if each not in self.image.members]:
            del self.session_deadlines[member_id]
        return [member_id for member_id, deadline_ms in self.session_deadlines.items() if deadline_ms <= now_ms]

    def restore_deadlines(self, now_ms: int, session_timeout_ms: int) -> None:
        """Start the sessions of all members that have none: after the group was loaded."""
        for member_id in self.image.members:
            self.session_deadlines.setdefault(member_id, now_ms + session_timeout_ms)

    def revert(self, step: Step) -> None:
        super(ShareGroup, self).revert(step)
        self.restore_deadlines(step.at.now_ms, step.settings.share_session_timeout_of(self.group_id))


def _member_tombstones(group_id: str, member_id: str) -> Iterator[Record]:
    yield tombstone(Kind.SHARE_CURRENT_MEMBER, group_id, member_id)
    yield tombstone(Kind.SHARE_TARGET_MEMBER, group_id, member_id)
    yield tombstone(Kind.SHARE_MEMBER, group_id, member_id)
