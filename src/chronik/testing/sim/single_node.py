"""One node, `synced`: every record that was acknowledged or read survives every crash."""

from __future__ import annotations

from typing import ClassVar

from chronik.testing.sim.faults import Nemesis
from chronik.testing.sim.host import Host
from chronik.testing.sim.node import SimNode, node_config
from chronik.testing.sim.scenario import Scenario
from chronik.testing.sim.workload import Workload, WorkloadSettings


class SingleNode(Scenario):
    """A single broker."""

    name: ClassVar[str] = "single-node"

    def build(self) -> None:
        host = Host(self.world, self.network, "node-1", "10.0.0.1")
        self.nodes.append(SimNode(host, node_config(1, host)))
        settings = WorkloadSettings.drawn(self.random, replication_factor=1)
        self.workload = Workload(self.world, self.history, self.client_hosts, [(host.address, 9092)], settings)
        self.nemesis = Nemesis(self.world, self.network, self.nodes, self.client_hosts)
