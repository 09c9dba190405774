"""The logs in the nodes' data folders: comparing replicas, damaging them, and what clients read afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from tests.cluster.support_cluster import Nodes
from tests.support.eventually import eventually

from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header

READ_TIMEOUT_S = 60.0
BATCH_RECORDS = 100
"""Small enough that a log has several batches, and can be cut between two of them."""


def stored_batches(log: Path) -> Iterator[tuple[BatchHeader, bytes]]:
    """Yield every batch of a log folder, in order."""
    for segment in sorted(log.glob("*.log")):
        for _, header, data in batches_in(segment):
            yield header, data


def batches_in(segment: Path) -> Iterator[tuple[int, BatchHeader, bytes]]:
    """Yield the position, header and bytes of every batch; a segment ends at its preallocated zeros."""
    data, position = segment.read_bytes(), 0
    while len(data) - position >= HEADER_BYTES:
        header = read_batch_header(data, position)
        if header.magic != 2 or position + header.size_bytes > len(data):
            break
        yield position, header, data[position : position + header.size_bytes]
        position += header.size_bytes


def replicas_agree(folders: Mapping[int, Path], partition: str, below: int) -> None:
    """Check that the logs of `partition` (TOPIC-N) in these data folders are identical up to the offset `below`."""
    copies: dict[int, list[tuple[BatchHeader, bytes]]] = {}
    for node_id, folder in folders.items():
        log = folder / "logs" / partition
        assert log.is_dir(), f"node {node_id} has no {log}"
        copies[node_id] = [batch for batch in stored_batches(log) if batch[0].base_offset < below]
    (first, expected), *others = copies.items()
    ends = expected[-1][0].next_offset if expected else 0
    assert ends >= below, f"{partition} ends at {ends} on node {first}, clients received {below}"
    for node_id, batches in others:
        for (expected_header, expected_bytes), (header, data) in zip(expected, batches, strict=False):
            assert data == expected_bytes, (
                f"{partition} differs between node {first} and node {node_id}: {expected_header} and {header}"
            )
        assert len(batches) == len(expected), (
            f"{partition} has {len(expected)} batches below {below} on node {first}, {len(batches)} on node {node_id}"
        )


def wait_until_replicas_agree(nodes: Nodes, replicas: Iterable[int], partition: str, below: int) -> None:
    """A damaged replica may have fetched all later records, and be in sync, before it is healed."""
    folders = {node_id: nodes.data_folder(node_id) for node_id in replicas}

    def agree() -> bool:
        replicas_agree(folders, partition, below)
        return True

    eventually(agree, READ_TIMEOUT_S, f"all replicas of {partition} have the same bytes")


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


def filled_topic(nodes: Nodes, count: int) -> str:
    """Create a topic with one partition and this many records, and wait until all replicas are in sync."""
    topic = nodes.new_topic(1)
    produce(nodes, topic, 0, count)
    nodes.wait_in_sync()
    return topic


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


def log_of(nodes: Nodes, node_id: int, topic: str, partition: int = 0) -> Path:
    return nodes.data_folder(node_id) / "logs" / f"{topic}-{partition}"


def check_whole_again(nodes: Nodes, topic: str, count: int) -> None:
    """Check that all records are read, all replicas are in sync and identical, and no node failed unexpectedly."""
    nodes.wait_in_sync()
    check_all_are_read(nodes, topic, count)
    wait_until_replicas_agree(nodes, nodes.ids, f"{topic}-0", count)
    nodes.no_surprises()


def remove(log: Path) -> None:
    shutil.rmtree(log)


def cut_at_a_batch(log: Path) -> int:
    """Truncate the log exactly between two batches, and return its end offset."""
    batches = list(stored_batches(log))
    kept = batches[: len(batches) // 2]
    truncate(_only_segment(log), sum(len(data) for _, data in kept))
    return kept[-1][0].next_offset


def cut_the_last_batch(log: Path) -> None:
    truncate(_only_segment(log), sum(len(data) for _, data in list(stored_batches(log))[:-1]))


def flip_in_the_last_batch(log: Path) -> None:
    overwrite(
        _only_segment(log), sum(len(data) for _, data in stored_batches(log)) - 5, lambda old: bytes([old[0] ^ 16])
    )


def damage_a_batch(log: Path) -> None:
    """Change the size of a batch in the middle of the log, so that no later batch can be reached."""
    batches = list(stored_batches(log))
    position = sum(len(data) for _, data in batches[: len(batches) // 2])
    overwrite(_only_segment(log), position + 8, lambda old: b"\xff\xff")


def _only_segment(log: Path) -> Path:
    (segment,) = log.glob("*.log")
    return segment


def closed_segments(log: Path) -> list[Path]:
    return sorted(log.glob("*.log"))[:-1]


def truncate(segment: Path, size_bytes: int) -> None:
    with segment.open("r+b") as file:
        file.truncate(size_bytes)


def overwrite(segment: Path, position: int, changed: Callable[[bytes], bytes]) -> None:
    """Replace bytes of a segment in place: `changed` gets the bytes from `position` on."""
    with segment.open("r+b") as file:
        file.seek(position)
        new = changed(file.read(64))
        file.seek(position)
        file.write(new)


def is_listed_up_to(nodes: Nodes, node_id: int, end_offset: int) -> bool:
    """Return whether the node's recovery point is this offset: it later proves that records were lost."""
    return f" {end_offset}\n" in (nodes.data_folder(node_id) / "recovery-points").read_text()
