"""The scenarios of a cluster: three nodes, with groups or bad disks, and five nodes that come and go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from chronik.metadata.image import OFFSETS_TOPIC, SHARE_STATE_TOPIC
from chronik.node.config import Peer
from chronik.node.replicas.partition import Partition
from chronik.testing.sim.audit import Auditor
from chronik.testing.sim.client import TOPIC, SimClient
from chronik.testing.sim.cluster_faults import CLUSTER_FAULTS, ClusterNemesis, LoneCut
from chronik.testing.sim.consumer_group_clients import HEARTBEAT_MS, SESSION_MS, ConsumerSettings
from chronik.testing.sim.disk_faults import FILE_FAULTS, DiskNemesis, SickDisk
from chronik.testing.sim.faults import Targets
from chronik.testing.sim.history import Availability
from chronik.testing.sim.host import Host
from chronik.testing.sim.node import SimNode, newest_image, node_config
from chronik.testing.sim.operators import ResizeOperator
from chronik.testing.sim.scenario import Scenario
from chronik.testing.sim.share_group_clients import DELIVERIES_MAX, LOCK_MS, ShareSettings
from chronik.testing.sim.topic_clients import COMPACTED_TOPIC
from chronik.testing.sim.workload import Workload, WorkloadSettings
from chronik.wire.batch import check_batches, decode_batch, read_marker
from chronik.wire.records import Record

REPLICAS = 3
SETTLED_S_MAX = 60.0

FILES, STORES, SICK, WORSE, ROT = "files", "stores", "sick", "worse", "rot"
TROUBLES = {FILES: 5, STORES: 1, SICK: 2, WORSE: 2}
"""Each kind of trouble and its weight."""
ROT_SHARE = 0.2
"""The share of seeds whose trouble is `ROT` instead."""
ROT_PAUSE_S = 0.5
ROT_SEGMENT_BYTES = "4096"
ROT_REREAD_SHARE = 0.1
SCRUB_INTERVALS_MS = 500, 4_000
"""With the second interval, readers often find the damage before the scrubber does."""
BESIDE = ("kill", "kill_all", "power", "stop", "isolate", "transfer", "freeze")
"""Faults in addition to damaged files and sick devices; each seed draws some of them."""
RECOVERY_POINT_INTERVALS_MS = 250, 60_000
"""With the second interval recovery points stay old: the synced ends must prove what was durable."""
FILES_PAUSE_S = 1.0
"""Another node's files can be damaged only after the damaged node has recovered, which takes a while."""

PLACEMENT_WEIGHTS = (5.0, 4.0, 2.0, 1.0, 1.0)
"""The weight of each node in replica placement; each seed draws the order of the nodes."""


