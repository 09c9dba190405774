"""`chronik demo`: the promise, shown on one machine: start a node, produce, consume, account for every record."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from chronik.cli.account import COLUMNS, Account
from chronik.cli.confluent import client_settings
from chronik.cli.demo_report import report_html
from chronik.cli.errors import CHECK_FAILED, CliError
from chronik.cli.local_node import LocalNode
from chronik.cli.options import with_cluster
from chronik.cli.output import print_table, progress
from chronik.client.topics import Topics

TOPIC = "demo"
PARTITIONS = 3
RECORDS = 100_000
VALUE_BYTES = 100
IDLE_S_MAX = 20.0
BATCH_RECORDS = 1000


def demo(
    report: Annotated[str | None, typer.Option(metavar="FILE.html", help="Write the account as a page.")] = None,
) -> None:
    """Run the whole story on free ports, then tear it down."""
    print(f"Starting a node, then {RECORDS:,} records through it with librdkafka ...", flush=True)
    with LocalNode() as node:
        print(f"Node ready at {node.bootstrap}, metrics at http://{node.http}/metrics", flush=True)
        with_cluster(node.bootstrap, lambda cluster: Topics(cluster).create(TOPIC, PARTITIONS, 1, {}))
        account = Account(PARTITIONS)
        produce_s = _produce(node.bootstrap, account)
        consume_s = _consume(node.bootstrap, account)
    rows, complaint = account.rows(), account.complaint()
    print_table("Account per partition", COLUMNS, [[row[column] for column in COLUMNS] for row in rows], COLUMNS)
    facts = {
        "records": f"{RECORDS:,} of {VALUE_BYTES} bytes, acks=all, idempotent producer, consumer group",
        "produced in": f"{produce_s:.2f} s ({RECORDS / produce_s:,.0f}/s)",
        "consumed in": f"{consume_s:.2f} s ({account.consumed_count / consume_s:,.0f}/s)",
    }
    for name, value in facts.items():
        print(f"{name}: {value}")
    if report is not None:
        _write_report(report, report_html(rows, complaint, facts))
        print(f"report: {report}")
    if complaint is not None:
        raise CliError(complaint, CHECK_FAILED)
    print("Every record that was produced was acknowledged and read once, in order. The node is stopped.")


def _produce(bootstrap: str, account: Account) -> float:
    """Record i goes to partition i modulo their number, so that each partition's order can be checked."""
    from confluent_kafka import Producer

    producer = Producer(client_settings(bootstrap, acks="all", enable_idempotence=True, linger_ms=5))

    def delivered(error: Any, message: Any) -> None:
        if error is None:
            account.acknowledged(message.partition(), int(message.key()))

    started_s = time.monotonic()
    with progress("produce", RECORDS) as bar:
        for number in range(RECORDS):
            partition = number % PARTITIONS
            key = str(number).encode()
            while True:
                try:
                    producer.produce(TOPIC, key.ljust(VALUE_BYTES), key, partition, on_delivery=delivered)
                    break
                except BufferError:
                    producer.poll(0.1)
            account.produced(partition)
            if number % BATCH_RECORDS == 0:
                producer.poll(0)
                bar.update(account.acked_count, f"{account.acked_count:,} acknowledged")
        producer.flush(IDLE_S_MAX)
    return time.monotonic() - started_s


def _consume(bootstrap: str, account: Account) -> float:
    """Reads until all that was acknowledged is there, or nothing has come for a while."""
    from confluent_kafka import Consumer

    consumer: Any = Consumer(client_settings(bootstrap, group_id="demo", auto_offset_reset="earliest"))
    consumer.subscribe([TOPIC])
    started_s = last_s = time.monotonic()
    with progress("consume", RECORDS) as bar:
        while account.consumed_count < account.acked_count and time.monotonic() - last_s < IDLE_S_MAX:
            batch = [message for message in consumer.consume(BATCH_RECORDS, 0.5) if message.error() is None]
            for message in batch:
                account.consumed(message.partition(), message.offset(), int(message.key()))
            if batch:
                last_s = time.monotonic()
                bar.update(account.consumed_count, f"{account.consumed_count:,} consumed")
    consumer.close()
    return last_s - started_s


def _write_report(path: str, page: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as opened:
            opened.write(page)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}; choose another --report") from None
