"""The state of a share group's partitions at the share coordinators: when it is initialized, altered and deleted.

Each change is noted in the group's log before the share coordinators are asked and after they have answered, so that no
state is forgotten: a new coordinator of the group repeats what was interrupted (`share_topics`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from chronik.groups import commits
from chronik.groups.image_group import WaitingReply
from chronik.groups.share_group import ShareGroup
from chronik.groups.step import DeleteShares, InitializeShares, Step, Write
from chronik.groups.topics import Assignment, TopicCatalog, TopicIdPartition
from chronik.wire.errors import ErrorCode, KafkaError

NO_OFFSET = -1
"""The leader of the partition selects the start offset, by `share.auto.offset.reset`."""

DONE = frozenset({ErrorCode.none})
GONE = frozenset({ErrorCode.none, ErrorCode.unknown_topic_or_partition})
"""The state of a topic that was deleted is deleted too."""


@dataclass(slots=True)
class ShareOperation(Write):
    """A pending request to the share coordinators. `finish` comes with an error if the request was not sent."""

    group: ShareGroup
    token: int | None
    errors: dict[TopicIdPartition, ErrorCode] = field(default_factory=dict, kw_only=True)
    """The outcome of each partition; a partition without one has failed."""

    def apply(self, step: Step) -> None:
        """Continue with the outcome, when the group may be changed."""

    def refused(self, error: ErrorCode, message: str = "") -> dict[str, Any]:
        return {"error_code": error, "error_message": message or None}

    def refuse(self, error: ErrorCode, step: Step) -> None:
        self.release()
        step.reply(self.token, self.refused(error))

    def release(self) -> None:
        """The operation has ended."""
        self.group.operation_count -= 1


# -- initializing ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Initialization(ShareOperation):
    offsets: Mapping[TopicIdPartition, int]

    def apply(self, step: Step) -> None:
        self.release()
        done = [partition for partition, error in self.errors.items() if error in DONE]
        group = self.group
        topics = group.image.topics.with_initialized(done)
        if topics != group.image.topics:
            group.change().topics = topics
            group.bump_epoch()

    def release(self) -> None:
        # Named in full, as in every dataclass with slots.
        super(Initialization, self).release()
        self.group.in_flight -= self.offsets.keys()


def initialize_later(group: ShareGroup, offsets: Mapping[TopicIdPartition, int]) -> None:
    """Have the state of partitions initialized once it is durable that they may have some."""
    _later(group, Initialization(group, None, offsets))


def _later(group: ShareGroup, operation: Initialization) -> None:
    group.operation_count += 1
    group.in_flight |= operation.offsets.keys()

    def send(error: ErrorCode, step: Step) -> None:
        if error is ErrorCode.none:
            step.actions.append(
                InitializeShares(group.group_id, step.add_write(operation), group.durable.epoch, operation.offsets)
            )
        else:
            operation.refuse(error, step)

    group.effects.append(send)


@dataclass(slots=True)
class Alteration(Initialization):
    """New start offsets, which a client requested."""

    missing: Collection[TopicIdPartition] = ()
    """Requested partitions whose topics do not exist any more."""

    def apply(self, step: Step) -> None:
        super(Alteration, self).apply(step)
        errors = {each: self.errors.get(each, ErrorCode.unknown_server_error) for each in self.offsets}
        errors |= dict.fromkeys(self.missing, ErrorCode.unknown_topic_or_partition)
        token, values = self.token, {"error_code": ErrorCode.none, "errors": errors}
        assert token is not None
        self.group.continuations.append(lambda: WaitingReply(token, values, {"errors": {}}))

    def release(self) -> None:
        super(Alteration, self).release()
        self.group.is_locked = False


def alter_offsets(
    group: ShareGroup, offsets: Mapping[TopicIdPartition, int], token: int, catalog: TopicCatalog
) -> None:
    """Replace the start offsets of existing partitions. Raise if the group is not empty."""
    check_empty(group)
    names = {topic_id: name for topic_id, _ in offsets if (name := catalog.name_of(topic_id)) is not None}
    # A topic may have been deleted while the request waited.
    existing = {each: offset for each, offset in offsets.items() if each[0] in names}
    image = group.change()
    image.topics = image.topics.with_initializing(existing, names)
    # The state epoch, by which the partition's leader notices that its state is old.
    group.bump_epoch()
    # Without members, deleted topics were not noticed.
    group.subscriptions_changed = True
    group.is_locked = True
    _later(group, Alteration(group, token, existing, missing=offsets.keys() - existing.keys()))


# -- deleting ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Deletion(ShareOperation):
    """The deletion of the state of whole topics."""

    topic_ids: Collection[UUID]
    partitions: Assignment = frozenset()

    def failures(self) -> dict[UUID, ErrorCode]:
        """Return the topics with state that is perhaps not deleted."""
        errors = {each: self.errors.get(each, ErrorCode.unknown_server_error) for each in sorted(self.partitions)}
        return {topic_id: error for (topic_id, _), error in errors.items() if error not in GONE}

    def apply(self, step: Step) -> None:
        self.release()
        failed = self.failures()
        group = self.group
        group.change().topics = group.image.topics.without([each for each in self.topic_ids if each not in failed])
        token, values = self.token, {"error_code": ErrorCode.none, "errors": failed}
        assert token is not None
        group.continuations.append(lambda: WaitingReply(token, values, {"errors": {}}))

    def release(self) -> None:
        super(Deletion, self).release()
        self.group.is_locked = False


@dataclass(slots=True)
class GroupDeletion(Deletion):
    """The deletion of all state, and then of the group."""

    def apply(self, step: Step) -> None:
        self.release()
        failed = self.failures()
        if failed:
            step.reply(self.token, self.refused(next(iter(failed.values()))))
        else:
            commits.delete(self.group, self.token, step)


def delete_offsets(group: ShareGroup, topic_ids: Collection[UUID], token: int, catalog: TopicCatalog) -> None:
    """Delete the state of these topics. Raise if the group is not empty."""
    check_empty(group)
    _delete_later(group, Deletion(group, token, topic_ids), catalog)


def delete_group(group: ShareGroup, token: int, catalog: TopicCatalog) -> None:
    """Delete the state of all topics, then the group. Raise if the group is not empty."""
    check_empty(group)
    topics = group.image.topics
    topic_ids = {*topics.initializing, *topics.initialized, *topics.deleting}
    _delete_later(group, GroupDeletion(group, token, topic_ids), catalog)


def check_empty(group: ShareGroup) -> None:
    if group.image.members:
        raise KafkaError(ErrorCode.non_empty_group, f"Group {group.group_id} is not empty.")


def _delete_later(group: ShareGroup, deletion: Deletion, catalog: TopicCatalog) -> None:
    group.operation_count += 1
    group.is_locked = True
    image = group.change()
    partitions = {each for each in image.topics.partitions() if each[0] in deletion.topic_ids}
    # Of a deletion that was interrupted, only the topics are in the log.
    for topic_id in image.topics.deleting.keys() & set(deletion.topic_ids):
        topic = catalog.topic(catalog.name_of(topic_id) or "")
        partitions.update(topic.partitions() if topic is not None else ())
    deletion.partitions = frozenset(partitions)
    image.topics = image.topics.with_deleting(deletion.topic_ids)

    def send(error: ErrorCode, step: Step) -> None:
        if error is ErrorCode.none:
            step.actions.append(DeleteShares(group.group_id, step.add_write(deletion), deletion.partitions))
        else:
            deletion.refuse(error, step)

    group.effects.append(send)
