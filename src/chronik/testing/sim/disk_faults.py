"""The nemesis of disks: files that are lost, cut, corrupted or restored from an old copy; devices that fail or hang.

Files are damaged while their node is down, alone or with all other nodes. The damaged node restarts first, last or in
between. `DamageTracker` decides which node's files may be damaged: one node's at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

from chronik.storage.folder import TopicPartition
from chronik.testing.sim.cluster_faults import CLUSTER_FAULTS, ClusterNemesis
from chronik.testing.sim.damage import DamageTracker
from chronik.testing.sim.disk import SYNCS, WRITES
from chronik.testing.sim.faults import Targets
from chronik.testing.sim.history import Availability
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.tree import FileNode, FolderNode

FILE_FAULTS: Mapping[str, int] = {
    "lose_log": 8,
    "shorten": 8,
    "damage": 8,
    "roll_back": 8,
    "lose_store": 5,
    "lose_node": 5,
    "old_store": 5,
}
"""Faults that damage the files of one node, and their weights."""
LOSE_COMMIT_LOG = "lose_commit_log"
"""One more of them, which seeds of `bad-disks` and `five-nodes` do not draw."""
ALL_SHARE = 0.6
"""How often all other nodes go down with the node whose files are damaged."""
POWER_SHARE = 0.8
"""How often a machine loses its memory with its commit log."""
LATER_S = (0.5, 3.0)
"""After nodes went down together, some of them start this much later than the first."""
LAGGING_S = (2.5, 4.0)
"""Longer than a session: the other nodes continue without a node that is down for this long."""
TRIES_MAX = 8
ROTS_MAX = 2
"""In one log of a node: a node that had to repair a log three times within a day leaves it to an operator."""
STORE_AGE_S = (0.3, 3.0)
"""The age of a Raft store that is restored from a copy."""
STORE_REFUSED_S = (2.0, 4.0)
"""After this long an operator removes a store that the node refuses to start with, as its error advises."""


class DiskNemesis(ClusterNemesis):
    """A `ClusterNemesis` with disk faults in addition."""

    lagging_share: ClassVar[float] = 0.4
    """How often another node lags when files are damaged."""

    def __init__(self, targets: Targets, kinds: Sequence[str]) -> None:
        super().__init__(targets)
        weights = {
            **CLUSTER_FAULTS,
            **FILE_FAULTS,
            LOSE_COMMIT_LOG: 8,
            "rot": 8,
            "lose_all_stores": 4,
            "fail_disk": 3,
            "hang_disk": 3,
        }
        self._faults = {kind: weights[kind] for kind in kinds}
        self.damage = DamageTracker(self._world, targets.nodes)
        self._stores: list[tuple[SimNode, FileNode]] = []
        """The Raft stores that were taken from their nodes."""
        self._old_stores: list[SimNode] = []
        """The nodes whose Raft stores were replaced by an older copy."""
        self._rotted: Counter[tuple[SimNode, TopicPartition]] = Counter()
        self._is_waiting = False
        """Whether a file fault waits until it is allowed: no other fault is injected until then."""

    def _injection(self, kind: str) -> Callable[[SimNode], None]:
        is_of_files = kind in FILE_FAULTS or kind == LOSE_COMMIT_LOG
        return partial(self._damage_files, kind) if is_of_files else super()._injection(kind)

    def end(self) -> None:
        self._put_stores_back()
        self._remove_old_stores()
        for node in self._nodes:
            node.host.disk.heal()
        super().end()

    def _strike(self) -> None:
        # Nodes without stores must not form a new cluster: that shows only if no fault disturbs them.
        if not self._stores and not self._is_waiting:
            super()._strike()

    # -- files ---------------------------------------------------------------------------------------------------------

    def _damage_files(self, kind: str, node: SimNode, tries: int = TRIES_MAX) -> None:
        """Damage the files of this node, or of another that may be damaged; if there is none, retry for a while."""
        victim = None if self.is_over else self._node_to_damage(kind, node)
        self._is_waiting = victim is None and tries > 0 and not self.is_over
        if victim is None:
            if not self._is_waiting:
                self.counts[kind] -= 1
                return
            if kind == "roll_back" and node.is_ready and not node.copies:
                self._kill(node)  # `_start` copies its folder before it runs again
            self._world.after(0.3, self._damage_files, kind, node, tries - 1)
        elif kind == "roll_back":
            self._roll_back(victim)
        elif kind in ("lose_store", "lose_node"):
            self._begin_anew(kind, victim)
        else:
            self._prepare(kind, victim)

    def _prepare(self, kind: str, node: SimNode) -> None:
        """Often take another node down first to make it lag; it restarts with the damaged node, before intact nodes."""
        others = [each for each in self._nodes if each is not node and each.is_ready]
        lagging = self._random.choice(others) if others and self._random.random() < self.lagging_share else None
        store = self.damage.files(node).copy_store()
        wait_s = self._random.uniform(*STORE_AGE_S)
        if lagging is not None:
            self._world.note(f"{lagging.host.name} is to fall behind")
            lagging.kill()
            wait_s = self._random.uniform(*LAGGING_S)
        elif kind != "old_store":
            wait_s = 0.0
        self._is_waiting = True
        self._world.after(wait_s, self._damage_now, kind, node, lagging, store)

    def _damage_now(self, kind: str, node: SimNode, lagging: SimNode | None, store: FileNode | None) -> None:
        self._is_waiting = False
        if self.is_over or not self._may_damage(kind, node):
            self.counts[kind] -= 1
            if lagging is not None:
                lagging.start_when_down()
        elif kind == "old_store":
            self._put_old_store(node, lagging, store)
        elif kind == LOSE_COMMIT_LOG:
            self._lose_commit_log(node, lagging)
        else:
            self._damage_log(kind, node, lagging)

    def _node_to_damage(self, kind: str, node: SimNode) -> SimNode | None:
        others = self._random.sample(self._nodes, len(self._nodes))
        return next((each for each in (node, *others) if self._may_damage(kind, each)), None)

    def _may_damage(self, kind: str, node: SimNode) -> bool:
        if not self._may_lose(node) or not self.damage.may_damage(node):
            return False
        return kind != "roll_back" or (bool(_older_copies(node)) and self._others_remember(node))

    def _damage_log(self, kind: str, node: SimNode, lagging: SimNode | None) -> None:
        if lagging is None:
            down = self._take_down(node)
        else:
            down = list(self._nodes)
            for each in down:
                each.kill()  # after a kill, the files show how far they had come
        files = self.damage.files(node)
        exposed = files.exposed()
        if exposed:
            chosen = self._random.choice(exposed)
            if kind == "lose_log":
                what = files.remove_log(chosen)
            elif kind == "shorten":
                what = files.shorten(chosen, self._random)
            else:
                what = files.damage(chosen, self._random)
            self._world.note(f"{node.host.name}: {chosen.log[0]}-{chosen.log[1]}, durable up to {chosen.upto}, {what}")
            self.damage.mark_damaged(node)
        else:
            self.counts[kind] -= 1
        self._bring_up(node, down, lagging)

    def _lose_commit_log(self, node: SimNode, lagging: SimNode | None) -> None:
        """Lose a commit log, most often together with the machine's memory, which has the same records."""
        is_alone = lagging is None and self._random.random() >= ALL_SHARE
        down = [node] if is_alone else list(self._nodes)
        for each in down:
            each.kill()
        if self._random.random() < POWER_SHARE and self._may_lose(node) and node.host.is_powered:
            node.power_off()
        what = self.damage.files(node).lose_commit_log(self._random)
        if what is None:
            self.counts[LOSE_COMMIT_LOG] -= 1
        else:
            self._world.note(f"{node.host.name} {what}")
            self.damage.mark_damaged(node)
        self._bring_up(node, down, lagging)

    def _roll_back(self, node: SimNode) -> None:
        """Restore the data folder as it was before an earlier run of the node."""
        down = self._take_down(node)
        self.damage.files(node).put_back(self._random.choice(_older_copies(node)))
        self._world.note(f"{node.host.name} has its data folder from an earlier time")
        self.damage.mark_damaged(node)
        self._bring_up(node, down)

    def _put_old_store(self, node: SimNode, lagging: SimNode | None, store: FileNode | None) -> None:
        """Replace the Raft store by a recent copy, as if the end of its file had been lost.

        The node is killed first: after a kill it knows how far its store had come, and does not vote with an older one.
        """
        down = list(self._nodes) if lagging is not None or self._random.random() < ALL_SHARE else [node]
        for each in down:
            each.kill()
        if store is not None:
            self.damage.files(node).put_store(store)
        self._world.note(f"{node.host.name} has its Raft store from a moment ago")
        node.copies.clear()
        self.damage.mark_damaged(node)
        self._old_stores.append(node)
        self._bring_up(node, down, lagging)
        self._world.after(self._random.uniform(*STORE_REFUSED_S), self._remove_old_stores)

    def _remove_old_stores(self) -> None:
        refused, self._old_stores = [node for node in self._old_stores if node.running_broker is None], []
        for node in refused:
            node.kill()
            self.damage.files(node).take_store()
            self._world.note(f"{node.host.name} has no Raft store any more")
            node.start_when_down()

    def _others_remember(self, node: SimNode) -> bool:
        """Return whether the other voters durably have the newest term and all committed entries: the copy may not.

        Otherwise no node would know what was committed: a voter that is rolled back is a lost voter.
        """
        rafts = {each: broker.member.raft.node for each in self._nodes if (broker := each.running_broker) is not None}
        if len(rafts) < len(self._nodes):
            return False
        term, commit = max(raft.term for raft in rafts.values()), max(raft.commit_index for raft in rafts.values())
        return all(
            raft.term == term and raft.applied_index >= commit for each, raft in rafts.items() if each is not node
        )

    def _start(self, node: SimNode) -> None:
        if "roll_back" in self._faults and not node.is_up and self.damage.files(node).exist:
            node.copies.append((node.starts, self.damage.files(node).copy()))
            del node.copies[:-3]
        super()._start(node)

    def _begin_anew(self, kind: str, node: SimNode) -> None:
        """Remove the node's Raft store, or all its files: it joins the cluster as a new member."""
        self._crash(node)
        if kind == "lose_store":
            self.damage.files(node).take_store()
        else:
            self.damage.files(node).wipe()
        self._world.note(f"{node.host.name} lost {'its Raft store' if kind == 'lose_store' else 'its disk'}")
        node.copies.clear()
        self.damage.mark_damaged(node)
        self._bring_up(node, [node])

    def _lose_all_stores(self, node: SimNode) -> None:
        """Start all nodes without their metadata; some seconds later an operator restores it.

        Only if every node has logs: nodes without any data may rightly form a new cluster.
        """
        files = [self.damage.files(each) for each in self._nodes]
        if self._stores or not self.damage.has_recovered() or not all(each.exposed() for each in files):
            self.counts["lose_all_stores"] -= 1
            self._fault("kill", node)()
            return
        for each in self._nodes:
            self._crash(each)
        self._stores = [
            (each, store) for each, of_node in zip(self._nodes, files, strict=True) if (store := of_node.take_store())
        ]
        self._world.note("all nodes lost their Raft stores")
        for each in self._nodes:
            self._start_later(each)
        self._world.after(self._random.uniform(2.0, 5.0), self._put_stores_back)

    def _put_stores_back(self) -> None:
        stores, self._stores = self._stores, []
        for node, _ in stores:
            node.kill()
        for node, store in stores:
            self.damage.files(node).put_store(store)
            node.host.resume()
            node.start_when_down()
        if stores:
            self._world.note("all nodes have their Raft stores again")

    def _take_down(self, node: SimNode) -> list[SimNode]:
        """Crash the node, and often all other nodes with it. Return the crashed nodes."""
        down = list(self._nodes) if self._random.random() < ALL_SHARE else [node]
        for each in down:
            self._crash(each)
        return down

    def _crash(self, node: SimNode) -> None:
        if self._random.random() < 0.5 and self._may_lose(node) and node.host.is_powered:
            node.power_off()
        else:
            node.kill()

    def _bring_up(self, node: SimNode, down: Sequence[SimNode], lagging: SimNode | None = None) -> None:
        """Start all nodes that are down: the damaged node last, or early with just enough others for a majority."""
        if lagging is not None:
            later_s = self._random.uniform(2.0, 6.0)
            for each in down:
                self._world.after(0.0 if each in (node, lagging) else later_s, self._start_later, each)
            return
        later_s = self._random.choice((0.0, 1.0)) * self._random.uniform(*LATER_S)
        others = self._random.sample([each for each in down if each is not node], len(down) - 1)
        is_last = self._random.random() < 0.2
        early = others if is_last else others[: len(self._nodes) // 2]
        for each in others:
            self._world.after(0.0 if each in early else later_s, self._start_later, each)
        self._world.after(later_s if is_last else 0.0, self._start, node)

    def _rot(self, node: SimNode) -> None:
        """Damage a closed segment while the node, or another that may be damaged, runs and serves."""
        victim = self._node_to_damage("rot", node)
        rotted = None
        if victim is not None:
            often = [log for (each, log), count in self._rotted.items() if each is victim and count == ROTS_MAX]
            rotted = self.damage.files(victim).rot(self._random, often)
        if victim is None or rotted is None:
            self.counts["rot"] -= 1
            return
        log, what = rotted
        self._rotted[victim, log] += 1
        self._world.note(f"{victim.host.name} {what}")
        self.damage.mark_damaged(victim)

    # -- devices -------------------------------------------------------------------------------------------------------

    def _fail_disk(self, node: SimNode) -> None:
        """Fail every write for a while; then restart the node if a sync failed.

        A failed sync loses what is in the page cache. If the node may not lose that, the device hangs instead.
        """
        if not self._may_lose(node):
            self.counts["fail_disk"] -= 1
            self._fault("hang_disk", node)()
            return
        seconds = self._duration_s()
        self._world.note(f"{node.host.name} cannot write to its disk for {seconds:.1f} s")
        node.host.disk.is_failing = True
        self._world.after(seconds, self._disk_is_well, node)

    def _disk_is_well(self, node: SimNode) -> None:
        node.host.disk.heal()
        self._world.note(f"{node.host.name} has a disk that is well")
        if node.host.disk.syncs_failed and not self.is_over:
            node.host.disk.syncs_failed = 0
            self._fault(self._random.choice(("kill", "stop")), node)()

    def _hang_disk(self, node: SimNode) -> None:
        """Block executor jobs; in some runs, syncs or all writes in the loop block as well."""
        seconds = self._duration_s()
        holds_up = self._random.choice((frozenset[str](), SYNCS, WRITES))
        self._world.note(f"{node.host.name} has a disk that hangs for {seconds:.1f} s")
        node.host.disk.hang(seconds, holds_up)


def _older_copies(node: SimNode) -> list[FolderNode]:
    """Return the copies that were made before the node's last start."""
    return [copy for starts, copy in node.copies if starts < node.starts]


class SickDisk(DiskNemesis):
    """One device fails or hangs, long enough to show that the cluster continues without it; no other fault occurs."""

    def __init__(self, targets: Targets, kinds: Sequence[str], availability: Availability) -> None:
        super().__init__(targets, kinds)
        self._availability = availability

    def begin(self, until_s: float, pause_s: float) -> None:
        self._world.after(self._random.uniform(0.5, 2.0), self._sicken)

    def end(self) -> None:
        self._availability.end()
        super().end()

    def _sicken(self) -> None:
        controllers = self._controllers()
        is_controller = self._random.random() < 0.5
        node = self._random.choice(controllers if controllers and is_controller else self._nodes)
        kind = self._random.choice(("fail_disk", "hang_disk"))
        self._fault(kind, node)()
        self._availability.begin(f"{kind} at {node.host.name}")

    def _duration_s(self) -> float:
        return 18.0
