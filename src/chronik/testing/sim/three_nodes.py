"""Three nodes, replication factor 3: nothing that was acknowledged with acks=all, or shown, is ever lost.

Under `synced` every node may die at any time, all of them at once too. Under `replicated`, which counts what is in
memory, every process may be killed, but only one machine (a minority) loses power, and min.insync.replicas is 2.

At the end all replicas of each partition must come into sync, and then have the same bytes.
"""

from __future__ import annotations

from typing import ClassVar

from chronik.node.config import Peer
from chronik.node.partition import Partition
from chronik.testing.sim.audit import Auditor
from chronik.testing.sim.cluster_faults import ClusterNemesis
from chronik.testing.sim.host import Host
from chronik.testing.sim.node import SimNode, node_config
from chronik.testing.sim.scenario import Scenario
from chronik.testing.sim.workload import TOPIC, Workload, WorkloadSettings
from chronik.wire.batch import check_batches

REPLICAS = 3
INTERNAL_PORT = 5092
IN_SYNC_S_MAX = 60.0
SYNCED_SHARE = 0.75


class ThreeNodes(Scenario):
    """A cluster that has a majority most of the time."""

    name: ClassVar[str] = "three-nodes"
    node_count: ClassVar[int] = 3

    busy_range_s: ClassVar[tuple[float, float]] = (3.0, 7.0)
    strike_pauses_s: ClassVar[tuple[float, ...]] = (0.4, 1.0, 2.0)

    def build(self) -> None:
        random = self.random
        self.is_synced = random.random() < SYNCED_SHARE
        hosts = [Host(self.world, self.network, f"node-{n}", f"10.0.0.{n}") for n in range(1, self.node_count + 1)]
        lag_ms_max = random.choice((1_000, 3_000))
        for node_id, host in enumerate(hosts, 1):
            peers = tuple(
                Peer(id=other, internal=f"{there.address}:{INTERNAL_PORT}")
                for other, there in enumerate(hosts, 1)
                if other != node_id
            )
            config = node_config(
                node_id,
                host,
                peers=peers,
                rack=f"rack-{node_id}",
                default_replication_factor=REPLICAS,
                durability="synced" if self.is_synced else "replicated",
                replica_lag_ms_max=lag_ms_max,
            )
            self.nodes.append(SimNode(host, config))
        bootstrap = [(host.address, 9092) for host in hosts]
        self.workload = Workload(self.world, self.history, self.client_hosts, bootstrap, self.draw_workload())
        self.nemesis = self.make_nemesis(None if self.is_synced else random.choice(self.nodes))
        Auditor(self.world, self.nodes, TOPIC).begin()

    def draw_workload(self) -> WorkloadSettings:
        # What one replica acknowledged alone does not outlive its machine's memory.
        return WorkloadSettings.drawn(self.random, REPLICAS, min_insync_replicas=None if self.is_synced else 2)

    def make_nemesis(self, mortal: SimNode | None) -> ClusterNemesis:
        return ClusterNemesis(self.world, self.network, self.nodes, self.client_hosts, TOPIC, mortal=mortal)

    def fail(self, node: SimNode) -> None:
        if self.is_synced:
            node.power_off()
        else:
            node.kill()

    def check_at_rest(self) -> None:
        """All replicas catch up and come into sync; then each has the same bytes."""
        if not self._come_into_sync():
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

    def _come_into_sync(self) -> bool:
        """One on a slow disk, in segments of a few records, takes its time; one that gets nowhere is stuck."""
        before = -1
        while (held := self._records_held()) > before:
            before = held
            if self.world.run(self.world.now + IN_SYNC_S_MAX, self._all_in_sync, self._events_max):
                return True
        return self._reaches(IN_SYNC_S_MAX, self._all_in_sync, "all replicas are in sync", self._who_lags)

    def _records_held(self) -> int:
        partitions = range(self.workload.settings.partitions)
        return sum(hosted.log_end_offset for partition in partitions for _, hosted in self._copies(partition))

    def _all_in_sync(self) -> bool:
        return all(self._is_in_sync(partition) for partition in range(self.workload.settings.partitions))

    def _is_in_sync(self, partition: int) -> bool:
        copies = [hosted for _, hosted in self._copies(partition)]
        leaders = [hosted for hosted in copies if hosted.leader is not None]
        if len(copies) < REPLICAS or len(leaders) != 1:
            return False
        end = leaders[0].log_end_offset
        return len(leaders[0].in_sync_replicas) == REPLICAS and all(
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
