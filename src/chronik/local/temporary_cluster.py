"""A local cluster on free ports in a temporary folder, removed at the end: for the demo and for tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Self

from chronik.local.cluster import START_NODE, LocalCluster, clean_environment, free_port
from chronik.local.errors import LocalClusterError

PORT_TRIES = 5


class TemporaryCluster(LocalCluster):
    """A context manager: inside it all nodes serve; after it no process or file remains."""

    def __init__(
        self,
        nodes: int,
        *,
        command: Sequence[str] = START_NODE,
        environment: Mapping[str, str] | None = None,
        is_secure: bool = False,
    ) -> None:
        own = clean_environment() if environment is None else environment
        super().__init__(tempfile.mkdtemp(prefix="chronik-"), command=command, environment=own)
        self._count = nodes
        self._is_secure = is_secure

    def __enter__(self) -> Self:
        try:
            self._start_on_free_ports()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
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
                    self.create(self._count, port, is_secure=self._is_secure)
                self.start_all()
                return
            except LocalClusterError as error:
                if "is taken" not in str(error) or attempt == PORT_TRIES - 1:
                    raise
