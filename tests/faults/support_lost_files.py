"""Files of one node that are lost, broken or restored from an old copy, usually while all nodes are killed.

Two replicas stay intact each time, and that is enough: nothing is lost, without human help. For a while, the damaged
replica may be the only one of its partition that is back.
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

SEGMENTS_TIMEOUT_S = 60.0
FIRST_READY_S = 20.0
CLOSED_SEGMENTS = 2
"""Damage to a closed segment before the last is certainly below the offset that the node knows to be durable."""
WRECKED_BYTES = 64
STALE_BY_RECORDS = 200
NOT_DATA = frozenset(["node.toml", "node.log", "node.pid", "ballast", "lock"])
"""Files in a node's folder that are not data: its settings, log file, pid, lock, and what fills its disk."""


@contextmanager
def lost_log(stage: Stage, workload: Workload) -> Iterator[None]:
    """Kill all nodes; when they come back, the folder of one replica is missing."""
    victim, log = _replica(stage, workload)
    _kill_all(stage)
    shutil.rmtree(log)
    stage.note(f"{log.name} removed on {victim}, all killed")
    yield
    _bring_back(stage, victim, log, is_first=stage.chance.random() < 0.5)


@contextmanager
def damaged_log(stage: Stage, workload: Workload) -> Iterator[None]:
    """Kill all nodes; one replica has a segment that is broken in the middle of a batch, and comes back first."""
    victim, log = _replica(stage, workload)
    segment = stage.chance.choice(_closed(log)[:-1])
    _kill_all(stage)
    data = bytearray(segment.read_bytes())
    inside = stage.chance.randrange(1, read_batch_header(data, 0).size_bytes)
    if stage.chance.random() < 0.5:
        del data[inside:]
        how = f"cut to {inside} bytes"
    else:
        data[inside : inside + WRECKED_BYTES] = stage.chance.randbytes(WRECKED_BYTES)
        how = f"wrecked from byte {inside} on"
    segment.write_bytes(data)
    stage.note(f"{log.name}/{segment.name} on {victim} {how}, all killed, {victim} returns first")
    yield
    _bring_back(stage, victim, log, is_first=True)
    # Recovery does not read closed segments: a changed batch there shows when a client reads it.
    stage.nodes.wait_in_sync()
    elect(stage.nodes, workload.topic, {int(log.name.rpartition("-")[2]): victim})
    workload.read_again()


@contextmanager
def short_log(stage: Stage, workload: Workload) -> Iterator[None]:
    """Kill all nodes; one replica has lost or corrupted the last batch of its log, and comes back first."""
    victim, log = _replica(stage, workload)
    _kill_all(stage)
    segment, at, size = _last_batch(log)
    data = bytearray(segment.read_bytes())
    if stage.chance.random() < 0.5:
        del data[at:]
        how = f"cut to {at} bytes"
    else:
        data[at + stage.chance.randrange(HEADER_BYTES, size)] ^= 1 << stage.chance.randrange(8)
        how = f"changed in the batch at byte {at}"
    segment.write_bytes(data)
    stage.note(f"{log.name}/{segment.name} on {victim} {how}, all killed, {victim} returns first")
    yield
    _bring_back(stage, victim, log, is_first=True)


def _last_batch(log: Path) -> tuple[Path, int, int]:
    """Return the segment of the log's last batch, and the position and size of that batch."""
    found: tuple[Path, int, int] | None = None
    for segment in sorted(log.glob("*.log")):
        data, at = segment.read_bytes(), 0
        while len(data) - at >= HEADER_BYTES and (header := read_batch_header(data, at)).magic == 2:
            found = segment, at, header.size_bytes
            at += header.size_bytes
    assert found is not None, f"{log} has no batch"
    return found


@contextmanager
def stale_folder(stage: Stage, workload: Workload) -> Iterator[None]:
    """Restore a node's data folder from a copy made before its last run; the other nodes may be killed with it."""
    victim, log = _replica(stage, workload)
    copy = stage.folder / f"copy-of-{victim}"
    is_clean = stage.chance.random() < 0.5
    (stage.nodes.stop if is_clean else stage.nodes.kill)(victim)
    _copy_data(Path(stage.nodes.node(victim).folder), copy)
    stage.nodes.start(victim)
    stage.nodes.wait_in_sync()
    workload.proceed(STALE_BY_RECORDS)
    stage.nodes.wait_in_sync()
    with_all = stage.chance.random() < 0.7
    if with_all:
        _kill_all(stage)
    else:
        stage.nodes.kill(victim)
    _copy_data(copy, Path(stage.nodes.node(victim).folder))
    shutil.rmtree(copy)
    told = f"copy from a {'clean stop' if is_clean else 'kill'}, {'all' if with_all else 'only it'} killed"
    stage.note(f"{victim} back to an older folder ({told})")
    yield
    _bring_back(stage, victim, log, is_first=with_all)


def _copy_data(source: Path, target: Path) -> None:
    """Replace the target's data with the source's; files in `NOT_DATA` are neither copied nor removed."""
    target.mkdir(exist_ok=True)
    for old in target.iterdir():
        if old.name in NOT_DATA:
            continue
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
    for found in source.iterdir():
        if found.name in NOT_DATA:
            continue
        if found.is_dir():
            shutil.copytree(found, target / found.name)
        else:
            shutil.copy2(found, target / found.name)


def _kill_all(stage: Stage) -> None:
    for node_id in stage.running:
        stage.nodes.kill(node_id)


def _bring_back(stage: Stage, victim: int, log: Path, *, is_first: bool) -> None:
    """Start all nodes. With `is_first`, the damaged replica is for a while the only one of its partition."""
    down = [node.id for node in stage.nodes.local.nodes if node.process.state is None]
    late: list[int] = []
    if is_first:
        late = [node_id for node_id in down if node_id != victim and _has_log(stage, node_id, log)]
    for node_id in down:
        if node_id not in late:
            stage.bring_back(node_id)
    if late:
        with contextlib.suppress(AssertionError):  # without the other replicas it may not become ready
            eventually(lambda: stage.nodes.node(victim).is_ready, FIRST_READY_S, f"node {victim} is ready")
        stage.hold()
    for node_id in late:
        stage.bring_back(node_id)


def _has_log(stage: Stage, node_id: int, log: Path) -> bool:
    return (Path(stage.nodes.node(node_id).folder) / "logs" / log.name).is_dir()


def _replica(stage: Stage, workload: Workload) -> tuple[int, Path]:
    """Choose a node and the folder of one of its replicas that has closed segments; all replicas are in sync."""
    stage.nodes.wait_in_sync()
    partition = stage.chance.choice(workload.partitions)
    victim = stage.chance.choice(stage.nodes.partitions(workload.topic)[partition].replicas)
    log = Path(stage.nodes.node(victim).folder) / "logs" / named(workload.topic, partition)
    eventually(lambda: len(_closed(log)) >= CLOSED_SEGMENTS, SEGMENTS_TIMEOUT_S, "there are closed segments")
    return victim, log


def _closed(log: Path) -> list[Path]:
    return sorted(log.glob("*.log"))[:-1]
