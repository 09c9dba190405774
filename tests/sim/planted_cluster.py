"""Bugs to plant into a cluster, in addition to those of one node in `planted`: typical mistakes of replication."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from tests.sim.planted import Planted, offset_is_loaded_and_later_stored

from chronik.metadata.image import PartitionImage
from chronik.node.membership import metadata_mark
from chronik.node.membership.cluster_member import ClusterMember
from chronik.node.replicas import partition as partition_module
from chronik.node.replicas.partition import FetchPosition, Partition
from chronik.raft.store import Persist, StoredState, stored_after
from chronik.replication.follower import PartitionFollower, Truncate
from chronik.replication.isr import InSyncReplicas
from chronik.replication.leader import PartitionLeader
from chronik.testing.sim import raft_store
from chronik.wire.fetch import FetchPartition


def watermark_is_the_leaders_end() -> AbstractContextManager[Any]:
    """The high watermark follows the leader's own log and ignores the other replicas of the ISR."""

    def advance(leader: PartitionLeader) -> bool:
        if not leader.has_enough_replicas or leader._own_end <= leader.high_watermark:
            return False
        leader.high_watermark = leader._own_end
        return True

    return patch.object(PartitionLeader, "_advance", advance)


def replicas_count_before_the_sync() -> AbstractContextManager[Any]:
    """Under `synced`, records in a replica's memory count as durable: acknowledged before any disk has them."""
    original = Partition.__init__

    def init(partition: Partition, *args: Any, **kwargs: Any) -> None:
        original(partition, *args, **kwargs)
        partition.acknowledges_unsynced = True

    return patch.object(Partition, "__init__", init)


@contextmanager
def vote_is_not_durable() -> Iterator[None]:
    """Term and vote are only written with the next entries, so a restarted node forgets its vote."""

    def stored(before: StoredState, persist: Persist) -> StoredState:
        after = stored_after(before, persist)
        if persist.entries:
            return after
        return StoredState(after.store_id, before.hard_state, after.snapshot, after.entries)

    def unmarked(*_: Any) -> None:
        return None

    with patch.object(raft_store, "stored_after", stored), patch.object(metadata_mark, "read_numbers", unmarked):
        yield


@contextmanager
def truncation_by_watermark() -> Iterator[None]:
    """A follower truncates to its own high watermark when it follows a new leader, without comparing epochs."""
    follow = Partition._follow

    def go_back(partition: Partition, image: PartitionImage) -> None:
        follow(partition, image)
        role = partition.role
        assert isinstance(role, PartitionFollower)
        if image.leader >= 0 and role.high_watermark < partition.log_end_offset:
            truncation = partition._replication.truncate(partition, role, Truncate(role.high_watermark, False))  # type: ignore[attr-defined]
            asyncio.get_running_loop().create_task(truncation)

    def same(*_: Any) -> None:
        return None

    with patch.object(Partition, "_follow", go_back), patch.object(partition_module, "diverging_epoch", same):
        yield


def leader_counts_received_positions() -> AbstractContextManager[Any]:
    """A leader takes for durable what a follower has received: it commits records that are on no other device."""
    replica_fetched = Partition.replica_fetched

    def fetched(partition: Partition, replica_id: int, broker_epoch: int, fetch: FetchPartition) -> Any:
        return replica_fetched(partition, replica_id, broker_epoch, fetch._replace(fetch_offset=fetch.read_offset))

    return patch.object(Partition, "replica_fetched", fetched)


def follower_reports_received_as_durable() -> AbstractContextManager[Any]:
    """A follower that fetches ahead states the end of its log as its fetch offset."""
    fetch_position = Partition.fetch_position

    def received(partition: Partition) -> FetchPosition | None:
        position = fetch_position(partition)
        return position and position._replace(durable_end=position.end, durable_epoch=position.last_epoch)

    return patch.object(Partition, "fetch_position", received)


def isr_removal_counts_before_its_commit() -> AbstractContextManager[Any]:
    """A leader stops waiting for a replica when it proposes to remove it, not when the controller has agreed."""
    propose = InSyncReplicas.propose

    def propose_and_count(isr: InSyncReplicas, members: Iterable[int]) -> None:
        members = tuple(members)
        propose(isr, members)
        isr.maximal = members

    return patch.object(InSyncReplicas, "propose", propose_and_count)


def stale_leader_serves() -> AbstractContextManager[Any]:
    """No node checks the lease: a leader that was paused or cut off answers as if it still led."""

    def always(member: ClusterMember) -> bool:
        return True

    return patch.object(ClusterMember, "lease_is_valid", always)


def early_batches_are_accepted() -> AbstractContextManager[Any]:
    """A new leader does not wait for batches that their producer sent to the former leader."""

    def never(partition: Partition) -> bool:
        return False

    return patch.object(Partition, "_may_be_early", never)


PLANTED_IN_CLUSTER: dict[Planted, tuple[int, int]] = {
    offset_is_loaded_and_later_stored: (1, 3),
    watermark_is_the_leaders_end: (0, 9),
    replicas_count_before_the_sync: (36, 34),
    vote_is_not_durable: (9, 26),
    truncation_by_watermark: (3, 7),
    leader_counts_received_positions: (0, 5),
    follower_reports_received_as_durable: (0, 5),
    isr_removal_counts_before_its_commit: (24, 36),
    stale_leader_serves: (5, 30),
    early_batches_are_accepted: (12, 20),
}
"""Each bug, the first seed, and the number of seeds that may pass before it is found: about three times the mean.

Measured over the seeds from 0 on, as hits in seeds: 19 in 20, 7 in 20, 7 in 80, 7 in 60, 9 in 20, 5 in 8, 6 in 8,
5 in 60, 2 in 20. If hits are far apart, the first seed is one that finds the bug, because a seed takes 1-3 s. If it
finds nothing after a change of the source, the search takes longer until a new first seed is written here.
"""
