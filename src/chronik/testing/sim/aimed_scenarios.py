"""Scenarios with one kind of fault, aimed at a step that a single defence guards.

Other scenarios reach these steps too, but in few seeds. Beside many faults, other defences hide a missing one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from chronik.metadata.image import OFFSETS_TOPIC
from chronik.testing.sim.client import TOPIC, SimClient
from chronik.testing.sim.cluster_faults import LONG_S, SEVER_PAUSE_S, ClusterNemesis, SeveredLeader
from chronik.testing.sim.cluster_scenarios import REPLICAS, ConsumerGroups, ShareGroups, ThreeNodes
from chronik.testing.sim.disk_faults import DiskNemesis
from chronik.testing.sim.faults import ACKNOWLEDGED, APPENDED, TRUNCATED, Strike, Targets
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.operators import LeaderOperator
from chronik.testing.sim.workload import WorkloadSettings

BUSY_S = 9.0
CRASH_S_MAX = 0.1


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


class OldStores(ThreeNodes):
    """A node has its Raft store from a moment ago: it must not elect a leader without the entries that it lost."""

    name: ClassVar[str] = "old-stores"

    def build(self) -> None:
        self.busy_s, self.strike_pause_s, self.strikes_from_the_start = BUSY_S, SEVER_PAUSE_S, False
        super().build()

    def draws_lone_cut(self) -> bool:
        return False

    def draw_workload(self) -> WorkloadSettings:
        return WorkloadSettings.drawn(self.random, REPLICAS, min_insync_replicas=2).unhurried()

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        return OldStore(targets, ["old_store"])


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
