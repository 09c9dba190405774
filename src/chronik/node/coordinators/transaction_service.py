"""The transactional ids of this node: the state machine of `chronik.transactions`, stored in `__transaction_state`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

from chronik.groups.step import Moment
from chronik.metadata.image import TRANSACTIONS_TOPIC
from chronik.node.admin.topics import Topics
from chronik.node.age_clock import AgeClock
from chronik.node.coordinators.markers import MarkerSender, MarkerWriter
from chronik.node.coordinators.service import CoordinatorService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.peers import Peers
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.observe.metrics import TransactionGauges
from chronik.transactions.actions import Action, Ended, Settled, WriteMarkers
from chronik.transactions.coordinator import (
    IDS_EXPIRED_MAX,
    EndRequest,
    InitProducerRequest,
    ProducerIdAndEpoch,
    TransactionCoordinator,
    TransactionSettings,
)
from chronik.transactions.records import UnreadableRecord
from chronik.transactions.transaction import (
    EPOCH_BUMP_VERSION,
    NO_PRODUCER_ID,
    TopicPartition,
    TransactionMetadata,
    TransactionState,
)
from chronik.wire.errors import ErrorCode, KafkaError

SETTLE_WAIT_S = 0.1
"""How long a request waits for the transition before it, before it gets CONCURRENT_TRANSACTIONS. The next transaction
usually begins while the markers of the last one are being written, and clients would pause longer than that takes."""

EXPIRY_PAUSE_S = 1.0
"""Between two parts of many ids that expire."""


class TransactionService(CoordinatorService[TransactionCoordinator]):
    """The transactional ids that this node coordinates. Owned by the loop."""

    invalid_key = ErrorCode.invalid_request

    skips_damage = False
    """A lost state may hold a decision to commit: an older state would abort what is partly committed."""

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        host: PartitionHost,
        topics: Topics,
        lease_is_valid: Callable[[], bool],
        age_clock: AgeClock,
        peers: Peers,
        markers: MarkerWriter,
        next_producer_id: Callable[[], Awaitable[int]],
    ) -> None:
        config = runtime.config
        settings = TransactionSettings(config.transaction_max_timeout_ms, config.transactional_id_expiration_ms)
        coordinator = TransactionCoordinator(settings)
        count = config.transaction_state_topic_partitions
        super().__init__(
            TRANSACTIONS_TOPIC,
            count,
            "transactions",
            coordinator,
            runtime,
            metadata,
            host,
            topics,
            lease_is_valid,
            age_clock,
        )
        self._next_producer_id = next_producer_id
        self._markers = MarkerSender(runtime, metadata, peers, markers, self._marker_written)
        self._settling: dict[str, asyncio.Future[None]] = {}
        """Resolved when the id has no pending transition; only for ids that a request waits for."""
        self._adding: dict[tuple[str, ProducerIdAndEpoch], dict[TopicPartition, None]] = {}
        """The partitions that requests in progress add to a producer's transaction."""

    async def stop(self) -> None:
        await super().stop()
        self._markers.stop()

    # -- partitions ----------------------------------------------------------------------------------------------------

    def finish_loading(self, partition: int, leader_epoch: int) -> int:
        try:
            actions = self._coordinator.finish_loading(partition, leader_epoch, self._now())
        except UnreadableRecord as error:
            raise KafkaError(ErrorCode.corrupt_message, f"{self.topic.name}-{partition}: {error}") from error
        self._run(actions)
        return 0

    def unload(self, partition: int) -> None:
        self._markers.unloaded(partition)
        super().unload(partition)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def init_producer(
        self, transactional_id: str, timeout_ms: int, expected: ProducerIdAndEpoch | None
    ) -> Values:
        """Return `error_code`, `producer_id` and `producer_epoch`."""
        await self.topic.ensure_exists()

        async def submit() -> Values:
            fresh_producer_id = await self._fresh_producer_id(transactional_id)
            request = InitProducerRequest(transactional_id, timeout_ms, expected, fresh_producer_id)
            return await self._submit(
                transactional_id, lambda token, at: self._coordinator.init_producer(request, token, at)
            )

        return await self._settled(transactional_id, submit)

    async def add_partitions(
        self, transactional_id: str, producer: ProducerIdAndEpoch, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Add all partitions, or none: if one does not exist, the others get OPERATION_NOT_ATTEMPTED."""
        missing = self._missing(partitions)
        if missing:
            return missing
        added = frozenset(partitions)
        # What waits for the same pending transition is added together: with version 2, the leaders of several
        # partitions ask at once, and each record costs a round trip to the replicas.
        adding = self._adding.setdefault((transactional_id, producer), {})
        adding.update(dict.fromkeys(added))
        try:
            values = await self._settled(
                transactional_id,
                lambda: self._submit(
                    transactional_id,
                    lambda token, at: self._coordinator.add_partitions(
                        transactional_id, producer, added | adding.keys(), token, at
                    ),
                ),
            )
        finally:
            for each in added:
                adding.pop(each, None)
            if not adding:
                self._adding.pop((transactional_id, producer), None)
        error: ErrorCode = values["error_code"]
        return dict.fromkeys(partitions, error)

    def verify_partitions(
        self, transactional_id: str, producer: ProducerIdAndEpoch, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Return for each partition NONE if it is in the open transaction; TRANSACTION_ABORTABLE if it is not."""
        missing = self._missing(partitions)
        if missing:
            return missing
        error, verified = self._authority(transactional_id).verify_partitions(transactional_id, producer, partitions)
        if error is not ErrorCode.none:
            return dict.fromkeys(partitions, error)
        return {each: ErrorCode.none if verified[each] else ErrorCode.transaction_abortable for each in partitions}

    def _missing(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, ErrorCode]:
        """Return an error for each partition if one of them does not exist, otherwise nothing."""
        image = self._metadata.image
        if all(image.partition(*each) is not None for each in partitions):
            return {}
        unknown, other = ErrorCode.unknown_topic_or_partition, ErrorCode.operation_not_attempted
        return {each: unknown if image.partition(*each) is None else other for each in partitions}

    async def end(
        self, transactional_id: str, producer: ProducerIdAndEpoch, *, is_commit: bool, client_version: int
    ) -> Values:
        """Return `error_code`, and the `producer_id` and `producer_epoch` of the next transaction."""

        async def submit() -> Values:
            may_bump = client_version >= EPOCH_BUMP_VERSION and self._coordinator.knows(transactional_id)
            fresh_producer_id = await self._fresh_producer_id(transactional_id) if may_bump else NO_PRODUCER_ID
            request = EndRequest(transactional_id, *producer, is_commit, client_version, fresh_producer_id)
            return await self._submit(transactional_id, lambda token, at: self._coordinator.end(request, token, at))

        return await self._settled(transactional_id, submit)

    async def _fresh_producer_id(self, transactional_id: str) -> int:
        """Return an unused producer id if the next request may need it: it costs a call to the controller."""
        if not self._authority(transactional_id).needs_producer_id(transactional_id):
            return NO_PRODUCER_ID
        try:
            return await self._next_producer_id()
        except KafkaError as error:
            # As in Kafka: clients wait and retry. Some treat the controller's own errors as fatal.
            raise KafkaError(ErrorCode.coordinator_load_in_progress, f"no producer id: {error}") from error

    async def _settled(self, transactional_id: str, submit: Callable[[], Awaitable[Values]]) -> Values:
        """Submit a request, and again if another transition was pending and ends soon."""
        deadline_s = self._loop.time() + SETTLE_WAIT_S
        while True:
            values = await submit()
            if values["error_code"] is not ErrorCode.concurrent_transactions:
                return values
            settled = self._settling.get(transactional_id)
            if settled is None:
                settled = self._settling[transactional_id] = self._loop.create_future()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await asyncio.shield(settled)
            except TimeoutError:
                if self._settling.get(transactional_id) is settled:
                    del self._settling[transactional_id]
                return values

    # -- queries -------------------------------------------------------------------------------------------------------

    def describe(self, transactional_id: str) -> tuple[ErrorCode, TransactionMetadata | None]:
        return self._authority(transactional_id).describe(transactional_id)

    def transactions(self) -> Iterator[tuple[str, TransactionMetadata]]:
        """Return all ids of this node. An incomplete list is an error: tools take what is not listed for lost."""
        if not self._lease_is_valid():
            raise KafkaError(ErrorCode.coordinator_not_available, "this node has lost its lease")
        if self._coordinator.is_loading:
            raise KafkaError(ErrorCode.coordinator_load_in_progress, "transactional ids are being loaded")
        return self._coordinator.transactions()

    def gauges(self) -> TransactionGauges:
        if not self._lease_is_valid():
            return TransactionGauges()
        wall_ms = self._runtime.env.wall_ms()
        open_ms = [
            wall_ms - state.start_ms
            for _, state in self._coordinator.transactions()
            if state.state is TransactionState.ONGOING
        ]
        return TransactionGauges(len(open_ms), max(0, 0, *open_ms) / 1000, self._markers.pending_count())

    # -- actions -------------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case WriteMarkers():
                self._markers.send(action)
            case Settled(transactional_id=transactional_id):
                settled = self._settling.pop(transactional_id, None)
                if settled is not None and not settled.done():
                    settled.set_result(None)
            case Ended():
                self._ended(action)

    def _ended(self, ended: Ended) -> None:
        metrics = self._runtime.metrics
        if ended.is_commit:
            metrics.transactions_committed += 1
        else:
            metrics.transactions_aborted[ended.cause] += 1
        if ended.cause == "client":
            return
        self._log.info(
            "transaction_aborted",
            transactional_id=ended.transactional_id,
            producer_id=ended.producer_id,
            cause=ended.cause,
            open_ms=ended.open_ms,
        )

    def _marker_written(self, action: WriteMarkers, partition: TopicPartition) -> None:
        producer = ProducerIdAndEpoch(action.producer_id, action.producer_epoch)
        self._run(self._coordinator.marker_written(action.transactional_id, producer, partition, self._now()))

    def _expired(self, at: Moment) -> Sequence[Action]:
        actions = self._coordinator.expire_ids(at)
        if len(actions) == IDS_EXPIRED_MAX:
            self._expire_after(EXPIRY_PAUSE_S)
        return actions
