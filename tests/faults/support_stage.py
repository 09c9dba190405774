"""Where a campaign plays: nodes in a room of their own, what may be done to them, and the way back to health."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.cluster.support_cluster import TIED_NODE, Nodes, tied_environment
from tests.cluster.support_workload import Workload
from tests.faults.support_room import CUT, HOST, NoRoom, Room, Way
from tests.support.eventually import eventually

from chronik.cli.errors import CliError
from chronik.cli.local_cluster import LocalCluster

NODES = 5
SMALL_DISKS = 2
"""So many nodes, the last ones, have a disk that can be filled; the others write to a real one."""
SMALL_DISK_BYTES = 256 * 1024 * 1024
RECOVERY_TIMEOUT_S = 120.0
SLOW_SYNCS, SLOW_READS = "slow-syncs", "slow-reads"
HANGING = "60000"
"""What the switch of `debug_slow_syncs` says for a disk that hangs: so many milliseconds for each sync."""

Ways = Mapping[tuple[int, int], Way]


class RoomCluster(LocalCluster):
    """Each node in its namespace, at an address of its own."""

    def __init__(self, folder: Path, room: Room) -> None:
        self._room = room
        super().__init__(str(folder), command=TIED_NODE, environment=tied_environment())

    def host_of(self, node_id: int) -> str:
        return self._room.address(node_id)

    def command_of(self, node_id: int) -> tuple[str, ...]:
        return (*self._room.enter(node_id), *super().command_of(node_id))


class Stage:
    """A running cluster with what can be done to it. `without` says which means this machine does not give, and why.

    Owned by the main thread: nodes are tied to the thread that starts them.
    """

    def __init__(self, folder: Path, seed: int, count: int = NODES) -> None:
        self.seed = seed
        self.chance = random.Random(f"acts of {seed}")
        self.without = ""
        self.notes: list[str] = []
        self.measured: list[tuple[str, float, float]] = []
        """What acts measured: name, seconds, and how many it may be."""
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
            for node in self.nodes.local.nodes:
                slow = {
                    "debug_slow_syncs": str(folder / f"{SLOW_SYNCS}-{node.id}"),
                    "debug_slow_reads": str(folder / f"{SLOW_READS}-{node.id}"),
                }
                node.change(slow)
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

    def _nodes(self, folder: Path, count: int) -> Nodes:
        settings: dict[str, Any] = {"default_replication_factor": 3}
        if self.room is None:
            return Nodes(folder, count, settings, cuttable=True)
        for node_id in range(count + 1 - SMALL_DISKS, count + 1):
            own = folder / f"node-{node_id}"
            own.mkdir(parents=True)
            self.room.disk(own, SMALL_DISK_BYTES)
            self.small_disks.append(node_id)
        return Nodes(folder, count, settings, local=RoomCluster(folder, self.room))

    # -- what faults use -----------------------------------------------------------------------------------------------

    def note(self, told: str) -> None:
        """What is happening, for the line about it."""
        self.notes.append(told)

    def hold(self) -> None:
        """The fault takes its time: there is nothing to wait for."""
        time.sleep(self.chance.uniform(*self.hold_s))

    @property
    def running(self) -> list[int]:
        return [node.id for node in self.nodes.running]

    def pick(self, count: int = 1) -> list[int]:
        """Some nodes that run."""
        running = self.running
        return self.chance.sample(running, min(count, len(running)))

    def leaders(self, workload: Workload) -> list[int]:
        """Those that lead partitions of the topic, by the metadata of whoever answers; any node where nobody does."""
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
        """The network is like that meanwhile, on top of what else is wrong with it."""
        self._ways.append(ways)
        self._put()
        yield
        self._ways.remove(ways)
        self._put()

    @contextlib.contextmanager
    def hanging(self, node_id: int) -> Iterator[None]:
        """The node's disk hangs meanwhile."""
        switch = self.folder / f"{SLOW_SYNCS}-{node_id}"
        switch.write_text(HANGING)
        yield
        switch.unlink(missing_ok=True)

    def everywhere(self, way: Way) -> Ways:
        """The same between all nodes and for clients."""
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

    # -- and back ------------------------------------------------------------------------------------------------------

    def bring_back(self, node_id: int) -> None:
        """Starts or resumes a node, as its supervisor would; whether it gets anywhere shows in `recover`."""
        process = self.nodes.node(node_id).process
        if process.state == "paused":
            self.nodes.resume(node_id)
        elif process.state is None:
            try:
                self.nodes.local.launch(node_id)
            except CliError as error:
                assert node_id in self.may_end_by_itself, str(error)
                self.note(str(error))

    def recover(self, workload: Workload) -> None:
        """Nothing is wrong any more: all comes back by itself, and records flow."""
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
        except CliError as error:
            raise AssertionError(str(error)) from None
        return True


def _both(one: Way, other: Way) -> Way:
    loss = 1.0 - (1.0 - one.loss) * (1.0 - other.loss)
    return Way(loss, one.delay_ms + other.delay_ms, one.jitter_ms + other.jitter_ms)
