"""A local cluster on free ports in a temporary folder, removed at the end: for the demo and for tests."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from chronik.local.cluster import LocalCluster, clean_environment, free_port
from chronik.local.errors import LocalClusterError

PORT_TRIES = 5


class TemporaryCluster(LocalCluster):
    """A context manager: inside it all nodes serve; after it no process or file remains."""

    def __init__(
        self,
        nodes: int = 3,
        *,
        settings: Mapping[str, Any] | None = None,
        command: Sequence[str] = (sys.executable, "-m", "chronik.cli", "start"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder = tempfile.mkdtemp(prefix="chronik-")
        own = clean_environment() if environment is None else environment
        super().__init__(folder, command=command, environment=own)
        self._count = nodes
        self._settings = dict(settings or {})

    def __enter__(self) -> TemporaryCluster:
        try:
            self._start_on_free_ports()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Kill running nodes, and delete the folder."""
        self.refresh()
        for node in self.running:
            self.kill(node.id)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_on_free_ports(self) -> None:
        """Start the nodes, and retry on other ports if another process took ours between the check and the start."""
        for attempt in range(PORT_TRIES):
            port = free_port(self._count)
            try:
                if attempt:
                    self.move_to(port)
                else:
                    self.create(self._count, port, self._settings)
                self.start_all()
                return
            except LocalClusterError as error:
                if "is taken" not in str(error) or attempt == PORT_TRIES - 1:
                    raise
