"""Transactions: throughput, commit latency, read_committed consumers, and the failover of a coordinator with many ids.

The client is librdkafka. A transaction ends when commit_transaction() returns: then its outcome is durable.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import KafkaException, Producer

from bench.clients import NotMeasured, Topic, drive
from bench.processes import usage_of
from bench.samples import Figure
from bench.workloads import KILOBYTE_RECORD, MEGABYTE, PARTITIONS, SETTLE_S, SIZE_NAMES, Life
from chronik.cli.bench_report import percentiles
from chronik.cli.client_properties import librdkafka_settings
from chronik.cli.options import with_cluster
from chronik.client.cluster import TRANSACTION_COORDINATOR, Cluster, Deadline
from chronik.client.errors import raise_for
from chronik.wire.api import ApiKey

TRANSACTION_S = 0.1
SMALL_RECORDS = 10
ABORTED_EVERY = 5
WAIT_S_MAX = 60.0
IDS_AT_ONCE = 100
TIMEOUT_MS = 60_000


class TransactionalProducer:
    """One producer of librdkafka. Raises NotMeasured if a transaction fails."""

    def __init__(self, topic: Topic, transactional_id: str | None = None, linger_ms: float = 5.0) -> None:
        self._topic = topic.name
        self._producer = Producer(
            {
                **librdkafka_settings(topic.bootstrap),
                "transactional.id": transactional_id or topic.name,
                "linger.ms": linger_ms,
                "log_level": 0,
            }
        )
        self._producer.init_transactions(WAIT_S_MAX)
        self.commit_small(b"first")  # connect to all leaders before the measurement

    def commit_for(self, seconds: float, value: bytes, *, aborts: bool = False) -> int:
        """Send records for this long, commit (or abort) them, and return their number."""
        until_s, sent = time.monotonic() + seconds, 0
        self._producer.begin_transaction()
        while time.monotonic() < until_s:
            for _ in range(100):
                try:
                    self._producer.produce(self._topic, value)
                except BufferError:
                    self._producer.poll(0.01)
                    break
                sent += 1
            self._producer.poll(0)
        if aborts:
            self._abort()
        else:
            self._commit()
        return sent

    def commit_small(self, value: bytes) -> None:
        """Commit ten records, over all partitions."""
        self._producer.begin_transaction()
        for number in range(SMALL_RECORDS):
            self._producer.produce(self._topic, value, partition=number % PARTITIONS)
        self._commit()

    def commit_until_one_succeeds(self, partition: int) -> None:
        """Repeat a transaction of one record until it is committed."""
        until_s = time.monotonic() + WAIT_S_MAX
        while True:
            try:
                self._producer.begin_transaction()
                self._producer.produce(self._topic, b"after", partition=partition)
                self._producer.commit_transaction(WAIT_S_MAX)
                return
            except KafkaException as error:
                if time.monotonic() > until_s or not error.args[0].txn_requires_abort():
                    raise NotMeasured(f"no commit after the failover: {error}") from None
                self._producer.abort_transaction(WAIT_S_MAX)

    def _abort(self) -> None:
        try:
            # Without it, librdkafka drops records instead of sending them.
            left = self._producer.flush(WAIT_S_MAX)
            self._producer.abort_transaction(WAIT_S_MAX)
        except KafkaException as error:
            raise NotMeasured(f"a transaction was not aborted: {error}") from None
        if left:
            raise NotMeasured(f"{left} records of an aborted transaction were not sent")

    def _commit(self) -> None:
        try:
            self._producer.commit_transaction(WAIT_S_MAX)
        except KafkaException as error:
            raise NotMeasured(f"a transaction was not committed: {error}") from None


def produce(life: Life) -> Iterator[Figure]:
    """One producer that commits every 100 ms, with librdkafka's own batching."""
    for size_bytes in SIZE_NAMES:
        value = os.urandom(size_bytes)
        with Topic(life.server, PARTITIONS) as topic:
            producer = TransactionalProducer(topic)
            before, started_s = usage_of(life.server.pids), time.monotonic()
            sent = 0
            while time.monotonic() - started_s < life.scale.seconds(5.0):
                sent += producer.commit_for(TRANSACTION_S, value)
            seconds, after = time.monotonic() - started_s, usage_of(life.server.pids)
        workload = f"transactions of 100 ms, {SIZE_NAMES[size_bytes]}, {life.setup}"
        cpu_s = after.cpu_s - before.cpu_s
        usage: dict[str, Any] = {"cpu_s": cpu_s, "resident_mb": after.resident_bytes / MEGABYTE}
        yield Figure(workload, "records", "1/s", sent / seconds, ">= 1.0", **usage)
        cost = cpu_s * 1000 / (sent * size_bytes / MEGABYTE)
        yield Figure(workload, "server CPU", "ms/MB", cost, "<= 1.0", **usage)


