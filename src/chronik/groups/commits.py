"""Offset requests of a group: commit, delete, expire; and the deletion of a whole group.

Each change is written to the log first. It takes effect once it is durable, in log order. The offsets of a transaction
take effect once its commit marker is durable too.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from chronik.groups.any_group import AnyGroup, GroupKind, GroupState
from chronik.groups.consumer_group import ConsumerGroup
from chronik.groups.group import Group
from chronik.groups.membership import check_member
from chronik.groups.offsets import Producer
from chronik.groups.records import CONSUMER_PROTOCOL_TYPE, CommittedOffset, TopicPartition, offset_record
from chronik.groups.step import Step, Write, offset_write_error
from chronik.wire.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """An OffsetCommit or TxnOffsetCommit request for existing partitions, in any version.

    A negative generation marks a consumer that is not a member: it may commit only while the group has no members.
    TxnOffsetCommit below version 3 has neither a generation nor a member id, and may commit at any time.
    """

    group_id: str
    generation: int
    member_id: str
    instance_id: str | None
    offsets: tuple[tuple[TopicPartition, int, int, str], ...]
    """Partition, offset, leader epoch (-1 if unknown) and the client's metadata."""
    knows_epochs: bool = False
    """Whether the request's version has member epochs: OffsetCommit 9 and above, TxnOffsetCommit 6 and above."""


def check_commit(group: AnyGroup, request: CommitRequest) -> ErrorCode:
    if group.kind is GroupKind.SHARE:
        return ErrorCode.group_id_not_found if request.knows_epochs else ErrorCode.illegal_generation
    if isinstance(group, ConsumerGroup):
        error = check_epoch(group, request.member_id, request.generation)
        return ErrorCode.unsupported_version if _is_too_old(group, request) else error
    assert isinstance(group, Group)
    if request.generation < 0 and group.state is GroupState.EMPTY:
        return ErrorCode.none
    if request.generation < 0 and not request.member_id and request.instance_id is None:
        return ErrorCode.unknown_member_id
    error = check_member(group, request.member_id, request.instance_id, request.generation)
    if error is not ErrorCode.none:
        return error
    if group.state is GroupState.COMPLETING_REBALANCE:
        # It has joined this generation but does not know its assignment yet.
        return ErrorCode.rebalance_in_progress
    return ErrorCode.none


def check_epoch(group: ConsumerGroup, member_id: str | None, epoch: int) -> ErrorCode:
    """Check the member epoch, or the generation of a classic member; without members, none is needed."""
    if epoch < 0 and not group.durable.members:
        return ErrorCode.none
    member = group.durable.members.get(member_id or "")
    if member is None:
        return ErrorCode.unknown_member_id
    if member.current.epoch == epoch >= 0:
        return ErrorCode.none
    return ErrorCode.illegal_generation if member.uses_classic_protocol else ErrorCode.stale_member_epoch


def _is_too_old(group: ConsumerGroup, request: CommitRequest) -> bool:
    """Whether a member of the new protocol uses a version that can only carry a generation."""
    member = group.durable.members.get(request.member_id)
    return member is not None and not member.uses_classic_protocol and not request.knows_epochs


def check_transactional_commit(group: AnyGroup, request: CommitRequest) -> ErrorCode:
    """Check the sender (KIP-447). Its generation is enough: the state of the group is not checked."""
    if group.kind is GroupKind.SHARE:
        return ErrorCode.group_id_not_found if request.knows_epochs else ErrorCode.illegal_generation
    if isinstance(group, ConsumerGroup):
        if request.generation < 0 and not request.member_id and request.instance_id is None:
            return ErrorCode.none
        error = check_epoch(group, request.member_id, request.generation)
        is_stale = error is ErrorCode.stale_member_epoch
        return ErrorCode.illegal_generation if is_stale and not request.knows_epochs else error
    assert isinstance(group, Group)
    if request.generation < 0 and group.state is GroupState.EMPTY:
        return ErrorCode.none
    if request.generation < 0 and not request.member_id and request.instance_id is None:
        return ErrorCode.none
    return check_member(group, request.member_id, request.instance_id, request.generation)


def commit(group: AnyGroup, request: CommitRequest, token: int, step: Step) -> None:
    error = check_commit(group, request)
    member = group.members.get(request.member_id) if isinstance(group, Group) else None
    if error is ErrorCode.none and member is not None:
        member.heard_from(step.at.now_ms)
    changes, errors = _accepted(request, error, step)
    _change_offsets(group, changes, token, errors, step)


def commit_transactional(
    group: AnyGroup, request: CommitRequest, producer: Producer, verified_from: int, token: int, step: Step
) -> bool:
    """Write offsets that are pending until the producer's transaction ends; return whether there are any to write."""
    changes, errors = _accepted(request, check_transactional_commit(group, request), step)
    if not changes:
        step.reply(token, {"error_code": ErrorCode.none, "errors": errors})
        return False
    group.offsets.start((partition for partition, _ in changes), in_transaction=True)
    records = [offset_record(group.group_id, partition, committed) for partition, committed in changes]
    step.append(records, TransactionalWrite(group, changes, token, errors, producer), producer, verified_from)
    return True


def _accepted(
    request: CommitRequest, error: ErrorCode, step: Step
) -> tuple[list[tuple[TopicPartition, CommittedOffset]], dict[TopicPartition, ErrorCode]]:
    """Return the offsets to write, none if there is an error, and the error of each partition."""
    errors: dict[TopicPartition, ErrorCode] = {}
    changes: list[tuple[TopicPartition, CommittedOffset]] = []
    for partition, offset, leader_epoch, metadata in request.offsets:
        if error is ErrorCode.none and len(metadata.encode()) > step.settings.offset_metadata_bytes_max:
            errors[partition] = ErrorCode.offset_metadata_too_large
        else:
            errors[partition] = error
            if error is ErrorCode.none:
                changes.append((partition, CommittedOffset(offset, leader_epoch, metadata, step.at.wall_ms)))
    return changes, errors


