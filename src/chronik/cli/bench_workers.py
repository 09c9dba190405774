"""The processes of a benchmark: each runs one real client and reports through a pipe.

A worker sends `ready` when it is connected, waits for `go`, sends `progress` regularly, and ends with `done` and its
`WorkerResult`, or with `failed` and a reason.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

STALL_S_MAX = 60.0
FIRST_S_MAX = 30.0
LATENCY_SAMPLES_MAX = 100_000
TICK_S = 0.005
KEYS = tuple(f"key-{number}".encode() for number in range(1_000))
PRODUCER_SETTINGS = ("acks", "enable.idempotence", "linger.ms")


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """The task of one worker. `partitions` holds (partition, start offset, records) for consumers.

    With `is_keyed`, records of a round trip have keys, which choose among all these partitions.
    """

    mode: str
    settings: dict[str, Any]
    topic: str
    records: int
    size_bytes: int
    rate: float | None = None
    partitions: tuple[tuple[int, int, int], ...] = ()
    is_keyed: bool = False


@dataclass(slots=True)
class WorkerResult:
    """The result of one worker, from its first record to its last answer."""

    records: int = 0
    bytes: int = 0
    errors: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)


def work(task: WorkerTask, pipe: Connection) -> None:
    """The entry point of a worker process."""
    try:
        run = {"produce": _produce, "consume": _consume, "roundtrip": _roundtrip}[task.mode]
        pipe.send(("done", run(task, pipe)))
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


class _Reporter:
    """Reports progress to the parent, at most four times a second."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._next_s = 0.0

    def wait_for_go(self) -> WorkerResult:
        self._pipe.send(("ready", None))
        self._pipe.recv()
        return WorkerResult(started_s=time.monotonic(), cpu_s=-time.process_time())

    def progress(self, done: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + 0.25
            self._pipe.send(("progress", done))


def _finish(result: WorkerResult) -> WorkerResult:
    result.ended_s = time.monotonic()
    result.cpu_s += time.process_time()
    return result


def _produce(task: WorkerTask, pipe: Connection) -> WorkerResult:
    """Produce. Latency is sampled: with a callback per record, the client's Python code would dominate the measurement.

    The first record is sent before `go`: an idempotent producer waits half a second for its id, and then connects.
    """
    from confluent_kafka import Producer

    producer = Producer(task.settings)
    producer.list_topics(task.topic, timeout=10.0)
    value = os.urandom(task.size_bytes)
    sample_every = max(1, task.records // LATENCY_SAMPLES_MAX)
    sent = 0
    if task.records > 1:
        producer.produce(task.topic, value)
        if producer.flush(FIRST_S_MAX):
            raise TimeoutError(f"the first record was not acknowledged within {FIRST_S_MAX:g} s")
        sent = 1
    reporter = _Reporter(pipe)
    result = reporter.wait_for_go()

    def delivered(error: Any, message: Any) -> None:
        if error is None:
            result.latencies_ms.append(message.latency() * 1000)

    while sent < task.records:
        for _ in range(min(_due(task.rate, result.started_s, sent), task.records - sent, 1000)):
            sampled = delivered if sent % sample_every == 0 else None
            while True:
                try:
                    if sampled is None:
                        producer.produce(task.topic, value)
                    else:
                        producer.produce(task.topic, value, on_delivery=sampled)
                    break
                except BufferError:
                    producer.poll(0.05)
            sent += 1
        producer.poll(0 if task.rate is None else TICK_S)
        reporter.progress(sent)
    result.errors = producer.flush(STALL_S_MAX)
    result.records, result.bytes = sent, sent * task.size_bytes
    return _finish(result)


def _consume(task: WorkerTask, pipe: Connection) -> WorkerResult:
    """Consume. Latency is the duration of one call for up to 10,000 records."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(task.settings)
    consumer.list_topics(task.topic, timeout=10.0)
    reporter = _Reporter(pipe)
    result = reporter.wait_for_go()
    consumer.assign([TopicPartition(task.topic, partition, start) for partition, start, _ in task.partitions])
    last_s = time.monotonic()
    while result.records < task.records:
        count = min(10_000, task.records - result.records)
        if task.rate is not None and (count := min(count, _due(task.rate, result.started_s, result.records))) == 0:
            time.sleep(TICK_S)
            continue
        called_s = time.monotonic()
        batch = consumer.consume(count, 1.0)
        now_s = time.monotonic()
        good = [message for message in batch if message.error() is None]
        if good:
            last_s = now_s
            result.latencies_ms.append((now_s - called_s) * 1000)
            result.records += len(good)
            result.bytes += sum(map(len, good))
        elif now_s - last_s > STALL_S_MAX:
            break
        reporter.progress(result.records)
    result.errors = task.records - result.records
    _finish(result)
    consumer.close()
    return result


def _roundtrip(task: WorkerTask, pipe: Connection) -> WorkerResult:
    """Measure each record from produce() to consume() in this process. The value starts with the time it was sent.

    One extra record per partition goes first, outside the measurement, so that all connections exist when it starts.
    """
    from confluent_kafka import Consumer, Producer, TopicPartition

    partitions = [partition for partition, *_ in task.partitions]
    shared = {name: value for name, value in task.settings.items() if name not in PRODUCER_SETTINGS}
    consumer: Any = Consumer(
        {**shared, "group.id": "chronik-bench", "enable.auto.commit": False, "fetch.wait.max.ms": 500}
    )
    producer = Producer({"linger.ms": 0, **task.settings})
    ends = [consumer.get_watermark_offsets(TopicPartition(task.topic, each), timeout=10.0)[1] for each in partitions]
    consumer.assign([TopicPartition(task.topic, each, end) for each, end in zip(partitions, ends, strict=True)])
    padding = os.urandom(max(0, task.size_bytes - 8))
    for partition in partitions:
        producer.produce(task.topic, bytes(8) + padding, partition=partition)
    if producer.flush(FIRST_S_MAX) or any(consumer.poll(FIRST_S_MAX) is None for _ in partitions):
        raise TimeoutError(f"the first records did not come back within {FIRST_S_MAX:g} s")
    reporter = _Reporter(pipe)
    result = reporter.wait_for_go()
    stop = threading.Event()

    def read() -> None:
        while result.records < task.records and not stop.is_set():
            # One by one: consume() of many records would wait for more to arrive, and measure that wait.
            message = consumer.poll(0.05)
            if message is not None and message.error() is None:
                sent_ns = int.from_bytes(message.value()[:8], "big")
                result.latencies_ms.append((time.monotonic_ns() - sent_ns) / 1e6)
                result.records += 1

    reader = threading.Thread(target=read)
    reader.start()
    sent = 0
    while sent < task.records:
        for _ in range(min(_due(task.rate, result.started_s, sent), task.records - sent)):
            value = time.monotonic_ns().to_bytes(8, "big") + padding
            if task.is_keyed:
                producer.produce(task.topic, value, key=KEYS[sent % len(KEYS)])
            else:
                producer.produce(task.topic, value, partition=partitions[0])
            sent += 1
        producer.poll(0.001)
        reporter.progress(result.records)
    result.errors = producer.flush(STALL_S_MAX)
    reader.join(STALL_S_MAX)
    stop.set()
    reader.join()
    result.errors += task.records - result.records
    result.bytes = result.records * task.size_bytes
    _finish(result)
    consumer.close()
    return result


def _due(rate: float | None, started_s: float, sent: int) -> int:
    """Return the number of records due by now at a rate; without a rate, as many as the client accepts."""
    if rate is None:
        return 1000
    return max(0, int((time.monotonic() - started_s) * rate) + 1 - sent)
