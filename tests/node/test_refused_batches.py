"""Idempotent producers of real clients, with some batches refused for a while: all are written, once, in order.

No client receives OUT_OF_ORDER_SEQUENCE_NUMBER, which makes librdkafka start a new epoch.
"""

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
from tests.support.eventually import until

from chronik.node.broker import Broker
from chronik.node.membership.topic_plans import NewTopic
from chronik.node.replicas.partition import Partition
from chronik.storage.disk import StorageFull
from chronik.wire.batch import decode_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

TOPIC = "orders"
RECORDS = 100
PER_BATCH = 1
"""librdkafka limits its pipeline to five records, not batches."""
REFUSED = 3
IN_FLIGHT = 5
SEND_TIMEOUT_S = 10.0


Send = Callable[[str, threading.Event], int]


class Refusing:
    """A partition that refuses some batches, as if its disk were full or replicas were missing.

    The node blocks until the client has sent everything that it sends before the first response.
    """

    def __init__(self, partition: Partition, error: KafkaError, taken: int, has_sent: threading.Event) -> None:
        self.outcomes: list[tuple[int, ErrorCode]] = []
        self._has_sent = has_sent
        self._partition = partition
        self._error = error
        self.is_early = error.code is ErrorCode.not_enough_replicas
        self._taken = taken
        self._left = REFUSED
        self._append, partition.append = partition.append, self.append  # type: ignore[method-assign, assignment]
        self._log_append, partition.log.append = partition.log.append, self.log_append  # type: ignore[method-assign, assignment]
        if self.is_early:
            partition.check_enough_replicas = self.refuse  # type: ignore[method-assign]

    def refuse(self) -> None:
        if self._taken:
            self._taken -= 1
            return
        assert self._has_sent.wait(SEND_TIMEOUT_S)
        if self._left:
            self._left -= 1
            raise self._error

    def log_append(self, *arguments: Any) -> Any:
        if not self.is_early:
            self.refuse()
        return self._log_append(*arguments)

    def append(self, records: memoryview, *arguments: Any) -> Any:
        sequence = read_batch_header(records).base_sequence
        try:
            result = self._append(records, *arguments)
        except KafkaError as error:
            self.outcomes.append((sequence, error.code))
            raise
        self.outcomes.append((sequence, ErrorCode.none))
        return result


def with_confluent(bootstrap: str, has_sent: threading.Event) -> int:
    """Send with a pipeline of five batches."""
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
    """Send one batch after the other."""
    has_sent.set()
    producer = kafka.KafkaProducer(
        bootstrap_servers=bootstrap, enable_idempotence=True, batch_size=200, retry_backoff_ms=20
    )
    sent = [producer.send(TOPIC, b"%d" % number, partition=0) for number in range(RECORDS)]
    acknowledged = sum(future.get(SEND_TIMEOUT_S) is not None for future in sent)
    producer.close()
    return acknowledged


def batches(partition: Partition) -> Iterator[tuple[int, list[int]]]:
    """Return the producer epoch and the values of each batch."""
    data = bytes(partition.log.read_job(0, 1 << 30, partition.high_watermark)())
    at = 0
    while at < len(data):
        header = read_batch_header(data, at)
        records = decode_batch(data[at : at + header.size_bytes])
        yield header.producer_epoch, [int(record.value or b"") for record in records]
        at += header.size_bytes


async def sent(broker: Broker, error: KafkaError, taken: int, send: Send) -> Refusing:
    await broker.topics.create(NewTopic(TOPIC, num_partitions=1))
    partition = broker.host.partitions[(TOPIC, 0)]
    has_sent = threading.Event()
    refusing = Refusing(partition, error, taken, has_sent)
    assert await asyncio.to_thread(send, f"127.0.0.1:{broker.server.port}", has_sent) == RECORDS
    assert [value for _, values in batches(partition) for value in values] == list(range(RECORDS))
    return refusing


@pytest.mark.parametrize("send", [with_confluent, with_kafka_python])
@pytest.mark.parametrize("taken", [0, 20], ids=["first", "later"])
@pytest.mark.parametrize(
    "error",
    [StorageFull("no room"), KafkaError(ErrorCode.not_enough_replicas, "1 of 2")],
    ids=["storage", "replicas"],
)
async def test_records_keep_their_order_when_batches_are_refused(
    tmp_path: Path, send: Send, taken: int, error: KafkaError
) -> None:
    async with LocalNodes(tmp_path, 1, default_replication_factor=1) as nodes:
        (broker,) = await nodes.start_all()
        refusing = await sent(broker, error, taken, send)
        refusals = [code for _, code in refusing.outcomes if code]
        assert set(refusals) <= {error.code}
        if send is with_confluent and not taken:
            # Later batches had to wait when the log accepted batches again, so librdkafka resent them.
            assert len(refusals) > (0 if refusing.is_early else REFUSED)
        assert {epoch for epoch, _ in batches(broker.host.partitions[(TOPIC, 0)])} == {0}


async def test_a_leader_with_a_full_disk_forwards_no_batch_after_a_refused_one(
    tmp_path: Path,
) -> None:
    """Found by `make soak`, full-disk: the next leader answered a forwarded batch with OUT_OF_ORDER_SEQUENCE_NUMBER."""

    async with LocalNodes(tmp_path) as nodes:
        brokers = await nodes.start_all()
        await brokers[0].topics.create(NewTopic(TOPIC, num_partitions=1))
        where = (TOPIC, 0)
        await until(lambda: all(where in broker.host.partitions for broker in brokers), "all nodes have it")
        led = await until(lambda: next((b for b in brokers if b.host.partitions[where].leads), None), "one leads")
        has_sent = threading.Event()
        Refusing(led.host.partitions[where], StorageFull("no room"), 20, has_sent)
        sending = asyncio.to_thread(with_confluent, f"127.0.0.1:{led.server.port}", has_sent)
        assert await sending == RECORDS
        other = next(broker for broker in brokers if broker.host.partitions[where].leads)
        assert other is not led
        found = list(batches(other.host.partitions[where]))
        assert [value for _, values in found for value in values] == list(range(RECORDS))
        assert {epoch for epoch, _ in found} == {0}
