"""The two compared systems, behind one protocol: Chronik and Apache Kafka, on one node or three.

Both get the same partitions, replicas and `min.insync.replicas`. With the durability `replicated`, written records are
acknowledged (Kafka's default); with `synced`, flushed records (Kafka with a flush for each append). With `default`,
each side keeps its own default: Chronik acknowledges flushed records, Kafka written ones.

With SASL_SSL clients authenticate by SCRAM-SHA-512, and the nodes authenticate each other by certificate. All traffic
is encrypted, with TLS 1.3 and the same cipher on both sides (`bench.secure_clients.check_tls`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from chronik.client.properties import Target

Durability = Literal["replicated", "synced", "default"]
ListenerProtocol = Literal["PLAINTEXT", "SASL_PLAINTEXT", "SASL_SSL"]
MECHANISM = "SCRAM-SHA-512"
ADMINISTRATOR = "admin"
"""The user of all rows but that of ACLs: a super user, if the server has an authorizer."""
SHORT_SESSION_MS, SHORT_HEARTBEAT_MS = 2_000, 200
TLS_VERSION = "TLSv1.3"
TLS_CIPHER = "TLS_AES_256_GCM_SHA384"
"""OpenSSL's first choice, which Chronik and librdkafka take. Kafka is restricted to it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is started: this many nodes, with a replica of each partition on each node."""

    nodes: int = 1
    durability: Durability = "replicated"
    protocol: ListenerProtocol = "PLAINTEXT"
    has_authorizer: bool = False
    allows_short_sessions: bool = False
    """Whether group configs may set sessions and heartbeat intervals of consumer groups below the default minimum."""

    def __str__(self) -> str:
        protocol = "" if self.protocol == "PLAINTEXT" else f", {self.protocol}"
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''}, {self.durability}{protocol}"


class ServerEnded(Exception):
    """A server's process ended by itself; the message is the end of its log."""


class Server(Protocol):
    """All processes of one system. Owns them and their folder; the folder outlives them."""

    setup: Setup

    @property
    def bootstrap(self) -> str: ...

    @property
    def target(self) -> Target:
        """Where and how clients connect: as the administrator, if the server authenticates them."""
        ...

    @property
    def pids(self) -> list[int]:
        """The running processes."""
        ...

    def launch(self) -> None:
        """Start every process that does not run, and return without waiting for them."""
        ...

    def check(self) -> None:
        """Raise ServerEnded if a process is gone that was not killed here."""
        ...

    def stop(self) -> None:
        """Stop all processes cleanly."""
        ...

    def kill(self, node_id: int | None = None) -> None:
        """Send SIGKILL to one node, or to all."""
        ...


@dataclass(frozen=True, slots=True)
class Side:
    """One of the compared systems, by the name that its samples carry."""

    name: str
    make: Callable[[Path, Setup], Server]


CHRONIK = "Chronik"
