"""The two systems that are compared, behind one protocol: Chronik and Apache Kafka, on one node or three.

Both get the same partitions, replicas and `min.insync.replicas`. Durability: `replicated` acknowledges what is written
(Kafka's default), `synced` what is flushed (Kafka with a flush for each append).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Durability = Literal["replicated", "synced"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What is started: so many nodes, with a replica of each partition on each."""

    nodes: int = 1
    durability: Durability = "replicated"

    def __str__(self) -> str:
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''}, {self.durability}"


class ServerEnded(Exception):
    """A server's process ended by itself; the end of its log says why."""


class Server(Protocol):
    """All processes of one system. Owns them and their folder; the folder outlives them."""

    setup: Setup

    @property
    def bootstrap(self) -> str: ...

    @property
    def pids(self) -> list[int]:
        """Those that run."""
        ...

    def launch(self) -> None:
        """Starts every process that does not run, and returns without waiting for them."""
        ...

    def check(self) -> None:
        """Raises ServerEnded where a process is gone that was not killed from here."""
        ...

    def stop(self) -> None:
        """A clean stop of all of them."""
        ...

    def kill(self, node_id: int | None = None) -> None:
        """SIGKILL to one node, or to all."""
        ...


@dataclass(frozen=True, slots=True)
class Side:
    """One of the systems compared, by the name that its samples carry."""

    name: str
    make: Callable[[Path, Setup], Server]


CHRONIK = "Chronik"
