"""The audit of a ledger, the log and a Delta table with 2 million rows each, from the moment that Spark is ready."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from confluent_kafka import Producer
from tests.support import topics
from tests.support.node import Node

from bench.filling import PARTITIONS
from bench.one_node import OwnRows, running_node
from chronik.client.ledger import Ledger
from chronik.pipeline.audit.job import AuditRequest, prepare, run
from chronik.pipeline.land.topic_landing import LandSettings, TopicLanding, topic_ids
from chronik.pipeline.session import java_fault, spark_session

T = TypeVar("T")

RECORDS, QUICK_RECORDS, RECORD_BYTES = 2_000_000, 100_000, 100
TOPIC = "audited"
SLICE = 10_000
ROUNDS = 3


def audit_table(rows: OwnRows, *, quick: bool) -> None:
    if fault := java_fault():
        rows.say(f"skipped: audit-table: {fault}")
        return
    records = QUICK_RECORDS if quick else RECORDS
    with running_node(durability="replicated") as node:
        ledger, tables = node.folder / "acked.jsonl", node.folder / "tables"
        produce(node, ledger, records)
        in_process(land, node.bootstrap, tables, records)
        took_s = []
        for number in range(1 if quick else ROUNDS):
            took_s.append(in_process(audited_s, node.bootstrap, ledger, tables, records))
            rows.say(f"    round {number}: {took_s[-1]:.2f} s")
        workload = f"audit of {records:,} records of 100 B with ledger and Delta table"
        rows.add(workload, "after session start", "s", statistics.median(took_s), "<= 10.0")


def produce(node: Node, path: Path, records: int) -> None:
    topics.create(node.bootstrap, TOPIC, PARTITIONS)
    producer = Producer({"bootstrap.servers": node.bootstrap, "queue.buffering.max.messages": 10 * SLICE})
    with Ledger(path) as ledger:
        for first in range(0, records, SLICE):
            while len(producer) > 5 * SLICE:
                producer.poll(0.05)
            for number in range(first, min(records, first + SLICE)):
                producer.produce(TOPIC, b"%0100d" % number, b"key-%d" % (number % 1000), on_delivery=ledger.confluent)
            producer.poll(0)
        if producer.flush(60) or ledger.failed:
            raise RuntimeError("records were not acknowledged")


def in_process(work: Callable[..., T], *arguments: Any) -> T:
    """Run in a process and a JVM of its own: each audit is the first job of its session, as that of the command."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as one:
        return one.submit(work, *arguments).result()


def land(bootstrap: str, tables: Path, records: int) -> None:
    spark = spark_session("chronik-land", "local[2]")
    settings = LandSettings(bootstrap, str(tables), f"{tables}/.checkpoints", "bench", once=True, wall_ms=lambda: 0)
    job = TopicLanding(spark, TOPIC, topic_ids(bootstrap, [TOPIC])[TOPIC], settings, None, time.monotonic)
    job.start()
    while not job.wait(0.1):
        pass
    if job.rows != records:
        raise RuntimeError(f"{job.rows:,} rows landed, not {records:,}")
    spark.stop()


def audited_s(bootstrap: str, ledger: Path, tables: Path, records: int) -> float:
    spark = spark_session("chronik-audit", "local[2]")
    began_s = time.monotonic()
    request = AuditRequest(bootstrap, TOPIC, ledger=str(ledger), table=str(tables))
    result = run(spark, prepare(request)).to_json()
    took_s = time.monotonic() - began_s
    spark.stop()
    counts = [result[side] for side in ("acked", "readable", "landed", "verified")]
    if result["verdict"] != "complete" or counts != [records] * 4:
        raise RuntimeError(f"the audit found {result['verdict']}: {counts}")
    return took_s
