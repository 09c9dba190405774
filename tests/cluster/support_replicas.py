"""Compare the replicas of a partition in the nodes' data folders, byte for byte, below the acknowledged end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header


def stored_batches(log: Path) -> Iterator[tuple[BatchHeader, bytes]]:
    """Yield every batch of a log folder, in order; a segment ends at its preallocated zeros."""
    for segment in sorted(log.glob("*.log")):
        data = segment.read_bytes()
        at = 0
        while len(data) - at >= HEADER_BYTES:
            header = read_batch_header(data, at)
            if header.magic != 2 or at + header.size_bytes > len(data):
                break
            yield header, data[at : at + header.size_bytes]
            at += header.size_bytes


def replicas_agree(folders: Mapping[int, Path], partition: str, below: int) -> None:
    """Check that the logs of `partition` (TOPIC-N) in these data folders are identical up to the offset `below`."""
    copies: dict[int, list[tuple[BatchHeader, bytes]]] = {}
    for node_id, folder in folders.items():
        log = folder / "logs" / partition
        assert log.is_dir(), f"node {node_id} has no {log}"
        copies[node_id] = [found for found in stored_batches(log) if found[0].base_offset < below]
    (first, expected), *others = copies.items()
    ends = expected[-1][0].next_offset if expected else 0
    assert ends >= below, f"{partition} ends at {ends} on node {first}, clients were told {below}"
    for node_id, batches in others:
        for (wanted, wanted_bytes), (header, found_bytes) in zip(expected, batches, strict=False):
            assert found_bytes == wanted_bytes, (
                f"{partition} differs between node {first} and node {node_id}: {wanted} and {header}"
            )
        assert len(batches) == len(expected), (
            f"{partition} has {len(expected)} batches below {below} on node {first}, {len(batches)} on node {node_id}"
        )
