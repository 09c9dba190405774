"""Files of one replica that rot: a flipped bit in a closed segment, a file that ends too early. And their repair.

Damage below what was durable is not what a crash leaves, and no node throws such a log away by itself: it says so in
its log, another replica leads, and a person decides. What a person does is done here: the partition's folder goes, and
the node fetches it anew.
"""

from __future__ import annotations

import contextlib
import shutil
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
BACK_IN_SYNC_S = 10.0


@contextmanager
def flipped_bit(stage: Stage, workload: Workload) -> Iterator[None]:
    """In the records of a closed segment, where nothing looks at the start: the chain of batches is whole.

    The node is made the leader; when somebody reads there, it notices and gives the partition to another replica, which
    has what was written.
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
    _fetch_anew(stage, victim, log)


@contextmanager
def truncated_file(stage: Stage, workload: Workload) -> Iterator[None]:
    """A segment, closed or not, that is shorter than it was: whoever leads, everything is read.

    The end of the log is fetched again by the node itself. Where records in the middle are gone, the node says so when
    it opens the log or when somebody reads there, and does not go on with it.
    """
    victim, log = _replica(stage, workload)
    partition = int(log.name.rpartition("-")[2])
    closed = _closed(log)
    segment = stage.chance.choice(sorted(log.glob("*.log")))
    stage.nodes.kill(victim)
    size = len(segment.read_bytes().rstrip(b"\0"))
    keep = stage.chance.randrange(max(1, size))
    with segment.open("r+b") as file:
        file.truncate(keep)
    stage.note(f"{log.name}/{segment.name} on {victim} cut from {size} to {keep} bytes")
    stage.nodes.start(victim)
    with contextlib.suppress(AssertionError):
        stage.nodes.wait_in_sync(BACK_IN_SYNC_S)  # where it opened the log
    if victim in stage.nodes.partitions(workload.topic)[partition].isr:
        elect(stage.nodes, workload.topic, {partition: victim})
    workload.read_again()
    yield
    if segment in closed:
        _fetch_anew(stage, victim, log)


def _replica(stage: Stage, workload: Workload) -> tuple[int, Path]:
    """A partition's folder on some node, with closed segments; all replicas are in sync."""
    stage.nodes.wait_in_sync()
    partition = stage.chance.choice(workload.partitions)
    victim = stage.chance.choice(stage.nodes.partitions(workload.topic)[partition].replicas)
    log = Path(stage.nodes.node(victim).folder) / "logs" / named(workload.topic, partition)
    eventually(lambda: _closed(log), SEGMENTS_TIMEOUT_S, "there is a closed segment")
    return victim, log


def _complaints(stage: Stage, victim: int) -> int:
    """How often the node has said that a log is damaged."""
    text = stage.nodes.log_text(victim)
    return sum(text.count(event) for event in DAMAGED)


def _closed(log: Path) -> list[Path]:
    return sorted(log.glob("*.log"))[:-1]


def _fetch_anew(stage: Stage, victim: int, log: Path) -> None:
    stage.nodes.kill(victim)
    shutil.rmtree(log)
    stage.nodes.start(victim)
