"""The nemesis: which faults occur, when, and how they are repaired.

Most crashes occur at a crash point (a sync begins or completes, a segment arrives, a file was renamed) and not at an
arbitrary time: that is where bugs are. Disk, threads and network report their own crash points. Those in the node's
code wrap its functions for the duration of a run: the node does not know of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any
from unittest.mock import patch

from chronik.groups.coordinator import GroupCoordinator
from chronik.node.membership.raft_service import RaftService
from chronik.node.replicas.partition import Partition
from chronik.raft.node import RaftNode
from chronik.replication.isr import InSyncReplicas
from chronik.shares.share_partition import SharePartition
from chronik.testing.sim.host import Host
from chronik.testing.sim.network import Network
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.world import World
from chronik.transactions.coordinator import TransactionCoordinator

FAULTS: Mapping[str, int] = {
    "kill": 5,
    "power": 8,
    "stop": 2,
    "pause": 2,
    "full": 1,
    "slow": 1,
    "sync_error": 1,
    "cut": 2,
    "reset": 1,
    "silence": 1,
}
"""Each fault and its weight."""

CRASHES = ("kill", "power", "pause", "freeze", "kill_all", "power_all")
"""Faults that may wait for a crash point."""
CRASH_POINT_WAIT_S = 0.4

NODE_POINTS: Mapping[str, int] = {
    "job.submitted": 4,
    "job.done": 2,
    "job.reported": 2,
    "segment.arrived": 2,
    "disk.write": 2,
    "disk.written": 4,
    "disk.sync": 4,
    "disk.synced": 2,
    "disk.sync_dir": 1,
    "disk.synced_dir": 1,
    "disk.create": 1,
    "disk.rename": 1,
    "disk.renamed": 1,
    "disk.remove": 1,
    "disk.removed": 1,
    "disk.truncate": 1,
}
"""The crash points of disk, threads and network, each with its weight."""
BEFORE = True
ANSWERED = "raft.answered"
DECIDED = "transaction.decided"
ACKNOWLEDGED = "share.acknowledged"
APPENDED = "partition.appended"
TRUNCATED = "partition.truncated"
WRAPPED: tuple[tuple[type[Any], str, bool, str], ...] = (
    (Partition, "append", not BEFORE, APPENDED),
    (Partition, "append_fetched", not BEFORE, "partition.replicated"),
    (Partition, "synced", BEFORE, "partition.synced"),
    (Partition, "_watermark_rose", BEFORE, "partition.committed"),
    (Partition, "truncation_ended", not BEFORE, TRUNCATED),
    (Partition, "_lead", not BEFORE, "partition.leads"),
    (Partition, "_follow", not BEFORE, "partition.follows"),
    (InSyncReplicas, "propose", not BEFORE, "isr.proposed"),
    (InSyncReplicas, "committed_as", not BEFORE, "isr.committed"),
    (RaftNode, "persisted", BEFORE, "raft.persisted"),
    (RaftService, "_persisted", not BEFORE, ANSWERED),
)
"""Each function, whether its crash point comes before or after it, and the crash point's name.

partition.synced, raft.persisted: the data is durable, but not yet reported. partition.truncated: records that the new
leader lacks are removed, and nothing was fetched in their place. isr.proposed: the leader relies on an ISR change that
the controller has not received. raft.answered: persisted state was reported, for example a vote.
"""

WRAPPED_TRANSACTIONS: tuple[tuple[type[Any], str, bool, str], ...] = (
    (Partition, "append_marker", BEFORE, "partition.marker"),
    (Partition, "append_marker", not BEFORE, "partition.marked"),
    (TransactionCoordinator, "_decided", BEFORE, DECIDED),
    (TransactionCoordinator, "_complete", BEFORE, "transaction.completes"),
    (TransactionCoordinator, "_add", not BEFORE, "transaction.adds"),
    (GroupCoordinator, "transaction_ended", BEFORE, "group.transaction_ended"),
)
"""transaction.decided: the outcome is durable, and neither the client nor a partition knows it."""

WRAPPED_SHARES: tuple[tuple[type[Any], str, bool, str], ...] = (
    (SharePartition, "acknowledge", not BEFORE, ACKNOWLEDGED),
)
"""share.acknowledged: the leader has accepted an acknowledgement, and not sent it to the share coordinator."""

CLUSTER_POINTS: Mapping[str, int] = {**NODE_POINTS, **{name: 2 for *_, name in WRAPPED}}
TRANSACTION_POINTS: Mapping[str, int] = {name: 4 for *_, name in WRAPPED_TRANSACTIONS}


@dataclass(slots=True)
class Strike:
    """A fault that waits for a crash point."""

    point: str
    countdown: int
    carry_out: Callable[[], None]
    is_due: Callable[[], bool] = lambda: True
    """Whether to strike here, or to wait for another crash point of the same name."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What faults are injected into: nodes, and the network between them and the machines of their clients."""

    network: Network
    nodes: Sequence[SimNode]
    clients: Sequence[Host]
    mortal: SimNode | None = None
    """If given, only this node may lose unsynced writes."""


