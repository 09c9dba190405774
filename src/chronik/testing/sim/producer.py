"""A producer: sends batches of unique records to every partition, pipelined, with any acks, idempotent or not.

An idempotent producer resends batches in order with the same sequences until all are acknowledged. Any other producer
never sends a record twice: an unanswered batch may or may not be in the log, and later batches start a new stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from chronik.client.connection import Connection
from chronik.client.errors import RETRIABLE, ClientError
from chronik.testing.sim.client import REQUEST_TIMEOUT_S, SimClient
from chronik.testing.sim.history import History, PartitionHistory, RecordName
from chronik.testing.sim.world import World
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.produce import ProduceRequest, ProduceTopic, read_produce_response, write_produce_request

BY_NAME_AT_MOST = 12
PRODUCE_TIMEOUT_MS = 700


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    acks: int
    is_promise: bool
    """Whether acknowledged records must never be lost: not so with acks=1 and several replicas."""
    is_idempotent: bool
    in_flight_max: int
    """Unanswered batches of one partition: at most 5 for an idempotent producer."""
    batch_records_max: int
    record_bytes_max: int
    pause_s: float
    """Mean time between batches of one partition."""


@dataclass(slots=True)
class Batch:
    number: int
    names: list[RecordName]
    data: bytes


class SimProducer(SimClient):
    """One producer, with one produce lane for each partition."""

    def __init__(
        self,
        name: str,
        world: World,
        history: History,
        bootstrap: list[tuple[str, int]],
        topic: str,
        partitions: int,
        settings: ProducerSettings,
    ) -> None:
        super().__init__(name, world, history, bootstrap)
        self.topic = topic
        self.settings = settings
        self.producer_id = -1
        self.producer_epoch = -1
        self._partitions = partitions

    async def work(self) -> None:
        if self.settings.is_idempotent:
            await self.insist(self._init_producer_id)
        async with asyncio.TaskGroup() as group:
            for partition in range(self._partitions):
                lane = _Lane(self, self.history.partition(self.topic, partition), partition)
                group.create_task(lane.run(), name=f"{self.name}-{partition}")

    async def _init_producer_id(self) -> None:
        values = {"transactional_id": None, "transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1}
        connection = await self.leader(self.topic, 0)
        response = await connection.call(ApiKey.INIT_PRODUCER_ID, values, timeout_s=REQUEST_TIMEOUT_S)
        if response.error_code != ErrorCode.none:
            raise KafkaError(response.error_code, "no producer id")
        self.producer_id, self.producer_epoch = int(response.producer_id), int(response.producer_epoch)
        self.history.producer_id_given(self.producer_id, self.producer_epoch, self.name)


class _Lane:
    """The records of one producer for one partition.

    Invariant: `_unacknowledged` holds every batch that must still be acknowledged, in the order of its records.
    """

    def __init__(self, producer: SimProducer, history: PartitionHistory, partition: int) -> None:
        self._producer = producer
        self._settings = producer.settings
        self._history = history
        self._partition = partition
        self._random = producer.world.random(f"client:{producer.name}:{partition}")
        self._connections = 0
        self._next_number = 0
        self._next_sequence = 0
        self._batches = 0
        self._unacknowledged: deque[Batch] = deque()

    async def run(self) -> None:
        while not (self._producer.is_finishing and not self._unacknowledged):
            connection = await self._producer.leader(self._history.name.topic, self._partition)
            self._connections += 1
            if self._settings.acks == 0:
                await self._send_unanswered(connection)
            else:
                await self._send_and_wait(connection)
            if self._unacknowledged or not self._producer.is_finishing:
                await self._producer.pause()

    # -- acks=0 --------------------------------------------------------------------------------------------------------

    async def _send_unanswered(self, connection: Connection) -> None:
        version = connection.version(ApiKey.PRODUCE, BY_NAME_AT_MOST)
        try:
            while not self._producer.is_finishing:
                connection.send_unanswered(ApiKey.PRODUCE, version, self._request(version, self._next_batch()))
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await connection.drained()
                await self._wait_a_little()
        except (ClientError, TimeoutError) as error:
            connection.close()
            self._producer.failed(error)

    # -- acks=1 and acks=all -------------------------------------------------------------------------------------------

    async def _send_and_wait(self, connection: Connection) -> None:
        """Keep the pipeline full until a request fails; then wait for all requests in flight, and return."""
        version = connection.version(ApiKey.PRODUCE, BY_NAME_AT_MOST)
        in_flight: deque[tuple[Batch, asyncio.Future[memoryview]]] = deque()
        for batch in self._unacknowledged:
            in_flight.append((batch, connection.send(ApiKey.PRODUCE, version, self._request(version, batch))))
        is_failed = False
        while in_flight or not (self._producer.is_finishing or is_failed):
            while self._has_room() and not (is_failed or self._producer.is_finishing):
                batch = self._next_batch()
                self._unacknowledged.append(batch)
                in_flight.append((batch, connection.send(ApiKey.PRODUCE, version, self._request(version, batch))))
                await self._wait_a_little()
            if not in_flight:
                continue
            batch, answer = in_flight.popleft()
            try:
                base_offset = await self._outcome(version, answer)
            except (ClientError, KafkaError, TimeoutError) as error:
                if isinstance(error, TimeoutError):
                    connection.close()
                self._producer.failed(error)
                is_failed = True
                self._not_acknowledged(batch, error)
            else:
                if self._settings.is_promise:
                    self._history.acknowledged(batch.names, base_offset)
                self._unacknowledged.remove(batch)

    def _has_room(self) -> bool:
        """Limit the batches from the first unacknowledged one on to `in_flight_max`, as real clients do."""
        first = self._unacknowledged[0].number if self._unacknowledged else self._batches
        return self._batches - first < self._settings.in_flight_max

    async def _outcome(self, version: int, answer: asyncio.Future[memoryview]) -> int:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            body = await answer
        result = read_produce_response(version, body).topics[0][2][0]
        if result.error_code:
            raise KafkaError(ErrorCode(result.error_code), result.error_message or "")
        return result.base_offset

    def _not_acknowledged(self, batch: Batch, error: BaseException) -> None:
        if not self._settings.is_idempotent:
            # The batch may be in the log; resending it could append it twice.
            self._unacknowledged.remove(batch)
        if isinstance(error, KafkaError) and error.code not in RETRIABLE:
            # Includes OUT_OF_ORDER_SEQUENCE_NUMBER after a failed batch: a real client would start a new epoch then.
            self._producer.world.violated(
                f"{self._history.name}: {self._producer.name} got {error.code.name} ({error.message})"
            )

    # -- batches -------------------------------------------------------------------------------------------------------

    def _next_batch(self) -> Batch:
        settings, random, producer = self._settings, self._random, self._producer
        stream = f"{producer.name}-{self._partition}"
        if not settings.is_idempotent:
            stream += f"#{self._connections}"
        names = []
        for _ in range(random.randint(1, settings.batch_records_max)):
            names.append(RecordName(stream, self._next_number))
            self._next_number += 1
        for name in names:
            self._history.sending(name)
        wall_ms = 1_750_000_000_000 + int(producer.world.now * 1000)
        records = [(None, name.value(random.randint(1, settings.record_bytes_max)), (), wall_ms) for name in names]
        base_sequence = -1
        if settings.is_idempotent:
            base_sequence = self._next_sequence
            self._next_sequence += len(names)
        data = encode_batch(
            records,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            base_sequence=base_sequence,
        )
        self._batches += 1
        return Batch(self._batches - 1, names, data)

    def _request(self, version: int, batch: Batch) -> bytes:
        topics = [ProduceTopic(self._history.name.topic, None, [(self._partition, memoryview(batch.data))])]
        return write_produce_request(version, ProduceRequest(None, self._settings.acks, PRODUCE_TIMEOUT_MS, topics))

    async def _wait_a_little(self) -> None:
        """Sleep between batches, but often not at all, so that some are sent back to back."""
        pause_s = self._settings.pause_s
        if self._random.random() < 0.6:
            await asyncio.sleep(self._random.expovariate(1.0) * pause_s)
