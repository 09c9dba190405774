"""The cluster of a campaign: nodes in network namespaces, the faults to inject, and the recovery from them."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.support_disks import SlowNodes, slow_environment
from tests.cluster.support_workload import Workload
from tests.faults.support_room import CUT, HOST, NoRoom, Room, Way
from tests.support.eventually import eventually
from tests.support.slow_node import SLOW_NODE

from chronik.local.cluster import LocalCluster
from chronik.local.errors import LocalClusterError

NODES = 5
SMALL_DISKS = 2
"""This many nodes, the last ones, have a disk that can be filled; the other nodes write to a real disk."""
SMALL_DISK_BYTES = 256 * 1024 * 1024
RECOVERY_TIMEOUT_S = 120.0
HANGING = "60000"
"""What the switch for syncs holds for a hanging disk: the milliseconds that each sync takes."""

Ways = Mapping[tuple[int, int], Way]


class RoomCluster(LocalCluster):
    """Runs each node in its own namespace, at its own address."""

    def __init__(self, folder: Path, room: Room) -> None:
        self._room = room
        super().__init__(str(folder), command=SLOW_NODE, environment=slow_environment())

    def host_of(self, node_id: int) -> str:
        return self._room.address(node_id)

    def command_of(self, node_id: int) -> tuple[str, ...]:
        return (*self._room.enter(node_id), *super().command_of(node_id))


class Stage:
    """A running cluster and the faults that can be injected. `without` gives the reason if there are no namespaces.

    Owned by the main thread: nodes are tied to the thread that starts them.
    """

    def __init__(self, folder: Path, seed: int, count: int = NODES) -> None:
        self.seed = seed
        self.chance = random.Random(f"acts of {seed}")
        self.without = ""
        self.notes: list[str] = []
        self.measured: list[tuple[str, float, float]] = []
        """What the acts measured: name, seconds, and the maximum allowed seconds."""
        self.hold_s: tuple[float, float] = (2.0, 8.0)
        self.is_mixed = False
        self.may_end_by_itself: set[int] = set()
        self.small_disks: list[int] = []
        self._ways: list[Ways] = []
        self._exit = contextlib.ExitStack()
        self.room = self._room(seed)
        with contextlib.ExitStack() as undo:
            undo.callback(self._exit.close)
            self.nodes = self._exit.enter_context(self._nodes(folder, count))
            self.folder = folder
            self.nodes.start_all()
            undo.pop_all()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _room(self, seed: int) -> Room | None:
        try:
            return self._exit.enter_context(Room(seed))
        except NoRoom as reason:
            self.without = str(reason)
            return None

    def _nodes(self, folder: Path, count: int) -> SlowNodes:
        settings: dict[str, Any] = {"default_replication_factor": 3}
        if self.room is None:
            return SlowNodes(folder, count, settings, cuttable=True)
        for node_id in range(count + 1 - SMALL_DISKS, count + 1):
            own = folder / f"node-{node_id}"
            own.mkdir(parents=True)
            self.room.disk(own, SMALL_DISK_BYTES)
            self.small_disks.append(node_id)
        return SlowNodes(folder, count, settings, local=RoomCluster(folder, self.room))

    # -- faults --------------------------------------------------------------------------------------------------------

    def note(self, told: str) -> None:
        """Add a note for the line that reports the act."""
        self.notes.append(told)

    def hold(self) -> None:
        """Let the fault last; there is no condition to wait for."""
        time.sleep(self.chance.uniform(*self.hold_s))

    @property
    def running(self) -> list[int]:
        return [node.id for node in self.nodes.running]

    def pick(self, count: int = 1) -> list[int]:
        """Choose `count` running nodes, or all if fewer run."""
        running = self.running
        return self.chance.sample(running, min(count, len(running)))

    def leaders(self, workload: Workload) -> list[int]:
        """Return the running nodes that lead the topic's partitions; if no node returns metadata, any running node."""
        try:
            found = {state.leader for state in self.nodes.partitions(workload.topic).values()}
        except AssertionError:
            found = set()
        return sorted(found & set(self.running)) or self.pick()

    def controller(self) -> list[int]:
        view = self.nodes.local.view()
        return [view["controller"]] if view is not None and view["controller"] in self.running else self.pick()

    @contextlib.contextmanager
    def network(self, ways: Ways) -> Iterator[None]:
        """Apply these network faults inside the block, on top of those already active."""
        self._ways.append(ways)
        self._put()
        yield
        self._ways.remove(ways)
        self._put()

    @contextlib.contextmanager
    def hanging(self, node_id: int) -> Iterator[None]:
        """Let the node's disk hang inside the block."""
        switch = self.nodes.slow_syncs(node_id)
        switch.write_text(HANGING)
        yield
        switch.unlink(missing_ok=True)

    def everywhere(self, way: Way) -> Ways:
        """Return the network with `way` between all nodes, and between nodes and clients."""
        ends = [HOST, *self.nodes.ids]
        return {(source, target): way for source in ends for target in ends if source != target}

    def _put(self) -> None:
        together: dict[tuple[int, int], Way] = {}
        for ways in self._ways:
            for ends, way in ways.items():
                together[ends] = _both(together.get(ends, Way()), way)
        if self.room is not None:
            self.room.put([(*ends, way) for ends, way in together.items()])
        else:
            self.nodes.links.cut_pairs({ends for ends, way in together.items() if way == CUT})

    # -- recovery ------------------------------------------------------------------------------------------------------

    def bring_back(self, node_id: int) -> None:
        """Start or resume a node, as its supervisor would; `recover` checks whether it becomes ready."""
        process = self.nodes.node(node_id).process
        if process.state == "paused":
            self.nodes.resume(node_id)
        elif process.state is None:
            try:
                self.nodes.local.launch(node_id)
            except LocalClusterError as error:
                assert node_id in self.may_end_by_itself, str(error)
                self.note(str(error))

    def recover(self, workload: Workload) -> None:
        """Wait, with all faults removed, until every node and replica has recovered by itself and records flow."""
        assert not self._ways
        until_s = time.monotonic() + RECOVERY_TIMEOUT_S
        for node in self.nodes.local.nodes:
            if node.process.state is None:
                assert node.id in self.may_end_by_itself, f"node {node.id} has ended: {node.process.reason()}"
                self.note(f"node {node.id} had stopped: {node.process.reason()}")
                self.nodes.local.launch(node.id)
        self.may_end_by_itself.clear()
        eventually(self._all_ready, RECOVERY_TIMEOUT_S, "all nodes serve")
        self.nodes.wait_in_sync(max(1.0, until_s - time.monotonic()))
        workload.proceed(1)

    def _all_ready(self) -> bool:
        try:
            self.nodes.local.wait_until_ready(1.0)
        except LocalClusterError as error:
            raise AssertionError(str(error)) from None
        return True


def _both(one: Way, other: Way) -> Way:
    loss = 1.0 - (1.0 - one.loss) * (1.0 - other.loss)
    return Way(loss, one.delay_ms + other.delay_ms, one.jitter_ms + other.jitter_ms)
