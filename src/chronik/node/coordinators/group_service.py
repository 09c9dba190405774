"""The groups of this node: the state machine of `chronik.groups`, stored in `__consumer_offsets`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from uuid import UUID

from chronik.groups.commits import CommitRequest
from chronik.groups.consumer_member import ConsumerHeartbeat
from chronik.groups.coordinator import GroupCoordinator
from chronik.groups.member import JoinRequest, SyncRequest
from chronik.groups.offsets import Producer
from chronik.groups.records import CommittedOffset, TopicPartition
from chronik.groups.step import Action, GroupSettings, MigrationPolicy, Moment, Rebalanced
from chronik.groups.topics import Topic
from chronik.metadata.events import Event, PartitionsCreated, ReplicasChanged, TopicCreated, TopicDeleted
from chronik.metadata.image import OFFSETS_TOPIC, ClusterImage
from chronik.node.admin.topics import Topics
from chronik.node.age_clock import AgeClock
from chronik.node.coordinators.coordinator_topic import LoadedRecords
from chronik.node.coordinators.service import CoordinatorService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.observe.metrics import GroupLag
from chronik.wire.errors import ErrorCode, KafkaError


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
            consumer_members_max=config.group_consumer_max_size,
            assignors=config.group_consumer_assignors,
            migration=MigrationPolicy(config.group_consumer_migration_policy),
            group_configs=self._configs_of,
        )
        coordinator = GroupCoordinator(settings, runtime.env.new_uuid)
        coordinator.catalog = MetadataTopics(metadata.image)
        count = config.offsets_topic_partitions
        super().__init__(
            OFFSETS_TOPIC, count, "groups", coordinator, runtime, metadata, host, topics, lease_is_valid, age_clock
        )

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        """Remove the offsets of deleted topics, and move coordinators with their partitions."""
        self._coordinator.catalog = MetadataTopics(image)
        changed = {name: None for event in events for name in _changed_topics(event)}
        if changed:
            self._coordinator.topics_changed(changed)
        for event in events:
            if isinstance(event, TopicDeleted) and event.topic.name != OFFSETS_TOPIC and not self._is_stopped:
                self._run(self._coordinator.topics_deleted((event.topic.name,), self._now()))
        super().metadata_changed(image, events)

    def _configs_of(self, group_id: str) -> Mapping[str, int]:
        configs = self._metadata.image.group_configs.get(group_id, {})
        return {name: int(text) for name, text in configs.items()}

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

    def _expired(self, at: Moment) -> Sequence[Action]:
        return self._coordinator.expire_offsets(at)
