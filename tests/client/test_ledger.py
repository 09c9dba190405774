"""Ledgers: the acknowledgements that producers of three clients received match the log; files survive their writer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.node import Node
from tests.support.topics import NOW_MS

import chronik
from chronik.client import ledger as ledger_module
from chronik.client.ledger import Entry, Ledger, LedgerError
from chronik.pipeline.source.ranges import RecordRange
from chronik.pipeline.source.reading import ReadSettings, read_range
from chronik.wire.checksum import record_checksum

RECORDS: list[tuple[bytes | None, bytes | None, list[tuple[str, Any]]]] = [
    (b"k", b"v", []),
    (None, b"", [("h", b"1"), ("h", b"")]),
    (b"\xff\x00", None, []),
]


def entries(path: Path) -> list[Entry]:
    """Read a ledger except a torn last line."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [msgspec.json.decode(line, type=Entry) for line in lines if line.endswith(b"\n")]


def in_the_log(bootstrap: str, topic: str, count: int) -> list[Entry]:
    settings = ReadSettings(bootstrap, with_headers=True)
    rows = [row for batch in read_range(RecordRange(topic, 0, 0, count), "", settings) for row in batch.to_pylist()]
    return [
        Entry(
            topic,
            0,
            row["offset"],
            row["key"],
            int(row["timestamp"].timestamp() * 1000),
            record_checksum(row["key"], row["value"], [(h["key"], h["value"]) for h in row["headers"] or ()]),
        )
        for row in rows
    ]


def produce_confluent(bootstrap: str, topic: str, ledger: Ledger) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap})
    for key, value, headers in RECORDS:
        producer.produce(
            topic,
            value,
            key,
            headers=headers,
            on_delivery=ledger.confluent_with(headers) if headers else ledger.confluent,
        )
    assert producer.flush(30) == 0


def produce_kafka_python(bootstrap: str, topic: str, ledger: Ledger) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=bootstrap)
    for key, value, headers in RECORDS:
        producer.send(topic, value, key, headers=headers).add_callback(ledger.kafka_python(key, value, headers))
    producer.flush(30)
    producer.close()


def produce_aiokafka(bootstrap: str, topic: str, ledger: Ledger) -> None:
    from aiokafka import AIOKafkaProducer

    async def run() -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
            for number, (key, value, headers) in enumerate(RECORDS):
                sent = await producer.send(topic, value, key, headers=headers, timestamp_ms=NOW_MS + number)
                sent.add_done_callback(ledger.aiokafka(key, value, headers, NOW_MS + number))
            await producer.flush()

    asyncio.run(run())


@pytest.mark.parametrize("produce", [produce_confluent, produce_kafka_python, produce_aiokafka])
def test_the_ledger_lists_the_records_of_the_log(shared_node: Node, tmp_path: Path, produce: Any) -> None:
    topic = produce.__name__.replace("_", "-")
    topics.create(shared_node.bootstrap, topic, 1)
    with chronik.Ledger(tmp_path / "acked.jsonl") as ledger:
        produce(shared_node.bootstrap, topic, ledger)
    written = sorted(entries(tmp_path / "acked.jsonl"), key=lambda entry: entry.offset)
    assert written == in_the_log(shared_node.bootstrap, topic, len(RECORDS))
    assert ledger.failed == 0


def test_unacknowledged_records_are_counted_but_not_written(tmp_path: Path) -> None:
    async def fail(ledger: Ledger) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(ledger.aiokafka(None, b"v"))
        future.set_exception(OSError("refused"))
        await asyncio.sleep(0)

    with Ledger(tmp_path / "l") as ledger:
        ledger.confluent("timed out", None)
        asyncio.run(fail(ledger))
    assert ledger.failed == 2
    assert entries(tmp_path / "l") == []


