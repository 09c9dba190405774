"""Random runs from one seed: random clients and faults. Then all faults end, and the cluster must recover."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.raft.harness import SETTINGS, Cluster
from tests.raft.oracle import Violation

from chronik.raft.membership import Remove

PEACE_MS = 5_000
"""Within this time, from any state, a leader is elected, a command is committed and every member has it."""

DRIFT = SETTINGS.clock_drift_percent / 100

CLIENTS = {"propose": 30, "burst": 4, "nothing": 30}
FAULTS = {"crash": 5, "start": 8, "split": 4, "cut_one_way": 4, "heal": 8, "pause": 3, "transfer": 3, "weather": 2}
MEMBERS = {"wipe": 3, "add": 2, "remove": 3}


@dataclass(frozen=True, slots=True)
class Plan:
    """The content of a run: how often each action occurs, relative to the others."""

    weights: Mapping[str, int]
    steps: int = 100
    sizes: tuple[int, ...] = (3, 3, 5)


FAULTY = Plan(CLIENTS | FAULTS)
CHANGING = Plan(CLIENTS | FAULTS | MEMBERS)
RESTLESS = Plan(CLIENTS | {"restart": 20, "deafen": 10, "heal": 6, "pause": 10, "nothing": 45, "weather": 1})
"""Leaders are reachable by some nodes only, or pause while the other nodes continue."""
LOSING = Plan(CLIENTS | FAULTS | {"wipe": 12, "split": 8, "cut_one_way": 8}, sizes=(3,))
"""Disks are lost while other nodes lag."""
HANDED_OVER = Plan(CLIENTS | FAULTS | {"transfer": 25, "cut_one_way": 8, "heal": 12})
"""Leadership changes often, while some nodes do not hear of it."""

SICK = Plan(CLIENTS | FAULTS | {"sicken": 15, "crash": 3})
"""Disks hang for a while, mostly those of leaders."""


class Nemesis:
    """One run on one cluster. Every choice comes from the cluster's seed."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster = cluster
        self._plan = plan
        self._next_id = max(cluster.hosts) + 1

    def run(self) -> None:
        cluster, plan = self.cluster, self._plan
        actions: dict[str, Callable[[], None]] = {name: getattr(self, f"_{name}") for name in plan.weights}
        names, weights = list(actions), list(plan.weights.values())
        self._weather()
        cluster.compacts_every = cluster.random.choice([None, 5, 20])
        for _ in range(plan.steps):
            (name,) = cluster.random.choices(names, weights)
            actions[name]()
            cluster.run_for(cluster.random.choice([1, 5, 20, 50, 100, 300]))
            self._let_go()
        self.make_peace()

    def make_peace(self) -> None:
        """End all faults; the cluster must recover within a bound."""
        cluster = self.cluster
        cluster.faults = type(cluster.faults)()
        for host in list(cluster.hosts.values()):
            if host.hangs_until_ms > cluster.now_ms:
                cluster.restart(host.node_id)
            host.paused_until_ms = min(host.paused_until_ms, cluster.now_ms)
            if host.node is None:
                cluster.start(host.node_id)
        cluster.commit(PEACE_MS)
        cluster.converge(PEACE_MS)

    # Clients

    def _nothing(self) -> None:
        """Only let time pass."""

    def _propose(self) -> None:
        """Propose on a random node that believes it is the leader, even an outdated one."""
        leaders = [host.node_id for host in self.cluster.running if host.node is not None and host.node.is_leader]
        if leaders:
            self.cluster.propose(self.cluster.random.choice(leaders))

    def _burst(self) -> None:
        for _ in range(self.cluster.random.randrange(2, 20)):
            self._propose()

    # Faults

    def _crash(self) -> None:
        running = [host.node_id for host in self.cluster.running]
        if running:
            self.cluster.crash(self.cluster.random.choice(running))

    def _start(self) -> None:
        down = [host.node_id for host in self.cluster.hosts.values() if host.node is None]
        if down:
            self.cluster.start(self.cluster.random.choice(down))

    def _restart(self) -> None:
        """Kill the process and restart it immediately."""
        running = [host.node_id for host in self.cluster.running]
        if running:
            self.cluster.restart(self.cluster.random.choice(running))

    def _deafen(self) -> None:
        """Drop the leader's messages to one node, so that its election timeout expires."""
        leader = self.cluster.leader
        if leader is not None:
            others = [each for each in self.cluster.hosts if each != leader.node_id]
            self.cluster.faults.cut[(leader.node_id, self.cluster.random.choice(others))] = None

    def _split(self) -> None:
        cluster = self.cluster
        node_ids = list(cluster.hosts)
        self.cluster.cut_off(*cluster.random.sample(node_ids, cluster.random.randrange(1, len(node_ids))))

    def _cut_one_way(self) -> None:
        source, target = self.cluster.random.sample(list(self.cluster.hosts), 2)
        self.cluster.faults.cut[(source, target)] = None

    def _heal(self) -> None:
        self.cluster.heal()

    def _pause(self) -> None:
        """Pause a node, mostly the leader, because a paused leader may miss what happens in the meantime."""
        cluster = self.cluster
        leader = cluster.leader
        others = list(cluster.hosts)
        node_id = leader.node_id if leader is not None and cluster.random.random() < 0.7 else None
        cluster.pause(node_id or cluster.random.choice(others), cluster.random.choice([50, 300, 1_000]))

    def _sicken(self) -> None:
        """Make a disk hang; the node notices during the hang, or only afterwards."""
        random, cluster = self.cluster.random, self.cluster
        leader = cluster.leader
        node_id = leader.node_id if leader is not None and random.random() < 0.7 else None
        cluster.sicken(node_id or random.choice(list(cluster.hosts)), random.choice([100, 1_000, 3_000]), 300)

    def _transfer(self) -> None:
        leader = self.cluster.leader
        if leader is not None:
            targets = [member.node_id for member in leader.membership.members]
            self.cluster.transfer(leader.node_id, self.cluster.random.choice([None, *targets]))

    def _weather(self) -> None:
        """Choose new network and disk conditions."""
        random, faults = self.cluster.random, self.cluster.faults
        faults.latency_ms = random.choice([(0.5, 2.0), (0.5, 2.0), (1.0, 20.0), (10.0, 100.0)])
        faults.stray = random.choice([0.0, 0.05, 0.2])
        faults.write_ms = random.choice([(0.2, 2.0), (0.2, 2.0), (1.0, 30.0), (1.0, 150.0)])
        faults.loss = random.choice([0.0, 0.02, 0.1])
        faults.duplication = random.choice([0.0, 0.02, 0.1])
        faults.crash_at_write = random.choice([0.0, 0.02, 0.1])

    # Members

    def _may_lose_one(self) -> bool:
        """Return whether every voter has its store, so that losing one store keeps a majority."""
        leader = self.cluster.leader
        if leader is None or leader._state.members.index > leader.commit_index:
            return False
        stores = [(each, host.store.stored.store_id) for each, host in self.cluster.hosts.items()]
        members = leader.membership.voters
        return len(members) >= 3 and all((member.node_id, member.store) in stores for member in members)

    def _wipe(self) -> None:
        if self._may_lose_one():
            self.cluster.wipe(self.cluster.random.choice(list(self.cluster.hosts)))

    def _add(self) -> None:
        if len(self.cluster.hosts) < 6:
            self.cluster.add_host(self._next_id)
            self._next_id += 1

    def _remove(self) -> None:
        """Remove any member, even the leader; its host is switched off some time later."""
        leader = self.cluster.leader
        if leader is not None and self._may_lose_one() and len(self.cluster.hosts) > 3:
            target = self.cluster.random.choice(leader.membership.members).node_id
            self.cluster.change(leader.node_id, Remove(target))

    def _let_go(self) -> None:
        """Delete hosts that a committed change has removed."""
        leader = self.cluster.leader
        if leader is None or leader._state.members.index > leader.commit_index:
            return
        members = [member.node_id for member in leader.membership.members]
        for node_id, host in list(self.cluster.hosts.items()):
            was_member = host.node is not None and not host.node._state.is_blank
            if node_id not in members and was_member and self.cluster.random.random() < 0.2:
                self.cluster.crash(node_id)
                del self.cluster.hosts[node_id]


def random_run(seed: int, plan: Plan, make: Callable[..., Cluster] = Cluster) -> Cluster:
    """Run from `seed`. A failure is a Violation or an error of the core; the same seed replays it."""
    size = plan.sizes[seed % len(plan.sizes)]
    cluster = make(size, seed, drift=DRIFT, voters_max=size)
    Nemesis(cluster, plan).run()
    return cluster


def flapping_run(seed: int, make: Callable[..., Cluster] = Cluster) -> Cluster:
    """Isolate and reconnect one node at a time; the other nodes always hear their leader, and must keep it."""
    cluster = make(3, seed, drift=DRIFT)
    leader = cluster.elect()
    cluster.converge()
    for _ in range(3):
        cluster.cut_off(cluster.random.choice([each for each in cluster.hosts if each != leader.node_id]))
        cluster.run_for(cluster.random.uniform(100, 2_000))
        cluster.heal()
        cluster.run_for(1_000)
        if cluster.leader is not leader:
            raise Violation(f"stability: a node that came back took leadership from {leader.node_id}")
    return cluster
