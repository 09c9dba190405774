"""Moments in the node's code that matter for crashes, beyond those of disk, threads and network.

Seen by wrapping the functions for as long as a run lasts: the node's code knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from chronik.node.membership.raft_service import RaftService
from chronik.node.replicas.partition import Partition
from chronik.raft.node import RaftNode
from chronik.replication.isr import InSyncReplicas
from chronik.testing.sim.world import World

BEFORE = True
ANSWERED = "raft.answered"
WRAPPED: tuple[tuple[type[Any], str, bool, str], ...] = (
    (Partition, "append", not BEFORE, "partition.appended"),
    (Partition, "append_fetched", not BEFORE, "partition.replicated"),
    (Partition, "synced", BEFORE, "partition.synced"),
    (Partition, "_watermark_rose", BEFORE, "partition.committed"),
    (Partition, "cut_ended", not BEFORE, "partition.truncated"),
    (Partition, "_lead", not BEFORE, "partition.leads"),
    (Partition, "_follow", not BEFORE, "partition.follows"),
    (InSyncReplicas, "propose", not BEFORE, "isr.proposed"),
    (InSyncReplicas, "committed_as", not BEFORE, "isr.committed"),
    (RaftNode, "persisted", BEFORE, "raft.persisted"),
    (RaftService, "_persisted", not BEFORE, ANSWERED),
)
"""Each function, whether its moment comes before it or after it, and the moment's name.

partition.synced, raft.persisted: it is on the disk, and nobody has been told. partition.truncated: what another leader
does not have is gone, and nothing was fetched in its place. isr.proposed: the leader counts with a change of which the
controller has not heard. raft.answered: what was persisted has been told, a vote for example.
"""

CLUSTER_MOMENTS = {name: 2 for *_, name in WRAPPED}


@contextmanager
def moments(world: World) -> Iterator[None]:
    """Seen for as long as the block lasts."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _, _ in WRAPPED]
    for owner, name, is_before, moment in WRAPPED:
        setattr(owner, name, _wrapped(world, getattr(owner, name), is_before, moment))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _wrapped(world: World, original: Callable[..., Any], is_before: bool, moment: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        process = world.running
        if process is None:
            return original(*args, **kwargs)
        if is_before:
            process.reached(moment)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        process.reached(moment)
        return result

    return wrapped
