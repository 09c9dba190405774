"""Injects faults into a running cluster, one or several at a time, and checks that it recovers from them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.support_cluster import Nodes
from tests.cluster.support_workload import Workload
from tests.faults.support_namespaces import CUT, HOST, LinkFault, Namespaces, NamespacesUnavailable
from tests.faults.support_security import ClusterSecurity
from tests.support.eventually import eventually

from chronik.local.errors import LocalClusterError

NODES = 5
SMALL_DISKS = 2
"""This many nodes, the last ones, have a disk that can be filled; the other nodes write to a real disk."""
SMALL_DISK_BYTES = 256 * 1024 * 1024
COMMIT_LOG_SHARE = 0.5
COMMIT_LOG_BYTES = 1024 * 1024
RECOVERY_TIMEOUT_S = 120.0

LinkFaults = Mapping[tuple[int, int], LinkFault]


class CampaignNodes(Nodes):
    """Runs secured nodes: with `namespaces`, each in its own one at its own address; otherwise on loopback."""

    def __init__(
        self,
        folder: Path,
        count: int,
        settings: Mapping[str, Any],
        security: ClusterSecurity,
        namespaces: Namespaces | None,
    ) -> None:
        self._security = security
        self._namespaces = namespaces
        super().__init__(folder, count, settings, cuttable=namespaces is None, disk_switches=True)

    def host_of(self, node_id: int) -> str:
        return super().host_of(node_id) if self._namespaces is None else self._namespaces.address(node_id)

    def command_of(self, node_id: int) -> tuple[str, ...]:
        prefix = () if self._namespaces is None else self._namespaces.enter(node_id)
        return (*prefix, *super().command_of(node_id))

    def move_to(self, port: int) -> None:
        super().move_to(port)
        for node in self:
            node.change(self._secured(node.id, node.kafka.port))

    def _write_node(self, node_id: int, port: int, shared: Mapping[str, Any]) -> None:
        super()._write_node(node_id, port, {**shared, **self._secured(node_id, port)})

    def _secured(self, node_id: int, port: int) -> dict[str, Any]:
        return self._security.node_settings(node_id, self.host_of(node_id), port)


class FaultInjector:
    """The faults of one cluster. Without `namespaces`, packets cannot be lost or delayed: only links can be cut.

    Owned by the main thread: nodes are tied to the thread that starts them.
    """

    def __init__(
        self,
        nodes: Nodes,
        chance: random.Random,
        namespaces: Namespaces | None = None,
        security: ClusterSecurity | None = None,
    ) -> None:
        self.nodes = nodes
        self.chance = chance
        self.namespaces = namespaces
        self._security = security
        self.small_disks: list[int] = []
        self.notes: list[str] = []
        self.measured: list[tuple[str, float, float]] = []
        """What the faults measured: name, seconds, and the maximum allowed seconds."""
        self.hold_s: tuple[float, float] = (2.0, 8.0)
        self.progress = 1
        """Records of each partition to wait for while one node after the other is restarted."""
        self.is_mixed = False
        self.may_end_by_itself: set[int] = set()
        self._link_faults: list[LinkFaults] = []

    # -- faults --------------------------------------------------------------------------------------------------------

    @property
    def security(self) -> ClusterSecurity:
        assert self._security is not None, "only the nodes of a campaign are secured"
        return self._security

    def note(self, text: str) -> None:
        """Add a note for the line that reports the fault."""
        self.notes.append(text)

    def hold(self, since_s: float | None = None) -> None:
        """Let the fault last, from `since_s` on: its duration is part of the fault, not a wait for a condition."""
        passed_s = 0.0 if since_s is None else time.monotonic() - since_s
        time.sleep(max(0.0, self.chance.uniform(*self.hold_s) - passed_s))

    @property
    def responsive(self) -> list[int]:
        return [node.id for node in self.nodes.responsive]

    def pick(self, count: int = 1) -> list[int]:
        """Choose `count` responsive nodes, or all if there are fewer."""
        responsive = self.responsive
        return self.chance.sample(responsive, min(count, len(responsive)))

    def leaders(self, workload: Workload) -> list[int]:
        """Return the responsive leaders of the topic's partitions; if no node returns metadata, any responsive node."""
        try:
            leaders = {state.leader for state in self.nodes.partitions(workload.topic).values()}
        except AssertionError:
            leaders = set()
        return sorted(leaders & set(self.responsive)) or self.pick()

    def controller(self) -> list[int]:
        view = self.nodes.view()
        return [view["controller"]] if view is not None and view["controller"] in self.responsive else self.pick()

    @contextlib.contextmanager
    def network(self, faults: LinkFaults) -> Iterator[None]:
        """Apply these network faults inside the block, on top of those already active."""
        self._link_faults.append(faults)
        self._apply_link_faults()
        yield
        self._link_faults.remove(faults)
        self._apply_link_faults()

    def everywhere(self, fault: LinkFault) -> LinkFaults:
        """Return this fault between all nodes, and between nodes and clients."""
        ends = [HOST, *self.nodes.ids]
        return {(source, target): fault for source in ends for target in ends if source != target}

    def _apply_link_faults(self) -> None:
        combined: dict[tuple[int, int], LinkFault] = {}
        for faults in self._link_faults:
            for ends, fault in faults.items():
                combined[ends] = combined.get(ends, LinkFault()).combined_with(fault)
        if self.namespaces is not None:
            self.namespaces.apply([(*ends, fault) for ends, fault in combined.items()])
        else:
            self.nodes.links.cut_pairs({ends for ends, fault in combined.items() if fault == CUT})

    # -- recovery ------------------------------------------------------------------------------------------------------

    def bring_back(self, node_id: int) -> None:
        """Start or resume a node, as its supervisor would; `recover` checks whether it becomes ready."""
        process = self.nodes.node(node_id).process
        if process.state == "paused":
            self.nodes.resume(node_id)
        elif process.state is None:
            try:
                self.nodes.launch(node_id)
            except LocalClusterError as error:
                assert node_id in self.may_end_by_itself, str(error)
                self.note(str(error))

    def recover(self, workload: Workload) -> None:
        """Wait, with all faults removed, until every node and replica has recovered by itself and records flow."""
        assert not self._link_faults
        until_s = time.monotonic() + RECOVERY_TIMEOUT_S
        for node in self.nodes:
            if node.process.state is None:
                assert node.id in self.may_end_by_itself, f"node {node.id} has ended: {node.process.reason()}"
                self.note(f"node {node.id} had stopped: {node.process.reason()}")
                self.nodes.launch(node.id)
        self.may_end_by_itself.clear()
        eventually(self._all_ready, RECOVERY_TIMEOUT_S, "all nodes serve")
        self.nodes.wait_in_sync(max(1.0, until_s - time.monotonic()))
        workload.proceed(1)

    def _all_ready(self) -> bool:
        try:
            self.nodes.wait_until_ready(1.0)
        except LocalClusterError as error:
            raise AssertionError(str(error)) from None
        return True


