"""A real `chronik start` process for a test: started, observed, killed, restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.eventually import eventually
from tests.support.forked_node import AnyProcess, start_node
from tests.support.ports import free_ports

from chronik.local.node import to_toml

CHRONIK = Path(sys.executable).with_name("chronik")
READY_TIMEOUT_S = 15.0
EXIT_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 60
PORT_TRIES = 3
SMALL_FILES: Mapping[str, Any] = {"commit_log_bytes": 4 * 1024 * 1024}
"""For the nodes of tests: a start writes 1 MiB, not 16, and files of the commit log are recycled while a test runs."""


class NodeFailed(Exception):
    """The node is not healthy: it exited, never became ready, or left something behind.

    Not an AssertionError, because `eventually` treats those as "not yet".
    """


class Node:
    """One node process. Owns its folder, its ports and its process group; `settings` are keys of node.toml.

    The data folder outlives the process, so `kill` then `start` is a crash and a recovery.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None, *, runs_checkout: bool = False) -> None:
        """`runs_checkout`: run the checkout even if the nodes of this test run are those of an installed wheel."""
        self.folder = folder
        self._runs_checkout = runs_checkout
        self.settings = {**SMALL_FILES, **(settings or {})}
        self.node_id = int(self.settings.get("node_id", 1))
        self.data_dir = folder / f"node-{self.node_id}"
        self.log_path = folder / f"node-{self.node_id}.log"
        self.process: AnyProcess | None = None
        self._choose_ports()

    def __repr__(self) -> str:
        return f"Node({self.node_id} at {self.bootstrap})"

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.kafka_port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        if self.process is None:
            raise NodeFailed(f"{self} is not running")
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> Node:
        """Start the process and return when it is ready. If another process took the port, try another port."""
        for _ in range(PORT_TRIES):
            self._launch()
            try:
                eventually(self._is_ready, READY_TIMEOUT_S, f"{self} answers /readyz")
            except NodeFailed:
                taken = "is taken" in self.log_text() and not (self.data_dir / "meta.json").exists()
                if not taken:
                    raise
                self._choose_ports()
                continue
            except AssertionError as error:
                self.kill()
                raise NodeFailed(f"{error}\n{self.log_tail()}") from None
            return self
        raise NodeFailed(f"no free port for {self}\n{self.log_tail()}")

    def kill(self) -> None:
        """Send SIGKILL: no clean shutdown, nothing flushed."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(EXIT_TIMEOUT_S)
            self._nothing_left_behind()

    def terminate(self) -> None:
        """Send SIGTERM, and check that the node exits cleanly."""
        if self.process is None:
            return
        process = self.process
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise NodeFailed(f"{self} was still running {EXIT_TIMEOUT_S} s after SIGTERM\n{self.log_tail()}") from None
        self._nothing_left_behind()
        if status != 0:
            raise NodeFailed(f"{self} exited {status} after SIGTERM\n{self.log_tail()}")

    def restart(self) -> Node:
        """Stop cleanly and start on the same ports and data."""
        self.terminate()
        return self.start()

    def get(self, path: str, timeout_s: float = 5.0) -> str:
        """Return the body of one HTTP GET to this node."""
        with urllib.request.urlopen(self.http + path, timeout=timeout_s) as response:
            return str(response.read().decode())

    def log_text(self) -> str:
        """Return all output of the process, over all its starts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        return "\n".join([f"--- last lines of {self.log_path}", *self.log_text().splitlines()[-lines:]])

    def _choose_ports(self) -> None:
        self.kafka_port, self.http_port, self.internal_port = free_ports(3)

    def _launch(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / f"node-{self.node_id}.toml"
        listen = {
            "kafka": self.bootstrap,
            "http": f"127.0.0.1:{self.http_port}",
            "internal": f"127.0.0.1:{self.internal_port}",
        }
        own = {"node_id": self.node_id, "data_dir": str(self.data_dir), "listen": listen}
        config.write_text(to_toml({**own, **self.settings}))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CHRONIK_")}
        with self.log_path.open("ab") as log:
            self.process = start_node(
                ["--config", str(config)], environment, log.fileno(), self.folder, runs_checkout=self._runs_checkout
            )

    def _is_ready(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            status = None if self.process is None else self.process.returncode
            self.process = None
            raise NodeFailed(f"{self} exited {status} before it was ready\n{self.log_tail()}")
        try:
            self.get("/readyz")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _nothing_left_behind(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process = None
        else:
            raise NodeFailed(f"{self} left a process of its group {self.pid} behind; it was killed")
