"""The nemesis of a cluster: faults between nodes, and faults aimed at nodes with a role.

It prefers leaders: the controller, and the leader of a partition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from chronik.metadata.image import OFFSETS_TOPIC
from chronik.testing.sim.client import TOPIC
from chronik.testing.sim.faults import ANSWERED, CLUSTER_POINTS, FAULTS, Nemesis, Strike, Targets
from chronik.testing.sim.host import Host
from chronik.testing.sim.node import SimNode

CLUSTER_FAULTS: Mapping[str, int] = {
    **FAULTS,
    "power": 5,
    "freeze": 4,
    "isolate": 5,
    "deafen": 2,
    "part": 4,
    "kill_all": 1,
    "power_all": 1,
    "transfer": 2,
    "coup": 2,
    "jump": 1,
    "drift": 1,
}
"""Each fault and its weight under `synced` durability."""
CUTS = ("isolate", "part", "freeze")
VOTES = ("coup", "transfer", "kill")
SHORT_S_MAX = 1.0
LONG_S = (2.2, 4.5)
"""A broker session lasts 2 s: some pauses and cuts are shorter, some longer."""
ALONE_S = (5.0, 7.0)
"""Longer than a broker session, a member session and an election, one after the other."""
SEVER_PAUSE_S = 4.0
SEVER_WAIT_S = 1.0
SEVERED_S = (3.0, 5.0)
"""Longer than a broker session: another node takes over."""
WALL_JUMP_MS_MAX = 20 * 60 * 1000
DRIFT_MAX = 0.05
"""Leases tolerate this drift: the rates of two clocks differ by at most 10 %."""


class ClusterNemesis(Nemesis):
    """Invariant: if the targets name a `mortal` node, only that node ever loses unsynced writes."""

    def __init__(self, targets: Targets) -> None:
        super().__init__(targets, CLUSTER_FAULTS, CLUSTER_POINTS)
        # Faults of all kinds at once mask each other: a long cut reveals nothing if another node dies meanwhile.
        some = tuple(self._random.sample(sorted(CLUSTER_FAULTS), self._random.randint(2, 5)))
        kinds = self._random.choice((tuple(CLUSTER_FAULTS), some, CUTS, CUTS, VOTES))
        self._faults = {kind: CLUSTER_FAULTS[kind] for kind in kinds}
        self._mortal = targets.mortal

    def _victim(self) -> SimNode:
        if self._random.random() < 0.6:
            leaders = [node for node in self._nodes if node.is_controller or self._leads_partition(node)]
            if leaders:
                return self._random.choice(leaders)
        return self._random.choice(self._nodes)

    def _controllers(self) -> list[SimNode]:
        """Return the nodes that consider themselves the controller: usually one."""
        return [node for node in self._nodes if node.is_controller]

    def _leads_partition(self, node: SimNode, topic: str = TOPIC) -> bool:
        broker = node.ready_broker
        return broker is not None and any(
            hosted.topic == topic and hosted.leader is not None for hosted in broker.host.partitions.values()
        )

    def _may_lose(self, node: SimNode) -> bool:
        return self._mortal is None or node is self._mortal

    def _power(self, node: SimNode) -> None:
        if self._may_lose(node):
            super()._power(node)

    def _sync_error(self, node: SimNode) -> None:
        if self._may_lose(node):
            super()._sync_error(node)

    def _freeze(self, node: SimNode) -> None:
        """Pause the node, perhaps for longer than its session, so that other nodes take over."""
        self._hold(node, "frozen", self._duration_s())

    def _isolate(self, node: SimNode) -> None:
        """Cut the node off from the other nodes; clients still reach it."""
        others = [other.host for other in self._nodes if other is not node]
        self._cut_links([(node.host, other) for other in others] + [(other, node.host) for other in others])

    def _deafen(self, node: SimNode) -> None:
        """Cut one direction of the link between two nodes."""
        other = self._random.choice([each for each in self._nodes if each is not node])
        self._cut_links([(other.host, node.host)])

    def _part(self, node: SimNode) -> None:
        """Cut a partition's leader and the controller off from each other; other nodes still reach both."""
        leaders = [each for each in self._nodes if self._leads_partition(each)]
        leader = self._random.choice(leaders or [node])
        controllers = [each for each in self._controllers() or self._nodes if each is not leader]
        other = self._random.choice(controllers or [node])
        if other is not leader:
            self._cut_links([(leader.host, other.host), (other.host, leader.host)])

    def _cut_links(self, links: Sequence[tuple[Host, Host]]) -> None:
        duration_s = self._duration_s()
        for source, target in links:
            self._cut_link(source, target, duration_s)

    def _duration_s(self) -> float:
        return self._random.uniform(*LONG_S) if self._random.random() < 0.5 else self._random.random() * SHORT_S_MAX

    def _kill_all(self, _: SimNode) -> None:
        for node in self._nodes:
            self._kill(node)

    def _power_all(self, _: SimNode) -> None:
        for node in self._nodes:
            self._power(node)

    def _transfer(self, _: SimNode) -> None:
        """Make the controller transfer its Raft leadership to another node."""
        for node in self._controllers():
            broker, process = node.broker, node.host.process
            if broker is not None and process is not None:
                self._world.note(f"{node.host.name} transfers its Raft leadership")
                process.loop.call_soon_threadsafe(broker.member.raft.transfer_leadership)

    def _coup(self, node: SimNode) -> None:
        """At the next vote, isolate the candidate and kill all other nodes, so that they vote again."""
        for voter in self._nodes:
            strike = Strike(ANSWERED, 1, partial(self._cut_off_candidate, voter), partial(_has_just_voted, voter))
            self._armed[voter.host] = strike
            self._world.after(1.5, self._disarm, voter.host, strike)
        if self._random.random() < 0.5:
            self._transfer(node)
        else:
            for controller in self._controllers():
                self._kill(controller)

    def _disarm(self, host: Host, strike: Strike) -> None:
        if self._armed.get(host) is strike:
            del self._armed[host]

    def _cut_off_candidate(self, voter: SimNode) -> None:
        candidate_id = None if voter.broker is None else voter.broker.member.raft.node.vote
        for node in self._nodes:
            self._armed.pop(node.host, None)
            if node.config.node_id == candidate_id:
                self._isolate(node)
            else:
                self._kill(node)

    def _jump(self, node: SimNode) -> None:
        step_ms = self._random.randint(-WALL_JUMP_MS_MAX, WALL_JUMP_MS_MAX)
        self._world.note(f"the wall clock of {node.host.name} jumps by {step_ms} ms")
        node.host.clock.wall_offset_ms += step_ms

    def _drift(self, node: SimNode) -> None:
        clock, rate = node.host.clock, node.host.clock.rate
        clock.run_at(1.0 + self._random.uniform(-DRIFT_MAX, DRIFT_MAX))
        self._world.note(f"the clocks of {node.host.name} run at {clock.rate:.5f}")
        self._world.after(self._random.random() * 5.0, clock.run_at, rate)


