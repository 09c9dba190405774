"""Consume, transform, produce: the output and the offsets of the input commit together, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import confluent_kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioTopicPartition
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonTopicPartition
from kafka.structs import OffsetAndMetadata
from tests.clients.conftest import NewName
from tests.support.eventually import eventually

RECORDS = [b"%d" % number for number in range(20)]
BATCH = 5
TIMEOUT_S = 20


def outcomes() -> list[bool]:
    """Whether each transaction commits: every second one aborts first."""
    return [is_commit for _ in range(len(RECORDS) // BATCH) for is_commit in (False, True)]


def confluent_app(bootstrap: str, source: str, target: str, group: str) -> int:
    """Return the group's committed offset."""
    settings = {"bootstrap.servers": bootstrap}
    producer = confluent_kafka.Producer({**settings, "transactional.id": f"app-{group}"})
    producer.init_transactions(TIMEOUT_S)
    partition = confluent_kafka.TopicPartition(source, 0)
    for is_commit in outcomes():
        # A new member in each transaction: its position is the committed offset, once that is stable.
        consumer = confluent_kafka.Consumer(
            {**settings, "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
        )
        consumer.subscribe([source])
        records: list[confluent_kafka.Message] = []
        while len(records) < BATCH:
            records += consumer.consume(BATCH - len(records), 1.0)
        producer.begin_transaction()
        for record in records:
            producer.produce(target, b"out-" + (record.value() or b""), partition=0)
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), TIMEOUT_S
        )
        if is_commit:
            producer.commit_transaction(TIMEOUT_S)
        else:
            producer.abort_transaction(TIMEOUT_S)
        consumer.close()
    last = confluent_kafka.Consumer({**settings, "group.id": group})
    (committed,) = last.committed([partition], TIMEOUT_S)
    last.close()
    return int(committed.offset)


def kafka_python_app(bootstrap: str, source: str, target: str, group: str) -> int:
    producer = KafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"app-{group}")
    producer.init_transactions()
    partition = PythonTopicPartition(source, 0)
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False
    )
    consumer.assign([partition])
    committed = 0
    for is_commit in outcomes():
        consumer.seek(partition, committed)
        records: list[Any] = []
        while len(records) < BATCH:
            found = consumer.poll(1_000, max_records=BATCH - len(records))
            records += [record for batch in found.values() for record in batch]
        producer.begin_transaction()
        for record in records:
            producer.send(target, b"out-" + record.value, partition=0)
        producer.send_offsets_to_transaction({partition: OffsetAndMetadata(records[-1].offset + 1, "", -1)}, group)
        if is_commit:
            producer.commit_transaction()
            committed = records[-1].offset + 1
            # The answer to EndTxn precedes the markers, and this client does not ask for stable offsets.
            _wait_for_offset(consumer, partition, committed)
        else:
            producer.abort_transaction()
            assert (consumer.committed(partition) or 0) == committed
    producer.close()
    consumer.close()
    return committed


def _wait_for_offset(consumer: KafkaConsumer, partition: PythonTopicPartition, offset: int) -> None:
    eventually(lambda: consumer.committed(partition) == offset, TIMEOUT_S, f"offset {offset} is committed")


def aiokafka_app(bootstrap: str, source: str, target: str, group: str) -> int:
    return asyncio.run(_aiokafka_app(bootstrap, source, target, group))


async def _aiokafka_app(bootstrap: str, source: str, target: str, group: str) -> int:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"app-{group}")
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False
    )
    partition = AioTopicPartition(source, 0)
    await producer.start()
    await consumer.start()
    consumer.assign([partition])
    committed = 0
    for is_commit in outcomes():
        consumer.seek(partition, committed)
        records = [await asyncio.wait_for(consumer.getone(), TIMEOUT_S) for _ in range(BATCH)]
        await producer.begin_transaction()
        for record in records:
            await producer.send(target, b"out-" + record.value, partition=0)
        await producer.send_offsets_to_transaction({partition: records[-1].offset + 1}, group)
        if is_commit:
            await producer.commit_transaction()
            committed = records[-1].offset + 1
            async with asyncio.timeout(TIMEOUT_S):
                while await consumer.committed(partition) != committed:
                    await asyncio.sleep(0.01)
        else:
            await producer.abort_transaction()
            assert (await consumer.committed(partition) or 0) == committed
    await producer.stop()
    await consumer.stop()
    return committed


@pytest.mark.parametrize("app", [confluent_app, kafka_python_app, aiokafka_app])
def test_each_record_is_transformed_exactly_once(
    app: Callable[[str, str, str, str], int],
    bootstrap: str,
    new_name: NewName,
    create_topic: Callable[[str, int], None],
) -> None:
    source, target, group = new_name("source"), new_name("target"), new_name("group")
    create_topic(source, 1)
    create_topic(target, 1)
    writer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    for value in RECORDS:
        writer.produce(source, value, partition=0)
    assert writer.flush(TIMEOUT_S) == 0

    assert app(bootstrap, source, target, group) == len(RECORDS)

    reader = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": new_name("reader"),
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    reader.assign([confluent_kafka.TopicPartition(target, 0, confluent_kafka.OFFSET_BEGINNING)])
    read: list[bytes] = []
    error: confluent_kafka.KafkaError | None = None
    while error is None:
        record = reader.poll(TIMEOUT_S)
        assert record is not None, "the end of the topic is not reached"
        error = record.error()
        if error is None:
            read.append(record.value() or b"")
    assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF
    reader.close()
    assert read == [b"out-" + value for value in RECORDS]
