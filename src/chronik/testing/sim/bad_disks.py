"""Three nodes on bad disks: files of one node at a time are lost, cut, corrupted or rolled back; devices fail or hang.

Each seed has one kind of trouble. The guarantees are those of `three_nodes`: while the files of one in-sync replica are
intact, nothing is lost, no operator is needed, and one sick device does not stop other nodes (`availability`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from chronik.testing.sim.availability import Availability
from chronik.testing.sim.cluster_faults import ClusterNemesis
from chronik.testing.sim.disk_faults import WOUNDS, DiskNemesis, SickDisk
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.three_nodes import ThreeNodes
from chronik.testing.sim.workload import TOPIC, WorkloadSettings

FILES, STORES, SICK, WORSE = "files", "stores", "sick", "worse"
TROUBLES = {FILES: 5, STORES: 1, SICK: 2, WORSE: 2}
"""Each kind of trouble and its weight."""
BESIDE = ("kill", "kill_all", "power", "stop", "isolate", "transfer", "freeze")
"""Faults in addition to damaged files and sick devices; each seed draws some of them."""
SICK_BUSY_S = 22.0
RECOVERY_POINT_INTERVALS_MS = 250, 60_000
"""With the second interval recovery points stay old: the synced ends must prove what was durable."""
FILES_PAUSE_S = 1.0
"""Another node's files can be damaged only after the damaged node has recovered, which takes a while."""


class BadDisks(ThreeNodes):
    """A cluster whose disks cannot be trusted."""

    name: ClassVar[str] = "bad-disks"

    def build(self) -> None:
        trouble = self.world.random("trouble")
        self._trouble = trouble.choices(list(TROUBLES), list(TROUBLES.values()))[0]
        beside = trouble.sample(BESIDE, trouble.randint(0, 3))
        if self._trouble == FILES:
            self.strike_pause_s = FILES_PAUSE_S
            self.recovery_point_interval_ms = trouble.choice(RECOVERY_POINT_INTERVALS_MS)
            self._kinds = [*trouble.sample(sorted(WOUNDS), trouble.randint(1, 2)), *beside]
        elif self._trouble == STORES:
            self._kinds = ["lose_all_stores", *beside]
        else:
            self._kinds = ["fail_disk", "hang_disk", *beside]
        if self._trouble == SICK:
            self.busy_s = SICK_BUSY_S
        self.strikes_from_the_start = False
        super().build()

    def draws_lone_cut(self) -> bool:
        return False

    def draw_workload(self) -> WorkloadSettings:
        settings = WorkloadSettings.drawn(self.random, 3, min_insync_replicas=2)
        return settings.unhurried() if self._trouble == SICK else replace(settings, producers=settings.producers[:2])

    def make_nemesis(self, mortal: SimNode | None) -> ClusterNemesis:
        shared = self.world, self.network, self.nodes, self.client_hosts, TOPIC, self._kinds
        if self._trouble == SICK:
            availability = Availability(self.world, self.history, TOPIC)
            return SickDisk(*shared, mortal=mortal, availability=availability)
        return DiskNemesis(*shared, mortal=mortal)
