"""Scenarios with one kind of fault, aimed at a step that a single defence guards.

Other scenarios reach these steps too, but in few seeds. Beside many faults, other defences hide a missing one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import ClassVar

from chronik.metadata.image import OFFSETS_TOPIC
from chronik.testing.sim.client import TOPIC, SimClient
from chronik.testing.sim.cluster_faults import (
    CLUSTER_FAULTS,
    LONG_S,
    SEVER_PAUSE_S,
    SEVERED_S,
    ClusterNemesis,
    SeveredLeader,
)
from chronik.testing.sim.cluster_scenarios import REPLICAS, ConsumerGroups, ShareGroups, ThreeNodes
from chronik.testing.sim.disk_faults import LOSE_COMMIT_LOG, DiskNemesis
from chronik.testing.sim.faults import ACKNOWLEDGED, APPENDED, TRUNCATED, Strike, Targets
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.operators import LeaderOperator
from chronik.testing.sim.topic_clients import TopicChurn
from chronik.testing.sim.workload import WorkloadSettings
from chronik.testing.sim.world import World

BUSY_S = 9.0
CRASH_S_MAX = 0.1
OLD_POINTS_MS = 60_000
BUSY_PAUSE_S = 40e-3
PLACED = ((1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 3, 2), (2, 3, 1), (3, 2, 1))
"""The replicas of each partition. Most have the same leader; it fetches the others while it truncates them."""
CHURNED_TOPICS = 3
SLOWNESS = (1.0, 10.0, 30.0)
SLOW_S = 1.0


class NoFaults(ClusterNemesis):
    """Injects nothing: only operators change the cluster."""

    def begin(self, until_s: float, pause_s: float) -> None:
        return


class MovingShareLeaders(ShareGroups):
    """A share group whose partitions get other leaders while all nodes run: what is not written must not survive.

    In half of the seeds an operator moves the leadership. In the others the leader is cut off when it has received an
    acknowledgement.
    """

    name: ClassVar[str] = "moving-share-leaders"

    def build(self) -> None:
        self._severs = self.world.random("share-leaders").random() < 0.5
        self.busy_s, self.strike_pause_s, self.strikes_from_the_start = BUSY_S, SEVER_PAUSE_S, False
        super().build()

    def draw_workload(self) -> WorkloadSettings:
        return replace(super().draw_workload(), has_reassignments=False)

    def operators(self, settings: WorkloadSettings) -> Sequence[SimClient]:
        return () if self._severs else (LeaderOperator("a0", self.service(), settings.partitions, REPLICAS),)

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        return SeveredLeader(targets, TOPIC, ACKNOWLEDGED) if self._severs else NoFaults(targets)


class DeposedLeader(SeveredLeader):
    """Cuts a leader off, and crashes it soon after it has truncated what its successor lacks."""

    def _sever_now(self, leader: SimNode) -> None:
        super()._sever_now(leader)
        self._armed[leader.host] = Strike(TRUNCATED, 1, partial(self._crash_soon, leader))

    def _crash_soon(self, node: SimNode) -> None:
        kind = self._random.choice(("kill", "power"))
        self._world.after(self._random.random() * CRASH_S_MAX, self._fault(kind, node))


class DeposedLeaders(ThreeNodes):
    """Leaders with a commit log crash after they have truncated: no truncated record may return."""

    name: ClassVar[str] = "deposed-leaders"
    node_settings: ClassVar[Mapping[str, object]] = {"commit_log": True}

    def build(self) -> None:
        self.busy_s, self.strike_pause_s, self.strikes_from_the_start = BUSY_S, SEVER_PAUSE_S, False
        super().build()

    def draws_lone_cut(self) -> bool:
        return False

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        return DeposedLeader(targets, TOPIC, APPENDED)


class OldStore(DiskNemesis):
    """Replaces a Raft store by a copy from before another node went down, and starts these two first."""

    lagging_share: ClassVar[float] = 1.0


class OneFileFault(ThreeNodes):
    """One kind of damage to the files of a node, and a workload that leaves time to recover from it."""

    def build(self) -> None:
        self.busy_s, self.strike_pause_s, self.strikes_from_the_start = BUSY_S, SEVER_PAUSE_S, False
        super().build()

    def draws_lone_cut(self) -> bool:
        return False

    def draw_workload(self) -> WorkloadSettings:
        return WorkloadSettings.drawn(self.random, REPLICAS, min_insync_replicas=2).unhurried()


class OldStores(OneFileFault):
    """A node has its Raft store from a moment ago: it must not elect a leader without the entries that it lost."""

    name: ClassVar[str] = "old-stores"

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        return OldStore(targets, ["old_store"])


class CommitLogLoss(DiskNemesis):
    """Loses the commit log of a node, and starts that node and one that lags before the third."""

    lagging_share: ClassVar[float] = 0.8


class LostCommitLogs(OneFileFault):
    """A node loses its commit log, which alone had some acknowledged records: it must catch up before it leads.

    Recovery points are old: they would prove the loss.
    """

    name: ClassVar[str] = "lost-commit-logs"
    recovery_point_interval_ms: int = OLD_POINTS_MS
    node_settings: ClassVar[Mapping[str, object]] = {"commit_log": True}
    synced_share: ClassVar[float] = 1.0

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        return CommitLogLoss(targets, [LOSE_COMMIT_LOG])


class SlowlyDeposedLeader(DeposedLeader):
    """As `DeposedLeader`, but perhaps on a slow disk, and with kills more often than power failures.

    Then truncations take long, other work of the node comes between their steps, and a kill shows what that work wrote.
    """

    def _sever_now(self, leader: SimNode) -> None:
        super()._sever_now(leader)
        leader.host.disk.slowness = self._random.choice(SLOWNESS)
        self._world.after(SEVERED_S[1] + SLOW_S, setattr, leader.host.disk, "slowness", 1.0)

    def _crash_soon(self, node: SimNode) -> None:
        kind = self._random.choice(("kill", "kill", "power"))
        self._world.after(self._random.random() ** 2 * CRASH_S_MAX, self._fault(kind, node))


class SteppedJobs(ThreeNodes):
    """The jobs of threads are done in steps: the loop and other jobs run between the disk operations of a job.

    Nodes have a commit log. In four fifths of the seeds, topics are created and deleted again and again, and a node
    that leads most partitions is cut off. When it is back, it truncates them, and crashes soon after the first
    truncation. In the others, some of all faults occur, and commit logs are lost.
    """

    name: ClassVar[str] = "stepped-jobs"
    node_settings: ClassVar[Mapping[str, object]] = {"commit_log": True, "replica_fetch_bytes_max": 500}
    synced_share: ClassVar[float] = 1.0
    busy_range_s: ClassVar[tuple[float, float]] = (3.0, 4.0)

    @classmethod
    def conditions(cls, world: World) -> AbstractContextManager[None]:
        from chronik.testing.sim.steps import stepped_locks

        return stepped_locks(world)

    def build(self) -> None:
        from chronik.testing.sim.steps import SteppedExecutor

        drawn = self.world.random("stepped-jobs")
        self._deposes = drawn.random() < 0.8
        self._kinds = [*drawn.sample(sorted(CLUSTER_FAULTS), drawn.randint(2, 5)), LOSE_COMMIT_LOG]
        if self._deposes:
            self.busy_s, self.strike_pause_s, self.strikes_from_the_start = BUSY_S, SEVER_PAUSE_S, False
        super().build()
        for node in self.nodes:
            node.host.executor_type = SteppedExecutor

    def draws_lone_cut(self) -> bool:
        return False

    def draw_workload(self) -> WorkloadSettings:
        settings = super().draw_workload()
        if not self._deposes:
            return settings
        # Small batches go to the commit log.
        producer = replace(settings.producers[0], pause_s=BUSY_PAUSE_S, record_bytes_max=100, batch_records_max=3)
        return replace(
            settings,
            partitions=len(PLACED),
            assignments=PLACED,
            producers=(producer,),
            members=(),
            has_reassignments=False,
        )

    def operators(self, settings: WorkloadSettings) -> Sequence[SimClient]:
        churned = range(CHURNED_TOPICS if self._deposes else 0)
        return [TopicChurn(f"d{number}", self.service(), REPLICAS, f"brief-{number}") for number in churned]

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        if self._deposes:
            return SlowlyDeposedLeader(targets, TOPIC, APPENDED)
        return DiskNemesis(targets, self._kinds)


class MuteMembers(ClusterNemesis):
    """Cuts the way from a client machine to a coordinator: their requests arrive after their sessions."""

    def __init__(self, targets: Targets) -> None:
        super().__init__(targets)
        self._faults = {"mute": 1}
        self._clients = targets.clients

    def _mute(self, node: SimNode) -> None:
        coordinators = [each for each in self._nodes if self._leads_partition(each, OFFSETS_TOPIC)]
        client, duration_s = self._random.choice(self._clients), self._random.uniform(*LONG_S)
        for coordinator in coordinators or [node]:
            self._cut_link(client, coordinator.host, duration_s)


class LateCommits(ConsumerGroups):
    """Commits of a consumer group arrive when their members have been removed: they must be refused."""

    name: ClassVar[str] = "late-commits"

    def build(self) -> None:
        self.busy_s, self.strike_pause_s, self.strikes_from_the_start = BUSY_S, SEVER_PAUSE_S / 2, False
        super().build()

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        return MuteMembers(targets)
