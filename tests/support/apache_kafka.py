"""A real Apache Kafka broker, from its jars: our tools must work with it as well as with our own nodes."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.eventually import eventually
from tests.support.ports import free_ports

JARS = Path(__file__).resolve().parents[2] / ".tools" / "kafka-broker-4.3"
START_S_MAX = 60.0
CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qk"

SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners={listeners},CONTROLLER://127.0.0.1:{controller}
advertised.listeners={listeners}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
"""


def missing() -> str | None:
    """Return why Apache Kafka cannot run here, or None if it can."""
    if shutil.which("java") is None:
        return "Apache Kafka needs Java, and there is none"
    if not JARS.is_dir():
        return "Apache Kafka's jars are not in .tools: make test fetches them"
    return None


class ApacheKafka:
    """One broker that is also the controller. Owns its folder and its process."""

    def __init__(self, folder: Path, settings: str = "", more_listeners: Mapping[str, int] | None = None) -> None:
        """`settings` are added to the broker's own, one on each line; later lines win.

        `more_listeners` are ports by name, beside PLAINTEXT.
        """
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        broker, controller = free_ports(2)
        self._port = broker
        self.bootstrap = f"127.0.0.1:{broker}"
        self._settings = folder / "server.properties"
        ports = {"PLAINTEXT": broker, **(more_listeners or {})}
        listeners = ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())
        own = SETTINGS.format(listeners=listeners, controller=controller, folder=folder)
        self._settings.write_text(own + settings)

    def start(self) -> ApacheKafka:
        formatted = ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(self._settings)]
        subprocess.run([*self._java(), *formatted], check=True, capture_output=True, timeout=START_S_MAX)
        with (self._folder / "kafka.log").open("wb") as log:
            command = [*self._java(), "kafka.Kafka", str(self._settings)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(self._listens, START_S_MAX, "Apache Kafka listens")
        return self

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def _java(self) -> list[str]:
        return ["java", "-Xmx400m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{JARS}/*"]

    def _listens(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"Apache Kafka exited: {(self._folder / 'kafka.log').read_text()[-2000:]}")
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self._port)) == 0