class Nemesis:
    """Breaks and repairs nodes, and the network between them and their clients."""

    def __init__(
        self, targets: Targets, faults: Mapping[str, int] = FAULTS, points: Mapping[str, int] = NODE_POINTS
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._world = targets.network.world
        self._network = targets.network
        self._nodes = targets.nodes
        self._hosts = (*targets.clients, *(node.host for node in targets.nodes))
        self._faults = faults
        self._points = points
        self._random = self._world.random("nemesis")
        self._armed: dict[Host, Strike] = {}
        self.is_over = False

    def begin(self, until_s: float, pause_s: float) -> None:
        """Inject faults at random times, on average `pause_s` apart, until `until_s`."""
        for node in self._nodes:
            node.host.on_crash_point = self._on_crash_point
        now_s = self._world.now
        while True:
            now_s += pause_s * (0.3 + 1.4 * self._random.random())
            if now_s >= until_s:
                break
            self._world.at(now_s, self._strike)

    def end(self) -> None:
        """Repair everything and inject no more faults."""
        self.is_over = True
        self._armed.clear()
        for one, other in permutations(self._hosts, 2):
            self._network.heal(one, other)
        for node in self._nodes:
            node.host.on_crash_point = None
            node.host.disk.make_room()
            node.host.disk.slowness = 1.0
            node.host.resume()
            if node.host.disk.syncs_failed:
                # A log whose sync failed waits for an operator to restart the node.
                node.kill()
            node.host.disk.sync_error_share = 0.0
            node.start_when_down()

    def _strike(self) -> None:
        if self.is_over:
            return
        node = self._victim()
        kind = self._random.choices(list(self._faults), list(self._faults.values()))[0]
        carry_out = self._fault(kind, node)
        if kind in CRASHES and self._random.random() < 0.75:
            self._arm(node, self._random.randint(1, 8), carry_out)
        else:
            carry_out()

    def _victim(self) -> SimNode:
        return self._random.choice(self._nodes)

    def _arm(self, node: SimNode, countdown: int, carry_out: Callable[[], None]) -> None:
        point = self._random.choices(list(self._points), list(self._points.values()))[0]
        strike = self._armed[node.host] = Strike(point, countdown, carry_out)
        self._world.after(CRASH_POINT_WAIT_S, self._strike_anyway, node.host, strike)

    def _strike_anyway(self, host: Host, strike: Strike) -> None:
        if self._armed.get(host) is strike:
            del self._armed[host]
            strike.carry_out()

    def _on_crash_point(self, host: Host, point: str) -> None:
        strike = self._armed.get(host)
        if strike is None or strike.point != point or not strike.is_due():
            return
        strike.countdown -= 1
        if strike.countdown == 0:
            del self._armed[host]
            self._world.note(f"{host.name} reaches {point}")
            strike.carry_out()

    def _fault(self, kind: str, node: SimNode) -> Callable[[], None]:
        inject = self._injection(kind)

        def carry_out() -> None:
            if not self.is_over:
                self.counts[kind] += 1
                inject(node)

        return carry_out

    def _injection(self, kind: str) -> Callable[[SimNode], None]:
        """Each fault is a method: `_kill` for "kill"."""
        injection: Callable[[SimNode], None] = getattr(self, f"_{kind}")
        return injection

    def _kill(self, node: SimNode) -> None:
        node.kill()
        self._start_later(node)

    def _power(self, node: SimNode) -> None:
        if node.host.is_powered:
            node.power_off()
        self._start_later(node)

    def _start_later(self, node: SimNode) -> None:
        self._world.after(self._random.random() * 0.3, self._start, node)

    def _start(self, node: SimNode) -> None:
        if self.is_over:
            return
        node.host.resume()
        node.start_when_down()
        if self._random.random() < 0.4:
            if self._random.random() < 0.5:
                kind = self._random.choice(("kill", "power"))
                self._arm(node, self._random.randint(1, 30), self._fault(kind, node))
            else:
                # Soon after recovery, to expose data that recovery assumed durable but did not sync.
                self._world.after(self._random.random() * 0.4, self._fault("power", node))

    def _stop(self, node: SimNode) -> None:
        node.stop()
        self._start_later(node)

    def _pause(self, node: SimNode) -> None:
        self._hold(node, "paused", self._random.expovariate(1.0) * 0.5)

    def _hold(self, node: SimNode, how: str, pause_s: float) -> None:
        self._world.note(f"{node.host.name} is {how} for {pause_s:.3f} s")
        node.host.pause()
        self._world.after(pause_s, node.host.resume)

    def _full(self, node: SimNode) -> None:
        left_bytes = self._random.choice((0, 100, 5_000, 70_000))
        self._world.note(f"{node.host.name} has a full disk, {left_bytes} bytes left")
        node.host.disk.fill(left_bytes)
        self._world.after(self._random.random() * 1.5, node.host.disk.make_room)

    def _slow(self, node: SimNode) -> None:
        disk = node.host.disk
        disk.slowness = self._random.choice((10.0, 50.0, 200.0))
        self._world.note(f"{node.host.name} has a disk that is {disk.slowness:g} times slower")
        self._world.after(self._random.random(), setattr, disk, "slowness", 1.0)

    def _sync_error(self, node: SimNode) -> None:
        disk = node.host.disk
        disk.sync_error_share = self._random.choice((0.02, 0.2, 1.0))
        self._world.note(f"{node.host.name} fails {disk.sync_error_share:.0%} of its syncs")
        self._world.after(self._random.random() * 0.5, self._sync_error_over, node)

    def _sync_error_over(self, node: SimNode) -> None:
        disk = node.host.disk
        disk.sync_error_share = 0.0
        if disk.syncs_failed and not self.is_over:
            disk.syncs_failed = 0
            self._fault(self._random.choice(("kill", "power", "stop")), node)()

    def _cut(self, node: SimNode) -> None:
        others = [host for host in self._hosts if host is not node.host]
        way = self._random.choice(("in", "out", "both"))
        duration_s = self._random.expovariate(1.0) * 0.8
        for other in self._random.sample(others, self._random.randint(1, len(others))):
            if way != "out":
                self._cut_link(other, node.host, duration_s)
            if way != "in":
                self._cut_link(node.host, other, duration_s)

    def _cut_link(self, source: Host, target: Host, duration_s: float) -> None:
        self._network.cut(source, target)
        self._world.after(duration_s, self._network.heal, source, target)

    def _reset(self, node: SimNode) -> None:
        count = self._network.reset_some(node.host, self._random.random())
        self._world.note(f"{count} connections of {node.host.name} are reset")

    def _silence(self, node: SimNode) -> None:
        count = self._network.silence_some(node.host, self._random.random())
        self._world.note(f"{count} connections of {node.host.name} fall silent")


@contextmanager
def crash_points(world: World) -> Iterator[None]:
    """Enable the crash points within the block."""
    with ExitStack() as enabled:
        for owner, name, is_before, point in (*WRAPPED, *WRAPPED_TRANSACTIONS, *WRAPPED_SHARES):
            wrapped = _wrapped(world, getattr(owner, name), is_before, point)
            enabled.enter_context(patch.object(owner, name, wrapped))
        yield


def _wrapped(world: World, original: Callable[..., Any], is_before: bool, point: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        process = world.running
        if process is not None and is_before:
            process.reached(point)
        result = original(*args, **kwargs)
        if process is not None and not is_before:
            process.reached(point)
        return result

    return wrapped
