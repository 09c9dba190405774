"""A compiled node against a pure one: the same bytes on disk and on the wire, also after a crash."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from tests.node.support_wire import WireClient, batch, connect, decoded, fetch_of
from tests.support.eventually import eventually
from tests.support.node import Node
from tests.support.tested_build import compiled_folder

from chronik.wire.api import ApiKey
from chronik.wire.fetch import write_fetch_request

TOPIC, GROUP = "mixed", "readers"
PARTITIONS = 2
RECORDS = 300
VERSIONS = range(3, 13)
"""Of Produce, and from 4 on of Fetch; later versions name topics by a random id."""


@pytest.fixture
def compiled() -> Path:
    return compiled_folder()


@pytest.fixture
def nodes(compiled: Path, tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """A compiled node after a mixed load and SIGKILL, and a pure node with a copy of its folder; none runs."""
    first = Node(tmp_path / "compiled").start()
    assert json.loads(first.get("/api/cluster"))["build"] == "compiled"
    other = Node(tmp_path / "pure", runs_checkout=True)
    try:
        mixed_load(first)
        first.kill()
        shutil.copytree(first.data_dir, other.data_dir)
        yield first, other
    finally:
        first.kill()
        other.kill()


def mixed_load(node: Node) -> None:
    """Idempotent and compressed records, committed and aborted transactions with offsets, a group."""
    with connect(node) as client:
        client.create_topic(TOPIC, partitions=PARTITIONS, configs={"segment.bytes": "16384"})
    common = {"bootstrap.servers": node.bootstrap, "linger.ms": 2}
    for codec in ("none", "gzip", "lz4", "snappy", "zstd"):
        producer = Producer({**common, "enable.idempotence": True, "compression.type": codec})
        for number in range(RECORDS):
            producer.produce(
                TOPIC, f"{codec} {number}".encode() * 5, partition=number % PARTITIONS, headers={"n": b"1"}
            )
        assert producer.flush(30) == 0
    consumer = Consumer({**common, "group.id": GROUP, "auto.offset.reset": "earliest", "enable.auto.commit": False})
    consumer.subscribe([TOPIC])
    read = 0
    while read < RECORDS:
        read += len(consumer.consume(100, 10.0))
    consumer.commit(asynchronous=False)
    sender = Producer({**common, "transactional.id": "mixed-sender"})
    sender.init_transactions(30)
    for number in range(6):
        sender.begin_transaction()
        sender.produce(TOPIC, b"in a transaction", partition=number % PARTITIONS)
        sender.send_offsets_to_transaction(
            [TopicPartition(TOPIC, 0, number + 1)], consumer.consumer_group_metadata(), 30
        )
        sender.abort_transaction(30) if number % 3 == 2 else sender.commit_transaction(30)
    consumer.close()
    # The coordinator of a node that starts again would repeat markers of a transaction that is not complete.
    eventually(lambda: transaction_state(node) == "CompleteAbort", what="the last transaction is complete")


def transaction_state(node: Node) -> str:
    with connect(node) as client:
        answer = client.call(ApiKey.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": ["mixed-sender"]})
    return str(answer.transaction_states[0].transaction_state)


def raw_answers(node: Node) -> list[bytes]:
    """Return responses byte for byte, with the records of all partitions, from every version and isolation level."""
    answers = []
    with connect(node) as client:
        for version in VERSIONS:
            for partition in range(PARTITIONS):
                answers += [fetched(client, max(version, 4), partition), produced(client, version, partition)]
                answers.append(listed(client, partition))
        answers.append(committed(client))
    return answers


def fetched(client: WireClient, version: int, partition: int) -> bytes:
    body = write_fetch_request(version, fetch_of((TOPIC, partition, 0), partition_max_bytes=1 << 24))
    return client.answer(ApiKey.FETCH, version, client.send(ApiKey.FETCH, version, body))


def produced(client: WireClient, version: int, partition: int) -> bytes:
    values = [b"a", b"bb" * version]
    correlation_id = client.send_produce(TOPIC, batch(*values), partition=partition, version=version)
    return client.answer(ApiKey.PRODUCE, version, correlation_id)


def listed(client: WireClient, partition: int) -> bytes:
    return repr([client.list_offset(TOPIC, timestamp, partition=partition) for timestamp in (-1, -2, -3)]).encode()


def committed(client: WireClient) -> bytes:
    topics = [{"name": TOPIC, "partition_indexes": list(range(PARTITIONS))}]
    return repr(client.call(ApiKey.OFFSET_FETCH, 5, {"group_id": GROUP, "topics": topics})).encode()


def logs_of(node: Node) -> dict[str, bytes]:
    """Return the records and indexes of all partitions."""
    return {
        str(path.relative_to(node.data_dir)): path.read_bytes()
        for path in sorted(node.data_dir.rglob("*"))
        if path.suffix in (".log", ".index", ".timeindex", ".txnindex")
    }


def test_after_a_crash_both_answer_and_write_the_same_bytes(nodes: tuple[Node, Node]) -> None:
    compiled, pure = nodes
    answers = [raw_answers(node.start()) for node in nodes]
    assert answers[0] == answers[1]
    assert len(answers[0][0]) > 10_000
    with connect(compiled) as client:
        everything = client.fetch_one(TOPIC, partition_max_bytes=1 << 24).records
        assert len(decoded(everything)) > RECORDS
    assert json.loads(pure.get("/api/cluster"))["build"] == "pure"
    for node in nodes:
        node.terminate()
    written = logs_of(compiled)
    assert sum(map(len, written.values())) > 10_000
    assert written == logs_of(pure)


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, cwd="/", capture_output=True, text=True)


def test_a_traceback_names_the_file_and_line_of_a_compiled_module(compiled: Path) -> None:
    source = "from chronik.wire.batch import check_batches\ncheck_batches(memoryview(bytes(100)), 1000)"
    shown = python(compiled, "-c", source).stderr
    place = re.search(r'File "(chronik/wire/batch\.py)", line (\d+), in check_batches', shown)
    assert place is not None, shown
    line = (compiled / place[1]).read_text().splitlines()[int(place[2]) - 1]
    assert "raise _wrong_magic" in line


def test_a_compiled_node_with_edited_sources_does_not_start(compiled: Path, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "page", "pipeline")
    copy = shutil.copytree(compiled, tmp_path / "copy", ignore=ignored)
    assert python(copy, "-m", "chronik.cli", "version").stdout.endswith(" (compiled)\n")
    with (copy / "chronik/storage/log.py").open("a") as source:
        source.write("\n# an edit\n")
    started = python(copy, "-m", "chronik.cli", "start", "--data-dir", str(tmp_path / "data"))
    assert started.returncode == 2
    assert started.stderr.startswith("chronik: chronik/storage/log.py was edited after it was compiled")
