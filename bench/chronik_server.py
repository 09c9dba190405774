"""Chronik's nodes, as `chronik cluster up` starts them; they end with the measuring process."""

from __future__ import annotations

from pathlib import Path

from bench.servers import CHRONIK, ServerEnded, Setup, Side
from chronik.local.cluster import LocalCluster, free_port
from chronik.testing.tied_node import TIED_NODE, tied_environment


class ChronikServer:
    """The nodes of a `LocalCluster`, with default settings except for the durability."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.setup = setup
        self._environment = tied_environment()
        self._cluster = LocalCluster(str(folder), command=TIED_NODE, environment=self._environment)
        self._cluster.create(setup.nodes, free_port(setup.nodes), {"durability": setup.durability})
        self._expected: set[int] = set()

    @property
    def bootstrap(self) -> str:
        return self._cluster.bootstrap

    @property
    def pids(self) -> list[int]:
        return [pid for node in self._cluster.nodes if (pid := node.process.pid) is not None]

    def launch(self) -> None:
        for node in self._cluster.nodes:
            if node.process.state is None:
                node.process.launch([*TIED_NODE, "--data-dir", node.folder], self._environment)
                self._expected.add(node.id)

    def check(self) -> None:
        for node in self._cluster.nodes:
            if node.id in self._expected and node.process.state is None:
                raise ServerEnded(f"Chronik's node {node.id} ended: {node.process.reason()}")

    def stop(self) -> None:
        self._expected.clear()
        self._cluster.stop_all()

    def kill(self, node_id: int | None = None) -> None:
        for node in self._cluster.running:
            if node_id in (None, node.id):
                self._expected.discard(node.id)
                self._cluster.kill(node.id)


SIDE = Side(CHRONIK, ChronikServer)
