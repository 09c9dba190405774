"""Producers: one sends unique records to every partition, pipelined, with any acks; one appends a batch at a time.

An idempotent producer resends batches in order with the same sequences until all are acknowledged. Any other producer
never sends a record twice: an unanswered batch may or may not be in the log, and later batches start a new stream.

A patient producer waits long for a response, and meanwhile sends later batches to a new leader, as librdkafka does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.testing.sim.client import (
    REQUEST_TIMEOUT_S,
    TOPIC,
    TOPIC_NAMES_MAX_VERSION,
    Service,
    SimClient,
    init_producer_id,
    produce_request,
    produced_offset,
)
from chronik.testing.sim.history import PartitionHistory, RecordName
from chronik.testing.sim.host import EPOCH_MS
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch
from chronik.wire.errors import KafkaError

PATIENT_TIMEOUT_S = 20.0
PRODUCE_TIMEOUT_SHARE = 0.7
"""The node gives up before the client does, as with real clients."""


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
    is_patient: bool = False
    """Whether later batches go to a new leader while earlier ones have no response yet. Only if idempotent."""


@dataclass(slots=True)
class Batch:
    number: int
    names: list[RecordName]
    data: bytes


class SimProducer(SimClient):
    """One producer, with one produce lane for each partition."""

    def __init__(self, name: str, service: Service, partitions: int, settings: ProducerSettings) -> None:
        super().__init__(name, service)
        self.settings = settings
        self.producer_id = -1
        self.producer_epoch = -1
        self._partitions = partitions

    async def work(self) -> None:
        if self.settings.is_idempotent:
            self.producer_id, self.producer_epoch = await _new_producer_id(self, TOPIC)
        async with asyncio.TaskGroup() as group:
            for partition in range(self._partitions):
                lane = _ProduceLane(self, self.history.partition(TOPIC, partition))
                group.create_task(lane.run(), name=f"{self.name}-{partition}")


class _ProduceLane:
    """The records of one producer for one partition.

    Invariant: `_unacknowledged` holds every batch that must still be acknowledged, in the order of its records.
    """

    def __init__(self, producer: SimProducer, history: PartitionHistory) -> None:
        self._producer = producer
        self._settings = producer.settings
        self._history = history
        self._random = producer.world.random(f"client:{producer.name}:{history.name.partition}")
        self._connections = 0
        self._next_number = 0
        self._next_sequence = 0
        self._batches = 0
        self._unacknowledged: deque[Batch] = deque()

    async def run(self) -> None:
        while not (self._producer.is_finishing and not self._unacknowledged):
            connection = await self._producer.leader(*self._history.name)
            self._connections += 1
            if self._settings.acks == 0:
                await self._send_unanswered(connection)
            else:
                await self._send_and_wait(connection)
            if self._unacknowledged or not self._producer.is_finishing:
                await self._producer.pause()

    async def _send_unanswered(self, connection: Connection) -> None:
        version = connection.version(ApiKey.PRODUCE, TOPIC_NAMES_MAX_VERSION)
        try:
            while not self._producer.is_finishing:
                connection.send_unanswered(ApiKey.PRODUCE, version, self._request(version, self._next_batch()))
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await connection.drained()
                await self._wait_a_little()
        except (ClientError, TimeoutError) as error:
            connection.close()
            self._producer.count(error)

    async def _send_and_wait(self, connection: Connection) -> None:
        """Keep the pipeline full until a request fails; then wait for all requests in flight, and return."""
        version = connection.version(ApiKey.PRODUCE, TOPIC_NAMES_MAX_VERSION)
        in_flight: deque[tuple[Batch, Connection, asyncio.Future[memoryview]]] = deque()

        def send(batch: Batch) -> None:
            answer = connection.send(ApiKey.PRODUCE, version, self._request(version, batch))
            in_flight.append((batch, connection, answer))

        for batch in self._unacknowledged:
            send(batch)
        is_failed = False
        while in_flight or not (self._producer.is_finishing or is_failed):
            while self._has_room() and not (is_failed or self._producer.is_finishing):
                if self._settings.is_patient and in_flight:
                    connection = await self._newest_leader(connection)
                batch = self._next_batch()
                self._unacknowledged.append(batch)
                send(batch)
                await self._wait_a_little()
            if not in_flight:
                continue
            batch, to, answer = in_flight.popleft()
            try:
                async with asyncio.timeout(self._timeout_s):
                    base_offset = produced_offset(version, await answer)
            except (ClientError, KafkaError, TimeoutError) as error:
                if isinstance(error, TimeoutError):
                    to.close()
                is_failed = True
                if not self._settings.is_idempotent:
                    # The batch may be in the log; resending it could append it twice.
                    self._unacknowledged.remove(batch)
                # OUT_OF_ORDER_SEQUENCE_NUMBER is a violation, too: a real client would start a new epoch then.
                self._producer.failed(error, self._history.name)
            else:
                if self._settings.is_promise:
                    self._history.acknowledged(batch.names, base_offset)
                self._unacknowledged.remove(batch)

    @property
    def _timeout_s(self) -> float:
        return PATIENT_TIMEOUT_S if self._settings.is_patient else REQUEST_TIMEOUT_S

    async def _newest_leader(self, connection: Connection) -> Connection:
        """Return a connection to the leader that some node names, else the given one."""
        try:
            return await self._producer.find_leader(*self._history.name)
        except (ClientError, KafkaError, TimeoutError) as error:
            self._producer.count(error)
            return connection

    def _has_room(self) -> bool:
        """Limit the batches from the first unacknowledged one on to `in_flight_max`, as real clients do."""
        first = self._unacknowledged[0].number if self._unacknowledged else self._batches
        return self._batches - first < self._settings.in_flight_max

    def _next_batch(self) -> Batch:
        settings, random, producer = self._settings, self._random, self._producer
        stream = f"{producer.name}-{self._history.name.partition}"
        if not settings.is_idempotent:
            stream += f"#{self._connections}"
        first = self._next_number
        self._next_number += random.randint(1, settings.batch_records_max)
        names = [RecordName(stream, number) for number in range(first, self._next_number)]
        for name in names:
            self._history.sending(name)
        wall_ms = _wall_ms(producer)
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
        timeout_ms = int(self._timeout_s * PRODUCE_TIMEOUT_SHARE * 1000)
        return produce_request(version, *self._history.name, batch.data, self._settings.acks, timeout_ms=timeout_ms)

    async def _wait_a_little(self) -> None:
        """Sleep between batches, but often not at all, so that some are sent back to back."""
        if self._settings.is_patient and self._random.random() < 0.05:
            # Long enough for a failover, so that some batches are sent before it and some after it.
            await asyncio.sleep(self._random.uniform(0.0, 4.0))
        elif self._random.random() < 0.6:
            await asyncio.sleep(self._random.expovariate(1.0) * self._settings.pause_s)


class Appender:
    """Sends one idempotent batch at a time to partition 0, for clients that must know what is in the log.

    Invariant: each acknowledged batch is in the log once, after all earlier batches.
    """

    def __init__(self, client: SimClient, topic: str) -> None:
        self._client = client
        self._topic = topic
        self._producer_id = -1
        self._producer_epoch = -1
        self._next_sequence = 0

    async def append(self, records: Sequence[tuple[bytes | None, bytes | None]]) -> int:
        """Send the batch until it is acknowledged, and return its base offset."""
        client = self._client
        if self._producer_id < 0:
            self._producer_id, self._producer_epoch = await _new_producer_id(client, self._topic)
        wall_ms = _wall_ms(client)
        batch = encode_batch(
            [(key, value, (), wall_ms) for key, value in records],
            producer_id=self._producer_id,
            producer_epoch=self._producer_epoch,
            base_sequence=self._next_sequence,
        )
        self._next_sequence += len(records)
        return await client.insist(lambda: self._send(batch))

    async def _send(self, batch: bytes) -> int:
        connection = await self._client.leader(self._topic, 0)
        version = connection.version(ApiKey.PRODUCE, TOPIC_NAMES_MAX_VERSION)
        request = produce_request(version, self._topic, 0, batch)
        body = await connection.request(ApiKey.PRODUCE, version, request, timeout_s=REQUEST_TIMEOUT_S)
        return produced_offset(version, body)


async def _new_producer_id(client: SimClient, topic: str) -> tuple[int, int]:
    """Return a new producer id and its epoch, from the leader of partition 0."""

    async def attempt() -> tuple[int, int]:
        return await init_producer_id(await client.leader(topic, 0))

    producer_id, epoch = await client.insist(attempt)
    client.history.producer_id_assigned(producer_id, epoch, client.name)
    return producer_id, epoch


def _wall_ms(client: SimClient) -> int:
    return EPOCH_MS + int(client.world.now * 1000)
