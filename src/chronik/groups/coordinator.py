"""All groups of the offsets partitions that this node leads.

coordinator = GroupCoordinator(settings, new_uuid)
coordinator.partition_count = 16
coordinator.start_loading(3)
coordinator.replay(3, records)                      # and replay_marker, in log order
coordinator.finish_loading(3, at)
actions = coordinator.join(request, token, at)      # carry out the actions, in order
actions = coordinator.appended(append.token, ErrorCode.none, at)
actions = coordinator.tick(at)                      # not later than next_deadline_ms()
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from chronik.groups import (
    classic_members,
    commits,
    descriptions,
    heartbeats,
    membership,
    migration,
    rebalance,
    share_heartbeats,
    share_offsets,
)
from chronik.groups.any_group import AnyGroup, GroupState
from chronik.groups.commits import CommitRequest, TransactionalWrite
from chronik.groups.consumer_group import ConsumerGroup
from chronik.groups.consumer_member import JOIN_EPOCH, LEAVE_EPOCH, STATIC_LEAVE_EPOCH, ConsumerHeartbeat
from chronik.groups.group import Group
from chronik.groups.image_group import ImageGroup, ImageWrite, QueuedRequest, WaitingReply
from chronik.groups.member import JoinRequest, SyncRequest
from chronik.groups.offsets import Producer
from chronik.groups.records import CommittedOffset, TopicPartition, group_partition
from chronik.groups.replay import Replay
from chronik.groups.share_group import ShareGroup
from chronik.groups.share_member import ShareHeartbeat
from chronik.groups.share_offsets import ShareOperation
from chronik.groups.share_topics import ShareTopics
from chronik.groups.step import Action, GroupSettings, Moment, Reply, Step, Write, group_write_error
from chronik.groups.topics import NoTopics, TopicCatalog, TopicIdPartition
from chronik.wire.errors import ErrorCode, KafkaError

NAME_BYTES_MAX = 16_384
"""Group, instance and protocol names become strings with an int16 length in the log; this is half their limit."""

CLIENT_ID_CHARS_MAX = 255
"""How many characters of the client id go into a member id."""


class GroupCoordinator:
    """The groups of every loaded partition.

    Invariants: every token is answered exactly once; readers see a change only once it is durable, and an offset of a
    transaction only once its commit marker is; appends of one partition are returned in the order in which they take
    effect. Owned by the node's loop; nothing here waits, reads a clock or touches a file.
    """

    def __init__(self, settings: GroupSettings, new_uuid: Callable[[], UUID]) -> None:
        self.settings = settings
        self.partition_count = 0
        """The number of partitions of the offsets topic; 0 until it exists."""
        self.catalog: TopicCatalog = NoTopics()
        """The topics of the cluster. `topics_changed` follows each change that groups must notice."""
        self._new_uuid = new_uuid
        self._groups: dict[str, AnyGroup] = {}
        self._loaded: dict[int, None] = {}
        self._loading: dict[int, Replay] = {}
        self._writes: dict[int, Write] = {}
        """The appends whose result is still pending, by token."""
        self._transactions: dict[tuple[int, int], Transaction] = {}
        """The open transactions with offsets, by partition and producer id."""
        self._write_count = 0
        self._timers: list[tuple[int, int, AnyGroup]] = []
        self._timer_count = 0

    # Partitions

    def start_loading(self, partition: int) -> None:
        """Start loading a partition that this node now leads. Its groups are unknown until `finish_loading`."""
        self._loading[partition] = Replay()

    def replay(
        self,
        partition: int,
        records: Iterable[tuple[bytes | None, bytes | None]],
        producer: Producer | None = None,
    ) -> None:
        """Read the next records of a loading partition, in log order; `producer` if they are in its transaction."""
        self._loading[partition].read(records, producer)

    def replay_marker(self, partition: int, producer: Producer, is_commit: bool) -> None:
        """Read the next marker of a loading partition, in log order."""
        self._loading[partition].table.end(producer, is_commit)

    def finish_loading(self, partition: int, at: Moment) -> int:
        """Add the partition's groups, with fresh member sessions; return the number of unreadable records."""
        replay = self._loading.pop(partition)
        self._loaded[partition] = None
        for producer, is_commit in replay.markers:
            replay.table.end(producer, is_commit)
        for group in replay.groups(partition, at.now_ms):
            self._groups[group.group_id] = group
            if isinstance(group, ConsumerGroup):
                group.stale_version = self.catalog.version
                group.restore_deadlines(at.now_ms, self.settings.session_timeout_of(group.group_id))
            elif isinstance(group, ShareGroup):
                group.restore_deadlines(at.now_ms, self.settings.share_session_timeout_of(group.group_id))
            for producer_id in group.offsets.producers():
                self._transaction(partition, producer_id).group_ids[group.group_id] = None
            self._settle(group)
        return replay.unreadable_count

    def unload(self, partition: int, at: Moment) -> list[Action]:
        """Drop the groups of a partition that another node now leads; waiting clients get NOT_COORDINATOR."""
        self._loading.pop(partition, None)
        self._loaded.pop(partition, None)
        step = self._step(at)
        for group in [each for each in self._groups.values() if each.partition == partition]:
            if isinstance(group, Group):
                membership.refuse_all(group, ErrorCode.not_coordinator, step)
            elif isinstance(group, ImageGroup):
                _refuse_queue(group, step)
            self._forget(group)
        for token in [each for each, write in self._writes.items() if write.group.partition == partition]:
            self._writes.pop(token).refuse(ErrorCode.not_coordinator, step)
        for key in [each for each in self._transactions if each[0] == partition]:
            del self._transactions[key]
        return step.actions

    def refuse_waiting(self, at: Moment) -> list[Action]:
        """Answer the requests that may wait for long with NOT_COORDINATOR: this node may not serve them now."""
        step = self._step(at)
        for group in list(self._groups.values()):
            if isinstance(group, Group):
                membership.refuse_waiting(group, ErrorCode.not_coordinator, step)
            elif isinstance(group, ImageGroup):
                _refuse_queue(group, step)
            self._settle(group)
        return step.actions

    def is_loaded(self, partition: int) -> bool:
        return partition in self._loaded

    def partition_of(self, group_id: str) -> int | None:
        """Return the partition that owns a group; None if there are no partitions yet or the name is too long."""
        group = self._groups.get(group_id)
        if group is not None:
            return group.partition
        if not self.partition_count or len(group_id) > NAME_BYTES_MAX:
            return None
        return group_partition(group_id, self.partition_count)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    # Members

    def join(self, request: JoinRequest, token: int, at: Moment) -> list[Action]:
        error = self._check_group(request.group_id)
        if error is ErrorCode.none:
            error = self._check_join(request)
        group = self._groups.get(request.group_id)
        if error is ErrorCode.none and group is None and request.member_id:
            error = ErrorCode.unknown_member_id
        if error is ErrorCode.none and isinstance(group, ShareGroup):
            error = ErrorCode.inconsistent_group_protocol
        if error is not ErrorCode.none:
            return [Reply(token, rebalance.join_error(error, request.member_id))]
        if group is None:
            group = self._create(request.group_id)
        if isinstance(group, ConsumerGroup):
            queued = QueuedRequest(token, _refuse_join(request), lambda at: self.join(request, token, at))
            return self._change(group, queued, lambda step: self._join_classic(group, request, token, queued, step), at)
        assert isinstance(group, Group)
        step = self._step(at)
        membership.join(group, request, token, self._new_member_id, step)
        self._settle(group)
        return step.actions

    def _check_join(self, request: JoinRequest) -> ErrorCode:
        settings = self.settings
        if not settings.session_timeout_ms_min <= request.session_timeout_ms <= settings.session_timeout_ms_max:
            return ErrorCode.invalid_session_timeout
        names = (request.instance_id or "", request.protocol_type, *(name for name, _ in request.protocols))
        if request.instance_id == "" or any(len(name.encode()) > NAME_BYTES_MAX for name in names):
            return ErrorCode.invalid_request
        return ErrorCode.none

    def _new_member_id(self, prefix: str) -> str:
        return f"{prefix[:CLIENT_ID_CHARS_MAX]}-{self._new_uuid()}"

    def sync(self, request: SyncRequest, token: int, at: Moment) -> list[Action]:
        group = self._find(request.group_id, ErrorCode.unknown_member_id)
        if group is ErrorCode.coordinator_load_in_progress:
            # The state of an active rebalance is not in the log, so loading loses it: the member must join again.
            group = ErrorCode.rebalance_in_progress
        if isinstance(group, ShareGroup):
            group = ErrorCode.unknown_member_id
        if isinstance(group, ErrorCode):
            return [Reply(token, rebalance.sync_error(group))]
        step = self._step(at)
        if isinstance(group, ConsumerGroup):
            step.reply(token, classic_members.sync(group, request, self.catalog, step))
            self._settle(group)
            return step.actions
        assert isinstance(group, Group)
        membership.sync(group, request, token, step)
        self._settle(group)
        return step.actions

    def heartbeat(
        self, group_id: str, member_id: str, generation: int, instance_id: str | None, at: Moment
    ) -> ErrorCode:
        """Handle a classic heartbeat at once. In a classic group it only extends deadlines, so no timer changes."""
        group = self._groups.get(group_id)
        if isinstance(group, ConsumerGroup):
            error = classic_members.heartbeat(group, member_id, generation, instance_id, self._step(at))
            self._settle(group)
            return error
        if isinstance(group, Group):
            return membership.heartbeat(group, member_id, generation, instance_id, at.now_ms)
        error = self._check_group(group_id)
        if error is ErrorCode.coordinator_load_in_progress:
            return ErrorCode.none  # Loading starts a fresh session, so the member need not react yet.
        return error if error is not ErrorCode.none else ErrorCode.unknown_member_id

    def leave(self, group_id: str, members: Sequence[tuple[str, str | None]], token: int, at: Moment) -> list[Action]:
        """Remove the members (id and instance id); each has its own error in the response."""
        error = self._check_group(group_id)
        if error is not ErrorCode.none:
            return [Reply(token, {"error_code": error, "members": []})]
        step = self._step(at)
        group = self._groups.get(group_id)
        if isinstance(group, ConsumerGroup):
            queued = QueuedRequest(token, _refuse_leave, lambda at: self.leave(group_id, members, token, at))
            return self._change(group, queued, lambda step: _leave_classic(group, members, token), at)
        results = []
        for member_id, instance_id in members:
            error = ErrorCode.unknown_member_id
            if isinstance(group, Group):
                error = membership.leave(group, member_id, instance_id, step)
            results.append({"member_id": member_id, "group_instance_id": instance_id, "error_code": error})
        step.reply(token, {"error_code": ErrorCode.none, "members": results})
        if group is not None:
            self._settle(group)
        return step.actions

    def consumer_heartbeat(self, request: ConsumerHeartbeat, token: int, at: Moment) -> list[Action]:
        """Handle a ConsumerGroupHeartbeat: a member joins, stays or leaves."""
        step = self._step(at)
        try:
            heartbeats.check_request(request, self.settings.assignors)
            group = self._consumer_group(request, step)
        except KafkaError as error:
            return [Reply(token, heartbeats.refused(error.code, error.message))]
        if not request.member_id:
            request = replace(request, member_id=str(self._new_uuid()))
        queued = QueuedRequest(token, heartbeats.refused, lambda at: self.consumer_heartbeat(request, token, at))
        handle = migration.leave if request.epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH) else heartbeats.join_or_stay
        return [
            *step.actions,
            *self._change(group, queued, lambda step: handle(group, request, token, self.catalog, step), at),
        ]

    def _consumer_group(self, request: ConsumerHeartbeat, step: Step) -> ConsumerGroup:
        """Return the group of the request. A member that joins creates it, or converts a classic group."""
        error = self._check_group(request.group_id)
        if error is not ErrorCode.none:
            raise KafkaError(error)
        group = self._groups.get(request.group_id)
        if isinstance(group, ConsumerGroup):
            return group
        if request.epoch != JOIN_EPOCH or isinstance(group, ShareGroup):
            raise KafkaError(ErrorCode.group_id_not_found, f"Group {request.group_id} is not a consumer group.")
        if isinstance(group, Group):
            created = migration.to_consumer_group(group, self.catalog, step)
            self._replace(group, created)
        else:
            created = ConsumerGroup(request.group_id, group_partition(request.group_id, self.partition_count))
            created.durable = created.image
            self._groups[request.group_id] = created
        return created

    def _join_classic(
        self, group: ConsumerGroup, request: JoinRequest, token: int, queued: QueuedRequest, step: Step
    ) -> None:
        """Handle JoinGroup in a consumer group. If no member of the new protocol is left, it becomes classic first."""
        static = group.image.members.get(group.image.static_members.get(request.instance_id or "", ""))
        replaced = None if request.member_id else static
        is_last = replaced is not None and migration.may_become_classic(
            group, replaced, self.settings, is_replaced=True
        )
        if is_last or not group.image.members:
            migration.convert(group, replaced, self.catalog, step)
            group.queue.append(queued)
        else:
            classic_members.join(group, request, token, self._new_member_id, self.catalog, step)

    def share_heartbeat(self, request: ShareHeartbeat, token: int, at: Moment) -> list[Action]:
        """Handle a ShareGroupHeartbeat: a member joins, stays or leaves."""
        try:
            share_heartbeats.check_request(request)
            group = self._share_group(request.group_id, may_create=request.epoch == JOIN_EPOCH)
        except KafkaError as error:
            return [Reply(token, heartbeats.refused(error.code, error.message))]
        queued = QueuedRequest(token, heartbeats.refused, lambda at: self.share_heartbeat(request, token, at))
        if request.epoch == LEAVE_EPOCH:
            return self._change(group, queued, lambda step: share_heartbeats.leave(group, request, token), at)
        return self._change(group, queued, lambda step: share_heartbeats.join_or_stay(group, request, token, step), at)

    def _share_group(self, group_id: str, *, may_create: bool = False, reads: bool = False) -> ShareGroup:
        error = self._check_group(group_id, reads=reads)
        if error is not ErrorCode.none:
            raise KafkaError(error)
        group = self._groups.get(group_id)
        if group is None and may_create:
            created = ShareGroup(group_id, group_partition(group_id, self.partition_count))
            created.durable = created.image
            self._groups[group_id] = created
            return created
        if not isinstance(group, ShareGroup):
            message = f"Group {group_id} is not a share group." if group else f"Group {group_id} not found."
            raise KafkaError(ErrorCode.group_id_not_found, message)
        return group

    def share_topics(self, group_id: str) -> ShareTopics:
        """Return the partitions of a share group that have state; raise if there is no such group."""
        return self._share_group(group_id, reads=True).durable.topics

    def alter_share_offsets(
        self, group_id: str, offsets: Mapping[TopicIdPartition, int], token: int, at: Moment
    ) -> list[Action]:
        """Set the start offsets of existing partitions. The group must be empty, or not exist: then it is created."""

        def again(at: Moment) -> list[Action]:
            return self.alter_share_offsets(group_id, offsets, token, at)

        def change(group: ShareGroup) -> None:
            share_offsets.alter_offsets(group, offsets, token, self.catalog)

        return self._change_shares(group_id, token, again, change, at, may_create=True)

    def delete_share_offsets(self, group_id: str, topics: Collection[str], token: int, at: Moment) -> list[Action]:
        """Delete the state of topics, as far as there is some. The group must be empty."""

        def again(at: Moment) -> list[Action]:
            return self.delete_share_offsets(group_id, topics, token, at)

        def change(group: ShareGroup) -> None:
            ids = group.image.topics.ids()
            topic_ids = [ids[name] for name in topics if name in ids]
            share_offsets.delete_offsets(group, topic_ids, token, self.catalog)

        return self._change_shares(group_id, token, again, change, at)

    def _change_shares(
        self,
        group_id: str,
        token: int,
        again: Callable[[Moment], list[Action]],
        change: Callable[[ShareGroup], None],
        at: Moment,
        *,
        may_create: bool = False,
    ) -> list[Action]:
        try:
            group = self._share_group(group_id, may_create=may_create)
        except KafkaError as error:
            return [Reply(token, heartbeats.refused(error.code, error.message))]
        queued = QueuedRequest(token, heartbeats.refused, again)
        return self._change(group, queued, lambda step: change(group), at)

    def shares_done(self, token: int, errors: Mapping[TopicIdPartition, ErrorCode], at: Moment) -> list[Action]:
        """Continue with the answer of the share coordinators. Ignored if the group's partition was unloaded."""
        operation = self._writes.pop(token, None)
        if not isinstance(operation, ShareOperation):
            return []
        operation.errors.update(errors)
        return self._apply(operation, at)

    def _apply(self, operation: ShareOperation, at: Moment) -> list[Action]:
        queued = QueuedRequest(
            operation.token, operation.refused, lambda at: self._apply(operation, at), operation.release
        )
        return self._change(operation.group, queued, operation.apply, at)

    def _change(
        self, group: ImageGroup[Any], queued: QueuedRequest, change: Callable[[Step], None], at: Moment
    ) -> list[Action]:
        """Apply a request that may change a group, or have it wait for the pending write of the group."""
        if group.is_writing or group.is_replaced:
            group.queue.append(queued)
            return []
        step = self._step(at)
        try:
            change(step)
        except KafkaError as error:
            step.reply(queued.token, queued.refuse(error.code, error.message))
            if isinstance(group, ConsumerGroup) and group.origin is not None:
                self._replace(group, group.origin)  # The member that was to convert the group is refused.
                return step.actions
        if not group.is_draining:
            self._conclude(group, step)
        return step.actions

    def _conclude(self, group: ImageGroup[Any], step: Step) -> None:
        if isinstance(group, ConsumerGroup):
            heartbeats.conclude(group, self.catalog, step)
        elif isinstance(group, ShareGroup):
            share_heartbeats.conclude(group, self.catalog, step)
        # If nothing is written, deadlines were only extended: an earlier timer is harmless.
        if group.is_writing or group.scheduled_ms is None or group.assignment_due_ms is not None:
            self._settle(group)

    def _replace(self, group: AnyGroup, successor: AnyGroup) -> None:
        """Replace a group by one of the other kind."""
        group.is_dead, successor.is_dead = True, False
        group.scheduled_ms = successor.scheduled_ms = None
        self._groups[successor.group_id] = successor
        self._settle(successor)

    def _image_written(self, group: ImageGroup[Any], error: ErrorCode, step: Step) -> list[Action]:
        """Continue after a write of an image: finish a conversion, and handle the requests that waited."""
        is_written = error in (ErrorCode.none, ErrorCode.request_timed_out)
        if not is_written:
            # The requests that waited would fail too, and a conversion would repeat itself: clients retry later.
            _refuse_queue(group, step, group_write_error(error))
        if isinstance(group, ConsumerGroup):
            self._finish_conversion(group, is_written, step)
        queue, group.queue = group.queue, []
        actions = step.actions
        group.is_draining = not group.is_dead
        for request in queue:
            actions += request.run(step.at)
        group.is_draining = False
        if not group.is_dead:
            if is_written:  # Otherwise no request has changed it, and another write would fail, too.
                after = self._step(step.at)
                self._conclude(group, after)
                actions += after.actions
            self._settle(group)
        return actions

    def _finish_conversion(self, group: ConsumerGroup, is_written: bool, step: Step) -> None:
        origin, group.origin = group.origin, None
        successor, group.successor = group.successor, None
        if not is_written and origin is not None:
            self._replace(group, origin)
        elif is_written and successor is not None:
            classic = Group(group.group_id, group.partition, group.offsets)
            classic.restore(successor, step.at.now_ms)
            self._replace(group, classic)

    # Offsets

    def commit(self, request: CommitRequest, token: int, at: Moment) -> list[Action]:
        missing = ErrorCode.group_id_not_found if request.knows_epochs else ErrorCode.illegal_generation
        group = self._find(request.group_id, missing, may_be_empty=True)
        if group is missing and request.generation < 0:
            group = self._create(request.group_id)
        if isinstance(group, ErrorCode):
            return [Reply(token, {"errors": {partition: group for partition, *_ in request.offsets}})]
        step = self._step(at)
        commits.commit(group, request, token, step)
        self._forget_if_hollow(group)
        return step.actions

    def commit_transactional(
        self, request: CommitRequest, producer: Producer, verified_from: int, token: int, at: Moment
    ) -> list[Action]:
        """Commit offsets as part of a transaction: they take effect when it commits (`transaction_ended`).

        The transaction is verified, if there is no marker of the producer in the log from `verified_from` on.
        """
        missing = ErrorCode.group_id_not_found if request.knows_epochs else ErrorCode.illegal_generation
        group = self._find(request.group_id, missing)
        if group is missing and request.generation < 0:
            group = self._create(request.group_id)
        if isinstance(group, ErrorCode):
            return [Reply(token, {"errors": {partition: group for partition, *_ in request.offsets}})]
        step = self._step(at)
        if commits.commit_transactional(group, request, producer, verified_from, token, step):
            transaction = self._transaction(group.partition, producer.producer_id)
            transaction.group_ids[group.group_id] = None
            transaction.write_count += 1
        self._forget_if_hollow(group)
        return step.actions

    def transaction_ended(self, partition: int, producer: Producer, is_commit: bool) -> None:
        """Apply a marker that is committed in the log of a partition.

        It follows, in the log, all offsets that it decides, but the node may report it before the outcome of their
        append: then it takes effect after that. Until a partition is loaded, its markers wait for that. Markers of
        other partitions are ignored: if this node leads such a partition later, it reads them from the log.
        """
        if partition in self._loading:
            self._loading[partition].markers.append((producer, is_commit))
            return
        transaction = self._transactions.get((partition, producer.producer_id))
        if transaction is not None:
            transaction.markers.append((producer, is_commit))
            self._apply_markers(partition, producer.producer_id, transaction)

    def _transaction(self, partition: int, producer_id: int) -> "Transaction":
        return self._transactions.setdefault((partition, producer_id), Transaction())

    def _apply_markers(self, partition: int, producer_id: int, transaction: "Transaction") -> None:
        if transaction.write_count:
            return
        groups = [self._groups[group_id] for group_id in transaction.group_ids if group_id in self._groups]
        for producer, is_commit in transaction.markers:
            for group in groups:
                group.offsets.end(producer, is_commit)
        transaction.markers.clear()
        transaction.group_ids = {group.group_id: None for group in groups if producer_id in group.offsets.producers()}
        if not transaction.group_ids:
            del self._transactions[(partition, producer_id)]
        for group in groups:
            self._forget_if_hollow(group)

    def committed(
        self,
        group_id: str,
        partitions: Iterable[TopicPartition] | None,
        member_id: str | None = None,
        member_epoch: int = -1,
    ) -> tuple[ErrorCode, dict[TopicPartition, CommittedOffset | None]]:
        """Return the offsets of these partitions, or of all; None if there is none. An unknown group has no offsets.

        A request of a member of a consumer group is checked as a commit is.
        """
        error = self._check_group(group_id, may_be_empty=True, reads=True)
        group = self._groups.get(group_id)
        is_member = member_id is not None or member_epoch >= 0
        if error is ErrorCode.none and isinstance(group, ConsumerGroup) and is_member:
            error = commits.check_epoch(group, member_id, member_epoch)
        if error is not ErrorCode.none:
            return error, {}
        known = group.offsets.committed if group is not None else {}
        if partitions is None:
            return ErrorCode.none, dict(known)
        return ErrorCode.none, {partition: known.get(partition) for partition in partitions}

    def unstable_partitions(self, group_id: str) -> set[TopicPartition]:
        """Return the partitions whose committed offset an open transaction may change."""
        group = self._groups.get(group_id)
        return group.offsets.unstable_partitions() if group is not None else set()

    def delete_offsets(
        self, group_id: str, partitions: Sequence[TopicPartition], token: int, at: Moment
    ) -> list[Action]:
        group = self._find(group_id, ErrorCode.group_id_not_found, may_be_empty=True)
        if isinstance(group, ShareGroup):
            group = ErrorCode.group_id_not_found
        if isinstance(group, ErrorCode):
            return [Reply(token, {"error_code": group, "errors": {}})]
        step = self._step(at)
        commits.delete_offsets(group, partitions, token, step)
        return step.actions

    def topics_deleted(self, topics: Collection[str], at: Moment) -> list[Action]:
        """Remove the offsets of deleted topics, which would otherwise apply to new topics of the same name."""
        step = self._step(at)
        for group in self._groups.values():
            commits.forget_topics(group, topics, step)
        return step.actions

    def topics_changed(self, topics: Collection[str]) -> None:
        """Note that topics were created, deleted or changed. The next heartbeat of a group that uses them notices."""
        for group in self._groups.values():
            if isinstance(group, ConsumerGroup):
                group.stale_version = self.catalog.version
            if isinstance(group, ImageGroup) and not group.subscriptions_changed:
                subscribed = group.subscribed_topics() or frozenset()
                group.subscriptions_changed = any(name in subscribed for name in topics)

    def rights_changed(self) -> None:
        """Note that ACLs have changed: an expression selects only topics that the member may describe."""
        for group in self._groups.values():
            if isinstance(group, ConsumerGroup):
                group.stale_version = self.catalog.version
                group.resolved_versions.clear()

    def committed_topics(self) -> list[str]:
        """Return the topics of all offsets, committed or pending."""
        return sorted({topic for group in self._groups.values() for topic, _ in group.offsets.partitions()})

    def expire_offsets(self, at: Moment) -> list[Action]:
        """Remove offsets past their retention time. The node calls this periodically."""
        step = self._step(at)
        for group in self._groups.values():
            if not group.is_locked:
                commits.expire(group, step)
        return step.actions

    # Groups

    def describe(self, group_id: str) -> dict[str, Any]:
        """Describe one group for DescribeGroups; an unknown group is Dead."""
        error = self._check_group(group_id, may_be_empty=True, reads=True)
        group = self._groups.get(group_id)
        if error is ErrorCode.none and isinstance(group, Group):
            return membership.describe(group)
        state = str(GroupState.DEAD) if error is ErrorCode.none else ""
        dead = {"error_code": error, "group_id": group_id, "group_state": state, "protocol_type": "", "members": []}
        is_other_kind = error is ErrorCode.none and group is not None
        return {**dead, "error_message": f"Group {group_id} is not a classic group."} if is_other_kind else dead

    def describe_consumer_group(self, group_id: str) -> dict[str, Any]:
        """Describe one group for ConsumerGroupDescribe."""
        error = self._check_group(group_id, reads=True)
        group = self._groups.get(group_id)
        if error is ErrorCode.none and isinstance(group, ConsumerGroup):
            return descriptions.describe(group, self.settings.assignors[0], self.catalog)
        message = ""
        if error is ErrorCode.none:
            error = ErrorCode.group_id_not_found
            message = f"Group {group_id} is not a consumer group." if group else f"Group {group_id} not found."
        return {"group_id": group_id, **heartbeats.refused(error, message)}

    def describe_share_group(self, group_id: str) -> dict[str, Any]:
        """Describe one group for ShareGroupDescribe."""
        try:
            return descriptions.describe_shares(self._share_group(group_id, reads=True), self.catalog)
        except KafkaError as error:
            return {"group_id": group_id, **heartbeats.refused(error.code, error.message)}

    def groups(self) -> list[dict[str, Any]]:
        return [
            {
                "group_id": group.group_id,
                "protocol_type": group.protocol_type or "",
                "group_state": str(group.state),
                "group_type": str(group.kind),
            }
            for group in self._groups.values()
        ]

    def all_committed(self) -> Iterator[tuple[str, TopicPartition, CommittedOffset]]:
        for group in self._groups.values():
            for partition, committed in group.offsets.committed.items():
                yield group.group_id, partition, committed

    def delete_group(self, group_id: str, token: int, at: Moment) -> list[Action]:
        group = self._find(group_id, ErrorCode.group_id_not_found, may_be_empty=True)
        again = QueuedRequest(token, _refuse, lambda at: self.delete_group(group_id, token, at))
        if isinstance(group, ShareGroup):
            shared = group
            return self._change(shared, again, lambda step: share_offsets.delete_group(shared, token, self.catalog), at)
        if isinstance(group, ConsumerGroup) and (group.is_writing or group.is_replaced):
            group.queue.append(again)
            return []
        if isinstance(group, AnyGroup) and group.state is not GroupState.EMPTY:
            group = ErrorCode.non_empty_group
        if isinstance(group, ErrorCode):
            return [Reply(token, {"error_code": group})]
        step = self._step(at)
        if isinstance(group, Group):
            group.pending_members.clear()
        commits.delete(group, token, step)
        return step.actions

    # Log and clock

    def appended(self, token: int, error: ErrorCode, at: Moment) -> list[Action]:
        """Record that an append is durable (`ErrorCode.none`) or failed. Ignored if its partition was unloaded."""
        write = self._writes.pop(token, None)
        if write is None:
            return []
        step = self._step(at)
        write.finish(error, step)
        if isinstance(write, ImageWrite):
            return self._image_written(write.group, error, step)
        if write.group.is_dead:
            self._forget(write.group)
        else:
            self._settle(write.group)
        if isinstance(write, TransactionalWrite):
            producer_id = write.producer.producer_id
            transaction = self._transactions[(write.group.partition, producer_id)]
            transaction.write_count -= 1
            self._apply_markers(write.group.partition, producer_id, transaction)
        return step.actions

    def next_deadline_ms(self) -> int | None:
        """The latest time for the next `tick`; None while nothing is pending."""
        while self._timers:
            deadline_ms, _, group = self._timers[0]
            if group.scheduled_ms == deadline_ms:
                return deadline_ms
            heapq.heappop(self._timers)
        return None

    def tick(self, at: Moment) -> list[Action]:
        step = self._step(at)
        while (deadline_ms := self.next_deadline_ms()) is not None and deadline_ms <= at.now_ms:
            _, _, group = heapq.heappop(self._timers)
            group.scheduled_ms = None
            if isinstance(group, ImageGroup) and not group.is_writing:
                if isinstance(group, ConsumerGroup):
                    migration.on_time(group, self.catalog, step)
                elif isinstance(group, ShareGroup):
                    share_heartbeats.on_time(group, step)
                self._conclude(group, step)
            elif isinstance(group, Group):
                rebalance.on_time(group, step)
            self._settle(group)
        return step.actions

    def _step(self, at: Moment) -> Step:
        return Step(at, self.settings, self._add_write)

    def _add_write(self, write: Write) -> int:
        self._write_count += 1
        self._writes[self._write_count] = write
        return self._write_count

    def _check_group(self, group_id: str, *, may_be_empty: bool = False, reads: bool = False) -> ErrorCode:
        """Check that this node serves the group. The empty name is legacy, for committing offsets only."""
        group = self._groups.get(group_id)
        if group is not None:
            # Until its tombstones are durable, the group neither exists nor is deleted; clients retry after this error.
            is_between = group.is_locked and not reads
            return ErrorCode.coordinator_load_in_progress if is_between else ErrorCode.none
        if (not group_id and not may_be_empty) or len(group_id.encode()) > NAME_BYTES_MAX:
            return ErrorCode.invalid_group_id
        if not self.partition_count:
            return ErrorCode.coordinator_not_available
        partition = group_partition(group_id, self.partition_count)
        if partition in self._loaded:
            return ErrorCode.none
        return ErrorCode.coordinator_load_in_progress if partition in self._loading else ErrorCode.not_coordinator

    def _find(self, group_id: str, missing: ErrorCode, *, may_be_empty: bool = False) -> AnyGroup | ErrorCode:
        """Return a group that this node serves, or the error: `missing` if the group does not exist."""
        error = self._check_group(group_id, may_be_empty=may_be_empty)
        return error if error is not ErrorCode.none else self._groups.get(group_id, missing)

    def _create(self, group_id: str) -> Group:
        group = Group(group_id, group_partition(group_id, self.partition_count))
        self._groups[group_id] = group
        return group

    def _settle(self, group: AnyGroup) -> None:
        """Finish an event: set an earlier timer if needed, and forget a group that has no content left."""
        self._forget_if_hollow(group)
        if group.is_dead:
            return
        deadline_ms = group.next_deadline_ms()
        if deadline_ms is not None and (group.scheduled_ms is None or deadline_ms < group.scheduled_ms):
            group.scheduled_ms = deadline_ms
            self._timer_count += 1
            heapq.heappush(self._timers, (deadline_ms, self._timer_count, group))

    def _forget_if_hollow(self, group: AnyGroup) -> None:
        if group.is_hollow:
            self._forget(group)

    def _forget(self, group: AnyGroup) -> None:
        group.is_dead = True
        group.scheduled_ms = None
        if self._groups.get(group.group_id) is group:
            del self._groups[group.group_id]


