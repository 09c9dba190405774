"""Five nodes, replication factor 3, uneven placement; nodes join, leave and are lost, disks are bad.

The guarantees are those of `three_nodes` and `bad_disks`. In half of the seeds the fifth node joins a running cluster.
In some seeds an operator removes nodes and adds them again, and changes min.insync.replicas during writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from chronik.testing.sim.cluster_faults import CLUSTER_FAULTS, ClusterNemesis, LoneCut
from chronik.testing.sim.disk_faults import WOUNDS, DiskNemesis
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.resizer import SimResizer
from chronik.testing.sim.three_nodes import REPLICAS, ThreeNodes
from chronik.testing.sim.workload import TOPIC, Workload, WorkloadSettings

FOUNDERS_BEFORE_A_JOIN = 4
PLACEMENT_WEIGHTS = (5.0, 4.0, 2.0, 1.0, 1.0)
"""The weight of each node in replica placement; each seed draws the order of the nodes."""
JOINS_AFTER_S = (0.5, 3.0)
SICK_SHARE = 0.3


class FiveNodes(ThreeNodes):
    """A cluster whose nodes may all have different partitions."""

    name: ClassVar[str] = "five-nodes"
    node_count: ClassVar[int] = 5
    busy_range_s: ClassVar[tuple[float, float]] = (2.0, 4.0)

    def build(self) -> None:
        drawn = self.world.random("five-nodes")
        self.founder_count = drawn.choice((FOUNDERS_BEFORE_A_JOIN, self.node_count))
        self._order = drawn.sample(range(1, self.node_count + 1), self.node_count)
        self._has_resizer = drawn.random() < 0.5
        kinds = sorted(CLUSTER_FAULTS)
        self._kinds = drawn.sample(kinds, drawn.randint(1, 3)) + drawn.sample(sorted(WOUNDS), drawn.randint(0, 2))
        if drawn.random() < SICK_SHARE:
            self._kinds += ["fail_disk", "hang_disk"]
        super().build()
        if self.founder_count < self.node_count:
            self.absent.append(self.nodes[-1])
            self.world.after(drawn.uniform(*JOINS_AFTER_S), self._joins)

    def _joins(self) -> None:
        for node in self.absent:
            self.world.note(f"{node.host.name} joins")
            node.start_when_down()

    def draw_workload(self) -> WorkloadSettings:
        settings = super().draw_workload()
        placed = [node for node in self._order if node <= self.founder_count]
        weights = PLACEMENT_WEIGHTS[: len(placed)]
        assignments = tuple(self._placed(placed, list(weights)) for _ in range(settings.partitions))
        # Five nodes exchange more messages than three: run fewer producers.
        return replace(settings, assignments=assignments, producers=settings.producers[:2])

    def _placed(self, nodes: list[int], weights: list[float]) -> tuple[int, ...]:
        """Draw distinct nodes for the replicas, by weight."""
        left = dict(zip(nodes, weights, strict=True))
        chosen: list[int] = []
        while len(chosen) < REPLICAS:
            chosen += self.random.choices(list(left), list(left.values()))
            del left[chosen[-1]]
        return tuple(chosen)

    def make_workload(self, bootstrap: list[tuple[str, int]], settings: WorkloadSettings) -> Workload:
        operators = []
        if self._has_resizer and not self.has_lone_cut:
            configured = int(settings.topic_configs["min.insync.replicas"])
            values = (configured, 1, 2, 3) if self.is_synced else (2, 3)
            operators.append(SimResizer("r0", self.world, self.history, bootstrap, TOPIC, self.nodes, values))
        return Workload(self.world, self.history, self.client_hosts, bootstrap, settings, operators)

    def make_nemesis(self, mortal: SimNode | None) -> ClusterNemesis:
        shared = self.world, self.network, self.nodes, self.client_hosts, TOPIC
        if self.has_lone_cut:
            return LoneCut(*shared, mortal=mortal)
        return DiskNemesis(*shared, self._kinds, mortal=mortal)
