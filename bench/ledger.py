"""What a ledger costs a producer: with one, with an empty callback in its place, and with neither.

    .venv/bin/python bench/ledger.py [--size 1000] [--client confluent] [--rate 50000]

Each client sends as fast as it can, and at the given rates; rounds take turns and the best of each counts. CPU is that
of the producer's process, per record.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import topics  # noqa: E402
from tests.support.node import Node  # noqa: E402

import chronik  # noqa: E402

ROUNDS = 4
TOPIC = "ledger-bench"
NOTHING, EMPTY, LEDGER = "nothing", "empty callback", "ledger"
RATES = (20_000, 50_000)
PACED_S = 5
SLICES_PER_S = 100


class Run(NamedTuple):
    bootstrap: str
    value: bytes
    count: int
    rate: int
    """Records per second; 0 means as many as possible."""
    report: str
    ledger: chronik.Ledger | None

    def numbers(self) -> Iterator[int]:
        """Yield a number for each record, when it is time to send it."""
        per_slice = self.rate // SLICES_PER_S
        started_s = time.perf_counter()
        for number in range(self.count):
            if per_slice and number % per_slice == 0:
                early_s = started_s + number / self.rate - time.perf_counter()
                if early_s > 0:
                    time.sleep(early_s)
            yield number


def confluent(run: Run) -> None:
    from confluent_kafka import Producer

    def seen(error: object, message: object) -> None:
        pass

    callbacks = {
        NOTHING: {},
        EMPTY: {"on_delivery": seen},
        LEDGER: {"on_delivery": run.ledger and run.ledger.confluent},
    }
    given = callbacks[run.report]
    queue = {"queue.buffering.max.messages": 1_000_000}
    producer = Producer({"bootstrap.servers": run.bootstrap, "linger.ms": 5, **queue})
    for number in run.numbers():
        producer.produce(TOPIC, run.value, b"%d" % number, **given)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()


def kafka_python(run: Run) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=run.bootstrap, linger_ms=5, batch_size=64 * 1024)
    for number in run.numbers():
        key = b"%d" % number
        sent = producer.send(TOPIC, run.value, key)
        if run.ledger is not None:
            sent.add_callback(run.ledger.kafka_python(key, run.value))
        elif run.report == EMPTY:
            sent.add_callback(lambda metadata: None)
    producer.flush()
    producer.close()


def aiokafka(run: Run) -> None:
    from aiokafka import AIOKafkaProducer

    async def send() -> None:
        async with AIOKafkaProducer(bootstrap_servers=run.bootstrap, linger_ms=5, max_batch_size=64 * 1024) as producer:
            for number in run.numbers():
                key = b"%d" % number
                sent = await producer.send(TOPIC, run.value, key)
                if run.ledger is not None:
                    sent.add_done_callback(run.ledger.aiokafka(key, run.value))
                elif run.report == EMPTY:
                    sent.add_done_callback(lambda future: None)
            await producer.flush()

    asyncio.run(send())


CLIENTS: dict[str, tuple[Callable[[Run], None], int]] = {
    "confluent": (confluent, 200_000),
    "kafka-python": (kafka_python, 30_000),
    "aiokafka": (aiokafka, 30_000),
}


def measure(client: str, bootstrap: str, value: bytes, rate: int, folder: Path) -> None:
    produce, count = CLIENTS[client]
    count = rate * PACED_S or count
    best: dict[str, tuple[float, float]] = {}
    for _ in range(2 if rate else ROUNDS):
        for report in (NOTHING, EMPTY, LEDGER):
            ledger = chronik.Ledger(folder / "ledger.jsonl", append=False) if report == LEDGER else None
            started_s, cpu_s = time.perf_counter(), time.process_time()
            produce(Run(bootstrap, value, count, rate, report, ledger))
            if ledger is not None:
                ledger.close()
            took = time.perf_counter() - started_s, time.process_time() - cpu_s
            best[report] = min(best.get(report, took), took)
    pace = f"{rate:,}/s wanted" if rate else "full speed"
    print(f"{client}, {len(value)} B, {pace}", flush=True)
    for report, (seconds, cpu_s) in best.items():
        against = "".join(f", {best[other][0] / seconds - 1:+.1%} of {other}" for other in best if other != report)
        print(f"  {report:15} {count / seconds:9,.0f}/s, CPU {cpu_s / count * 1e6:5.2f} us/record{against}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--client", choices=list(CLIENTS), action="append")
    parser.add_argument("--rate", type=int, action="append", help=f"default: 0 (full speed), and {RATES} for confluent")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chronik-bench-"))
    node = Node(folder).start()
    try:
        topics.create(node.bootstrap, TOPIC, 3)
        for client in options.client or CLIENTS:
            for rate in options.rate or (0, *(RATES if client == "confluent" else ())):
                measure(client, node.bootstrap, b"x" * options.size, rate, folder)
        node.terminate()
    finally:
        if node.is_running:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
