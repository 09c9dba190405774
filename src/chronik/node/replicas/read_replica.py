"""The replica that a consumer should read from: one in its own rack, if one there has the data (KIP-392)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chronik.metadata.image import ClusterImage

if TYPE_CHECKING:
    from chronik.node.replicas.partition import Partition

NO_REPLICA = -1


def read_replica(image: ClusterImage, partition: Partition, rack: str, offset: int) -> int | None:
    """Return the in-sync replica in `rack` that is furthest and has `offset`, or None to read from this leader.

    Followers know only the watermark, so they cannot serve topics whose records are visible when appended.
    """
    leader = partition.leader
    if leader is None or partition.settings.visible_when_appended:
        return None
    best: int | None = None
    for replica in leader.in_sync_replicas:
        broker = image.brokers.get(replica)
        if broker is None or broker.rack != rack:
            continue
        if replica == leader.node_id:
            return None
        if broker.is_fenced or broker.is_shutting_down or leader.counted_end_of(replica) < offset:
            continue
        if best is None or leader.counted_end_of(replica) > leader.counted_end_of(best):
            best = replica
    return best
