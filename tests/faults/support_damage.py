"""Files of one replica that rot, are lost or come from an old copy; alone, and together with a kill of all nodes.

Damage below what was durable is not what a crash leaves, and no node throws such a log away by itself: it says so in
its log, another replica leads, and a person decides. What a person does is done here for `flipped_bit` and
`truncated_file`: the partition's folder goes, and the node fetches it anew.

After the others nobody does anything: two replicas are whole, and that is enough.
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
FIRST_READY_S = 20.0
WRECKED_BYTES = 64
STALE_BY_RECORDS = 200
NOT_DATA = frozenset(["node.toml", "node.log", "node.pid", "ballast", "lock"])
"""Of a node's folder: settings, log and process of the node as it is now, and what fills its disk."""


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


@contextmanager
def lost_log(stage: Stage, workload: Workload) -> Iterator[None]:
    """All nodes die; when they come back, the folder of one replica is gone."""
    victim, log = _replica(stage, workload)
    _kill_all(stage)
    shutil.rmtree(log)
    stage.note(f"{log.name} removed on {victim}, all killed")
    yield
    _bring_back(stage, victim, log, is_first=stage.chance.random() < 0.5)


@contextmanager
def damaged_log(stage: Stage, workload: Workload) -> Iterator[None]:
    """All nodes die; one replica has a segment that is broken in the middle of a batch, and comes back first."""
    victim, log = _replica(stage, workload)
    eventually(lambda: len(_closed(log)) > 1, SEGMENTS_TIMEOUT_S, "there are two closed segments")
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


@contextmanager
def stale_folder(stage: Stage, workload: Workload) -> Iterator[None]:
    """A node's data folder is put back to a copy that was made before its last run; the others may die with it."""
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
    """The data folder without what belongs to the machine; whatever else was in the target goes."""
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
    """All nodes. With `is_first`, the hurt replica is for a while the only one of its partition that is back."""
    down = [node.id for node in stage.nodes.local.nodes if node.process.state is None]
    late: list[int] = []
    if is_first:
        late = [node_id for node_id in down if node_id != victim and _has_log(stage, node_id, log)]
    for node_id in down:
        if node_id not in late:
            stage.bring_back(node_id)
    if late:
        with contextlib.suppress(AssertionError):  # without the others it may not get far
            eventually(lambda: stage.nodes.node(victim).is_ready, FIRST_READY_S, f"node {victim} is ready")
        stage.hold()
    for node_id in late:
        stage.bring_back(node_id)


def _has_log(stage: Stage, node_id: int, log: Path) -> bool:
    return (Path(stage.nodes.node(node_id).folder) / "logs" / log.name).is_dir()


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
