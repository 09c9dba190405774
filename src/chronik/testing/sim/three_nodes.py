"""Three nodes, `synced`, replication factor 3: nothing that was acknowledged with acks=all, or shown, is ever lost.

At the end all replicas of each partition must come into sync, and then have the same bytes.
"""

from __future__ import annotations

from typing import ClassVar

from chronik.node.config import Peer
from chronik.node.partition import Partition
from chronik.testing.sim.faults import Nemesis
from chronik.testing.sim.host import Host
from chronik.testing.sim.node import SimNode, node_config
from chronik.testing.sim.scenario import Scenario
from chronik.testing.sim.workload import TOPIC, Workload, WorkloadSettings
from chronik.wire.batch import check_batches

NODES = 3
INTERNAL_PORT = 5092
IN_SYNC_S_MAX = 30.0


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
        """All replicas catch up and come into sync; then each has the same bytes."""
        if not self._reaches(IN_SYNC_S_MAX, self._all_in_sync, "all replicas are in sync", self._who_lags):
            return
        for partition in range(self.workload.settings.partitions):
            copies = self._copies(partition)
            contents = {name: _content(hosted) for name, hosted in copies}
            if len(set(contents.values())) > 1:
                sizes = {name: len(content) for name, content in contents.items()}
                self.world.violated(f"the replicas of {TOPIC}-{partition} differ: {sizes} bytes")

    def _copies(self, partition: int) -> list[tuple[str, Partition]]:
        return [
            (node.host.name, hosted)
            for node in self.nodes
            if node.broker is not None and (hosted := node.broker.host.partitions.get((TOPIC, partition)))
        ]

    def _all_in_sync(self) -> bool:
        return all(self._is_in_sync(partition) for partition in range(self.workload.settings.partitions))

    def _is_in_sync(self, partition: int) -> bool:
        copies = [hosted for _, hosted in self._copies(partition)]
        leaders = [hosted for hosted in copies if hosted.leader is not None]
        if len(copies) < NODES or len(leaders) != 1:
            return False
        end = leaders[0].log_end_offset
        return len(leaders[0].in_sync_replicas) == NODES and all(
            hosted.log_end_offset == hosted.high_watermark == end for hosted in copies
        )

    def _who_lags(self) -> str:
        return "; ".join(
            f"{TOPIC}-{partition} at {name}: epoch {hosted.leader_epoch}, watermark {hosted.high_watermark} of "
            f"{hosted.log_end_offset}, in sync {hosted.in_sync_replicas}"
            for partition in range(self.workload.settings.partitions)
            if not self._is_in_sync(partition)
            for name, hosted in self._copies(partition)
        )


def _content(hosted: Partition) -> bytes:
    """All its batches: a read ends with a segment, and each replica has segments of its own."""
    content = bytearray()
    position, end = hosted.log_start_offset, hosted.log_end_offset
    while position < end:
        data = memoryview(bytes(hosted.log.read_job(position, 1 << 30, end)()))
        content += data
        position = check_batches(data, len(data), from_producer=False)[-1][1].next_offset
    return bytes(content)
