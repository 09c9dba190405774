"""Chronik's nodes, as `chronik cluster up` starts them; they end with the measuring process."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from tests.support.tested_build import tested_environment

from bench.servers import (
    ADMINISTRATOR,
    CHRONIK,
    MECHANISM,
    SHORT_HEARTBEAT_MS,
    SHORT_SESSION_MS,
    ServerEnded,
    Setup,
    Side,
)
from chronik.client.properties import ClientSettings, Target
from chronik.client.security import ClientSecurity
from chronik.local.cluster import LocalCluster, free_port
from chronik.testing.tied_node import TIED_NODE, tied_environment


class ChronikServer:
    """The nodes of a `LocalCluster`, with default settings except for the durability and the security.

    With SASL_SSL it is a cluster of `chronik cluster up --secure`.
    """

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.setup = setup
        self._environment = {**tied_environment(), **tested_environment()}
        self._cluster = LocalCluster(str(folder), command=TIED_NODE, environment=self._environment)
        self._password = secrets.token_urlsafe()
        settings: dict[str, Any] = {} if setup.durability == "default" else {"durability": setup.durability}
        if setup.allows_short_sessions:
            settings["group_consumer_min_session_timeout_ms"] = SHORT_SESSION_MS
            settings["group_consumer_min_heartbeat_interval_ms"] = SHORT_HEARTBEAT_MS
        is_secure = setup.protocol == "SASL_SSL"
        if setup.protocol == "SASL_PLAINTEXT":
            settings |= self._sasl(folder)
        self._cluster.create(setup.nodes, free_port(setup.nodes), settings, is_secure=is_secure)
        self._expected: set[int] = set()

    @property
    def bootstrap(self) -> str:
        return self._cluster.bootstrap

    @property
    def target(self) -> Target:
        if self.setup.protocol == "PLAINTEXT":
            return self.bootstrap
        if self.setup.protocol == "SASL_SSL":
            return self._cluster.client_settings
        security = ClientSecurity(self.setup.protocol, MECHANISM, ADMINISTRATOR, self._password)
        return ClientSettings(self.bootstrap, security)

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

    def _sasl(self, folder: Path) -> dict[str, Any]:
        users = folder / "sasl-users"  # not "users": the cluster would be one of `cluster up --secure`
        with open(os.open(users, os.O_WRONLY | os.O_CREAT, 0o600), "w") as opened:
            opened.write(f"{ADMINISTRATOR}:{self._password}\n")
        return {
            "security": {"protocol": "SASL_PLAINTEXT"},
            "sasl": {"mechanisms": [MECHANISM], "users_file": str(users)},
            "authorization": {"enabled": self.setup.has_authorizer, "super_users": [f"User:{ADMINISTRATOR}"]},
        }


SIDE = Side(CHRONIK, ChronikServer)