class LoneCut(ClusterNemesis):
    """Cuts one node off from the other nodes, but not from clients, until others have long taken over its roles.

    No other fault occurs, so its stale answers are visible. Most often the node coordinates: it leads a partition of
    `topic`.
    """

    def __init__(self, targets: Targets, topic: str = OFFSETS_TOPIC) -> None:
        super().__init__(targets)
        self._topic = topic

    def begin(self, until_s: float, pause_s: float) -> None:
        self._world.after(self._random.uniform(0.5, 2.0), self._cut_one)

    def _cut_one(self) -> None:
        coordinators = [node for node in self._nodes if self._leads_partition(node, self._topic)]
        self._fault("isolate", self._random.choice(coordinators or self._nodes))()

    def _duration_s(self) -> float:
        return self._random.uniform(*ALONE_S)


class SeveredLeader(ClusterNemesis):
    """Cuts a leader of `topic` off from the other nodes, but not from clients, when it reaches a crash point.

    No other fault occurs. The cut outlasts a broker session, so that another node takes over.
    """

    def __init__(self, targets: Targets, topic: str, point: str) -> None:
        super().__init__(targets)
        self._faults = {"sever": 1}
        self._topic, self._point = topic, point

    def _sever(self, node: SimNode) -> None:
        leaders = [each for each in self._nodes if self._leads_partition(each, self._topic)]
        leader = self._random.choice(leaders or [node])
        strike = Strike(self._point, 1, partial(self._sever_now, leader))
        self._armed[leader.host] = strike
        self._world.after(SEVER_WAIT_S, self._disarm, leader.host, strike)

    def _sever_now(self, leader: SimNode) -> None:
        duration_s = self._random.uniform(*SEVERED_S)
        for other in self._nodes:
            if other is not leader:
                self._cut_link(leader.host, other.host, duration_s)
                self._cut_link(other.host, leader.host, duration_s)


def _has_just_voted(voter: SimNode) -> bool:
    """Return whether the voter's answer was, or may have been, the vote that elects another node."""
    broker = voter.running_broker
    if broker is None:
        return False
    raft = broker.member.raft.node
    return raft.vote not in (None, raft.node_id) and raft.leader is None
