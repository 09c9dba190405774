"""One node of a cluster on this machine: its folder, its settings, its process and its HTTP endpoint.

DIR/node-N/node.toml     settings, written by `chronik cluster`, read by `chronik start --config`
DIR/node-N/node.log      JSON lines
DIR/node-N/node.pid      the process id, in decimal
DIR/node-N/cluster-secret  the secret by which the nodes authenticate each other; only this user may read it
DIR/node-N/...           the node's data folder
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import time
import tomllib
from collections.abc import Mapping
from typing import Any

from chronik.client.endpoint import Endpoint
from chronik.local.errors import LocalClusterError
from chronik.local.node_process import NodeProcess
from chronik.node.config import ConfigError, load
from chronik.node.membership.cluster_secret import SECRET_NAME, read_secret
from chronik.node.serving.signed import Kind, node_token
from chronik.storage.disk import RealDisk

HTTP_TIMEOUT_S = 2.0


class LocalNode:
    """A node with its settings in `folder`/node.toml. Reading its state never changes it."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        self.config_path = os.path.join(self.folder, "node.toml")
        self.log_path = os.path.join(self.folder, "node.log")
        self._tls: ssl.SSLContext | None = None
        self.process = NodeProcess(self.config_path, os.path.join(self.folder, "node.pid"), self.log_path)
        self.reload()

    def reload(self) -> None:
        """Load the settings: another process may have changed them."""
        try:
            self.config = load(self.config_path)
            self._tls = None
        except ConfigError as error:
            raise LocalClusterError(str(error)) from None

    @property
    def id(self) -> int:
        return self.config.node_id

    @property
    def kafka(self) -> Endpoint:
        return self.config.advertised_kafka()

    @property
    def http(self) -> Endpoint:
        return self.config.http_endpoint

    @property
    def internal(self) -> Endpoint:
        return self.config.internal_endpoint

    @property
    def bootstrap(self) -> str:
        return str(self.kafka)

    @property
    def is_ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def cluster_view(self) -> dict[str, Any] | None:
        """Return this node's view of its cluster (`/api/cluster`), or None if it does not answer."""
        status, body = self.get("/api/cluster")
        try:
            view = json.loads(body) if status == http.client.OK else None
        except ValueError:
            return None  # another server has the port
        return view if isinstance(view, dict) else None

    @property
    def is_hanging(self) -> bool:
        """Whether its HTTP port accepts connections and answers nothing: the process is alive, its loop is not."""
        if self.get("/healthz")[0]:
            return False
        try:
            socket.create_connection(self.http, HTTP_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            pass
        return True

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of one GET request; status 0 if the node does not answer."""
        status, body = self._get(path, {})
        if status == http.client.UNAUTHORIZED:
            status, body = self._get(path, self._proof())
        return status, body

    def _proof(self) -> dict[str, str]:
        """Return the header that proves this node's cluster secret, which its folder holds; none without it."""
        path = self.config.cluster_secret_file or os.path.join(self.folder, SECRET_NAME)
        try:
            secret = read_secret(RealDisk(), path)
        except (OSError, ConfigError):
            secret = None
        if secret is None:
            return {}
        key = secret.derived(Kind.NODE.purpose)[0]
        return {"Authorization": f"Bearer {node_token(key, time.time_ns() // 1_000_000)}"}

    def _get(self, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        # Not by asyncio: the caller may be on an event loop, as asynchronous tests are.
        connection = http.client.HTTPConnection(*self.http, timeout=HTTP_TIMEOUT_S)
        if self.config.security.http_tls:
            if self._tls is None:
                self._tls = ssl.create_default_context(cafile=self.config.tls.authorities or None)
            connection = http.client.HTTPSConnection(*self.http, timeout=HTTP_TIMEOUT_S, context=self._tls)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path, headers=dict(headers))
                response = connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException):
                return 0, b""

    def change(self, settings: Mapping[str, Any]) -> None:
        """Change some settings and keep all others; None removes a setting. The node reads them at its next start."""
        with open(self.config_path, "rb") as opened:
            write_settings(self.folder, {**tomllib.load(opened), **settings})
        self.reload()


def nodes_in(folder: str) -> list[LocalNode]:
    """Return the nodes with settings in a cluster's folder, ordered by id."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LocalClusterError(f"cannot read {folder}: {error.strerror}; pass another --dir") from None
    paths = [os.path.join(folder, name) for name in names if re.fullmatch(r"node-\d+", name)]
    return sorted(
        (LocalNode(path) for path in paths if os.path.exists(os.path.join(path, "node.toml"))), key=lambda node: node.id
    )


def write_settings(folder: str, settings: Mapping[str, Any]) -> None:
    """Write `folder`/node.toml atomically, without the settings that are None."""
    path = os.path.join(folder, "node.toml")
    try:
        # The node's log, which this process creates, names topics and users.
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with open(path + ".new", "w", encoding="utf-8") as opened:
            opened.write(to_toml({name: value for name, value in settings.items() if value is not None}))
        os.replace(path + ".new", path)
    except OSError as error:
        raise LocalClusterError(
            f"cannot write {path}: {error.strerror}; make it writable, or pass another --dir"
        ) from None


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return settings as TOML: plain keys first, then a table per mapping and a table array per list of mappings."""
    lines: list[str] = []
    tables: list[str] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            tables += ["", f"[{_key(name)}]", to_toml(value).rstrip()]
        elif isinstance(value, (list, tuple)) and all(isinstance(row, Mapping) for row in value):
            for row in value:
                tables += ["", f"[[{_key(name)}]]", to_toml(row).rstrip()]
        else:
            # JSON and TOML write strings, numbers, booleans and lists of them the same way.
            lines.append(f"{_key(name)} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join([*lines, *tables, ""])


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)
