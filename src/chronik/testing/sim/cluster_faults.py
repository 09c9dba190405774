"""The nemesis of a cluster: what can happen between nodes, and to those whose role matters.

It prefers whoever leads: the controller, and the leader of a partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from chronik.testing.sim.faults import FAULTS, MOMENTS, Nemesis
from chronik.testing.sim.host import Host
from chronik.testing.sim.moments import CLUSTER_MOMENTS
from chronik.testing.sim.network import Network
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.world import World

CLUSTER_FAULTS: Mapping[str, int] = {
    **FAULTS,
    "power": 5,
    "freeze": 4,
    "isolate": 5,
    "deafen": 2,
    "kill_all": 1,
    "power_all": 1,
    "transfer": 2,
    "jump": 1,
    "drift": 1,
}
"""Each fault and its weight, where the disk's word counts (`synced`)."""
LEADER_SHARE = 0.5
FREEZE_S_MAX = 4.0
"""A session lasts 2 s: some pauses are shorter, some longer."""
ISOLATION_S_MAX = 4.0
WALL_JUMP_MS_MAX = 20 * 60 * 1000
DRIFT_MAX = 2e-3
DRIFT_S_MAX = 5.0


class ClusterNemesis(Nemesis):
    """Invariant: of the nodes only `powerless` ever lose power, where that is given."""

    def __init__(
        self,
        world: World,
        network: Network,
        nodes: Sequence[SimNode],
        clients: Sequence[Host],
        topic: str,
        faults: Mapping[str, int] = CLUSTER_FAULTS,
        powerless: SimNode | None = None,
    ) -> None:
        super().__init__(world, network, nodes, clients, faults, {**MOMENTS, **CLUSTER_MOMENTS})
        self._topic = topic
        self._powerless = powerless

    # -- whom it strikes -----------------------------------------------------------------------------------------------

    def _victim(self) -> SimNode:
        if self._random.random() < LEADER_SHARE:
            leaders = [node for node in self._nodes if self._leads(node)]
            if leaders:
                return self._random.choice(leaders)
        return self._random.choice(self._nodes)

    def _leads(self, node: SimNode) -> bool:
        broker = node.broker
        if not node.is_ready or broker is None:
            return False
        hosted = broker.host.partitions.values()
        return broker.is_controller or any(each.topic == self._topic and each.leader is not None for each in hosted)

    def _power(self, node: SimNode) -> None:
        if self._powerless is None or node is self._powerless:
            super()._power(node)
        else:
            self._kill(node)

    # -- the faults ----------------------------------------------------------------------------------------------------

    def _faults_by_name(self) -> dict[str, Callable[[SimNode], None]]:
        return {
            **super()._faults_by_name(),
            "freeze": self._freeze,
            "isolate": self._isolate,
            "deafen": self._deafen,
            "kill_all": self._kill_all,
            "power_all": self._power_all,
            "transfer": self._transfer,
            "jump": self._jump,
            "drift": self._drift,
        }

    def _freeze(self, node: SimNode) -> None:
        """A pause that may last longer than the session: others take over meanwhile."""
        pause_s = self._random.random() * FREEZE_S_MAX
        self._world.note(f"{node.host.name} is frozen for {pause_s:.3f} s")
        node.host.pause()
        self._world.after(pause_s, node.host.resume)

    def _isolate(self, node: SimNode) -> None:
        """Cut off from the other nodes; clients still reach it."""
        others = [other.host for other in self._nodes if other is not node]
        self._cut_links([(node.host, other) for other in others] + [(other, node.host) for other in others])

    def _deafen(self, node: SimNode) -> None:
        """One link between two nodes carries nothing in one direction."""
        other = self._random.choice([each for each in self._nodes if each is not node])
        self._cut_links([(other.host, node.host)])

    def _cut_links(self, links: Sequence[tuple[Host, Host]]) -> None:
        duration_s = self._random.random() * ISOLATION_S_MAX
        for source, target in links:
            self._network.cut(source, target)
            self._world.after(duration_s, self._network.heal, source, target)

    def _kill_all(self, _: SimNode) -> None:
        for node in self._nodes:
            self._kill(node)

    def _power_all(self, _: SimNode) -> None:
        for node in self._nodes:
            self._power(node)

    def _transfer(self, _: SimNode) -> None:
        """The controller hands its part to another node."""
        for node in self._nodes:
            broker, process = node.broker, node.host.process
            if node.is_ready and broker is not None and process is not None and broker.is_controller:
                self._world.note(f"{node.host.name} hands over the controller's part")
                process.loop.call_soon_threadsafe(broker.raft.transfer_leadership)

    def _jump(self, node: SimNode) -> None:
        step_ms = self._random.randint(-WALL_JUMP_MS_MAX, WALL_JUMP_MS_MAX)
        self._world.note(f"the wall clock of {node.host.name} jumps by {step_ms} ms")
        node.host.clock.step_wall(step_ms)

    def _drift(self, node: SimNode) -> None:
        clock, rate = node.host.clock, node.host.clock.rate
        clock.run_at(1.0 + self._random.uniform(-DRIFT_MAX, DRIFT_MAX))
        self._world.note(f"the clocks of {node.host.name} run at {clock.rate:.5f}")
        self._world.after(self._random.random() * DRIFT_S_MAX, clock.run_at, rate)
