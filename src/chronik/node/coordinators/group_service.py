"""The groups of this node: the state machine of `chronik.groups`, stored in `__consumer_offsets`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from chronik.groups.commits import CommitRequest
from chronik.groups.consumer_member import JOIN_EPOCH, ConsumerHeartbeat
from chronik.groups.coordinator import GroupCoordinator
from chronik.groups.member import JoinRequest, SyncRequest
from chronik.groups.offsets import Producer
from chronik.groups.records import CommittedOffset, TopicPartition
from chronik.groups.share_member import ShareHeartbeat
from chronik.groups.step import (
    Action,
    DeleteShares,
    GroupSettings,
    InitializeShares,
    MigrationPolicy,
    Moment,
    Rebalanced,
)
from chronik.groups.topics import Topic, TopicIdPartition
from chronik.metadata.events import (
    AclsCreated,
    AclsDeleted,
    Event,
    PartitionsCreated,
    ReplicasChanged,
    TopicCreated,
    TopicDeleted,
)
from chronik.metadata.image import OFFSETS_TOPIC, ClusterImage
from chronik.node.admin.topics import Topics
from chronik.node.age_clock import AgeClock
from chronik.node.coordinators.coordinator_topic import LoadedRecords
from chronik.node.coordinators.log_ends import LogEnds
from chronik.node.coordinators.service import CoordinatorService
from chronik.node.coordinators.share_state import ShareStateClient, Summary
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.observe.metrics import GroupLag
from chronik.shares.state import UNINITIALIZED_OFFSET, InitialState, SharePartitionKey
from chronik.wire.errors import ErrorCode, KafkaError

INITIALIZATION_WAIT_S = 1.0
"""How long the answer to a member that joins a share group waits for the state of new partitions."""

SHARE_STATE_TIMEOUT_MS = 5_000
UNKNOWN_LAG = -1


class MetadataTopics:
    """The topics of a metadata image, as groups see them."""

    def __init__(self, image: ClusterImage) -> None:
        self._image = image

    @property
    def version(self) -> int:
        return self._image.version

    def topic(self, name: str) -> Topic | None:
        topic = self._image.topic(name)
        if topic is None:
            return None
        racks = {broker_id: broker.rack for broker_id, broker in self._image.brokers.items()}
        return Topic(
            name,
            topic.id,
            tuple(
                tuple(sorted({rack for replica in each.replicas if (rack := racks.get(replica)) is not None}))
                for each in topic.partitions
            ),
        )

    def name_of(self, topic_id: UUID) -> str | None:
        return self._image.names_by_id.get(topic_id)

    def names(self) -> Iterable[str]:
        return self._image.topics


def _changed_topics(event: Event) -> tuple[str, ...]:
    """Return the topic whose partitions, or whose replicas, the event has changed."""
    match event:
        case TopicCreated(topic=topic) | TopicDeleted(topic=topic) | PartitionsCreated(topic=topic):
            return (topic.name,)
        case ReplicasChanged(topic=name):
            return (name,)
        case _:
            return ()


class GroupService(CoordinatorService[GroupCoordinator]):
    """The groups of this node. Owned by the loop."""

    invalid_key = ErrorCode.invalid_group_id

    skips_damage = True
    """A lost offset makes its group read records again. Without the partition no group of it could make progress."""

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        host: PartitionHost,
        topics: Topics,
        lease_is_valid: Callable[[], bool],
        age_clock: AgeClock,
        share_state: ShareStateClient,
        log_ends: LogEnds,
    ) -> None:
        config = runtime.config
        settings = GroupSettings(
            session_timeout_ms_min=config.group_min_session_timeout_ms,
            session_timeout_ms_max=config.group_max_session_timeout_ms,
            initial_rebalance_delay_ms=config.group_initial_rebalance_delay_ms,
            members_max=config.group_max_size,
            offsets_retention_ms=config.offsets_retention_minutes * 60_000,
            consumer_session_timeout_ms=config.group_consumer_session_timeout_ms,
            consumer_heartbeat_interval_ms=config.group_consumer_heartbeat_interval_ms,
            consumer_assignment_interval_ms=config.group_consumer_assignment_interval_ms,
            consumer_members_max=config.group_consumer_max_size,
            assignors=config.group_consumer_assignors,
            migration=MigrationPolicy(config.group_consumer_migration_policy),
            share_session_timeout_ms=config.group_share_session_timeout_ms,
            share_heartbeat_interval_ms=config.group_share_heartbeat_interval_ms,
            share_assignment_interval_ms=config.group_share_assignment_interval_ms,
            share_members_max=config.group_share_max_size,
            group_configs=self._configs_of,
        )
        coordinator = GroupCoordinator(settings, runtime.env.new_uuid)
        coordinator.catalog = MetadataTopics(metadata.image)
        count = config.offsets_topic_partitions
        super().__init__(
            OFFSETS_TOPIC, count, "groups", coordinator, runtime, metadata, host, topics, lease_is_valid, age_clock
        )
        self._share_state = share_state
        self._log_ends = log_ends
        self._share_tasks: dict[asyncio.Task[None], str] = {}
        """The pending requests to share coordinators, each with its group."""

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        """Remove the offsets of deleted topics, and move coordinators with their partitions."""
        self._coordinator.catalog = MetadataTopics(image)
        changed = {name: None for event in events for name in _changed_topics(event)}
        if changed:
            self._coordinator.topics_changed(changed)
        if any(isinstance(event, AclsCreated | AclsDeleted) for event in events):
            self._coordinator.rights_changed()
        for event in events:
            if isinstance(event, TopicDeleted) and event.topic.name != OFFSETS_TOPIC and not self._is_stopped:
                self._run(self._coordinator.topics_deleted((event.topic.name,), self._now()))
        super().metadata_changed(image, events)

    def _configs_of(self, group_id: str) -> Mapping[str, str]:
        return self._metadata.image.group_configs.get(group_id, {})

    def replay(self, partition: int, loaded: LoadedRecords) -> None:
        records, producer, is_commit = loaded
        if producer is not None and is_commit is not None:
            self._coordinator.replay_marker(partition, producer, is_commit)
        else:
            self._coordinator.replay(partition, records, producer)

    def finish_loading(self, partition: int, leader_epoch: int) -> int:
        unreadable_count = self._coordinator.finish_loading(partition, self._now())
        self._forget_deleted_topics()
        return unreadable_count

    def _forget_deleted_topics(self) -> None:
        """Remove the offsets of topics that were deleted while this node could not do so."""
        topics = self._metadata.image.topics
        deleted = [topic for topic in self._coordinator.committed_topics() if topic not in topics]
        self._run(self._coordinator.topics_deleted(deleted, self._now()) if deleted else [])

    def _resume(self) -> None:
        super()._resume()
        # Without a lease, the offsets of deleted topics could not be removed from the log.
        self._forget_deleted_topics()

    def _refuse_waiting(self) -> None:
        self._run(self._coordinator.refuse_waiting(self._now()))

    # -- requests ------------------------------------------------------------------------------------------------------

    async def join(self, request: JoinRequest) -> Values:
        await self.topic.ensure_exists()
        return await self._submit(request.group_id, lambda token, at: self._coordinator.join(request, token, at))

    async def sync(self, request: SyncRequest) -> Values:
        return await self._submit(request.group_id, lambda token, at: self._coordinator.sync(request, token, at))

    def heartbeat(self, group_id: str, member_id: str, generation: int, instance_id: str | None) -> ErrorCode:
        error = self._authority(group_id).heartbeat(group_id, member_id, generation, instance_id, self._now())
        self._set_timer()  # In a consumer group, a member that is notified of a rebalance must join in time.
        return error

    async def consumer_heartbeat(self, request: ConsumerHeartbeat) -> Values:
        await self.topic.ensure_exists()
        return await self._submit(
            request.group_id, lambda token, at: self._coordinator.consumer_heartbeat(request, token, at)
        )

    async def share_heartbeat(self, request: ShareHeartbeat) -> Values:
        await self.topic.ensure_exists()

        async def send() -> Values:
            return await self._submit(
                request.group_id, lambda token, at: self._coordinator.share_heartbeat(request, token, at)
            )

        values = await send()
        if request.epoch == JOIN_EPOCH and values["error_code"] is ErrorCode.none:
            # The partitions are assigned once their state exists: without this pause, at the next heartbeat.
            tasks = [task for task, group_id in self._share_tasks.items() if group_id == request.group_id]
            if tasks:
                await asyncio.wait(tasks, timeout=INITIALIZATION_WAIT_S)
                values = await send()
        return values

    async def share_offsets(self, group_id: str, topics: Mapping[str, Sequence[int]] | None) -> list[Values]:
        """Describe the start offsets of these partitions, or of all that the group has; raise if it does not exist."""
        await self.topic.ensure_exists()
        shared = self._authority(group_id).share_topics(group_id)
        image = self._metadata.image
        if topics is None:
            known = shared.partitions()
            topics = {
                name: sorted(index for each, index in known if each == topic_id)
                for name, topic_id in sorted(shared.ids().items())
                if topic_id in image.names_by_id and topic_id not in shared.deleting
            }
        ids = {name: topic.id for name in topics if (topic := image.topic(name)) is not None}
        initialized = shared.initialized_partitions()
        keys = [
            SharePartitionKey(group_id, ids[name], index)
            for name, indexes in topics.items()
            for index in indexes
            if name in ids and (ids[name], index) in initialized
        ]
        summaries = await self._share_state.read_summary(keys, SHARE_STATE_TIMEOUT_MS) if keys else {}
        started = [
            (image.names_by_id[key.topic_id], key.partition)
            for key, summary in summaries.items()
            if summary.error is ErrorCode.none and summary.start_offset >= 0 and key.topic_id in image.names_by_id
        ]
        ends = await self._log_ends.of(started)

        def describe(name: str, index: int) -> Values:
            if image.partition(name, index) is None:
                return _no_offset(index, ErrorCode.unknown_topic_or_partition)
            summary = summaries.get(SharePartitionKey(group_id, ids[name], index))
            if summary is None or summary.error is not ErrorCode.none:
                return _no_offset(index, ErrorCode.none if summary is None else summary.error)
            return {
                "partition_index": index,
                "start_offset": summary.start_offset,
                "leader_epoch": max(0, summary.leader_epoch),
                "lag": _lag(summary, ends.get((name, index))),
                "error_code": ErrorCode.none,
            }

        return [
            {
                "topic_name": name,
                "topic_id": ids.get(name),
                "partitions": [describe(name, index) for index in indexes],
            }
            for name, indexes in topics.items()
        ]

    async def alter_share_offsets(self, group_id: str, offsets: Mapping[TopicIdPartition, int]) -> Values:
        """Set start offsets; raise for an error of all. `errors` of the result has those of the partitions."""
        await self.topic.ensure_exists()
        return _checked(
            await self._submit(
                group_id, lambda token, at: self._coordinator.alter_share_offsets(group_id, offsets, token, at)
            )
        )

    async def delete_share_offsets(self, group_id: str, topics: Sequence[str]) -> Values:
        """Delete the state of topics; raise for an error of all. `errors` of the result has those of topic ids."""
        await self.topic.ensure_exists()
        return _checked(
            await self._submit(
                group_id, lambda token, at: self._coordinator.delete_share_offsets(group_id, topics, token, at)
            )
        )

    async def leave(self, group_id: str, members: list[tuple[str, str | None]]) -> Values:
        return await self._submit(group_id, lambda token, at: self._coordinator.leave(group_id, members, token, at))

    async def commit(self, request: CommitRequest) -> dict[TopicPartition, ErrorCode]:
        await self.topic.ensure_exists()
        values = await self._submit(request.group_id, lambda token, at: self._coordinator.commit(request, token, at))
        errors: dict[TopicPartition, ErrorCode] = values["errors"]
        return errors

    async def commit_transactional(
        self, request: CommitRequest, producer: Producer, verify: Callable[[TopicPartition], Awaitable[ErrorCode]]
    ) -> dict[TopicPartition, ErrorCode]:
        """Commit offsets as part of the producer's transaction.

        `verify` has the transaction's coordinator confirm that the transaction is open and contains the group's
        partition of the offsets topic. Without that, no marker would ever end it here.
        """
        await self.topic.ensure_exists()
        index = self._authority(request.group_id).partition_of(request.group_id)
        if not request.group_id or (index is None and self.partition_count):
            raise KafkaError(ErrorCode.invalid_group_id, f"a group name of {len(request.group_id)} characters")
        partition = None if index is None else self._host.partitions.get((OFFSETS_TOPIC, index))
        if index is None or partition is None:
            raise KafkaError(ErrorCode.coordinator_not_available, f"{OFFSETS_TOPIC} was deleted")
        leader_epoch, verified_from = partition.leader_epoch, partition.log_end_offset
        is_verified = partition.log.producers.has_transaction(*producer)
        while not is_verified:
            verified_from = partition.log_end_offset
            error = await verify((OFFSETS_TOPIC, index))
            if error is not ErrorCode.none:
                raise KafkaError(error, f"the transaction of producer {producer.producer_id} is not verified")
            if partition.leader_epoch != leader_epoch:
                raise KafkaError(ErrorCode.not_coordinator, f"{OFFSETS_TOPIC}-{index} has a new leader")
            # With version 2, the marker of the last transaction often arrives during the verification of the next one.
            # The answer may be older than the marker: ask again.
            is_verified = not partition.log.producers.has_marker(*producer, verified_from)
        values = await self._submit(
            request.group_id,
            lambda token, at: self._coordinator.commit_transactional(request, producer, verified_from, token, at),
        )
        errors: dict[TopicPartition, ErrorCode] = values["errors"]
        return errors

    def transaction_ended(self, partition: int, producer_id: int, epoch: int, is_commit: bool) -> None:
        """Apply a marker that is committed in a partition of the offsets topic.

        This needs no lease: the log has decided it.
        """
        self._coordinator.transaction_ended(partition, Producer(producer_id, epoch), is_commit)

    async def committed(
        self,
        group_id: str,
        partitions: Iterable[TopicPartition] | None,
        member_id: str | None = None,
        member_epoch: int = -1,
    ) -> tuple[ErrorCode, dict[TopicPartition, CommittedOffset | None]]:
        await self.topic.ensure_exists()
        return self._authority(group_id).committed(group_id, partitions, member_id, member_epoch)

    def unstable_partitions(self, group_id: str) -> set[TopicPartition]:
        """Return the partitions whose committed offset an open transaction may change."""
        return self._authority(group_id).unstable_partitions(group_id)

    async def delete_offsets(
        self, group_id: str, partitions: list[TopicPartition]
    ) -> tuple[ErrorCode, dict[TopicPartition, ErrorCode]]:
        await self.topic.ensure_exists()
        values = await self._submit(
            group_id, lambda token, at: self._coordinator.delete_offsets(group_id, partitions, token, at)
        )
        return values["error_code"], values["errors"]

    async def delete_group(self, group_id: str) -> ErrorCode:
        await self.topic.ensure_exists()
        values = await self._submit(group_id, lambda token, at: self._coordinator.delete_group(group_id, token, at))
        error: ErrorCode = values["error_code"]
        return error

    async def describe(self, group_id: str) -> Values:
        await self.topic.ensure_exists()
        return self._authority(group_id).describe(group_id)

    async def describe_consumer_group(self, group_id: str) -> Values:
        await self.topic.ensure_exists()
        return self._authority(group_id).describe_consumer_group(group_id)

    async def describe_share_group(self, group_id: str) -> Values:
        await self.topic.ensure_exists()
        return self._authority(group_id).describe_share_group(group_id)

    def groups(self) -> list[Values]:
        """Return all groups of this node, or none without a lease. COORDINATOR_LOAD_IN_PROGRESS while groups load."""
        if not self._lease_is_valid():
            return []
        if self._coordinator.is_loading:
            raise KafkaError(ErrorCode.coordinator_load_in_progress, "groups are being loaded")
        return self._coordinator.groups()

    def lag_gauges(self) -> Iterator[GroupLag]:
        if not self._lease_is_valid():
            return
        for group_id, (topic, index), committed in self._coordinator.all_committed():
            partition = self._host.partitions.get((topic, index))
            if partition is not None:
                yield GroupLag(group_id, topic, index, max(0, partition.high_watermark - committed.offset))

    # -- actions -------------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Rebalanced):
            self._runtime.metrics.group_rebalances += 1
            self._log.info(
                "group_rebalanced",
                group=action.group_id,
                generation=action.generation,
                members=action.member_count,
            )
        elif isinstance(action, InitializeShares):
            offsets = {
                SharePartitionKey(action.group_id, *partition): InitialState(action.state_epoch, offset)
                for partition, offset in action.offsets.items()
            }
            self._ask_share_coordinators(
                action.group_id, action.token, self._share_state.initialize(offsets, SHARE_STATE_TIMEOUT_MS)
            )
        elif isinstance(action, DeleteShares):
            keys = [SharePartitionKey(action.group_id, *partition) for partition in sorted(action.partitions)]
            self._ask_share_coordinators(
                action.group_id, action.token, self._share_state.delete(keys, SHARE_STATE_TIMEOUT_MS)
            )

    def _ask_share_coordinators(
        self, group_id: str, token: int, request: Coroutine[Any, Any, dict[SharePartitionKey, ErrorCode]]
    ) -> None:
        async def ask() -> None:
            try:
                errors = await request
            except Exception:
                # Report an outcome anyway: otherwise the group would wait for it forever.
                self._log.exception("share_state_failed", group=group_id)
                errors = {}
            failed = {error.name for error in errors.values() if error is not ErrorCode.none}
            if failed:
                self._log.warning("share_state_not_changed", group=group_id, errors=sorted(failed))
            answers = {(key.topic_id, key.partition): error for key, error in errors.items()}
            self._run(self._coordinator.shares_done(token, answers, self._now()))

        task = self._loop.create_task(ask())
        self._share_tasks[task] = group_id
        task.add_done_callback(lambda task: self._share_tasks.pop(task, None))

    async def stop(self) -> None:
        for task in list(self._share_tasks):
            task.cancel()
        await super().stop()

    def _expired(self, at: Moment) -> Sequence[Action]:
        return self._coordinator.expire_offsets(at)


def _no_offset(index: int, error: ErrorCode) -> Values:
    return {"partition_index": index, "start_offset": UNINITIALIZED_OFFSET, "lag": UNKNOWN_LAG, "error_code": error}


def _lag(summary: Summary, end: int | None) -> int:
    """Return the number of records from the start offset on that are not done; -1 if it is not known."""
    if end is None or summary.start_offset < 0 or summary.delivery_complete_count < 0:
        return UNKNOWN_LAG
    return max(0, end - summary.start_offset - summary.delivery_complete_count)


def _checked(values: Values) -> Values:
    if values["error_code"] is not ErrorCode.none:
        raise KafkaError(values["error_code"], values.get("error_message") or "")
    return values
