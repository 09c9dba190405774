"""The base of all scenarios (machines, nodes, clients, a nemesis, the phases of a run), and the one with a single node.

1. The nodes start and the topic is created. 2. Clients work while the nemesis injects faults; it may begin in phase 1.
3. All faults are repaired; producers must deliver all that is pending, and all clients must end. 4. The logs are read
from beginning to end. 5. All nodes fail at once; after they restart, the logs are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from chronik.testing.sim.client import Service, SimClient
from chronik.testing.sim.faults import Nemesis, Targets
from chronik.testing.sim.history import History
from chronik.testing.sim.host import Host
from chronik.testing.sim.network import Network
from chronik.testing.sim.node import SimNode, node_config
from chronik.testing.sim.workload import Workload, WorkloadSettings
from chronik.testing.sim.world import World

START_S_MAX = 60.0
RECOVERY_S_MAX = 120.0
CLIENT_MACHINES = 2


class Scenario:
    """One run. A subclass creates the nodes, the workload and the nemesis in `build`."""

    name: ClassVar[str]
    busy_range_s: ClassVar[tuple[float, float]] = (1.5, 4.0)
    strike_pauses_s: ClassVar[tuple[float, ...]] = (0.2, 0.4, 0.8)

    def __init__(self, world: World) -> None:
        self.world = world
        self.network = Network(world)
        self.history = History(world)
        self.random = world.random("scenario")
        self.client_hosts = [
            Host(world, self.network, f"client-{number}", f"10.0.1.{number}") for number in range(CLIENT_MACHINES)
        ]
        self.nodes: list[SimNode] = []
        self.absent: list[SimNode] = []
        """Nodes that do not start at first; they join later, at the latest when all faults are repaired."""
        self.workload: Workload
        self.nemesis: Nemesis
        self.busy_s = self.random.uniform(*self.busy_range_s)
        self.strike_pause_s = self.random.choice(self.strike_pauses_s)
        self.strikes_from_the_start = self.random.random() < 0.3
        self.build()

    @classmethod
    def conditions(cls, world: World) -> AbstractContextManager[None]:
        """Return what holds for the duration of a run of this scenario."""
        return nullcontext()

    def build(self) -> None:
        """Create `nodes`, `workload` and `nemesis`."""
        raise NotImplementedError

    def targets(self, mortal: SimNode | None = None) -> Targets:
        return Targets(self.network, self.nodes, self.client_hosts, mortal)

    def service(self) -> Service:
        return Service(self.world, self.history, [(node.host.address, 9092) for node in self.nodes])

    def check_at_rest(self) -> None:
        """Check what clients cannot see, after all writes have stopped."""

    def fail(self, node: SimNode) -> None:
        """Fail a node at the end of the run, to check what is on its disk."""
        node.power_off()

    def run(self) -> None:
        if self.strikes_from_the_start:
            self.nemesis.begin(self.busy_s, self.strike_pause_s)
        for node in self.nodes:
            if node not in self.absent:
                node.start_when_down()
        if not self._reaches(START_S_MAX, self._all_ready, "all nodes are ready"):
            return
        maker = self.workload.make_topic()
        if not self._reaches(START_S_MAX, lambda: maker.is_done, "the topic exists"):
            return
        self.workload.start()
        if not self.strikes_from_the_start:
            self.nemesis.begin(self.world.now + self.busy_s, self.strike_pause_s)
        self.world.run(self.world.now + self.busy_s)
        self.nemesis.end()
        self.absent.clear()
        if not self._reaches(RECOVERY_S_MAX, self._all_ready, "all nodes are ready again"):
            return
        # Operators are clients too, and may have stopped a node just before they ended.
        if not self._clients_end() or not self._reaches(START_S_MAX, self._all_ready, "all nodes are ready at the end"):
            return
        if not self._is_all_there("final"):
            return
        self.check_at_rest()
        if self.world.violation is not None:
            return
        for node in self.nodes:
            self.fail(node)
        for node in self.nodes:
            node.start_when_down()
        if self._reaches(START_S_MAX, self._all_ready, "all nodes are ready after the power failure"):
            self._is_all_there("reboot")

    @property
    def hosts(self) -> list[Host]:
        return [*self.client_hosts, *(node.host for node in self.nodes)]

    def _clients_end(self) -> bool:
        workload = self.workload
        for producer in workload.producers:
            producer.finish()
        if not self._ended(workload.producers, "the producers delivered all records"):
            return False
        for client in workload.others:
            client.finish()
        return self._ended(workload.others, "the clients ended")

    def _is_all_there(self, run: str) -> bool:
        return self._ended(self.workload.start_final_readers(run), f"everything was read ({run})")

    def _ended(self, clients: Sequence[SimClient], what: str) -> bool:
        def stuck() -> str:
            names = ", ".join(f"{each.name} {each.errors}" for each in clients if not each.is_done)
            return f"still running: {names}"

        return self._reaches(RECOVERY_S_MAX, lambda: all(client.is_done for client in clients), what, stuck)

    def _all_ready(self) -> bool:
        return all(node.is_ready for node in self.nodes if node not in self.absent)

    def _reaches(
        self, within_s: float, is_over: Callable[[], bool], what: str, why: Callable[[], str] = lambda: ""
    ) -> bool:
        if self.world.run(self.world.now + within_s, is_over):
            return True
        if self.world.violation is None and not self.world.is_cut_short:
            self.world.violated(f"not within {within_s:g} s: {what}; {why()}")
        return False


class SingleNode(Scenario):
    """One broker, `synced`: every record that was acknowledged or read survives every crash."""

    name: ClassVar[str] = "single-node"

    def build(self) -> None:
        host = Host(self.world, self.network, "node-1", "10.0.0.1")
        self.nodes.append(SimNode(host, node_config(1, host)))
        settings = WorkloadSettings.drawn(self.random, replication_factor=1)
        self.workload = Workload(self.service(), self.client_hosts, settings)
        self.nemesis = Nemesis(self.targets())
