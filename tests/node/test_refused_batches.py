"""Real idempotent producers whose first batches are refused for a while: all records are written, once, in order."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import kafka
import pytest
from tests.node.cluster_harness import LocalNodes

from chronik.node.broker import Broker
from chronik.node.partition import Partition
from chronik.node.topic_creation import NewTopic, create_topic
from chronik.storage.errors import StorageFull
from chronik.wire.batch import decode_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

TOPIC = "orders"
OUT_OF_ORDER = ErrorCode.out_of_order_sequence_number
RECORDS = 100
PER_BATCH = 1
"""What librdkafka pipelines is limited to five records, not batches."""
REFUSED = 3
IN_FLIGHT = 5
SEND_TIMEOUT_S = 10.0


Send = Callable[[str, threading.Event], int]


class Refusing:
    """A partition that does not take the first batches it is sent, as if its disk were full or replicas missing.

    The node stands still until the client has sent what it sends before the first answer.
    """

    def __init__(self, partition: Partition, error: KafkaError, has_sent: threading.Event) -> None:
        self.outcomes: list[tuple[int, ErrorCode]] = []
        self._has_sent = has_sent
        self._partition = partition
        self._error = error
        self._is_early = error.code is ErrorCode.not_enough_replicas
        self._left = REFUSED
        self._append, partition.append = partition.append, self.append  # type: ignore[method-assign]
        self._log_append, partition.log.append = partition.log.append, self.log_append  # type: ignore[method-assign, assignment]
        if self._is_early:
            partition.check_enough_replicas = self.refuse  # type: ignore[method-assign]

    def refuse(self) -> None:
        assert self._has_sent.wait(SEND_TIMEOUT_S)
        if self._left:
            self._left -= 1
            raise self._error

    def log_append(self, *arguments: Any) -> Any:
        if not self._is_early:
            self.refuse()
        return self._log_append(*arguments)

    def append(self, records: memoryview, now_ms: int) -> Any:
        sequence = read_batch_header(records).base_sequence
        try:
            result = self._append(records, now_ms)
        except KafkaError as error:
            self.outcomes.append((sequence, error.code))
            raise
        self.outcomes.append((sequence, ErrorCode.none))
        return result


def with_confluent(bootstrap: str, has_sent: threading.Event) -> int:
    """Pipelines five batches."""
    failures: list[str] = []

    def told(statistics: str) -> None:
        brokers = json.loads(statistics)["brokers"].values()
        if max(broker["waitresp_cnt"] for broker in brokers) == IN_FLIGHT:
            has_sent.set()

    def delivered(error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
        if error is not None:
            failures.append(error.str())

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": 100,
            "batch.num.messages": PER_BATCH,
            "retry.backoff.ms": 20,
            "max.in.flight.requests.per.connection": IN_FLIGHT,
            "statistics.interval.ms": 20,
            "stats_cb": told,
            "error_cb": lambda error: failures.append(error.str()),
        }
    )
    for number in range(RECORDS):
        producer.produce(TOPIC, b"%d" % number, partition=0, on_delivery=delivered)
    left = producer.flush(SEND_TIMEOUT_S)
    assert not failures
    return RECORDS - int(left)


def with_kafka_python(bootstrap: str, has_sent: threading.Event) -> int:
    """Sends one batch after the other."""
    has_sent.set()
    producer = kafka.KafkaProducer(
        bootstrap_servers=bootstrap, enable_idempotence=True, batch_size=200, retry_backoff_ms=20
    )
    sent = [producer.send(TOPIC, b"%d" % number, partition=0) for number in range(RECORDS)]
    acknowledged = sum(future.get(SEND_TIMEOUT_S) is not None for future in sent)
    producer.close()
    return acknowledged


def values(partition: Partition) -> Iterator[int]:
    data = bytes(partition.log.read_job(0, 1 << 30, partition.high_watermark)())
    at = 0
    while at < len(data):
        size_bytes = read_batch_header(data, at).size_bytes
        yield from (int(record.value or b"") for record in decode_batch(data[at : at + size_bytes]))
        at += size_bytes


async def sent(broker: Broker, error: KafkaError, send: Send) -> Refusing:
    await create_topic(broker, NewTopic(TOPIC, num_partitions=1))
    partition = broker.host.partitions[(TOPIC, 0)]
    has_sent = threading.Event()
    refusing = Refusing(partition, error, has_sent)
    assert await asyncio.to_thread(send, f"127.0.0.1:{broker.server.port}", has_sent) == RECORDS
    assert list(values(partition)) == list(range(RECORDS))
    return refusing


@pytest.mark.parametrize("send", [with_confluent, with_kafka_python])
@pytest.mark.parametrize(
    "error",
    [StorageFull("no room"), KafkaError(ErrorCode.not_enough_replicas, "1 of 2")],
    ids=["storage", "replicas"],
)
def test_records_keep_their_order_when_the_first_batches_are_refused(
    tmp_path: Path, send: Send, error: KafkaError
) -> None:
    async def story() -> None:
        async with LocalNodes(tmp_path, 1, default_replication_factor=1) as nodes:
            (broker,) = await nodes.start_all()
            refusing = await sent(broker, error, send)
            if send is with_confluent:
                # What came behind when the log took batches again had to wait, and librdkafka sent it again.
                assert OUT_OF_ORDER in {code for _, code in refusing.outcomes}

    asyncio.run(story())