def commit_latency(life: Life) -> Iterator[Figure]:
    """Measure from begin_transaction() until commit_transaction() returns, one transaction after another."""
    count = 50 if life.scale.quick else 500
    value = os.urandom(KILOBYTE_RECORD)
    latencies_ms: list[float] = []
    with Topic(life.server, PARTITIONS) as topic:
        producer = TransactionalProducer(topic, linger_ms=0.0)
        before = usage_of(life.server.pids)
        for _ in range(count):
            started_s = time.monotonic()
            producer.commit_small(value)
            latencies_ms.append((time.monotonic() - started_s) * 1000)
        after = usage_of(life.server.pids)
    workload = f"transactions of {SMALL_RECORDS} records in {PARTITIONS} partitions, {life.setup}"
    usage: dict[str, Any] = {"cpu_s": after.cpu_s - before.cpu_s, "resident_mb": after.resident_bytes / MEGABYTE}
    ranked = percentiles(latencies_ms)
    for metric in ("p50", "p99"):
        yield Figure(workload, metric, "ms", ranked[metric] or 0.0, "<= 1.0", **usage)


def read_committed(life: Life) -> Iterator[Figure]:
    """Read the same log with both isolation levels in turn. The first read is not measured.

    One transaction in five is aborted. The ratio compares how much of the log is read in a second: a read_committed
    consumer delivers less of it.
    """
    value = os.urandom(KILOBYTE_RECORD)
    throughput: dict[str, list[float]] = {"read_uncommitted": [], "read_committed": []}
    with Topic(life.server, PARTITIONS) as topic:
        producer = TransactionalProducer(topic)
        sent, aborted, wanted = SMALL_RECORDS, 0, life.scale.records(400_000)
        for number in itertools.count(1):
            aborts = number % ABORTED_EVERY == 0
            records = producer.commit_for(TRANSACTION_S, value, aborts=aborts)
            sent += records
            aborted += records if aborts else 0
            if sent >= wanted and aborted:
                break
        visible = {"read_uncommitted": sent, "read_committed": sent - aborted}
        drive(topic, "consume", sent, KILOBYTE_RECORD, isolation_level="read_uncommitted")
        for level in (*throughput, *reversed(throughput), *throughput):
            figures = drive(topic, "consume", visible[level], KILOBYTE_RECORD, isolation_level=level)
            throughput[level].append(figures["mb_per_s"])
    workload = f"consume 1 KB in transactions, one in five aborted, 1 consumer, {life.setup.nodes} node"
    committed, uncommitted = (statistics.median(throughput[level]) for level in ("read_committed", "read_uncommitted"))
    yield Figure(workload, "read_committed", "MB/s", committed, ">= 1.0")
    yield Figure(
        workload,
        "log read, read_committed by read_uncommitted",
        "ratio",
        committed / uncommitted * sent / visible["read_committed"],
        ">= 0.95",
        is_own_goal=True,
    )


def many_ids(count: int) -> Callable[[Life], Iterator[Figure]]:
    """Measure what so many transactional ids cost, and how soon a new coordinator of a third of them commits."""

    def run(life: Life) -> Iterator[Figure]:
        ids = [f"bench-{number}" for number in range(count // 20 if life.scale.quick else count)]
        workload = f"{count:,} transactional ids, {life.setup.nodes} nodes"
        with Topic(life.server, PARTITIONS, is_kept=True) as topic:
            producer = TransactionalProducer(topic, ids[0])
            before = usage_of(life.server.pids)
            with_cluster(topic.bootstrap, lambda cluster: _register(cluster, ids[1:]), WAIT_S_MAX)
            time.sleep(life.scale.seconds(SETTLE_S))
            added_mb = (usage_of(life.server.pids).resident_bytes - before.resident_bytes) / MEGABYTE
            yield Figure(workload, "resident memory added", "MB", added_mb, "<= 30.0", is_own_goal=True)
            coordinator, partition = with_cluster(topic.bootstrap, lambda cluster: _target(cluster, ids[0], topic.name))
            producer.commit_small(b"before")
            killed_s = time.monotonic()
            life.server.kill(coordinator)
            producer.commit_until_one_succeeds(partition)
            passed_s = time.monotonic() - killed_s
            yield Figure(workload, "coordinator killed, commit after", "s", passed_s, "<= 2.0", is_own_goal=True)

    return run


async def _register(cluster: Cluster, ids: list[str]) -> None:
    """Send InitProducerId for each id."""

    async def register(name: str) -> None:
        values = {
            "transactional_id": name,
            "transaction_timeout": TIMEOUT_MS,
            "producer_id": -1,
            "producer_epoch": -1,
        }

        def check(response: Any) -> None:
            raise_for(response, f"producer id of {name}")

        await cluster.call(ApiKey.INIT_PRODUCER_ID, values, check, transactional_id=name, at_most=5)

    for first in range(0, len(ids), IDS_AT_ONCE):
        await asyncio.gather(*(register(name) for name in ids[first : first + IDS_AT_ONCE]))


async def _target(cluster: Cluster, transactional_id: str, topic: str) -> tuple[int, int]:
    """Return the coordinator of the id, and a partition of the topic that another node leads."""
    coordinator = await cluster.coordinator(transactional_id, Deadline(WAIT_S_MAX), TRANSACTION_COORDINATOR)
    leaders = await cluster.leaders(topic)
    return coordinator, next(partition for partition, leader in leaders.items() if leader != coordinator)
