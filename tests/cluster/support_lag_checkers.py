"""Programs that report lag: Burrow with its ZooKeeper, and one on kadm (as kminion, kcl, rpk and Redpanda Console)."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.clients.drivers.java import JVM_FLAGS, TOOLS
from tests.support.eventually import eventually
from tests.support.ports import free_ports

ZOOKEEPER = TOOLS / "zookeeper-3.9"
START_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 5.0
KADM = TOOLS / "kadm"
KADM_TIMEOUT_S = 30.0

SETTINGS = """\
[logging]
filename = "{folder}/burrow.log"
level = "info"

[zookeeper]
servers = ["127.0.0.1:{zookeeper}"]

[client-profile.test]
client-id = "burrow"
kafka-version = "2.0.0"

[cluster.chronik]
class-name = "kafka"
client-profile = "test"
servers = [{servers}]
topic-refresh = 1
offset-refresh = 1

[consumer.chronik]
class-name = "kafka"
client-profile = "test"
cluster = "chronik"
servers = [{servers}]

[httpserver.default]
address = "127.0.0.1:{http}"

[storage.default]
class-name = "inmemory"
min-distance = 1

[evaluator.default]
class-name = "caching"
expire-cache = 1
"""


def burrow_is_missing() -> str | None:
    """Return why Burrow cannot run here, or None if it can."""
    if shutil.which("Burrow") is None:
        return "Burrow is not on the PATH: install the package burrow"
    if shutil.which("java") is None:
        return "Burrow needs ZooKeeper, and that needs Java, which is not there"
    if not any(ZOOKEEPER.glob("*.jar")):
        return "Burrow needs ZooKeeper, whose jars are not in .tools: make test fetches them"
    return None


class Burrow:
    """A Burrow process that monitors a cluster. Owns its folder and its processes."""

    def __init__(self, folder: Path, bootstrap: str) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._zookeeper, self._http = free_ports(2)
        servers = ", ".join(f'"{server}"' for server in bootstrap.split(","))
        settings = SETTINGS.format(folder=folder, zookeeper=self._zookeeper, servers=servers, http=self._http)
        (folder / "burrow.toml").write_text(settings)

    def __enter__(self) -> Burrow:
        try:
            server = [
                "org.apache.zookeeper.server.ZooKeeperServerMain",
                str(self._zookeeper),
                str(self._folder / "zookeeper"),
            ]
            flags = (*JVM_FLAGS, "-Dzookeeper.admin.enableServer=false")
            self._start("zookeeper", ["java", *flags, "-cp", f"{ZOOKEEPER}/*", *server], self._zookeeper)
            self._start("burrow", ["Burrow", "--config-dir", str(self._folder)], self._http)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def ask(self, path: str) -> dict[str, Any]:
        """Send a GET below `/v3/kafka/chronik`; an error is an answer, too, with `error` true."""
        connection = http.client.HTTPConnection("127.0.0.1", self._http, timeout=ASK_TIMEOUT_S)
        try:
            connection.request("GET", f"/v3/kafka/chronik{path}")
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        assert isinstance(answer, dict)
        return answer

    def log(self) -> str:
        path = self._folder / "burrow.log"
        return path.read_text() if path.exists() else ""

    def _start(self, name: str, command: list[str], port: int) -> None:
        with (self._folder / f"{name}.out").open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, cwd=self._folder)
        self._processes.append(process)

        def listens() -> bool:
            if process.poll() is not None:
                raise RuntimeError(
                    f"{name} exited: {(self._folder / f'{name}.out').read_text()[-2000:]}{self.log()[-2000:]}"
                )
            with socket.socket() as probe:
                probe.settimeout(ASK_TIMEOUT_S)
                if probe.connect_ex(("127.0.0.1", port)) != 0:
                    return False
                if name != "zookeeper":
                    return True
                # ZooKeeper listens before it serves, and closes connections that arrive too early.
                probe.sendall(b"srvr")
                return b"Mode: standalone" in probe.recv(4096)

        eventually(listens, START_TIMEOUT_S, f"{name} listens")

    def _kill(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(30)


def kadm_is_missing() -> str | None:
    """Return why kadm cannot run here, or None if it can."""
    return None if KADM.is_file() else "kadm's program is not in .tools: make test builds it where there is Go"


def ask_kadm(bootstrap: str, group: str, topic: str) -> dict[str, Any]:
    command = [str(KADM), bootstrap, group, topic]
    done = subprocess.run(command, capture_output=True, text=True, timeout=KADM_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer
