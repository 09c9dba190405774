"""Tracks the damaged node: acknowledged records are guaranteed only while one in-sync replica is intact.

One node at a time is `damaged`. It has recovered when it serves, is a voter again, is in sync for every partition that
it has a replica of, and its files hold all their records. Until then no other node's files are damaged. A node's files
are damaged only while every partition on it has another replica that is in the ISR or eligible.
"""

from __future__ import annotations

from collections.abc import Sequence

from chronik.storage.folder import TopicPartition
from chronik.testing.sim.node import SimNode, newest_image
from chronik.testing.sim.node_files import NodeFiles
from chronik.testing.sim.world import World

CHECK_S = 0.2
MAY_LOG_WHILE_DAMAGED = frozenset(["log_damaged", "commit_log_damaged"])


class DamageTracker:
    """Invariant: at most one node is `damaged`."""

    def __init__(self, world: World, nodes: Sequence[SimNode]) -> None:
        self._world = world
        self._nodes = nodes
        self.damaged: SimNode | None = None
        self._checked_s = 0.0

    def files(self, node: SimNode) -> NodeFiles:
        return NodeFiles(node.host, node.config.data_folder, node.config.node_id)

    def may_damage(self, node: SimNode) -> bool:
        """Return whether the cluster can lose this node's files. The node must be ready, so that its image counts."""
        if self.damaged is node and node.is_ready:
            return self._others_have_its_records(node)
        return self.has_recovered() and node.is_ready and self._others_have_its_records(node)

    def mark_damaged(self, node: SimNode) -> None:
        self.damaged = node
        node.may_log |= MAY_LOG_WHILE_DAMAGED

    def _others_have_its_records(self, node: SimNode) -> bool:
        image = newest_image(self._nodes)
        node_id = node.config.node_id
        return image is not None and all(
            any(other != node_id for other in (*partition.isr, *partition.eligible))
            for topic in image.topics.values()
            for partition in topic.partitions
            if node_id in partition.replicas
        )

    def has_recovered(self) -> bool:
        """Return whether no node is damaged. This reads all files of a node, so it is done only every `CHECK_S`."""
        node = self.damaged
        if node is None:
            return True
        if self._world.now < self._checked_s + CHECK_S:
            return False
        self._checked_s = self._world.now
        if self.missing_from(node):
            return False
        self._world.note(f"{node.host.name} is whole again")
        node.may_log -= MAY_LOG_WHILE_DAMAGED
        self.damaged = None
        return True

    def missing_from(self, node: SimNode) -> str:
        """Return why the node has not recovered yet; empty if it has."""
        image = newest_image(self._nodes)
        if image is None or not node.is_ready:
            return f"{node.host.name} is not ready"
        node_id = node.config.node_id
        if not self._votes(node_id):
            return f"{node.host.name} has no vote"
        for topic in image.topics.values():
            for partition in topic.partitions:
                log: TopicPartition = (topic.name, partition.partition)
                if node_id in partition.replicas and (missing := self._missing_of(node, log, partition.isr)):
                    return f"{node.host.name}, {topic.name}-{partition.partition}: {missing}"
        return ""

    def _votes(self, node_id: int) -> bool:
        """Return whether the Raft leader has the node as a voter: a node that lost its store is a learner first."""
        for node in self._nodes:
            broker = node.ready_broker
            if broker is not None and broker.member.raft.node.is_leader:
                member = broker.member.raft.node.membership.member(node_id)
                return member is not None and member.is_voter
        return False

    def _missing_of(self, node: SimNode, log: TopicPartition, isr: Sequence[int]) -> str:
        assert node.broker is not None
        hosted = node.broker.host.partitions.get(log)
        if hosted is None or node.config.node_id not in isr:
            return f"it is not in sync, but {list(isr)} are"
        end = self.files(node).whole_end(log)
        if end is None or end < hosted.high_watermark:
            return f"its files are whole up to {end} of {hosted.high_watermark}"
        starts = [
            copy.log_start_offset
            for other in self._nodes
            if (broker := other.ready_broker) is not None and (copy := broker.host.partitions.get(log))
        ]
        if hosted.log_start_offset > min(starts):
            return f"it starts at {hosted.log_start_offset}, others at {min(starts)}"
        return ""
