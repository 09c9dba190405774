"""A broker with an in-memory log that coordinates transactions, and keeps the markers that its partitions receive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, cast

from tests.groups.fake_broker import FakeBroker, MemoryLog, with_broker_of
from tests.support.handlers import handlers_of

from chronik.client.errors import Unreachable
from chronik.metadata.events import Event
from chronik.metadata.image import ClusterImage
from chronik.node.coordinators.markers import MarkerWriter
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.coordinators.transactions import Transactions
from chronik.node.replicas.partition import TransactionMarker
from chronik.observe.metrics import Metrics
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.wire.errors import ErrorCode, KafkaError

P = ParamSpec("P")
ID = "payments"
ORDERS = ("orders", 0)


class TransactionBroker(FakeBroker):
    """`marker_errors` has the error of the next markers of a partition. While `markers_allowed` is clear, they wait."""

    def __init__(self, logs: dict[tuple[str, int], MemoryLog] | None = None, **settings: Any) -> None:
        super().__init__(logs, **{"transaction_state_topic_partitions": 2, **settings})
        fake = cast(Any, self)
        self.metrics = cast(Any, Metrics())
        self.runtime = cast(Any, self.runtime.__class__)(
            self.loop, self.env, self.config, self.metrics, cast(Any, None), self.log
        )
        self.markers: list[tuple[str, int, TransactionMarker]] = []
        self.marker_errors: dict[tuple[str, int], list[ErrorCode]] = {}
        self.markers_allowed = asyncio.Event()
        self.markers_allowed.set()
        self.offsets_ended: list[tuple[int, int, int, bool]] = []
        self.next_producer_id = 1_000
        self.producer_ids_error: KafkaError | None = None
        self.marker_writer = MarkerWriter(
            self.runtime, fake, self.groups.is_loaded, lambda *marker: self.offsets_ended.append(marker)
        )
        self.transactions = TransactionService(
            self.runtime,
            fake.metadata,
            fake,
            fake,
            self.lease_is_valid,
            self.age_clock,
            fake,
            self.marker_writer,
            self.new_producer_id,
        )
        self.coordinators = Transactions(self.runtime, fake.metadata, fake, self.transactions)
        self.handlers = handlers_of(self)
        self.metadata.listener = self._metadata_changed

    def _metadata_changed(self, image: ClusterImage, events: list[Event]) -> None:
        self.groups.metadata_changed(image, events)
        self.transactions.metadata_changed(image, events)

    async def start(self) -> None:
        await super().start()
        await self.transactions.start()

    async def stop(self) -> None:
        await self.transactions.stop()
        self.coordinators.stop()
        await super().stop()

    async def new_producer_id(self) -> int:
        if self.producer_ids_error is not None:
            raise self.producer_ids_error
        self.next_producer_id += 1
        return self.next_producer_id

    async def connection(self, node_id: int, purpose: str) -> Any:
        raise Unreachable(f"node {node_id} does not exist in this test")

    async def append_marker(self, topic: str, index: int, marker: TransactionMarker, timeout_s: float) -> int:
        await self.markers_allowed.wait()
        errors = self.marker_errors.get((topic, index))
        if errors:
            raise KafkaError(errors.pop(0))
        self.markers.append((topic, index, marker))
        return len(self.markers)

    # What a transactional client does.

    async def begin(self, *partitions: tuple[str, int], name: str = ID, timeout_ms: int = 60_000) -> ProducerIdAndEpoch:
        """Return a producer with an open transaction over these partitions, whose topics are created."""
        for topic in {topic for topic, _ in partitions}:
            if self.image.topic(topic) is None:
                await self.create_topic(topic, 3)
        values = await self.transactions.init_producer(name, timeout_ms, None)
        assert values["error_code"] is ErrorCode.none, values
        producer = ProducerIdAndEpoch(values["producer_id"], values["producer_epoch"])
        if partitions:
            errors = await self.transactions.add_partitions(name, producer, partitions)
            assert set(errors.values()) == {ErrorCode.none}
        return producer

    async def until_state(self, state: str, name: str = ID) -> None:
        while True:
            error, found = self.transactions.describe(name)
            if error is ErrorCode.none and found is not None and found.state.label == state:
                return
            await asyncio.sleep(0.001)


def with_transactions(
    **settings: Any,
) -> Callable[[Callable[Concatenate[TransactionBroker, P], Awaitable[None]]], Callable[P, Awaitable[None]]]:
    return with_broker_of(TransactionBroker, **settings)