class ThreeNodes(Scenario):
    """Three nodes, replication factor 3: no record that was acknowledged with acks=all, or read, is ever lost.

    Under `synced` every node may die at any time, even all at once. Under `replicated`, which acknowledges records in
    memory, every process may be killed, but only one machine (a minority) loses power, and min.insync.replicas is 2.

    At the end all replicas of each partition must get in sync, and then have the same bytes.
    """

    name: ClassVar[str] = "three-nodes"
    node_count: ClassVar[int] = 3
    founder_count: int = 3
    """The founders are configured as peers of each other; a later node is configured with the founders and joins."""

    busy_range_s: ClassVar[tuple[float, float]] = (3.0, 7.0)
    strike_pauses_s: ClassVar[tuple[float, ...]] = (0.4, 1.0, 2.0)
    recovery_point_interval_ms: int = 250
    scrub_interval_ms: int = 500
    audited: ClassVar[tuple[str, ...]] = (TOPIC, OFFSETS_TOPIC, COMPACTED_TOPIC)
    node_settings: ClassVar[Mapping[str, object]] = {}
    synced_share: ClassVar[float] = 0.75

    def build(self) -> None:
        self.has_lone_cut = self.draws_lone_cut()
        if self.has_lone_cut:
            self.busy_s = 8.5
            self.strikes_from_the_start = False
        random = self.random
        self.is_synced = random.random() < self.synced_share
        hosts = [Host(self.world, self.network, f"node-{n}", f"10.0.0.{n}") for n in range(1, self.node_count + 1)]
        lag_ms_max = random.choice((1_000, 3_000))
        for node_id, host in enumerate(hosts, 1):
            peers = tuple(
                Peer(id=other, internal=f"{there.address}:5092")
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
                scrub_interval_ms=self.scrub_interval_ms,
                **self.node_settings,
            )
            self.nodes.append(SimNode(host, config))
        self.workload = self.make_workload(self.draw_workload())
        self.nemesis = self.make_nemesis(self.targets(mortal=None if self.is_synced else random.choice(self.nodes)))
        Auditor(self.world, self.nodes, self.audited).check()

    def draws_lone_cut(self) -> bool:
        return self.world.random("lone-cut").random() < 0.15

    def draw_workload(self) -> WorkloadSettings:
        # Under `replicated`, records on a single replica are lost with its machine's memory.
        settings = WorkloadSettings.drawn(self.random, REPLICAS, min_insync_replicas=None if self.is_synced else 2)
        return settings.for_groups(self.random) if self.has_lone_cut else settings

    def make_workload(self, settings: WorkloadSettings) -> Workload:
        return Workload(self.service(), self.client_hosts, settings, self.operators(settings))

    def operators(self, settings: WorkloadSettings) -> Sequence[SimClient]:
        """Return clients that change the cluster, in addition to those of the workload."""
        return ()

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        return LoneCut(targets) if self.has_lone_cut else ClusterNemesis(targets)

    def fail(self, node: SimNode) -> None:
        if self.is_synced:
            node.power_off()
        else:
            node.kill()

    def check_at_rest(self) -> None:
        """Wait until a damaged node has recovered and all replicas are in sync; then compare their content."""
        if not self._damage_is_repaired() or not self._come_into_sync():
            return
        for topic, index in self._audited():
            copies = self._copies(topic, index)
            (first, expected, _), *others = copies
            for name, hosted, _ in others:
                if not _is_same(hosted, expected):
                    ends = {name: hosted.log_end_offset for name, hosted, _ in copies}
                    self.world.violated(f"{topic}-{index} differs between {first} and {name}; it ends at {ends}")

    def _damage_is_repaired(self) -> bool:
        if not isinstance(self.nemesis, DiskNemesis) or self.nemesis.damage.damaged is None:
            return True
        tracker, damaged = self.nemesis.damage, self.nemesis.damage.damaged
        what = f"{damaged.host.name} is whole again"
        return self._reaches(SETTLED_S_MAX, tracker.has_recovered, what, lambda: tracker.missing_from(damaged))

    def _audited(self) -> list[tuple[str, int]]:
        """Return the partitions of the audited topics in the newest image."""
        image = newest_image(self.nodes)
        topics = [] if image is None else [topic for name in self.audited if (topic := image.topic(name)) is not None]
        return [(topic.name, partition.partition) for topic in topics for partition in topic.partitions]

    def _copies(self, topic: str, index: int) -> list[tuple[str, Partition, int]]:
        return [
            (node.host.name, hosted, node.config.node_id)
            for node in self.nodes
            if (broker := node.ready_broker) is not None and (hosted := broker.host.partitions.get((topic, index)))
        ]

    def _come_into_sync(self) -> bool:
        """Wait for as long as replicas make progress; without progress they are stuck.

        Catching up takes long on a slow disk with segments of a few records.
        """
        before = -1
        while (replicated := self._records_replicated()) > before:
            before = replicated
            if self.world.run(self.world.now + SETTLED_S_MAX, self._all_in_sync):
                return True
        return self._reaches(SETTLED_S_MAX, self._all_in_sync, "all replicas are in sync", self._lagging)

    def _records_replicated(self) -> int:
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

    def _lagging(self) -> str:
        return "; ".join(
            f"{topic}-{index} at {name}: epoch {hosted.leader_epoch}, watermark {hosted.high_watermark} of "
            f"{hosted.log_end_offset}, in sync {hosted.in_sync_replicas} of {hosted.replicas}"
            for topic, index in self._audited()
            if not self._is_in_sync(topic, index)
            for name, hosted, _ in self._copies(topic, index)
        )


class ConsumerGroups(ThreeNodes):
    """Three nodes with a consumer group (KIP-848) whose members come and go, some of the classic protocol.

    At no time two members own a partition by the assignments that they received. Committed offsets never go back. After
    the last fault every partition gets an owner: the members end only then.
    """

    name: ClassVar[str] = "consumer-groups"
    busy_range_s: ClassVar[tuple[float, float]] = (4.0, 8.0)
    node_settings: ClassVar[Mapping[str, object]] = {
        "group_consumer_session_timeout_ms": SESSION_MS,
        "group_consumer_min_session_timeout_ms": SESSION_MS,
        "group_consumer_heartbeat_interval_ms": HEARTBEAT_MS,
        "group_consumer_min_heartbeat_interval_ms": HEARTBEAT_MS,
    }

    def draws_lone_cut(self) -> bool:
        return False

    def draw_workload(self) -> WorkloadSettings:
        settings = super().draw_workload()
        return replace(
            settings.unhurried(),
            partitions=self.random.randint(3, 6),
            members=(),
            consumers=tuple(ConsumerSettings.drawn(self.random, number) for number in range(self.random.randint(2, 5))),
        )


