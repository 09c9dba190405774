"""The clients that `chronik verify` drives: kafka-python and confluent-kafka, as applications use them.

Settings are the clients' own defaults except for those of the experiment (acks, bootstrap, records per poll), so that
verification covers what people run. Idempotence is on with acks=all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from chronik.cli.client_properties import kafka_python_settings
from chronik.cli.confluent import client_settings, silent
from chronik.cli.errors import CliError
from chronik.client.properties import Target

DELIVERY_TIMEOUT_S = 120.0
CLIENTS = ("kafka-python", "confluent")


class Report(NamedTuple):
    """The client's delivery report for one record; offset -1 if the broker gave none (acks=0)."""

    number: int
    error: str | None
    offset: int = -1
    timestamp_ms: int = -1


class Read(NamedTuple):
    """One record that was read."""

    partition: int
    offset: int
    key: bytes | None


class KafkaPythonSender:
    def __init__(self, bootstrap: Target, topic: str, acks: str, report: Callable[[Report], None]) -> None:
        silent("kafka")
        from kafka import KafkaProducer
        from kafka.errors import KafkaError

        self._error = KafkaError
        self._topic = topic
        self._report = report
        with _reaching(bootstrap, KafkaError):
            self._producer = KafkaProducer(
                **kafka_python_settings(bootstrap),
                acks="all" if acks == "all" else int(acks),
                enable_idempotence=acks == "all",
                delivery_timeout_ms=int(DELIVERY_TIMEOUT_S * 1000),
            )

    def send(self, number: int, partition: int, key: bytes, value: bytes) -> None:
        try:
            future = self._producer.send(self._topic, value=value, key=key, partition=partition)
        except self._error as error:
            self._report(Report(number, str(error) or repr(error)))
            return
        future.add_callback(lambda sent: self._report(Report(number, None, sent.offset, sent.timestamp)))
        future.add_errback(lambda error: self._report(Report(number, str(error) or repr(error))))

    def serve_reports(self) -> None:
        """Do nothing: the client's own thread serves reports."""

    def flush(self) -> None:
        with contextlib.suppress(self._error):  # on a timeout, each late record gets its own report, or none
            self._producer.flush(timeout=DELIVERY_TIMEOUT_S)

    def close(self) -> None:
        self._producer.close(timeout=10.0)


class KafkaPythonReader:
    def __init__(self, bootstrap: Target, topic: str, starts: dict[int, int], max_records: int) -> None:
        silent("kafka")
        from kafka import KafkaConsumer, TopicPartition
        from kafka.errors import KafkaError

        with _reaching(bootstrap, KafkaError):
            self._consumer = KafkaConsumer(
                **kafka_python_settings(bootstrap),
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                max_poll_records=max_records,
            )
        partitions = [TopicPartition(topic, partition) for partition in starts]
        self._consumer.assign(partitions)
        for partition in partitions:
            self._consumer.seek(partition, starts[partition.partition])

    def poll(self, timeout_s: float) -> Sequence[Read]:
        polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000))
        return [Read(r.partition, r.offset, r.key) for records in polled.values() for r in records]

    def close(self) -> None:
        self._consumer.close(autocommit=False)


class ConfluentSender:
    def __init__(self, bootstrap: Target, topic: str, acks: str, report: Callable[[Report], None]) -> None:
        from confluent_kafka import KafkaException, Producer

        self._error = KafkaException
        self._topic = topic
        self._report = report
        timeout_ms = int(DELIVERY_TIMEOUT_S * 1000)
        self._producer = Producer(
            client_settings(bootstrap, acks=acks, enable_idempotence=acks == "all", message_timeout_ms=timeout_ms)
        )
        _reach_confluent(self._producer, topic, bootstrap)

    def send(self, number: int, partition: int, key: bytes, value: bytes) -> None:
        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                self._report(Report(number, error.str()))
            else:
                self._report(Report(number, None, message.offset(), message.timestamp()[1]))

        while True:
            try:
                self._producer.produce(self._topic, value, key, partition, on_delivery=delivered)
                return
            except BufferError:
                self._producer.poll(0.1)
            except self._error as error:
                self._report(Report(number, error.args[0].str()))
                return

    def serve_reports(self) -> None:
        self._producer.poll(0)

    def flush(self) -> None:
        self._producer.flush(DELIVERY_TIMEOUT_S)

    def close(self) -> None:
        self._producer.flush(0)


class ConfluentReader:
    def __init__(self, bootstrap: Target, topic: str, starts: dict[int, int], max_records: int) -> None:
        from confluent_kafka import Consumer, TopicPartition

        self._max_records = max_records
        self._consumer: Any = Consumer(
            client_settings(
                bootstrap, group_id=f"{topic}-reader", enable_auto_commit=False, auto_offset_reset="earliest"
            )
        )
        _reach_confluent(self._consumer, topic, bootstrap)
        self._consumer.assign([TopicPartition(topic, partition, offset) for partition, offset in starts.items()])

    def poll(self, timeout_s: float) -> Sequence[Read]:
        # `consume` waits for the full number of records. So wait for the first record only, and take the others if
        # available.
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        messages = [first, *(self._consumer.consume(self._max_records - 1, 0) if self._max_records > 1 else ())]
        return [Read(m.partition(), m.offset(), m.key()) for m in messages if m.error() is None]

    def close(self) -> None:
        self._consumer.close()


Sender = KafkaPythonSender | ConfluentSender
"""A producer for one topic. The client may deliver reports on its own thread."""
Reader = KafkaPythonReader | ConfluentReader
"""A consumer of all partitions of one topic, without a group."""


def open_sender(client: str, bootstrap: Target, topic: str, acks: str, report: Callable[[Report], None]) -> Sender:
    return (KafkaPythonSender if client == "kafka-python" else ConfluentSender)(bootstrap, topic, acks, report)


def open_reader(client: str, bootstrap: Target, topic: str, starts: dict[int, int], max_records: int) -> Reader:
    return (KafkaPythonReader if client == "kafka-python" else ConfluentReader)(bootstrap, topic, starts, max_records)


def _reach_confluent(client: Any, topic: str, bootstrap: Target) -> None:
    """Connect now: librdkafka connects lazily, and a wrong address must show before the first record."""
    from confluent_kafka import KafkaException

    with _reaching(bootstrap, KafkaException):
        client.list_topics(topic, timeout=30.0)


@contextlib.contextmanager
def _reaching(bootstrap: Target, failure: type[Exception]) -> Iterator[None]:
    try:
        yield
    except failure as error:
        raise CliError(f"no broker answers at {bootstrap} ({error}): start one, or pass -b HOST:PORT") from None