def test_records_of_a_transaction_are_written_with_its_outcome(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with Ledger(path) as ledger:
        committed, aborted, unknown = (ledger.transaction() for _ in range(3))
        for offset, reports in enumerate((committed, aborted, unknown)):
            reports.record("t", 0, offset, 2, b"k", b"v")
            reports.kafka_python(b"k", b"v")(SimpleNamespace(topic="t", partition=0, offset=offset + 10, timestamp=2))
        aborted.confluent("purged", None)
        ledger.flush()
        assert entries(path) == []  # nothing is acknowledged yet
        committed.commit()
        aborted.abort()
    assert [(entry.offset, entry.aborted) for entry in entries(path)] == [
        (0, False),
        (10, False),
        (1, True),
        (11, True),
    ]
    assert b"aborted" not in path.read_bytes().splitlines()[0]
    assert ledger.failed == 1


def test_readers_skip_a_torn_last_line_and_the_next_writer_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with Ledger(path) as ledger:
        ledger.record("t", 0, 1, 2, b"k", b"v" * 10)
        ledger.record("t", 0, 2, 2, b"k" * 200_000, b"v")
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert [entry.offset for entry in entries(path)] == [1]
    with Ledger(path) as ledger:
        ledger.record("t", 0, 3, 2, None, None)
    assert [entry.offset for entry in entries(path)] == [1, 3]
    with Ledger(path, append=False) as ledger:
        pass
    assert path.read_bytes() == b""


def test_concurrent_threads_lose_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "FLUSH_S", 0.0001)
    monkeypatch.setattr(ledger_module, "PENDING_RECORDS_MAX", 7)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Ledger(tmp_path / "l") as ledger:

            def write(partition: int) -> None:
                for offset in range(2000):
                    ledger.record("t", partition, offset, 0, None, b"v")

            threads = [threading.Thread(target=write, args=(partition,)) for partition in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    written = [(entry.partition, entry.offset) for entry in entries(tmp_path / "l")]
    assert sorted(written) == [(p, o) for p in range(4) for o in range(2000)]


def test_lines_are_written_without_an_explicit_flush(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l") as ledger:
        ledger.record("t", 0, 5, 0, None, b"v")
        eventually(lambda: [entry.offset for entry in entries(tmp_path / "l")] == [5])


def test_the_next_call_raises_an_error_if_the_disk_is_full() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    ledger = Ledger("/dev/full")
    ledger.record("t", 0, 0, 0, None, b"v")
    with pytest.raises(LedgerError, match="No space left"):
        ledger.flush()
    with pytest.raises(LedgerError, match="No space left"):
        ledger.record("t", 0, 1, 0, None, b"v")
    with pytest.raises(LedgerError):
        ledger.close()


def test_a_killed_process_leaves_complete_lines(tmp_path: Path) -> None:
    script = (
        "import chronik, itertools, sys\n"
        "ledger = chronik.Ledger(sys.argv[1])\n"
        "for offset in itertools.count():\n"
        "    ledger.record('t', 0, offset, 0, b'k', b'v')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "l")])
    try:
        eventually(lambda: (tmp_path / "l").exists() and (tmp_path / "l").stat().st_size > 1_000_000, 30)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    offsets = [entry.offset for entry in entries(tmp_path / "l")]
    assert offsets == list(range(len(offsets)))
    assert len(offsets) > 5000


def test_records_sent_without_acknowledgement_are_not_in_the_ledger(tmp_path: Path) -> None:
    """With acks=0, confluent-kafka reports no offset, kafka-python -1, and aiokafka no metadata at all."""

    class Report:
        def __getattr__(self, name: str) -> Any:
            return lambda: {"topic": "t", "partition": 0, "timestamp": (1, 5)}.get(name)

    path = tmp_path / "acked.jsonl"
    with Ledger(path) as ledger:
        ledger.confluent(None, Report())
        ledger.confluent_with([("h", b"1")])(None, Report())
        ledger.kafka_python(b"k", b"v")(SimpleNamespace(topic="t", partition=0, offset=-1, timestamp=5))
        done: Future[None] = Future()
        done.set_result(None)
        ledger.aiokafka(b"k", b"v")(done)
        assert ledger.failed == 4
        ledger.record("t", 0, 7, 5, b"k", b"v")
    assert [json.loads(line)["offset"] for line in path.read_text().splitlines()] == [7]
