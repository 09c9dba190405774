"""Three nodes, `synced`, replication factor 3: nothing that was acknowledged with acks=all, or shown, is ever lost.

At the end the replicas of each partition are compared byte for byte, as far as the watermark of each goes.
"""

from __future__ import annotations

from typing import ClassVar

from chronik.node.config import Peer
from chronik.testing.sim.faults import Nemesis
from chronik.testing.sim.host import Host
from chronik.testing.sim.node import SimNode, node_config
from chronik.testing.sim.scenario import Scenario
from chronik.testing.sim.workload import TOPIC, Workload, WorkloadSettings

NODES = 3
INTERNAL_PORT = 5092


class ThreeNodes(Scenario):
    """A cluster that has a majority most of the time."""

    name: ClassVar[str] = "three-nodes"

    def build(self) -> None:
        hosts = [Host(self.world, self.network, f"node-{n}", f"10.0.0.{n}") for n in range(1, NODES + 1)]
        for node_id, host in enumerate(hosts, 1):
            peers = tuple(
                Peer(id=other, internal=f"{there.address}:{INTERNAL_PORT}")
                for other, there in enumerate(hosts, 1)
                if other != node_id
            )
            self.nodes.append(SimNode(host, node_config(node_id, host, peers=peers, default_replication_factor=3)))
        settings = WorkloadSettings.drawn(self.random, replication_factor=NODES)
        bootstrap = [(host.address, 9092) for host in hosts]
        self.workload = Workload(self.world, self.history, self.client_hosts, bootstrap, settings)
        self.nemesis = Nemesis(self.world, self.network, self.nodes, self.client_hosts)

    def check_at_rest(self) -> None:
        for partition in range(self.workload.settings.partitions):
            copies = [
                (node.host.name, hosted)
                for node in self.nodes
                if node.broker is not None and (hosted := node.broker.host.partitions.get((TOPIC, partition)))
            ]
            upto = min((hosted.high_watermark for _, hosted in copies), default=0)
            contents = {name: bytes(hosted.log.read_job(0, 1 << 30, upto)()) for name, hosted in copies if upto}
            if len(set(contents.values())) > 1:
                self.world.violated(f"the replicas of {TOPIC}-{partition} differ below the watermark {upto}")
