"""aiokafka. Each call runs in its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiokafka
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaError, for_code
from tests.clients.drivers.base import (
    HEARTBEAT_INTERVAL_MS,
    READ_TIMEOUT_S,
    SESSION_TIMEOUT_MS,
    ClientError,
    PollingMember,
    Received,
    Sent,
)

T = TypeVar("T")

ASSIGNORS = {"range": RangePartitionAssignor}


class Aiokafka:
    name = "aiokafka"
    sets_timestamps = True

    def produce(
        self, bootstrap: str, topic: str, records: Sequence[Sent], *, codec: str = "none", idempotent: bool = False
    ) -> None:
        async def run() -> None:
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=bootstrap,
                compression_type=None if codec == "none" else codec,
                enable_idempotence=idempotent,
                acks="all",
                linger_ms=20,
                request_timeout_ms=5_000,
                max_request_size=4 << 20,
            )
            await producer.start()
            try:
                sent = [
                    await producer.send(
                        topic,
                        value=record.value,
                        key=record.key,
                        headers=list(record.headers),
                        partition=record.partition,
                        timestamp_ms=record.timestamp_ms,
                    )
                    for record in records
                ]
                await asyncio.wait_for(asyncio.gather(*sent), READ_TIMEOUT_S)
            finally:
                await producer.stop()

        _run(run())

    def transact(
        self, bootstrap: str, topic: str, transactional_id: str, transactions: Sequence[tuple[Sequence[Sent], bool]]
    ) -> None:
        async def run() -> None:
            producer = aiokafka.AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=transactional_id)
            await producer.start()
            try:
                for records, is_commit in transactions:
                    await producer.begin_transaction()
                    for record in records:
                        await producer.send(topic, value=record.value, key=record.key, partition=record.partition)
                    await producer.flush()
                    await (producer.commit_transaction() if is_commit else producer.abort_transaction())
            finally:
                await producer.stop()

        _run(run())

    def read(
        self,
        bootstrap: str,
        topic: str,
        count: int,
        *,
        partitions: Sequence[int] = (0,),
        isolation_level: str = "read_uncommitted",
    ) -> list[Received]:
        async def run() -> list[Received]:
            async with _consumer(bootstrap, isolation_level) as consumer:
                assigned = [aiokafka.TopicPartition(topic, partition) for partition in partitions]
                consumer.assign(assigned)
                await consumer.seek_to_beginning(*assigned)
                got: list[Received] = []
                async with asyncio.timeout(READ_TIMEOUT_S):
                    while len(got) < count:
                        got += _received(await consumer.getmany(timeout_ms=200))
                return got

        return _run(run())

    def join(self, bootstrap: str, topic: str, group: str, *, assignor: str = "range") -> PollingMember:
        member = AiokafkaMember(bootstrap, topic, group, assignor)
        member.start()
        return member

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        async def run() -> int | None:
            async with _consumer(bootstrap) as consumer:
                partition = aiokafka.TopicPartition(topic, 0)
                found = (await consumer.offsets_for_times({partition: timestamp_ms}))[partition]
                return None if found is None else int(found.offset)

        return _run(run())


class AiokafkaMember(PollingMember):
    """The event loop runs all the time in the member's thread, because aiokafka's heartbeats run on it."""

    def __init__(self, bootstrap: str, topic: str, group: str, assignor: str) -> None:
        super().__init__(f"aiokafka member of {group}")
        self._topic = topic
        self._settings: dict[str, Any] = {
            "bootstrap_servers": bootstrap,
            "group_id": group,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
            "session_timeout_ms": SESSION_TIMEOUT_MS,
            "partition_assignment_strategy": [ASSIGNORS[assignor]],
        }

    def open(self) -> None:
        self._runner = asyncio.Runner()

        async def start() -> Any:
            consumer = aiokafka.AIOKafkaConsumer(self._topic, **self._settings)
            await consumer.start()
            return consumer

        try:
            self._consumer = self._runner.run(start())
        except BaseException:
            self._runner.close()
            raise

    def step(self) -> tuple[list[Received], frozenset[int]]:
        async def step() -> list[Received]:
            got = _received(await self._consumer.getmany(timeout_ms=100))
            if got:
                try:
                    await self._consumer.commit()
                except KafkaError:
                    got = []
            return got

        got = self._runner.run(step())
        return got, frozenset(partition.partition for partition in self._consumer.assignment())

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._consumer.stop())


class AiokafkaAdmin:
    """The admin client, on an event loop that a thread keeps running between the calls."""

    def __init__(self, bootstrap: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def start() -> Any:
            admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
            await admin.start()
            return admin

        self._admin = self._call(start())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(READ_TIMEOUT_S)
        except KafkaError as error:
            raise ClientError(getattr(error, "errno", None), repr(error)) from error

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str] | None = None) -> None:
        new = NewTopic(topic, partitions, 1, topic_configs=dict(configs or {}))
        response = self._call(self._admin.create_topics([new]))
        _raise_code(response.topic_errors[0][1])

    def delete_topic(self, topic: str) -> None:
        response = self._call(self._admin.delete_topics([topic]))
        _raise_code(response.topic_error_codes[0][1])

    def topics(self) -> list[str]:
        return list(self._call(self._admin.list_topics()))

    def partition_count(self, topic: str) -> int:
        (described,) = self._call(self._admin.describe_topics([topic]))
        _raise_code(described["error_code"])
        return len(described["partitions"])

    def create_partitions(self, topic: str, total: int) -> None:
        response = self._call(self._admin.create_partitions({topic: NewPartitions(total)}))
        _raise_code(response.topic_errors[0][1])

    def configs(self, topic: str) -> dict[str, str | None]:
        (response,) = self._call(self._admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)]))
        (resource,) = response.resources
        _raise_code(resource[0])
        return {entry[0]: entry[1] for entry in resource[4]}

    def set_config(self, topic: str, name: str, value: str) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {name: value})
        (response,) = self._call(self._admin.alter_configs([resource]))
        _raise_code(response.resources[0][0])

    def delete_records(self, topic: str, before_offset: int) -> int:
        partition = aiokafka.TopicPartition(topic, 0)
        deleted = self._call(self._admin.delete_records({partition: RecordsToDelete(before_offset=before_offset)}))
        return int(deleted[partition])

    def groups(self) -> list[str]:
        return [group[0] for group in self._call(self._admin.list_consumer_groups())]

    def describe_group(self, group: str) -> tuple[str, int]:
        (response,) = self._call(self._admin.describe_consumer_groups([group]))
        code, _, state, _, _, members = response.groups[0][:6]
        _raise_code(code)
        return state, len(members)

    def committed(self, group: str, topic: str) -> dict[int, int]:
        committed = self._call(self._admin.list_consumer_group_offsets(group))
        return {partition.partition: int(at.offset) for partition, at in committed.items() if partition.topic == topic}

    def close(self) -> None:
        self._call(self._admin.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(READ_TIMEOUT_S)
        self._loop.close()


def _raise_code(code: int) -> None:
    if code:
        raise ClientError(code, for_code(code).__name__)


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except KafkaError as error:
        raise ClientError(getattr(error, "errno", None), repr(error)) from error


@asynccontextmanager
async def _consumer(bootstrap: str, isolation_level: str = "read_uncommitted") -> AsyncIterator[Any]:
    consumer = aiokafka.AIOKafkaConsumer(
        bootstrap_servers=bootstrap, enable_auto_commit=False, isolation_level=isolation_level
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


def _received(polled: Mapping[Any, Sequence[Any]]) -> list[Received]:
    return [
        Received(record.partition, record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
        for records in polled.values()
        for record in records
    ]
