"""Damaged files of one node: bit rot, and files that are lost, broken or restored from an old copy.

A crash never damages durable records. So the node logs bit rot, another replica leads, and the replica heals itself: it
sets the damaged part aside, fetches it again, and returns to the ISR without human help.

Files are mostly lost while all nodes are killed. Two replicas stay intact each time, and that is enough: nothing is
lost, without human help. For a while, the damaged replica may be the only one of its partition that is back.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.support_logs import batches_in, closed_segments, log_of, overwrite, truncate
from tests.cluster.support_workload import Workload
from tests.faults.support_injector import FaultInjector
from tests.support.eventually import eventually

from chronik.wire.batch import HEADER_BYTES, read_batch_header

DAMAGED = ('"event": "log_damaged"', '"event": "log_open_failed"')
SEGMENTS_TIMEOUT_S = 60.0
FIRST_READY_S = 20.0
CLOSED_SEGMENTS = 2
"""Damage to a closed segment before the last is certainly below the offset that the node knows to be durable."""
WRECKED_BYTES = 64
STALE_BY_RECORDS = 200
NOT_DATA = frozenset(["node.toml", "node.log", "node.pid", "ballast", "lock"])
"""Files in a node's folder that are not data: its settings, log file, pid, lock, and what fills its disk."""


# -- bit rot -----------------------------------------------------------------------------------------------------------