class ShareGroups(ThreeNodes):
    """Three nodes with a share group (KIP-932) whose members accept, release and reject, hang and crash.

    Each record ends accepted, rejected, or archived at its delivery limit. None is accepted twice, delivered after an
    acknowledged end, or skipped. After the last fault the group settles every record: the members end only then.
    """

    name: ClassVar[str] = "share-groups"
    busy_range_s: ClassVar[tuple[float, float]] = (3.0, 7.0)
    audited: ClassVar[tuple[str, ...]] = (TOPIC, OFFSETS_TOPIC, SHARE_STATE_TOPIC)
    node_settings: ClassVar[Mapping[str, object]] = {
        "group_share_session_timeout_ms": SESSION_MS,
        "group_share_min_session_timeout_ms": SESSION_MS,
        "group_share_heartbeat_interval_ms": HEARTBEAT_MS,
        "group_share_min_heartbeat_interval_ms": HEARTBEAT_MS,
        "group_share_record_lock_duration_ms": LOCK_MS,
        "group_share_min_record_lock_duration_ms": LOCK_MS,
        "group_share_delivery_count_limit": DELIVERIES_MAX,
        "share_state_topic_partitions": 2,
    }

    def draws_lone_cut(self) -> bool:
        return False

    def draw_workload(self) -> WorkloadSettings:
        settings = super().draw_workload()
        return replace(
            settings.unhurried(),
            partitions=self.random.randint(1, 3),
            members=(),
            has_offset_clients=False,
            has_reassignments=self.random.random() < 0.5,
            sharers=tuple(ShareSettings.drawn(self.random) for _ in range(self.random.randint(2, 4))),
        )


class BadDisks(ThreeNodes):
    """Three nodes on bad disks: files of one node at a time are lost, cut, corrupted or rolled back; devices fail.

    Each seed has one kind of trouble. The guarantees are those of `ThreeNodes`: while the files of one in-sync replica
    are intact, nothing is lost, no operator is needed, and one sick device does not stop other nodes (`Availability`).
    """

    name: ClassVar[str] = "bad-disks"

    def build(self) -> None:
        trouble = self.world.random("trouble")
        self._trouble = trouble.choices(list(TROUBLES), list(TROUBLES.values()))[0]
        beside = trouble.sample(BESIDE, trouble.randint(0, 3))
        if self.world.random("rot").random() < ROT_SHARE:
            self._trouble = ROT
        if self._trouble == FILES:
            self.strike_pause_s = FILES_PAUSE_S
            self.recovery_point_interval_ms = trouble.choice(RECOVERY_POINT_INTERVALS_MS)
            self._kinds = [*trouble.sample(sorted(FILE_FAULTS), trouble.randint(1, 2)), *beside]
        elif self._trouble == ROT:
            self.strike_pause_s = ROT_PAUSE_S
            self.scrub_interval_ms = trouble.choice(SCRUB_INTERVALS_MS)
            self._kinds = ["rot", *beside[:1]]
        elif self._trouble == STORES:
            self._kinds = ["lose_all_stores", *beside]
        else:
            self._kinds = ["fail_disk", "hang_disk", *beside]
        if self._trouble == SICK:
            self.busy_s = 22.0
        self.strikes_from_the_start = False
        super().build()

    def draws_lone_cut(self) -> bool:
        return False

    def draw_workload(self) -> WorkloadSettings:
        settings = WorkloadSettings.drawn(self.random, 3, min_insync_replicas=2)
        if self._trouble == ROT:
            configs = {**settings.topic_configs, "segment.bytes": ROT_SEGMENT_BYTES}
            settings = replace(
                settings, topic_configs=configs, reread_share=ROT_REREAD_SHARE, producers=settings.producers[:1]
            )
        if self._trouble == SICK:
            settings = settings.unhurried()
            # A patient producer waits longer for the sick node's response than `Availability` permits.
            return replace(settings, producers=tuple(replace(each, is_patient=False) for each in settings.producers))
        return replace(settings, producers=settings.producers[:2])

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        if self._trouble == SICK:
            return SickDisk(targets, self._kinds, Availability(self.world, self.history, TOPIC))
        return DiskNemesis(targets, self._kinds)


