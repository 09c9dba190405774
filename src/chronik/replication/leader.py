"""One partition as its leader sees it: which offsets count as written where, and so the high watermark."""

from collections.abc import Iterable


class PartitionLeader:
    """The high watermark of one partition during one leader epoch.

    Invariant: high_watermark <= the counted end of every in-sync replica, and high_watermark never falls.
    "Counted" is what the durability setting lets count as written: the synced end under `synced`, the log end under
    `replicated`. Owned by the node's loop; nothing here waits, reads a clock or touches a file.
    """

    __slots__ = ("_counted_ends", "high_watermark", "in_sync_replicas", "leader_epoch", "node_id")

    def __init__(
        self,
        node_id: int,
        leader_epoch: int,
        in_sync_replicas: Iterable[int],
        counted_end: int,
        high_watermark: int,
    ) -> None:
        self.node_id = node_id
        self.leader_epoch = leader_epoch
        self.in_sync_replicas = tuple(in_sync_replicas)
        if node_id not in self.in_sync_replicas:
            raise ValueError(f"node {node_id} leads without being in sync: {self.in_sync_replicas}")
        self.high_watermark = high_watermark
        self._counted_ends = dict.fromkeys(self.in_sync_replicas, high_watermark)
        self._counted_ends[node_id] = counted_end
        self._advance()

    def counted(self, replica: int, end: int) -> bool:
        """Replica `replica` has everything below `end`; tells whether the watermark rose."""
        known = self._counted_ends.get(replica)
        if known is None or end <= known:
            return False
        self._counted_ends[replica] = end
        return self._advance()

    def _advance(self) -> bool:
        end = min(self._counted_ends.values())
        if end <= self.high_watermark:
            return False
        self.high_watermark = end
        return True
