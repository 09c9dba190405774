"""Crash points: where bugs are, so faults strike there and not only at arbitrary times.

Disk, threads and network report their own. Those in the node's code wrap its functions for the duration of a run: the
node does not know of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from chronik.node.membership.raft_service import RaftService
from chronik.node.replicas.partition import Partition
from chronik.raft.node import RaftNode
from chronik.replication.isr import InSyncReplicas
from chronik.testing.sim.world import World

NODE_POINTS: Mapping[str, int] = {
    "job.submitted": 4,
    "job.done": 2,
    "job.reported": 2,
    "segment.arrived": 2,
    "disk.write": 2,
    "disk.written": 4,
    "disk.sync": 4,
    "disk.synced": 2,
    "disk.sync_dir": 1,
    "disk.synced_dir": 1,
    "disk.create": 1,
    "disk.rename": 1,
    "disk.renamed": 1,
    "disk.remove": 1,
    "disk.removed": 1,
    "disk.truncate": 1,
}
"""The crash points of disk, threads and network, each with its weight."""
BEFORE = True
ANSWERED = "raft.answered"
WRAPPED: tuple[tuple[type[Any], str, bool, str], ...] = (
    (Partition, "append", not BEFORE, "partition.appended"),
    (Partition, "append_fetched", not BEFORE, "partition.replicated"),
    (Partition, "synced", BEFORE, "partition.synced"),
    (Partition, "_watermark_rose", BEFORE, "partition.committed"),
    (Partition, "truncation_ended", not BEFORE, "partition.truncated"),
    (Partition, "_lead", not BEFORE, "partition.leads"),
    (Partition, "_follow", not BEFORE, "partition.follows"),
    (InSyncReplicas, "propose", not BEFORE, "isr.proposed"),
    (InSyncReplicas, "committed_as", not BEFORE, "isr.committed"),
    (RaftNode, "persisted", BEFORE, "raft.persisted"),
    (RaftService, "_persisted", not BEFORE, ANSWERED),
)
"""Each function, whether its crash point comes before or after it, and the crash point's name.

partition.synced, raft.persisted: the data is durable, but not yet reported. partition.truncated: records that the new
leader lacks are removed, and nothing was fetched in their place. isr.proposed: the leader relies on an ISR change that
the controller has not received. raft.answered: persisted state was reported, for example a vote.
"""

CLUSTER_POINTS: Mapping[str, int] = {**NODE_POINTS, **{name: 2 for *_, name in WRAPPED}}


@contextmanager
def crash_points(world: World) -> Iterator[None]:
    """Enable the crash points within the block."""
    with ExitStack() as enabled:
        for owner, name, is_before, point in WRAPPED:
            wrapped = _wrapped(world, getattr(owner, name), is_before, point)
            enabled.enter_context(patch.object(owner, name, wrapped))
        yield


def _wrapped(world: World, original: Callable[..., Any], is_before: bool, point: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        process = world.running
        if process is not None and is_before:
            process.reached(point)
        result = original(*args, **kwargs)
        if process is not None and not is_before:
            process.reached(point)
        return result

    return wrapped
