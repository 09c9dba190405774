"""A cluster of nodes on this machine, in one folder: create, start, inspect, stop, kill and pause its nodes.

All state is on disk (settings and pid files), so any process can manage the cluster. A process holds the folder's lock
while it makes a change.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from chronik.client.properties import ClientSettings
from chronik.local import security
from chronik.local.errors import LocalClusterError, UncleanStop
from chronik.local.node import LocalNode, nodes_in, write_settings
from chronik.local.node_process import Spawn, wait_until
from chronik.node.config import HTTP_PORT_BELOW_KAFKA, INTERNAL_PORT_BELOW_KAFKA
from chronik.node.membership.cluster_secret import SECRET_NAME, make_secret
from chronik.storage.disk import RealDisk, read_file, write_file_atomic

START_NODE = (sys.executable, "-m", "chronik.cli", "start")
HOST = "127.0.0.1"
NODES_MAX = 99
REPLICAS_MAX = 3
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 45.0
# Below the ephemeral port range, so that a node that is killed and restarted finds its ports still free.
FREE_PORT_FROM, FREE_PORT_UPTO = 24_100, 32_000
# Settings that differ between nodes, so they must not come from a shared environment. The cluster secret is stored in
# the node folders because a later command may run in a shell without the variable.
PER_NODE_VARIABLES = ("NODE_ID", "CLUSTER_ID", "CLUSTER_SECRET", "DATA_DIR", "PEERS", "LISTEN_", "ADVERTISE_", "RACK")


class LocalCluster:
    """The nodes of one folder. `command` starts one node; its `--data-dir` and `--config` are appended.
    `spawn` starts the processes (by default `spawn_process`).

    All nodes listen on loopback; a subclass can give each node its own host (`host_of`, `command_of`).
    """

    def __init__(
        self,
        folder: str,
        *,
        command: Sequence[str] = START_NODE,
        environment: Mapping[str, str] | None = None,
        spawn: Spawn | None = None,
    ) -> None:
        self.folder = os.path.abspath(folder)
        self.nodes: list[LocalNode] = []
        self.refresh()
        self._command = tuple(command)
        self._environment = shared_environment() if environment is None else dict(environment)
        self._spawn = spawn

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        return ",".join(node.bootstrap for node in self.nodes)

    @property
    def is_secured(self) -> bool:
        return security.is_secured(self.folder)

    @property
    def client_settings(self) -> ClientSettings:
        """How to connect to the cluster: as its administrator, if it is secured."""
        return security.client_settings(self.folder, self.bootstrap)

    @property
    def running(self) -> list[LocalNode]:
        """The nodes with a live process, including paused nodes."""
        return [node for node in self.nodes if node.process.state is not None]

    def refresh(self) -> None:
        """Reload the nodes from disk: another process may have added nodes or changed their ports."""
        known = {node.folder: node for node in self.nodes}
        self.nodes = [known.get(node.folder, node) for node in nodes_in(self.folder)]
        for node in self.nodes:
            node.reload()

    def node(self, node_id: int) -> LocalNode:
        found = next((node for node in self.nodes if node.id == node_id), None)
        if found is not None:
            return found
        if not self.nodes:
            raise LocalClusterError(f"there is no cluster in {self.folder}: start one with chronik cluster up")
        known = ", ".join(str(node.id) for node in self.nodes)
        raise LocalClusterError(f"there is no node {node_id} in {self.folder}: it has {known}")

    def view(self) -> dict[str, Any] | None:
        """Return the newest cluster view that a running node reports, or None if no node answers."""
        return newest_view(self.views().values())

    def views(self) -> dict[int, dict[str, Any] | None]:
        """Return each running node's view of the cluster, by node id; None for a node that does not answer."""
        return {node.id: node.cluster_view() for node in self.nodes if node.process.state == "running"}

    def host_of(self, node_id: int) -> str:
        """Return the address that a node listens on."""
        return HOST

    def command_of(self, node_id: int) -> tuple[str, ...]:
        """Return the command that starts a node, without the arguments that identify the node."""
        return self._command

    # -- setup ---------------------------------------------------------------------------------------------------------

    def create(
        self, nodes: int, port: int, settings: Mapping[str, Any] | None = None, *, is_secure: bool = False
    ) -> None:
        """Write the settings of a new cluster; node i gets `port` + i - 1, and the derived ports below it.

        A secure cluster has TLS, users and ACLs: see `security`.
        """
        check_ports([port + index for index in range(nodes)])
        if is_secure:
            security.create_security(self.folder)
        # A random id in the format of Kafka's cluster ids.
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        shared = {"cluster_id": cluster_id, "default_replication_factor": min(REPLICAS_MAX, nodes), **(settings or {})}
        for index in range(nodes):
            self._write_node(index + 1, port + index, shared)
        self.introduce()

    def add(self) -> LocalNode:
        """Write the settings of one more node, and add it to the other nodes' peers for their next start."""
        port = max(node.kafka.port for node in self.nodes) + 1
        node_id = max(node.id for node in self.nodes) + 1
        check_ports([port])
        first = self.nodes[0].config
        shared = {
            "cluster_id": first.cluster_id,
            "default_replication_factor": max(first.default_replication_factor, min(REPLICAS_MAX, len(self.nodes) + 1)),
            "durability": first.durability,
        }
        self._write_node(node_id, port, shared)
        self.introduce()
        return self.node(node_id)

    def move_to(self, port: int) -> None:
        """Change the ports of a stopped cluster."""
        ports = [port + index for index in range(len(self.nodes))]
        check_ports(ports)
        for node, own in zip(self.nodes, ports, strict=True):
            # Drop the peers' old addresses: one of them may be this node's new address.
            node.change({"listen": self._listen(node.id, own), "peers": None})
        self.introduce()

    def introduce(self) -> None:
        """Write the list of peers to each node's settings, and give each node the cluster secret."""
        self.refresh()
        for node in self.nodes:
            others = [{"id": other.id, "internal": str(other.internal)} for other in self.nodes if other is not node]
            node.change({"peers": others or None})
        self._share_secret()
        self._secure()

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def start_all(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Start every stopped node and wait until all nodes serve. On failure, kill the nodes that were started."""
        started = [node for node in self.nodes if node.process.state is None]
        try:
            for node in started:
                self.launch(node.id)
            self.wait_until_ready(timeout_s)
        except BaseException:
            for node in started:
                node.process.kill()
            raise

    def start(self, node_id: int, timeout_s: float = READY_TIMEOUT_S) -> bool:
        """Start one node. Return True when it serves, or False if too few nodes run for any node to serve."""
        node = self.launch(node_id)
        if 2 * len(self.running) <= len(self.nodes):
            self._wait(lambda: node.get("/healthz")[0] == 200, [node], timeout_s, "answer")
            return False
        self._wait(lambda: self._serves(node), [node], timeout_s, "become ready")
        return True

    def launch(self, node_id: int) -> LocalNode:
        """Start one node's process without waiting for it to become ready."""
        node = self.node(node_id)
        if node.process.state == "paused":
            raise LocalClusterError(f"node {node_id} is paused: chronik cluster resume {node_id}")
        if node.process.state is not None:
            raise LocalClusterError(f"node {node_id} is already running (process {node.process.pid})")
        self._share_secret()
        self._secure()
        # Pass the folder explicitly: it may have been moved since its settings were written.
        command = [*self.command_of(node.id), "--data-dir", node.folder]
        node.process.launch(command, self._environment, self._spawn)
        return node

    def stop(self, node_id: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop a node cleanly: it transfers its leadership, syncs its logs and marks them clean."""
        self._stop([self._running_node(node_id)], timeout_s)

    def stop_all(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        self._stop(self.running, timeout_s)

    def kill(self, node_id: int) -> None:
        """Send SIGKILL: the node flushes nothing and closes no connection cleanly."""
        self._running_node(node_id).process.kill()

    def pause(self, node_id: int) -> None:
        """Send SIGSTOP: connections stay open, and the node answers nothing."""
        node = self._running_node(node_id)
        node.process.send(signal.SIGSTOP)
        if not wait_until(lambda: node.process.state != "running", 5.0):
            pid = node.process.pid
            raise LocalClusterError(f"node {node_id} was sent SIGSTOP and still runs: look at process {pid}")

    def resume(self, node_id: int) -> bool:
        """Send SIGCONT; return False if the node was not paused."""
        node = self._running_node(node_id)
        was_paused = node.process.state == "paused"
        node.process.send(signal.SIGCONT)
        return was_paused

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait_until_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until every node serves, knows the controller, and is alive in every other node's view."""
        self._wait(lambda: all(map(self._serves, self.nodes)), self.nodes, timeout_s, "become ready")

    def wait_until_in_sync(self, timeout_s: float) -> bool:
        """Wait until every partition has a leader and all its replicas in sync. Return False if the time is up."""

        def is_in_sync() -> bool:
            view = self.view()
            return view is not None and view["under_replicated"] == 0 and view["leaderless"] == 0

        return wait_until(is_in_sync, timeout_s, interval_s=0.1)

    def _serves(self, node: LocalNode) -> bool:
        """Return whether the node is ready and its view has a controller and lists every running node as alive."""
        view = node.cluster_view() if node.is_ready else None
        if view is None or view["controller"] is None:
            return False
        alive = {known["id"] for known in view["nodes"] if known["state"] == "alive"}
        return alive >= {running.id for running in self.nodes if running.process.state == "running"}

    def _wait(self, condition: Callable[[], bool], nodes: Sequence[LocalNode], timeout_s: float, what: str) -> None:
        def is_met() -> bool:
            if condition():
                return True
            for node in nodes:
                if node.process.state is None:
                    reason = node.process.reason()
                    node.process.forget()
                    raise LocalClusterError(f"node {node.id} did not start: {reason}")
            return False

        if not wait_until(is_met, timeout_s):
            late = next((node for node in nodes if not node.is_ready), nodes[0])
            raise LocalClusterError(
                f"node {late.id} did not {what} within {timeout_s:g} s: see {late.log_path}, or try once more"
            )

    # -- internals -----------------------------------------------------------------------------------------------------

    def _share_secret(self) -> None:
        """Copy the cluster secret to each node that has none; create a secret if no node has one.

        This also runs at each start: the folder may predate cluster secrets, or a node's folder may have been emptied.
        """
        paths = [os.path.join(node.folder, SECRET_NAME) for node in self.nodes]
        missing = [path for path in paths if not os.path.exists(path)]
        source = next((path for path in paths if path not in missing), None)
        disk = RealDisk()
        for path in missing:
            try:
                if source is None:
                    make_secret(disk, path, random.SystemRandom())
                    source = path
                else:
                    write_file_atomic(disk, path, read_file(disk, source, private=True) or b"", private=True)
            except OSError as error:
                raise LocalClusterError(
                    f"cannot copy the cluster secret from {source or self.folder} to {path}: {error.strerror}; "
                    "make both usable for this user alone"
                ) from None

    def _secure(self) -> None:
        """Write what secures the nodes and their clients, if the cluster is secured. The folder may have been moved."""
        if not self.is_secured:
            return
        for node in self.nodes:
            settings = security.node_settings(self.folder, node.id, [node.kafka.host])
            if node.config.tls.certificate != settings["tls"]["certificate"]:
                node.change(settings)
        security.write_client_settings(self.folder, self.bootstrap)

    def _running_node(self, node_id: int) -> LocalNode:
        node = self.node(node_id)
        if node.process.state is None:
            raise LocalClusterError(f"node {node_id} is not running: chronik cluster start {node_id}")
        return node

    def _stop(self, nodes: Sequence[LocalNode], timeout_s: float) -> None:
        for node in nodes:
            node.process.send(signal.SIGTERM)
            node.process.send(signal.SIGCONT)  # a paused process handles signals only after SIGCONT
        deadline_s = time.monotonic() + timeout_s
        unclean: list[int] = []
        for node in nodes:
            if not node.process.wait_until_gone(max(0.0, deadline_s - time.monotonic())):
                node.process.kill()
                unclean.append(node.id)
            node.process.forget()
        if unclean:
            names = ", ".join(map(str, unclean))
            raise UncleanStop(
                f"node {names} did not stop within {timeout_s:g} s and was killed: the next start recovers its logs"
            )

    def _write_node(self, node_id: int, port: int, shared: Mapping[str, Any]) -> None:
        """Write the settings of a new node; `shared` are those that all nodes have in common."""
        folder = os.path.join(self.folder, f"node-{node_id}")
        listen = self._listen(node_id, port)
        write_settings(folder, {"node_id": node_id, "data_dir": folder, **shared, "listen": listen})

    def _listen(self, node_id: int, port: int) -> dict[str, str]:
        host = self.host_of(node_id)
        if host == HOST:
            return {"kafka": f"{host}:{port}"}
        # HTTP defaults to loopback, and so does the internal address of a node without peers.
        return dict(zip(("kafka", "http", "internal"), (f"{host}:{each}" for each in _ports(port)), strict=True))

    @contextlib.contextmanager
    def locked(self, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the folder's lock so that no other shell changes the cluster, and load earlier changes."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            lock = open(os.path.join(self.folder, "cluster.lock"), "w", encoding="ascii")  # noqa: SIM115 - closed below
        except OSError as error:
            raise LocalClusterError(
                f"cannot use {self.folder}: {error.strerror}; make it writable, or pass another --dir"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is not None:
                    on_wait(f"waiting for another chronik cluster command in {self.folder}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            self.refresh()
            yield


def newest_view(views: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the newest of several nodes' cluster views, or None if there is none."""
    present = [view for view in views if view is not None]
    return max(present, key=lambda view: (view["version"], view["controller"] is not None), default=None)


def shared_environment() -> dict[str, str]:
    """Return the environment for all nodes of a cluster, without the settings that differ between nodes."""
    own = tuple(f"CHRONIK_{name}" for name in PER_NODE_VARIABLES)
    return {name: value for name, value in os.environ.items() if not name.startswith(own)}


def clean_environment() -> dict[str, str]:
    """Return the environment for a private cluster: CHRONIK_* variables are meant for another cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CHRONIK_")}


def free_port(nodes: int) -> int:
    """Return a first port for `nodes` nodes such that every port that they will use is free."""
    chooser = random.Random()  # noqa: S311 - a port is not a secret
    for _ in range(100):
        port = chooser.randrange(FREE_PORT_FROM, FREE_PORT_UPTO - nodes)
        if all(_is_free(taken) for index in range(nodes) for taken in _ports(port + index)):
            return port
    lowest = FREE_PORT_FROM - INTERNAL_PORT_BELOW_KAFKA
    raise LocalClusterError(f"no {3 * nodes} free ports between {lowest} and {FREE_PORT_UPTO}: stop what listens there")


def check_ports(ports: Sequence[int]) -> None:
    """Raise if a node cannot use one of the ports, before anything is written."""
    for port in ports:
        if not INTERNAL_PORT_BELOW_KAFKA < port <= 65_535:
            raise LocalClusterError(
                f"port {port} cannot be used: nodes also listen {HTTP_PORT_BELOW_KAFKA} and "
                f"{INTERNAL_PORT_BELOW_KAFKA} below it, so pass --port with one above {INTERNAL_PORT_BELOW_KAFKA}"
            )
        for taken in _ports(port):
            if not _is_free(taken):
                raise LocalClusterError(
                    f"port {taken} is taken (by another cluster?): stop what listens there, or pass --port for others"
                )


def _ports(kafka: int) -> tuple[int, int, int]:
    return kafka, kafka - HTTP_PORT_BELOW_KAFKA, kafka - INTERNAL_PORT_BELOW_KAFKA


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
