"""Three nodes, replication factor 3: no record that was acknowledged with acks=all, or read, is ever lost.

Under `synced` every node may die at any time, even all at once. Under `replicated`, which acknowledges records in
memory, every process may be killed, but only one machine (a minority) loses power, and min.insync.replicas is 2.

At the end all replicas of each partition must get in sync, and then have the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from chronik.metadata.image import OFFSETS_TOPIC
from chronik.node.config import Peer
from chronik.node.replicas.partition import Partition
from chronik.testing.sim.audit import Auditor
from chronik.testing.sim.cluster_faults import ClusterNemesis, LoneCut
from chronik.testing.sim.disk_faults import DiskNemesis
from chronik.testing.sim.host import Host
from chronik.testing.sim.keyed import TOPIC as KEYED_TOPIC
from chronik.testing.sim.node import SimNode, node_config
from chronik.testing.sim.scenario import Scenario
from chronik.testing.sim.workload import TOPIC, Workload, WorkloadSettings
from chronik.wire.batch import check_batches, decode_batch

REPLICAS = 3
INTERNAL_PORT = 5092
IN_SYNC_S_MAX = 60.0
WHOLE_S_MAX = 60.0
SYNCED_SHARE = 0.75
AUDITED = (TOPIC, OFFSETS_TOPIC, KEYED_TOPIC)
LONE_CUT_SHARE = 0.15
LONE_CUT_BUSY_S = 8.5


class ThreeNodes(Scenario):
    """A cluster that has a majority most of the time."""

    name: ClassVar[str] = "three-nodes"
    node_count: ClassVar[int] = 3
    founder_count: int = 3
    """The founders are configured as peers of each other; a later node is configured with the founders and joins."""

    busy_range_s: ClassVar[tuple[float, float]] = (3.0, 7.0)
    strike_pauses_s: ClassVar[tuple[float, ...]] = (0.4, 1.0, 2.0)
    recovery_point_interval_ms: int = 250

    def build(self) -> None:
        self.has_lone_cut = self.draws_lone_cut()
        if self.has_lone_cut:
            self.busy_s = LONE_CUT_BUSY_S
            self.strikes_from_the_start = False
        random = self.random
        self.is_synced = random.random() < SYNCED_SHARE
        hosts = [Host(self.world, self.network, f"node-{n}", f"10.0.0.{n}") for n in range(1, self.node_count + 1)]
        lag_ms_max = random.choice((1_000, 3_000))
        for node_id, host in enumerate(hosts, 1):
            peers = tuple(
                Peer(id=other, internal=f"{there.address}:{INTERNAL_PORT}")
                for other, there in enumerate(hosts[: self.founder_count], 1)
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
                recovery_point_interval_ms=self.recovery_point_interval_ms,
            )
            self.nodes.append(SimNode(host, config))
        self.workload = self.make_workload([(host.address, 9092) for host in hosts], self.draw_workload())
        self.nemesis = self.make_nemesis(None if self.is_synced else random.choice(self.nodes))
        Auditor(self.world, self.nodes, AUDITED).begin()

    def draws_lone_cut(self) -> bool:
        return self.world.random("lone-cut").random() < LONE_CUT_SHARE

    def draw_workload(self) -> WorkloadSettings:
        # Under `replicated`, records on a single replica are lost with its machine's memory.
        settings = WorkloadSettings.drawn(self.random, REPLICAS, min_insync_replicas=None if self.is_synced else 2)
        return settings.of_groups(self.random) if self.has_lone_cut else settings

    def make_workload(self, bootstrap: list[tuple[str, int]], settings: WorkloadSettings) -> Workload:
        return Workload(self.world, self.history, self.client_hosts, bootstrap, settings)

    def make_nemesis(self, mortal: SimNode | None) -> ClusterNemesis:
        kind = LoneCut if self.has_lone_cut else ClusterNemesis
        return kind(self.world, self.network, self.nodes, self.client_hosts, TOPIC, mortal=mortal)

    def fail(self, node: SimNode) -> None:
        if self.is_synced:
            node.power_off()
        else:
            node.kill()

    def check_at_rest(self) -> None:
        """Wait until a damaged node has recovered and all replicas are in sync; then compare their content."""
        if not self._wounds_heal() or not self._come_into_sync():
            return
        for topic, index in self._audited():
            (first, expected, _), *others = self._copies(topic, index)
            for name, hosted, _ in others:
                if not _is_same(hosted, expected):
                    ends = {name: hosted.log_end_offset for name, hosted, _ in self._copies(topic, index)}
                    self.world.violated(f"{topic}-{index} differs between {first} and {name}; it ends at {ends}")

    def _wounds_heal(self) -> bool:
        if not isinstance(self.nemesis, DiskNemesis) or self.nemesis.wounds.wounded is None:
            return True
        wounds, wounded = self.nemesis.wounds, self.nemesis.wounds.wounded
        what = f"{wounded.host.name} is whole again"
        return self._reaches(WHOLE_S_MAX, wounds.is_healed, what, lambda: wounds.what_is_missing(wounded))

    def _audited(self) -> list[tuple[str, int]]:
        """Return the partitions of the audited topics in the newest image."""
        images = [node.broker.image for node in self.nodes if node.takes_part and node.broker is not None]
        newest = max(images, key=lambda image: image.version, default=None)
        topics = [] if newest is None else [topic for name in AUDITED if (topic := newest.topic(name)) is not None]
        return [(topic.name, partition.partition) for topic in topics for partition in topic.partitions]

    def _copies(self, topic: str, index: int) -> list[tuple[str, Partition, int]]:
        return [
            (node.host.name, hosted, node.config.node_id)
            for node in self.nodes
            if node.is_ready and node.broker is not None and (hosted := node.broker.host.partitions.get((topic, index)))
        ]

    def _come_into_sync(self) -> bool:
        """Wait for as long as replicas make progress; without progress they are stuck.

        Catching up takes long on a slow disk with segments of a few records.
        """
        before = -1
        while (held := self._records_held()) > before:
            before = held
            if self.world.run(self.world.now + IN_SYNC_S_MAX, self._all_in_sync, self._events_max):
                return True
        return self._reaches(IN_SYNC_S_MAX, self._all_in_sync, "all replicas are in sync", self._who_lags)

    def _records_held(self) -> int:
        return sum(hosted.log_end_offset for key in self._audited() for _, hosted, _ in self._copies(*key))

    def _all_in_sync(self) -> bool:
        return all(self._is_in_sync(*key) for key in self._audited())

    def _is_in_sync(self, topic: str, index: int) -> bool:
        copies = self._copies(topic, index)
        leaders = [hosted for _, hosted, _ in copies if hosted.leader is not None]
        if len(leaders) != 1:
            return False
        replicas, end = sorted(leaders[0].replicas), leaders[0].log_end_offset
        return (
            len(replicas) >= REPLICAS
            and sorted(leaders[0].in_sync_replicas) == replicas == sorted(node_id for *_, node_id in copies)
            and all(hosted.log_end_offset == hosted.high_watermark == end for _, hosted, _ in copies)
        )

    def _who_lags(self) -> str:
        return "; ".join(
            f"{topic}-{index} at {name}: epoch {hosted.leader_epoch}, watermark {hosted.high_watermark} of "
            f"{hosted.log_end_offset}, in sync {hosted.in_sync_replicas} of {hosted.replicas}"
            for topic, index in self._audited()
            if not self._is_in_sync(topic, index)
            for name, hosted, _ in self._copies(topic, index)
        )


def _batches(hosted: Partition) -> Iterator[memoryview]:
    """Yield all batches. A read ends with its segment, and each replica has its own segment boundaries."""
    position, end = hosted.log_start_offset, hosted.log_end_offset
    while position < end:
        data = memoryview(bytes(hosted.log.read_job(position, 1 << 30, end)()))
        if not len(data):
            return
        yield data
        position = check_batches(data, len(data), from_producer=False)[-1][1].next_offset


def _content(hosted: Partition) -> bytes:
    return b"".join(_batches(hosted))


def _is_same(one: Partition, other: Partition) -> bool:
    """Compare byte for byte; in a compacted topic, the last values of all keys are enough."""
    if _content(one) == _content(other):
        return True
    return one.log.config.cleanup_compact and _last_values(one) == _last_values(other)


def _last_values(hosted: Partition) -> dict[bytes | None, tuple[int, bytes]]:
    """Return each key's last value with its offset; keys whose last record is a tombstone are left out."""
    last: dict[bytes | None, tuple[int, bytes]] = {}
    for data in _batches(hosted):
        for at, _ in check_batches(data, len(data), from_producer=False):
            for record in decode_batch(data, at):
                last.pop(record.key, None)
                if record.value is not None:
                    last[record.key] = (record.offset, bytes(record.value))
    return last