@contextlib.contextmanager
def campaign_cluster(folder: Path, seed: int, say: Callable[[str], None]) -> Iterator[FaultInjector]:
    """Start five nodes in network namespaces; if there are none, on loopback, with the reason for it to `say`."""
    settings: dict[str, Any] = {"default_replication_factor": 3}
    if random.Random(f"commit log of {seed}").random() < COMMIT_LOG_SHARE:
        # Small files, so that they are recycled often.
        settings["commit_log_bytes"] = COMMIT_LOG_BYTES
        say("the nodes have a small commit log")
    with contextlib.ExitStack() as stack:
        try:
            namespaces: Namespaces | None = stack.enter_context(Namespaces(seed))
        except NamespacesUnavailable as reason:
            say(f"no network namespaces: {reason}")
            namespaces = None
        small_disks = [] if namespaces is None else list(range(NODES + 1 - SMALL_DISKS, NODES + 1))
        for node_id in small_disks:
            disk = folder / f"node-{node_id}"
            disk.mkdir(parents=True)
            assert namespaces is not None
            namespaces.mount_disk(disk, SMALL_DISK_BYTES)
        security = ClusterSecurity(folder / "security")
        nodes = stack.enter_context(CampaignNodes(folder, NODES, settings, security, namespaces))
        injector = FaultInjector(nodes, random.Random(f"acts of {seed}"), namespaces, security)
        injector.small_disks = small_disks
        nodes.start_all()
        security.create_users(nodes)
        yield injector
