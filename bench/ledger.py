"""What a ledger costs a producer: records/s with and without one, for each client, against one node.

    .venv/bin/python bench/ledger.py [--size 1000]

Rounds with and without take turns and the best of each counts. CPU is that of the producer's process, per record.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import topics  # noqa: E402
from tests.support.node import Node  # noqa: E402

import chronik  # noqa: E402

ROUNDS = 4
TOPIC = "ledger-bench"
Produce = Callable[[str, bytes, int, "chronik.Ledger | None"], None]


def confluent(bootstrap: str, value: bytes, count: int, ledger: chronik.Ledger | None) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000})
    for number in range(count):
        if ledger is None:
            producer.produce(TOPIC, value, b"%d" % number)
        else:
            producer.produce(TOPIC, value, b"%d" % number, on_delivery=ledger.confluent)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()


def confluent_callback(bootstrap: str, value: bytes, count: int, ledger: chronik.Ledger | None) -> None:
    """With an empty callback where there is no ledger: what any program that looks at its reports pays."""
    from confluent_kafka import Producer

    def seen(error: object, message: object) -> None:
        pass

    report = seen if ledger is None else ledger.confluent
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000})
    for number in range(count):
        producer.produce(TOPIC, value, b"%d" % number, on_delivery=report)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()


def kafka_python(bootstrap: str, value: bytes, count: int, ledger: chronik.Ledger | None) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=bootstrap, linger_ms=5, batch_size=64 * 1024)
    for number in range(count):
        key = b"%d" % number
        sent = producer.send(TOPIC, value, key)
        if ledger is not None:
            sent.add_callback(ledger.kafka_python(key, value))
    producer.flush()
    producer.close()


def aiokafka(bootstrap: str, value: bytes, count: int, ledger: chronik.Ledger | None) -> None:
    from aiokafka import AIOKafkaProducer

    async def run() -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5, max_batch_size=64 * 1024) as producer:
            for number in range(count):
                key = b"%d" % number
                sent = await producer.send(TOPIC, value, key)
                if ledger is not None:
                    sent.add_done_callback(ledger.aiokafka(key, value))
            await producer.flush()

    asyncio.run(run())


def measure(produce: Produce, bootstrap: str, value: bytes, count: int, folder: Path) -> None:
    best: dict[bool, tuple[float, float]] = {}
    for _ in range(ROUNDS):
        for with_ledger in (False, True):
            ledger = chronik.Ledger(folder / "ledger.jsonl", append=False) if with_ledger else None
            started_s, cpu_s = time.perf_counter(), time.process_time()
            produce(bootstrap, value, count, ledger)
            if ledger is not None:
                ledger.close()
            took = time.perf_counter() - started_s, time.process_time() - cpu_s
            best[with_ledger] = min(best.get(with_ledger, took), took)
    plain, kept = best[False], best[True]
    print(
        f"{produce.__name__:18} {len(value)} B: {count / plain[0]:9,.0f}/s without, {count / kept[0]:9,.0f}/s with "
        f"({kept[0] / plain[0] - 1:+.1%}); CPU {plain[1] / count * 1e6:.2f} and {kept[1] / count * 1e6:.2f} us/record",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=100)
    size_bytes = parser.parse_args().size
    folder = Path(tempfile.mkdtemp(prefix="chronik-bench-"))
    node = Node(folder).start()
    try:
        topics.create(node.bootstrap, TOPIC, 3)
        for produce, count in (
            (confluent, 200_000),
            (confluent_callback, 200_000),
            (kafka_python, 30_000),
            (aiokafka, 30_000),
        ):
            measure(produce, node.bootstrap, b"x" * size_bytes, count, folder)
        node.terminate()
    finally:
        if node.is_running:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