@contextmanager
def flipped_bit(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Flip a bit in the records of a closed segment; a starting node does not see it, as the batch chain is intact.

    The node becomes the leader. When a client reads there, the node detects the damage and transfers leadership to
    another replica, which has the records.
    """
    victim, log = _replica(injector, workload, 1)
    segment = injector.chance.choice(closed_segments(log))
    injector.nodes.kill(victim)
    position = injector.chance.randrange(HEADER_BYTES, _first_batch_bytes(segment))
    _flip_bit(injector, segment, position)
    injector.note(f"a bit of byte {position} of {log.name}/{segment.name} on {victim}")
    before = _complaints(injector, victim)
    injector.nodes.start(victim)
    injector.nodes.wait_in_sync()
    injector.nodes.elect(workload.topic, {_partition(log): victim})
    workload.read_again()
    eventually(lambda: _complaints(injector, victim) > before, what=f"node {victim} reports the damage")
    assert injector.nodes.leader(workload.topic, _partition(log)) != victim
    yield
    injector.nodes.wait_in_sync()


@contextmanager
def truncated_file(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Truncate a segment, closed or active: everything can be read, whichever replica leads.

    If records in the middle are missing, the node logs it when it opens the log.
    """
    victim, log = _replica(injector, workload, 1)
    segment = injector.chance.choice(sorted(log.glob("*.log")))
    injector.nodes.kill(victim)
    size = len(segment.read_bytes().rstrip(b"\0"))
    keep = injector.chance.randrange(max(1, size))
    truncate(segment, keep)
    injector.note(f"{log.name}/{segment.name} on {victim} cut from {size} to {keep} bytes")
    injector.nodes.start(victim)
    injector.nodes.wait_in_sync()
    injector.nodes.elect(workload.topic, {_partition(log): victim})
    workload.read_again()
    yield


def _complaints(injector: FaultInjector, victim: int) -> int:
    """Count how often the node logged that a log is damaged."""
    text = injector.nodes.log_text(victim)
    return sum(text.count(event) for event in DAMAGED)


# -- lost files --------------------------------------------------------------------------------------------------------


@contextmanager
def lost_log(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Kill all nodes; when they come back, the folder of one replica is missing."""
    victim, log = _replica(injector, workload)
    _kill_all(injector)
    shutil.rmtree(log)
    injector.note(f"{log.name} removed on {victim}, all killed")
    yield
    _bring_back(injector, victim, log, is_first=injector.chance.random() < 0.5)


@contextmanager
def damaged_log(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Kill all nodes; one replica has a segment that is broken in the middle of a batch, and comes back first."""
    victim, log = _replica(injector, workload)
    segment = injector.chance.choice(closed_segments(log)[:-1])
    _kill_all(injector)
    inside = injector.chance.randrange(1, _first_batch_bytes(segment))
    if injector.chance.random() < 0.5:
        truncate(segment, inside)
        how = f"cut to {inside} bytes"
    else:
        overwrite(segment, inside, lambda old: injector.chance.randbytes(WRECKED_BYTES))
        how = f"wrecked from byte {inside} on"
    injector.note(f"{log.name}/{segment.name} on {victim} {how}, all killed, {victim} returns first")
    yield
    _bring_back(injector, victim, log, is_first=True)
    # Recovery does not read closed segments: a changed batch there shows when a client reads it.
    injector.nodes.wait_in_sync()
    injector.nodes.elect(workload.topic, {_partition(log): victim})
    workload.read_again()


@contextmanager
def short_log(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Kill all nodes; one replica has lost or corrupted the last batch of its log, and comes back first."""
    victim, log = _replica(injector, workload)
    _kill_all(injector)
    segment, position, size = _last_batch(log)
    if injector.chance.random() < 0.5:
        truncate(segment, position)
        how = f"cut to {position} bytes"
    else:
        _flip_bit(injector, segment, position + injector.chance.randrange(HEADER_BYTES, size))
        how = f"changed in the batch at byte {position}"
    injector.note(f"{log.name}/{segment.name} on {victim} {how}, all killed, {victim} returns first")
    yield
    _bring_back(injector, victim, log, is_first=True)


@contextmanager
def stale_folder(injector: FaultInjector, workload: Workload) -> Iterator[None]:
    """Restore a node's data folder from a copy made before its last run; the other nodes may be killed with it."""
    victim, log = _replica(injector, workload)
    copy = Path(injector.nodes.folder) / f"copy-of-{victim}"
    is_clean = injector.chance.random() < 0.5
    (injector.nodes.stop if is_clean else injector.nodes.kill)(victim)
    _copy_data(injector.nodes.data_folder(victim), copy)
    injector.nodes.start(victim)
    injector.nodes.wait_in_sync()
    workload.proceed(STALE_BY_RECORDS)
    injector.nodes.wait_in_sync()
    with_all = injector.chance.random() < 0.7
    if with_all:
        _kill_all(injector)
    else:
        injector.nodes.kill(victim)
    _copy_data(copy, injector.nodes.data_folder(victim))
    shutil.rmtree(copy)
    how = f"copy from a {'clean stop' if is_clean else 'kill'}, {'all' if with_all else 'only it'} killed"
    injector.note(f"{victim} back to an older folder ({how})")
    yield
    _bring_back(injector, victim, log, is_first=with_all)


def _copy_data(source: Path, target: Path) -> None:
    """Replace the target's data with the source's; files in `NOT_DATA` are neither copied nor removed."""
    for old in target.iterdir() if target.exists() else ():
        if old.name in NOT_DATA:
            continue
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*NOT_DATA), dirs_exist_ok=True)


def _kill_all(injector: FaultInjector) -> None:
    for node_id in injector.responsive:
        injector.nodes.kill(node_id)


def _bring_back(injector: FaultInjector, victim: int, log: Path, *, is_first: bool) -> None:
    """Start all nodes. With `is_first`, the damaged replica is for a while the only one of its partition."""
    down = [node.id for node in injector.nodes if node.process.state is None]
    late: list[int] = []
    if is_first:
        late = [node_id for node_id in down if node_id != victim and _has_log(injector, node_id, log)]
    for node_id in down:
        if node_id not in late:
            injector.bring_back(node_id)
    if late:
        with contextlib.suppress(AssertionError):  # without the other replicas it may not become ready
            eventually(lambda: injector.nodes.node(victim).is_ready, FIRST_READY_S, f"node {victim} is ready")
        injector.hold()
    for node_id in late:
        injector.bring_back(node_id)


def _has_log(injector: FaultInjector, node_id: int, log: Path) -> bool:
    return (injector.nodes.data_folder(node_id) / "logs" / log.name).is_dir()


def _replica(injector: FaultInjector, workload: Workload, count: int = CLOSED_SEGMENTS) -> tuple[int, Path]:
    """Choose a node and the folder of one of its replicas with `count` closed segments; all replicas are in sync."""
    injector.nodes.wait_in_sync()
    partition = injector.chance.choice(workload.partitions)
    victim = injector.chance.choice(injector.nodes.partitions(workload.topic)[partition].replicas)
    log = log_of(injector.nodes, victim, workload.topic, partition)
    eventually(lambda: len(closed_segments(log)) >= count, SEGMENTS_TIMEOUT_S, f"{count} segments are closed")
    return victim, log


def _partition(log: Path) -> int:
    return int(log.name.rpartition("-")[2])


def _first_batch_bytes(segment: Path) -> int:
    return read_batch_header(segment.read_bytes(), 0).size_bytes


def _last_batch(log: Path) -> tuple[Path, int, int]:
    """Return the segment of the log's last batch, and the position and size of that batch."""
    *_, last = ((segment, batch) for segment in sorted(log.glob("*.log")) for batch in batches_in(segment))
    segment, (position, header, _) = last
    return segment, position, header.size_bytes


def _flip_bit(injector: FaultInjector, segment: Path, position: int) -> None:
    overwrite(segment, position, lambda old: bytes([old[0] ^ 1 << injector.chance.randrange(8)]))
