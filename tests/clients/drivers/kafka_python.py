"""kafka-python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import kafka
import kafka.errors
from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.errors import KafkaError, for_code
from tests.clients.drivers.base import (
    FETCH_WAIT_MS,
    HEARTBEAT_INTERVAL_MS,
    READ_TIMEOUT_S,
    SESSION_TIMEOUT_MS,
    ClientError,
    PollingMember,
    Received,
    Sent,
)
from tests.support.eventually import eventually

ASSIGNORS = {"range": RangePartitionAssignor, "cooperative-sticky": CooperativeStickyAssignor}


class KafkaPython:
    name = "kafka-python"
    sets_timestamps = True

    def produce(
        self, bootstrap: str, topic: str, records: Sequence[Sent], *, codec: str = "none", idempotent: bool = False
    ) -> None:
        with _errors():
            producer = kafka.KafkaProducer(
                bootstrap_servers=bootstrap,
                compression_type=None if codec == "none" else codec,
                enable_idempotence=idempotent,
                acks="all",
                linger_ms=20,
                max_block_ms=3_000,
                max_request_size=4 << 20,
            )
            try:
                sent = [
                    producer.send(
                        topic,
                        value=record.value,
                        key=record.key,
                        headers=list(record.headers),
                        partition=record.partition,
                        timestamp_ms=record.timestamp_ms,
                    )
                    for record in records
                ]
                for future in sent:
                    future.get(READ_TIMEOUT_S)
            finally:
                producer.close(timeout=5)

    def transact(
        self, bootstrap: str, topic: str, transactional_id: str, transactions: Sequence[tuple[Sequence[Sent], bool]]
    ) -> None:
        with _errors():
            producer = kafka.KafkaProducer(
                bootstrap_servers=bootstrap, transactional_id=transactional_id, max_block_ms=15_000
            )
            try:
                producer.init_transactions()
                for records, is_commit in transactions:
                    producer.begin_transaction()
                    for record in records:
                        producer.send(topic, value=record.value, key=record.key, partition=record.partition)
                    producer.flush()
                    if is_commit:
                        producer.commit_transaction()
                    else:
                        producer.abort_transaction()
            finally:
                producer.close(timeout=5)

    def read(
        self,
        bootstrap: str,
        topic: str,
        count: int,
        *,
        partitions: Sequence[int] = (0,),
        isolation_level: str = "read_uncommitted",
    ) -> list[Received]:
        with _errors(), _consumer(bootstrap, isolation_level) as consumer:
            consumer.assign([kafka.TopicPartition(topic, partition) for partition in partitions])
            consumer.seek_to_beginning()
            got: list[Received] = []

            def read_on() -> bool:
                got.extend(_received(consumer.poll(timeout_ms=200)))
                return len(got) >= count

            eventually(read_on, READ_TIMEOUT_S, f"kafka-python reads {count} records of {topic}")
            return got

    def join(self, bootstrap: str, topic: str, group: str, *, assignor: str = "range") -> PollingMember:
        member = KafkaPythonMember(bootstrap, topic, group, assignor)
        member.start()
        return member

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        with _errors(), _consumer(bootstrap) as consumer:
            partition = kafka.TopicPartition(topic, 0)
            found = consumer.offsets_for_times({partition: timestamp_ms})[partition]
            return None if found is None else int(found.offset)


class KafkaPythonMember(PollingMember):
    def __init__(self, bootstrap: str, topic: str, group: str, assignor: str) -> None:
        super().__init__(f"kafka-python member of {group}")
        self._topic = topic
        self._settings = {
            "bootstrap_servers": bootstrap,
            "group_id": group,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
            "session_timeout_ms": SESSION_TIMEOUT_MS,
            "partition_assignment_strategy": [ASSIGNORS[assignor]],
        }

    def open(self) -> None:
        self._consumer = kafka.KafkaConsumer(self._topic, **self._settings)

    def step(self) -> tuple[list[Received], frozenset[int]]:
        got = _received(self._consumer.poll(timeout_ms=100))
        if got:
            try:
                self._consumer.commit()
            except KafkaError:
                got = []
        return got, frozenset(partition.partition for partition in self._consumer.assignment())

    def close(self) -> None:
        self._consumer.close(autocommit=False)


class KafkaPythonAdmin:
    def __init__(self, bootstrap: str) -> None:
        self._admin = kafka.KafkaAdminClient(bootstrap_servers=bootstrap)

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str] | None = None) -> None:
        with _errors():
            self._admin.create_topics(
                {topic: {"num_partitions": partitions, "replication_factor": 1, "configs": dict(configs or {})}}
            )

    def delete_topic(self, topic: str) -> None:
        with _errors():
            self._admin.delete_topics([topic])

    def topics(self) -> list[str]:
        return list(self._admin.list_topics())

    def partition_count(self, topic: str) -> int:
        (described,) = self._admin.describe_topics([topic])
        _raise_code(described["error_code"])
        return len(described["partitions"])

    def create_partitions(self, topic: str, total: int) -> None:
        with _errors():
            self._admin.create_partitions({topic: total})

    def configs(self, topic: str) -> dict[str, str | None]:
        described = self._admin.describe_configs([_topic_resource(topic)], config_filter="all")
        return {name: config["value"] for name, config in _only(_only(described)).items()}

    def set_config(self, topic: str, name: str, value: str) -> None:
        with _errors():
            altered = self._admin.alter_configs([_topic_resource(topic, {name: value})], raise_on_unknown=False)
        _raise_named(_only(_only(altered)))

    def delete_records(self, topic: str, before_offset: int) -> int:
        with _errors():
            partition = kafka.TopicPartition(topic, 0)
            return int(self._admin.delete_records({partition: before_offset})[partition]["low_watermark"])

    def groups(self) -> list[str]:
        return [group["group_id"] for group in self._admin.list_groups()]

    def describe_group(self, group: str) -> tuple[str, int]:
        described = self._admin.describe_groups([group])[group]
        return described["group_state"], len(described["members"])

    def committed(self, group: str, topic: str) -> dict[int, int]:
        committed = self._admin.list_group_offsets({group: None})[group]
        return {partition.partition: int(at.offset) for partition, at in committed.items() if partition.topic == topic}

    def delete_group(self, group: str) -> None:
        with _errors():
            deleted = self._admin.delete_groups([group])
        _raise_named(deleted[group])

    def list_offset(self, topic: str, spec: str) -> int:
        specs = {
            "earliest": OffsetSpec.EARLIEST,
            "latest": OffsetSpec.LATEST,
            "max-timestamp": OffsetSpec.MAX_TIMESTAMP,
        }
        partition = kafka.TopicPartition(topic, 0)
        return int(self._admin.list_partition_offsets({partition: specs[spec]})[partition].offset)

    def close(self) -> None:
        self._admin.close()


def _only(mapping: Mapping[str, Any]) -> Any:
    (value,) = mapping.values()
    return value


def _topic_resource(topic: str, configs: Mapping[str, str] | None = None) -> Any:
    return ConfigResource(ConfigResourceType.TOPIC, topic, configs=None if configs is None else dict(configs))


def _raise_code(code: int) -> None:
    if code:
        raise ClientError(code, for_code(code).__name__)


def _raise_named(result: str) -> None:
    """Some admin calls return text instead of a code: OK, or text that contains the name of the error class."""
    if result == "OK":
        return
    found = re.search(r"\w+Error", result)
    error = getattr(kafka.errors, found[0], None) if found else None
    raise ClientError(getattr(error, "errno", None), result)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except KafkaError as error:
        raise ClientError(getattr(error, "errno", None), repr(error)) from error


@contextmanager
def _consumer(bootstrap: str, isolation_level: str = "read_uncommitted") -> Iterator[Any]:
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=bootstrap,
        enable_auto_commit=False,
        fetch_max_wait_ms=FETCH_WAIT_MS,
        isolation_level=isolation_level,
    )
    try:
        yield consumer
    finally:
        consumer.close(autocommit=False)


def _received(polled: Mapping[Any, Sequence[Any]]) -> list[Received]:
    return [
        Received(record.partition, record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
        for records in polled.values()
        for record in records
    ]
