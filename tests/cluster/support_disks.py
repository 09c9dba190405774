"""Nodes whose disks can be made to fail or to hang, one by one, while they run."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.support_cluster import Nodes

REFUSED_FROM_BYTES = 1


class SickNodes(Nodes):
    """Three nodes, each with a switch for its disk (`debug_slow_syncs`)."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(folder, settings=settings)
        for node in self.local.nodes:
            node.change({"debug_slow_syncs": str(self._switch(node.id))})

    def hang(self, node_id: int) -> None:
        """Nothing that a thread of the node writes ends: segments' syncs, small files, the Raft store."""
        self._switch(node_id).write_text("hang")

    def freeze(self, node_id: int) -> None:
        """Nothing that the node writes ends, appends on its loop included."""
        self._switch(node_id).write_text("freeze")

    def refuse(self, node_id: int) -> None:
        """Every write of the node fails at once (EFBIG), whatever file it is for."""
        self._limit(node_id, REFUSED_FROM_BYTES)

    def cure(self, node_id: int) -> None:
        """The disk is well again."""
        self._switch(node_id).unlink(missing_ok=True)
        if self.node(node_id).process.state is not None:
            self._limit(node_id, None)

    def _switch(self, node_id: int) -> Path:
        return self.folder / f"disk-{node_id}"

    def _limit(self, node_id: int, size_bytes: int | None) -> None:
        pid = self.node(node_id).process.pid
        assert pid is not None
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size_bytes is None else size_bytes, hard))
