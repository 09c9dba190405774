"""Nodes whose disks can be made to fail or hang, one by one, while they run."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.support_cluster import Nodes

REFUSED_FROM_BYTES = 1


class SickNodes(Nodes):
    """Three nodes; each has a switch for its disk (`debug_slow_syncs`)."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(folder, settings=settings)
        for node in self.local.nodes:
            node.change({"debug_slow_syncs": str(self._switch(node.id))})

    def hang(self, node_id: int) -> None:
        """Block all writes of the node's threads: syncs of segments, small files, the Raft store."""
        self._switch(node_id).write_text("hang")

    def freeze(self, node_id: int) -> None:
        """Block all writes of the node, including appends on its event loop."""
        self._switch(node_id).write_text("freeze")

    def refuse(self, node_id: int) -> None:
        """Make every write of the node fail at once (EFBIG), for any file."""
        self._limit(node_id, REFUSED_FROM_BYTES)

    def cure(self, node_id: int) -> None:
        """Restore the disk."""
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
