"""Logs that lose records while their nodes are down, and checks of what clients read afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_replicas import replicas_agree, stored_batches
from tests.support.eventually import eventually

READ_TIMEOUT_S = 60.0
BATCH_RECORDS = 100
"""Small enough that a log has several batches, and can be cut between two of them."""


def produce(nodes: Nodes, topic: str, first: int, count: int) -> None:
    """Produce records with acks=all, and check that all are acknowledged."""
    errors: list[object] = []

    def answered(error: object, _: object) -> None:
        if error is not None:
            errors.append(error)

    settings = {"bootstrap.servers": nodes.bootstrap, "enable.idempotence": True, "linger.ms": 5}
    producer = Producer({**settings, "batch.num.messages": BATCH_RECORDS})
    for number in range(first, first + count):
        producer.produce(topic, f"record-{number}".encode(), partition=0, on_delivery=answered)
        producer.poll(0)
    assert producer.flush(READ_TIMEOUT_S) == 0
    assert errors == []


def check_all_are_read(nodes: Nodes, topic: str, count: int) -> None:
    consumer = Consumer(
        {"bootstrap.servers": nodes.bootstrap, "group.id": "reader", "enable.auto.commit": False, "check.crcs": True}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: list[str] = []

    def read() -> bool:
        for message in consumer.consume(500, 0.5):
            if message.error() is None:
                values.append((message.value() or b"").decode())
        assert len(values) >= count, f"{len(values)} of {count} records are there"
        return True

    try:
        eventually(read, READ_TIMEOUT_S, "all records are read")
    finally:
        consumer.close()
    assert values == [f"record-{number}" for number in range(count)]


def log_of(nodes: Nodes, node_id: int, topic: str) -> Path:
    return Path(nodes.node(node_id).folder) / "logs" / f"{topic}-0"


def check_whole_again(nodes: Nodes, topic: str, count: int) -> None:
    """Check that all records are read, all replicas are in sync and identical, and no node failed unexpectedly."""
    nodes.wait_in_sync()
    check_all_are_read(nodes, topic, count)
    folders = {node_id: Path(nodes.node(node_id).folder) for node_id in nodes.ids}

    def agree() -> bool:
        replicas_agree(folders, f"{topic}-0", count)
        return True

    # A damaged replica may have fetched all later records, and be in sync, before it is healed.
    eventually(agree, READ_TIMEOUT_S, "all replicas have the same bytes")
    nodes.no_surprises()


def remove(log: Path) -> None:
    shutil.rmtree(log)


def cut_at_a_batch(log: Path) -> int:
    """Truncate the log exactly between two batches, and return its end offset."""
    batches = list(stored_batches(log))
    kept = batches[: len(batches) // 2]
    (segment,) = log.glob("*.log")
    with segment.open("r+b") as file:
        file.truncate(sum(len(data) for _, data in kept))
    return kept[-1][0].next_offset


def cut_the_last_batch(log: Path) -> None:
    size = sum(len(data) for _, data in list(stored_batches(log))[:-1])
    (segment,) = log.glob("*.log")
    with segment.open("r+b") as file:
        file.truncate(size)


def flip_in_the_last_batch(log: Path) -> None:
    size = sum(len(data) for _, data in stored_batches(log))
    (segment,) = log.glob("*.log")
    data = bytearray(segment.read_bytes())
    data[size - 5] ^= 0x10
    segment.write_bytes(data)


def damage_a_batch(log: Path) -> None:
    """Change the size of a batch in the middle of the log, so that no later batch can be reached."""
    batches = list(stored_batches(log))
    at = sum(len(data) for _, data in batches[: len(batches) // 2])
    (segment,) = log.glob("*.log")
    with segment.open("r+b") as file:
        file.seek(at + 8)
        file.write(b"\xff\xff")


def is_listed_up_to(nodes: Nodes, node_id: int, end_offset: int) -> bool:
    """Return whether the node's recovery point is this offset: it later proves that records were lost."""
    points = Path(nodes.node(node_id).folder) / "recovery-points"
    return f" {end_offset}\n" in points.read_text()
