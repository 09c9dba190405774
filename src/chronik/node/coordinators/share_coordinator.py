"""The share coordinator of this node: the state machine of `chronik.shares`, stored in `__share_group_state`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chronik.groups.step import Moment
from chronik.metadata.events import Event, TopicDeleted
from chronik.metadata.image import SHARE_STATE_TOPIC, ClusterImage
from chronik.node.admin.topics import Topics
from chronik.node.age_clock import AgeClock
from chronik.node.coordinators.service import CoordinatorService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.shares.coordinator import Action, ShareCoordinator
from chronik.shares.records import Snapshot, UnreadableRecord
from chronik.shares.state import InitialState, SharePartitionKey, WrittenState
from chronik.wire.errors import ErrorCode, KafkaError


class ShareCoordinatorService(CoordinatorService[ShareCoordinator]):
    """The state of the shared partitions that this node coordinates. Owned by the loop."""

    invalid_key = ErrorCode.invalid_request

    skips_damage = False
    """An older state would deliver accepted records again."""

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        host: PartitionHost,
        topics: Topics,
        lease_is_valid: Callable[[], bool],
        age_clock: AgeClock,
    ) -> None:
        super().__init__(
            SHARE_STATE_TOPIC,
            runtime.config.share_state_topic_partitions,
            "shares",
            ShareCoordinator(),
            runtime,
            metadata,
            host,
            topics,
            lease_is_valid,
            age_clock,
        )

    # -- partitions ----------------------------------------------------------------------------------------------------

    def finish_loading(self, partition: int, leader_epoch: int) -> int:
        try:
            self._coordinator.finish_loading(partition)
        except UnreadableRecord as error:
            raise KafkaError(ErrorCode.corrupt_message, f"{self.topic.name}-{partition}: {error}") from error
        return 0

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        super().metadata_changed(image, events)
        for event in events:
            if isinstance(event, TopicDeleted) and self._lease_is_valid():
                self._run(self._coordinator.topic_deleted(event.topic.id, self._now()))

    # -- requests ------------------------------------------------------------------------------------------------------

    async def initialize(self, key: SharePartitionKey, initial: InitialState) -> ErrorCode:
        self._check_exists(key)
        await self.topic.ensure_exists()
        return await self._ask(key, lambda token, at: self._coordinator.initialize(key, initial, token, at))

    async def read(self, key: SharePartitionKey, leader_epoch: int) -> tuple[ErrorCode, Snapshot | None]:
        self._check_exists(key)
        await self.topic.ensure_exists()
        values = await self._values(key, lambda token, at: self._coordinator.read(key, leader_epoch, token, at))
        return values["error_code"], values.get("state")

    async def write(self, key: SharePartitionKey, written: WrittenState) -> ErrorCode:
        self._check_exists(key)
        return await self._ask(key, lambda token, at: self._coordinator.write(key, written, token, at))

    async def summary(self, key: SharePartitionKey) -> tuple[ErrorCode, Snapshot | None]:
        await self.topic.ensure_exists()
        values = await self._values(key, lambda token, at: self._coordinator.summary(key, token, at))
        return values["error_code"], values.get("state")

    async def delete(self, key: SharePartitionKey) -> ErrorCode:
        await self.topic.ensure_exists()
        return await self._ask(key, lambda token, at: self._coordinator.delete(key, token, at))

    async def _ask(self, key: SharePartitionKey, start: Callable[[int, Moment], list[Action]]) -> ErrorCode:
        error: ErrorCode = (await self._values(key, start))["error_code"]
        return error

    async def _values(self, key: SharePartitionKey, start: Callable[[int, Moment], list[Action]]) -> dict[str, Any]:
        return await self._submit(key.coordinator_key, start)

    def _check_exists(self, key: SharePartitionKey) -> None:
        if key.partition < 0:
            raise KafkaError(ErrorCode.invalid_request, "a negative partition")
        topic = self._metadata.image.topic_by_id(key.topic_id)
        if topic is None or topic.partition(key.partition) is None:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"{key.topic_id}-{key.partition} does not exist")

    # -- actions -------------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Any) -> None:
        raise AssertionError(f"no other action than replies and appends: {action}")

    def _expired(self, at: Moment) -> Sequence[Action]:
        """Remove the state of topics that were deleted while their keys had no coordinator."""
        if not self._lease_is_valid():
            return []
        image = self._metadata.image
        gone = [topic_id for topic_id in self._coordinator.topic_ids() if image.topic_by_id(topic_id) is None]
        return [action for topic_id in gone for action in self._coordinator.topic_deleted(topic_id, at)]
