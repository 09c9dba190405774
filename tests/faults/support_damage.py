"""Bit rot in the files of one replica: a flipped bit in a closed segment, a truncated file.

A crash never damages durable records. So the node logs the damage, another replica leads, and the replica heals itself:
it sets the damaged part aside, fetches it again, and returns to the ISR without human help.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.support_elections import elect
from tests.cluster.support_recorder import named
from tests.cluster.support_workload import Workload
from tests.faults.support_stage import Stage
from tests.support.eventually import eventually

from chronik.wire.batch import HEADER_BYTES, read_batch_header

DAMAGED = ('"event": "log_damaged"', '"event": "log_open_failed"')
SEGMENTS_TIMEOUT_S = 60.0


@contextmanager
def flipped_bit(stage: Stage, workload: Workload) -> Iterator[None]:
    """Flip a bit in the records of a closed segment; a starting node does not see it, as the batch chain is intact.

    The node becomes the leader. When a client reads there, the node detects the damage and transfers leadership to
    another replica, which has the records.
    """
    victim, log = _replica(stage, workload)
    partition = int(log.name.rpartition("-")[2])
    segment = stage.chance.choice(_closed(log))
    stage.nodes.kill(victim)
    data = bytearray(segment.read_bytes())
    at = stage.chance.randrange(HEADER_BYTES, read_batch_header(data, 0).size_bytes)
    data[at] ^= 1 << stage.chance.randrange(8)
    segment.write_bytes(data)
    stage.note(f"a bit of byte {at} of {log.name}/{segment.name} on {victim}")
    before = _complaints(stage, victim)
    stage.nodes.start(victim)
    stage.nodes.wait_in_sync()
    elect(stage.nodes, workload.topic, {partition: victim})
    workload.read_again()
    eventually(lambda: _complaints(stage, victim) > before, what=f"node {victim} says that it is damaged")
    assert stage.nodes.leader(workload.topic, partition) != victim
    yield
    stage.nodes.wait_in_sync()


@contextmanager
def truncated_file(stage: Stage, workload: Workload) -> Iterator[None]:
    """Truncate a segment, closed or active: everything can be read, whichever replica leads.

    If records in the middle are missing, the node logs it when it opens the log.
    """
    victim, log = _replica(stage, workload)
    partition = int(log.name.rpartition("-")[2])
    segment = stage.chance.choice(sorted(log.glob("*.log")))
    stage.nodes.kill(victim)
    size = len(segment.read_bytes().rstrip(b"\0"))
    keep = stage.chance.randrange(max(1, size))
    with segment.open("r+b") as file:
        file.truncate(keep)
    stage.note(f"{log.name}/{segment.name} on {victim} cut from {size} to {keep} bytes")
    stage.nodes.start(victim)
    stage.nodes.wait_in_sync()
    elect(stage.nodes, workload.topic, {partition: victim})
    workload.read_again()
    yield


def _replica(stage: Stage, workload: Workload) -> tuple[int, Path]:
    """Choose a node and the folder of one of its replicas that has closed segments; all replicas are in sync."""
    stage.nodes.wait_in_sync()
    partition = stage.chance.choice(workload.partitions)
    victim = stage.chance.choice(stage.nodes.partitions(workload.topic)[partition].replicas)
    log = Path(stage.nodes.node(victim).folder) / "logs" / named(workload.topic, partition)
    eventually(lambda: _closed(log), SEGMENTS_TIMEOUT_S, "there is a closed segment")
    return victim, log


def _complaints(stage: Stage, victim: int) -> int:
    """Count how often the node logged that a log is damaged."""
    text = stage.nodes.log_text(victim)
    return sum(text.count(event) for event in DAMAGED)


def _closed(log: Path) -> list[Path]:
    return sorted(log.glob("*.log"))[:-1]
