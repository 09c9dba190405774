"""confluent-kafka, which wraps librdkafka."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import confluent_kafka as ck
import confluent_kafka.admin
from tests.clients.drivers.base import (
    FETCH_WAIT_MS,
    HEARTBEAT_INTERVAL_MS,
    READ_TIMEOUT_S,
    SERVER_ASSIGNORS,
    SESSION_TIMEOUT_MS,
    ClientError,
    PollingMember,
    Received,
    Sent,
)
from tests.support.eventually import eventually

# Its admin package is typed, but declares no exports.
cka: Any = confluent_kafka.admin

ADMIN_TIMEOUT_S = 10.0


class Confluent:
    name = "confluent-kafka"
    sets_timestamps = True

    def produce(
        self, bootstrap: str, topic: str, records: Sequence[Sent], *, codec: str = "none", idempotent: bool = False
    ) -> None:
        failures: list[ck.KafkaError] = []
        producer = ck.Producer(
            {
                "bootstrap.servers": bootstrap,
                "compression.type": codec,
                "enable.idempotence": idempotent,
                "acks": "all",
                "linger.ms": 20,
                "message.timeout.ms": 10_000,
                "topic.metadata.propagation.max.ms": 2_000,
                "message.max.bytes": 4 << 20,
            }
        )

        def delivered(error: ck.KafkaError | None, _message: ck.Message) -> None:
            if error is not None:
                failures.append(error)

        for record in records:
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers),
                partition=record.partition,
                timestamp=record.timestamp_ms or 0,
                on_delivery=delivered,
            )
        unsent = producer.flush(READ_TIMEOUT_S)
        if failures:
            raise ClientError(failures[0].code(), failures[0].str())
        if unsent:
            raise ClientError(None, f"{unsent} records were not sent within {READ_TIMEOUT_S} s")

    def transact(
        self, bootstrap: str, topic: str, transactional_id: str, transactions: Sequence[tuple[Sequence[Sent], bool]]
    ) -> None:
        producer = ck.Producer({"bootstrap.servers": bootstrap, "transactional.id": transactional_id})
        producer.init_transactions(READ_TIMEOUT_S)
        for records, is_commit in transactions:
            producer.begin_transaction()
            for record in records:
                producer.produce(topic, value=record.value, key=record.key, partition=record.partition)
            if is_commit:
                producer.commit_transaction(READ_TIMEOUT_S)
            else:
                producer.flush(READ_TIMEOUT_S)
                producer.abort_transaction(READ_TIMEOUT_S)

    def read(
        self,
        bootstrap: str,
        topic: str,
        count: int,
        *,
        partitions: Sequence[int] = (0,),
        isolation_level: str = "read_committed",
    ) -> list[Received]:
        with _consumer(bootstrap, isolation_level) as consumer:
            consumer.assign([ck.TopicPartition(topic, partition, ck.OFFSET_BEGINNING) for partition in partitions])
            got: list[Received] = []

            def read_on() -> bool:
                got.extend(_received(consumer.consume(count, timeout=0.2)))
                return len(got) >= count

            eventually(read_on, READ_TIMEOUT_S, f"confluent-kafka reads {count} records of {topic}")
            return got

    def join(self, bootstrap: str, topic: str, group: str, *, assignor: str = "range") -> PollingMember:
        member = ConfluentMember(bootstrap, topic, group, assignor)
        member.start()
        return member

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        with _consumer(bootstrap) as consumer:
            (found,) = consumer.offsets_for_times([ck.TopicPartition(topic, 0, timestamp_ms)], timeout=ADMIN_TIMEOUT_S)
            if found.error is not None:
                raise ClientError(found.error.code(), found.error.str())
            return None if found.offset < 0 else int(found.offset)


class ConfluentMember(PollingMember):
    def __init__(self, bootstrap: str, topic: str, group: str, assignor: str, instance_id: str | None = None) -> None:
        super().__init__(f"confluent-kafka member of {group}")
        self.assignments = 0
        self.topics: set[str] = set()
        self.values: set[bytes | None] = set()
        """Of every record that it received, whether its commit succeeded or not."""
        self._topic = topic
        self._settings: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "heartbeat.interval.ms": HEARTBEAT_INTERVAL_MS,
            "session.timeout.ms": SESSION_TIMEOUT_MS,
            "partition.assignment.strategy": assignor,
        }
        if instance_id is not None:
            self._settings["group.instance.id"] = instance_id
        if assignor in SERVER_ASSIGNORS:
            # The broker sets the timeouts of the new protocol, and librdkafka refuses them in its own settings.
            for setting in ("heartbeat.interval.ms", "session.timeout.ms", "partition.assignment.strategy"):
                del self._settings[setting]
            self._settings |= {"group.protocol": "consumer", "group.remote.assignor": SERVER_ASSIGNORS[assignor]}

    def open(self) -> None:
        self._consumer = ck.Consumer(self._settings)
        self._consumer.subscribe([self._topic], on_assign=self._assigned)

    def _assigned(self, _consumer: ck.Consumer, _partitions: list[ck.TopicPartition]) -> None:
        self.assignments += 1

    def step(self) -> tuple[list[Received], frozenset[int]]:
        got = _received(self._consumer.consume(100, timeout=0.1))
        self.values |= {record.value for record in got}
        if got:
            try:
                results = self._consumer.commit(asynchronous=False)
                if any(result.error is not None for result in results):
                    got = []
            except ck.KafkaException:
                got = []
        assigned = self._consumer.assignment()
        self.topics = {partition.topic for partition in assigned}
        return got, frozenset(partition.partition for partition in assigned)

    def close(self) -> None:
        self._consumer.close()


class ConfluentAdmin:
    def __init__(self, bootstrap: str) -> None:
        self._admin = cka.AdminClient({"bootstrap.servers": bootstrap})

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str] | None = None) -> None:
        _result(self._admin.create_topics([cka.NewTopic(topic, partitions, 1, config=dict(configs or {}))]))

    def delete_topic(self, topic: str) -> None:
        _result(self._admin.delete_topics([topic]))

    def topics(self) -> list[str]:
        return list(self._admin.list_topics(timeout=ADMIN_TIMEOUT_S).topics)

    def partition_count(self, topic: str) -> int:
        return len(_result(self._admin.describe_topics(ck.TopicCollection([topic]))).partitions)

    def create_partitions(self, topic: str, total: int) -> None:
        _result(self._admin.create_partitions([cka.NewPartitions(topic, total)]))

    def configs(self, topic: str) -> dict[str, str | None]:
        described = _result(self._admin.describe_configs([cka.ConfigResource(cka.ResourceType.TOPIC, topic)]))
        return {name: entry.value for name, entry in described.items()}

    def set_config(self, topic: str, name: str, value: str) -> None:
        entry = cka.ConfigEntry(name, value, incremental_operation=cka.AlterConfigOpType.SET)
        resource = cka.ConfigResource(cka.ResourceType.TOPIC, topic, incremental_configs=[entry])
        _result(self._admin.incremental_alter_configs([resource]))

    def delete_records(self, topic: str, before_offset: int) -> int:
        return int(_result(self._admin.delete_records([ck.TopicPartition(topic, 0, before_offset)])).low_watermark)

    def groups(self) -> list[str]:
        with _errors():
            return [group.group_id for group in self._admin.list_consumer_groups().result(ADMIN_TIMEOUT_S).valid]

    def describe_group(self, group: str) -> tuple[str, int]:
        described = _result(self._admin.describe_consumer_groups([group]))
        return described.state.name.replace("_", "").title(), len(described.members)

    def committed(self, group: str, topic: str) -> dict[int, int]:
        asked = [ck.ConsumerGroupTopicPartitions(group)]
        found = _result(self._admin.list_consumer_group_offsets(asked))
        return {at.partition: at.offset for at in found.topic_partitions if at.topic == topic}

    def delete_group(self, group: str) -> None:
        _result(self._admin.delete_consumer_groups([group]))

    def list_offset(self, topic: str, spec: str) -> int:
        specs = {
            "earliest": cka.OffsetSpec.earliest(),
            "latest": cka.OffsetSpec.latest(),
            "max-timestamp": cka.OffsetSpec.max_timestamp(),
        }
        return int(_result(self._admin.list_offsets({ck.TopicPartition(topic, 0): specs[spec]})).offset)

    def close(self) -> None:
        pass


def _result(futures: Mapping[Any, Any]) -> Any:
    """Return the result of the only future in `futures`."""
    (future,) = futures.values()
    with _errors():
        return future.result(ADMIN_TIMEOUT_S)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ck.KafkaException as error:
        raise ClientError(error.args[0].code(), error.args[0].str()) from error


@contextmanager
def _consumer(bootstrap: str, isolation_level: str = "read_committed") -> Iterator[Any]:
    """The default is librdkafka's own."""
    consumer = ck.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "assigned-by-hand",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": FETCH_WAIT_MS,
            "isolation.level": isolation_level,
        }
    )
    try:
        yield consumer
    finally:
        consumer.close()


def _received(messages: Sequence[Any]) -> list[Received]:
    got = []
    for message in messages:
        if message.error() is not None:
            raise ClientError(message.error().code(), message.error().str())
        _, timestamp_ms = message.timestamp()
        headers = tuple(message.headers() or ())
        got.append(
            Received(message.partition(), message.offset(), timestamp_ms, message.key(), message.value(), headers)
        )
    return got