def _refuse(error: ErrorCode, message: str) -> dict[str, Any]:
    return {"error_code": error}


def _refuse_join(request: JoinRequest) -> Callable[[ErrorCode, str], dict[str, Any]]:
    return lambda error, message: rebalance.join_error(error, request.member_id)


def _refuse_leave(error: ErrorCode, message: str) -> dict[str, Any]:
    return {"error_code": error, "members": []}


def _refuse_queue(group: ImageGroup[Any], step: Step, error: ErrorCode = ErrorCode.not_coordinator) -> None:
    for request in group.queue:
        step.reply(request.token, request.refuse(error, ""))
        request.release()
    group.queue.clear()


def _leave_classic(group: ConsumerGroup, members: Sequence[tuple[str, str | None]], token: int) -> None:
    results = [
        {
            "member_id": member_id,
            "group_instance_id": instance_id,
            "error_code": classic_members.leave(group, member_id, instance_id),
        }
        for member_id, instance_id in members
    ]
    values = {"error_code": ErrorCode.none, "members": results}
    group.continuations.append(lambda: WaitingReply(token, values, {"members": []}))


@dataclass(slots=True, eq=False)
class Transaction:
    """A producer's open transaction, as far as it has offsets in one partition."""

    group_ids: dict[str, None] = field(default_factory=dict)
    """The groups with pending offsets, or with offsets that are being written; an ordered set."""
    write_count: int = 0
    """The number of appends whose result is still pending."""
    markers: list[tuple[Producer, bool]] = field(default_factory=list)
    """The markers that were reported before the result of the appends, and whether each is a commit."""