class FiveNodes(ThreeNodes):
    """Five nodes, replication factor 3, uneven placement; nodes join, leave and are lost, disks are bad.

    The guarantees are those of `ThreeNodes` and `BadDisks`. In half of the seeds the fifth node joins a running
    cluster. In some seeds an operator removes nodes and adds them again, and changes min.insync.replicas during writes.
    """

    name: ClassVar[str] = "five-nodes"
    node_count: ClassVar[int] = 5
    busy_range_s: ClassVar[tuple[float, float]] = (2.0, 4.0)

    def build(self) -> None:
        drawn = self.world.random("five-nodes")
        self.founder_count = drawn.choice((4, self.node_count))
        self._order = drawn.sample(range(1, self.node_count + 1), self.node_count)
        self._is_resized = drawn.random() < 0.5
        kinds = sorted(CLUSTER_FAULTS)
        self._kinds = drawn.sample(kinds, drawn.randint(1, 3)) + drawn.sample(sorted(FILE_FAULTS), drawn.randint(0, 2))
        if drawn.random() < 0.3:
            self._kinds += ["fail_disk", "hang_disk"]
        super().build()
        if self.founder_count < self.node_count:
            self.absent.append(self.nodes[-1])
            self.world.after(drawn.uniform(0.5, 3.0), self._join)

    def _join(self) -> None:
        for node in self.absent:
            self.world.note(f"{node.host.name} joins")
            node.start_when_down()

    def draw_workload(self) -> WorkloadSettings:
        settings = super().draw_workload()
        placed = [node for node in self._order if node <= self.founder_count]
        weights = PLACEMENT_WEIGHTS[: len(placed)]
        assignments = tuple(self._place(placed, list(weights)) for _ in range(settings.partitions))
        # Five nodes exchange more messages than three: run fewer producers.
        return replace(settings, assignments=assignments, producers=settings.producers[:2])

    def _place(self, nodes: list[int], weights: list[float]) -> tuple[int, ...]:
        """Draw distinct nodes for the replicas, by weight."""
        left = dict(zip(nodes, weights, strict=True))
        chosen: list[int] = []
        while len(chosen) < REPLICAS:
            chosen += self.random.choices(list(left), list(left.values()))
            del left[chosen[-1]]
        return tuple(chosen)

    def operators(self, settings: WorkloadSettings) -> Sequence[SimClient]:
        if not self._is_resized or self.has_lone_cut:
            return ()
        configured = int(settings.topic_configs["min.insync.replicas"])
        min_insync = (configured, 1, 2, 3) if self.is_synced else (2, 3)
        return (ResizeOperator("r0", self.service(), self.nodes, min_insync),)

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        return LoneCut(targets) if self.has_lone_cut else DiskNemesis(targets, self._kinds)


def batches_of(hosted: Partition) -> Iterator[memoryview]:
    """Yield all batches. A read ends with its segment, and each replica has its own segment boundaries."""
    position, end = hosted.log_start_offset, hosted.log_end_offset
    while position < end:
        data = memoryview(bytes(hosted.log.read_job(position, 1 << 30, end)()))
        if not len(data):
            return
        yield data
        position = check_batches(data, len(data), from_producer=False)[-1][1].next_offset


def _is_same(one: Partition, other: Partition) -> bool:
    """Compare byte for byte; in a compacted topic, the last values of all keys are enough."""
    if b"".join(batches_of(one)) == b"".join(batches_of(other)):
        return True
    return one.log.config.cleanup_compact and _last_values(one) == _last_values(other)


def _last_values(hosted: Partition) -> dict[bytes | None, tuple[int, bytes]]:
    """Return each key's last value with its offset; keys whose last record is a tombstone are left out.

    Records of aborted transactions do not count: compaction removes them.
    """
    last: dict[bytes | None, tuple[int, bytes]] = {}
    for record in sorted(_committed_records(hosted), key=lambda record: record.offset):
        last.pop(record.key, None)
        if record.value is not None:
            last[record.key] = (record.offset, bytes(record.value))
    return last


def _committed_records(hosted: Partition) -> Iterator[Record]:
    """Yield the records outside transactions, and those of a transaction with its commit marker."""
    pending: dict[int, list[Record]] = {}
    for data in batches_of(hosted):
        for start, header in check_batches(data, len(data), from_producer=False):
            if header.is_control:
                records = pending.pop(header.producer_id, [])
                if header.record_count and read_marker(data, start).is_commit:
                    yield from records
            elif header.is_transactional:
                pending.setdefault(header.producer_id, []).extend(decode_batch(data, start))
            else:
                yield from decode_batch(data, start)
