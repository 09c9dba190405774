"""Nodes whose disks can be made slow, to hang or to fail, one by one, while they run."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.support_cluster import NODES, Nodes
from tests.support.slow_disk import FREEZE, HANG
from tests.support.slow_node import SLOW_NODE, slow_reads, slow_syncs, with_this_launcher

from chronik.local.cluster import LocalCluster
from chronik.testing.tied_node import tied_environment

REFUSED_FROM_BYTES = 1


def slow_environment() -> dict[str, str]:
    """Return the environment for nodes that SLOW_NODE starts and that end with this process."""
    return with_this_launcher(tied_environment())


class SlowNodes(Nodes):
    """Nodes whose disks have switches: see `tests.support.slow_disk`. `local` must start its nodes with SLOW_NODE."""

    def __init__(
        self,
        folder: Path,
        count: int = NODES,
        settings: Mapping[str, Any] | None = None,
        *,
        cuttable: bool = False,
        local: LocalCluster | None = None,
    ) -> None:
        local = local or LocalCluster(str(folder), command=SLOW_NODE, environment=slow_environment())
        super().__init__(folder, count, settings, cuttable=cuttable, local=local)

    def slow_reads(self, node_id: int) -> Path:
        return slow_reads(self.node(node_id).folder)

    def slow_syncs(self, node_id: int) -> Path:
        return slow_syncs(self.node(node_id).folder)


class SickNodes(SlowNodes):
    """Three nodes whose disks can be made to fail or hang."""

    def hang(self, node_id: int) -> None:
        """Block all writes of the node's threads: syncs of segments, small files, the Raft store."""
        self.slow_syncs(node_id).write_text(HANG)

    def freeze(self, node_id: int) -> None:
        """Block all writes of the node, including appends on its event loop."""
        self.slow_syncs(node_id).write_text(FREEZE)

    def refuse(self, node_id: int) -> None:
        """Make every write of the node fail at once (EFBIG), for any file."""
        self._limit(node_id, REFUSED_FROM_BYTES)

    def cure(self, node_id: int) -> None:
        """Restore the disk."""
        self.slow_syncs(node_id).unlink(missing_ok=True)
        if self.node(node_id).process.state is not None:
            self._limit(node_id, None)

    def _limit(self, node_id: int, size_bytes: int | None) -> None:
        pid = self.node(node_id).process.pid
        assert pid is not None
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size_bytes is None else size_bytes, hard))