def delete_offsets(group: AnyGroup, partitions: Sequence[TopicPartition], token: int, step: Step) -> None:
    """Handle OffsetDelete. Offsets of topics that the group's members consume are kept."""
    is_active = group.state is not GroupState.EMPTY
    if is_active and group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        step.reply(token, {"error_code": ErrorCode.non_empty_group, "errors": {}})
        return
    subscribed = group.subscribed_topics()
    errors: dict[TopicPartition, ErrorCode] = {}
    changes: list[tuple[TopicPartition, CommittedOffset | None]] = []
    for partition in partitions:
        if is_active and (subscribed is None or partition[0] in subscribed):
            errors[partition] = ErrorCode.group_subscribed_to_topic
        else:
            errors[partition] = ErrorCode.none
            changes.append((partition, None))
    _change_offsets(group, changes, token, errors, step)


def forget_topics(group: AnyGroup, topics: Collection[str], step: Step) -> None:
    changes = [(partition, None) for partition in group.offsets.partitions() if partition[0] in topics]
    _change_offsets(group, changes, None, {}, step)


def _change_offsets(
    group: AnyGroup,
    changes: Sequence[tuple[TopicPartition, CommittedOffset | None]],
    token: int | None,
    errors: dict[TopicPartition, ErrorCode],
    step: Step,
) -> None:
    if not changes:
        step.reply(token, {"error_code": ErrorCode.none, "errors": errors})
        return
    group.offsets.start(partition for partition, _ in changes)
    records = [offset_record(group.group_id, partition, committed) for partition, committed in changes]
    step.append(records, OffsetsWrite(group, changes, token, errors))


@dataclass(slots=True)
class OffsetsWrite(Write):
    """A pending write of offsets or offset tombstones; a request may wait for it."""

    changes: Sequence[tuple[TopicPartition, CommittedOffset | None]]
    token: int | None
    errors: dict[TopicPartition, ErrorCode]

    def finish(self, error: ErrorCode, step: Step) -> None:
        self.group.offsets.finish(self.changes, error is ErrorCode.none)
        self.refuse(offset_write_error(error), step)

    def refuse(self, error: ErrorCode, step: Step) -> None:
        _reply(self.token, self.errors, (partition for partition, _ in self.changes), error, step)


@dataclass(slots=True)
class TransactionalWrite(Write):
    """A pending write of offsets in a producer's transaction."""

    changes: Sequence[tuple[TopicPartition, CommittedOffset]]
    token: int
    errors: dict[TopicPartition, ErrorCode]
    producer: Producer

    def finish(self, error: ErrorCode, step: Step) -> None:
        # After a timeout the offsets are in the log: they are committed before the marker, or the log loses both.
        in_log = error in (ErrorCode.none, ErrorCode.request_timed_out)
        self.group.offsets.finish_held(self.changes, self.producer, in_log)
        self.refuse(offset_write_error(error), step)

    def refuse(self, error: ErrorCode, step: Step) -> None:
        _reply(self.token, self.errors, (partition for partition, _ in self.changes), error, step)


def _reply(
    token: int | None,
    errors: dict[TopicPartition, ErrorCode],
    written: Iterable[TopicPartition],
    error: ErrorCode,
    step: Step,
) -> None:
    """Reply with the errors found before the write, and with its outcome for the partitions that were written."""
    if error is not ErrorCode.none:
        errors.update(dict.fromkeys(written, error))
    step.reply(token, {"error_code": ErrorCode.none, "errors": errors})


def expire(group: AnyGroup, step: Step) -> None:
    """Remove offsets that were unused for the retention time, and the group once it has no offsets left.

    In an empty group the time starts at the commit or when the last member left, whichever is later. In a group with
    members, only offsets of topics that no member subscribes to expire; the time starts at the commit.
    """
    limit_ms = step.at.wall_ms - step.settings.offsets_retention_ms
    offsets = group.offsets
    needed = group.topics_in_use(limit_ms)
    expired = [
        partition
        for partition, committed in offsets.committed.items()
        if needed is not None
        and partition[0] not in needed
        and committed.commit_ms <= limit_ms
        and not offsets.is_changing(partition)
    ]
    is_last = len(expired) == len(offsets.partitions())
    if is_last and group.may_expire:
        delete(group, None, step)
    else:
        _change_offsets(group, [(partition, None) for partition in expired], None, {}, step)


def delete(group: AnyGroup, token: int | None, step: Step) -> None:
    """Write tombstones for the group and for every committed or pending offset. The group must be Empty."""
    changes = [(partition, None) for partition in group.offsets.partitions()]
    group.offsets.start(partition for partition, _ in changes)
    group.is_locked = True
    records = [offset_record(group.group_id, partition, None) for partition, _ in changes]
    step.append([*records, *group.tombstones()], DeleteWrite(group, changes, token))


@dataclass(slots=True)
class DeleteWrite(Write):
    """A pending write of a group's tombstones. Until it is durable, nothing else may change the group."""

    changes: Sequence[tuple[TopicPartition, None]]
    token: int | None

    def finish(self, error: ErrorCode, step: Step) -> None:
        self.group.is_locked = False
        self.group.offsets.finish(self.changes, error is ErrorCode.none)
        if error is ErrorCode.none:
            self.group.is_dead = True
        step.reply(self.token, {"error_code": offset_write_error(error)})

    def refuse(self, error: ErrorCode, step: Step) -> None:
        step.reply(self.token, {"error_code": error})
