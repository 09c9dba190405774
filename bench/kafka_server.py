"""Apache Kafka in KRaft mode, each node both broker and controller, from the jars that the tests use.

Settings are those of Kafka's server.properties and start script (1 GB heap, G1). As its documentation advises for few
nodes, replication factors do not exceed the number of nodes. A smaller heap gets a smaller log cleaner buffer, which
takes 128 MB at the start by default. Files of a deleted topic are removed after 1 s instead of 60, so that they do not
disturb the next part.

With SASL, clients have a listener of their own. With SASL_SSL the other two have TLS and require certificates, as
Chronik's nodes do of each other. Certificates are made as for `chronik cluster up --secure`.
"""

from __future__ import annotations

import ctypes
import itertools
import secrets
import signal
import subprocess
from pathlib import Path

from tests.support import apache_kafka
from tests.support.ports import free_ports

from bench.servers import (
    ADMINISTRATOR,
    MECHANISM,
    SHORT_HEARTBEAT_MS,
    SHORT_SESSION_MS,
    TLS_CIPHER,
    TLS_VERSION,
    ServerEnded,
    Setup,
    Side,
)
from chronik.client.properties import ClientSettings, Target
from chronik.client.security import ClientSecurity
from chronik.local.certificates import create_authority, load_authority
from chronik.local.security import LOOPBACK

NAME = "Apache Kafka 4.3"
HEAP_MB = 1024
STOP_TIMEOUT_S = 60.0
FORMAT_TIMEOUT_S = 60.0
LOG_TAIL_CHARACTERS = 2000
SMALL_CLEANER_BYTES = 4 * 1024 * 1024
PR_SET_PDEATHSIG = 1

JVM = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)

SETTINGS = """\
process.roles=broker,controller
node.id={node_id}
controller.quorum.voters={voters}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
num.network.threads=3
num.io.threads=8
socket.send.buffer.bytes=102400
socket.receive.buffer.bytes=102400
socket.request.max.bytes=104857600
default.replication.factor={replicas}
min.insync.replicas={in_sync_least}
offsets.topic.replication.factor={replicas}
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr={in_sync_least}
share.coordinator.state.topic.replication.factor={replicas}
share.coordinator.state.topic.min.isr={in_sync_least}
auto.create.topics.enable=false
log.segment.delete.delay.ms=1000
"""

PLAINTEXT_SETTINGS = """\
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
"""

SASL_SETTINGS = """\
listeners=CLIENTS://127.0.0.1:{broker},BROKERS://127.0.0.1:{internal},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=CLIENTS://127.0.0.1:{broker},BROKERS://127.0.0.1:{internal}
listener.security.protocol.map=CLIENTS:{protocol},BROKERS:{inner_protocol},CONTROLLER:{inner_protocol}
inter.broker.listener.name=BROKERS
sasl.enabled.mechanisms={mechanism}
listener.name.clients.{mechanism_key}.sasl.jaas.config=\
org.apache.kafka.common.security.scram.ScramLoginModule required;
"""

TLS_SETTINGS = """\
ssl.keystore.type=PEM
ssl.keystore.location={keystore}
ssl.truststore.type=PEM
ssl.truststore.location={authorities}
ssl.enabled.protocols={version}
ssl.cipher.suites={cipher}
listener.name.brokers.ssl.client.auth=required
listener.name.controller.ssl.client.auth=required
"""

AUTHORIZER_SETTINGS = """\
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users={super_users}
"""

SHORT_SESSION_SETTINGS = f"""\
group.consumer.min.session.timeout.ms={SHORT_SESSION_MS}
group.consumer.min.heartbeat.interval.ms={SHORT_HEARTBEAT_MS}
"""

_libc = ctypes.CDLL(None)


class KafkaServer:
    """One to three brokers that are also the controllers."""

    def __init__(self, folder: Path, setup: Setup, heap_mb: int = HEAP_MB) -> None:
        self.setup = setup
        self._heap_mb = heap_mb
        ports = iter(free_ports(3 * setup.nodes))
        self._brokers, self._internal, self._controllers = (
            list(itertools.islice(ports, setup.nodes)) for _ in range(3)
        )
        self._certificates = folder / "certs"
        self._password = secrets.token_urlsafe()
        self._folders = [folder / f"kafka-{index}" for index in range(1, setup.nodes + 1)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        voters = ",".join(f"{index}@127.0.0.1:{port}" for index, port in enumerate(self._controllers, 1))
        for index, own in enumerate(self._folders):
            own.mkdir(parents=True)
            text = SETTINGS.format(
                node_id=index + 1,
                voters=voters,
                folder=own,
                replicas=setup.nodes,
                in_sync_least=2 if setup.nodes > 2 else 1,
            )
            text += self._security(index)
            if setup.durability == "synced":
                text += "log.flush.interval.messages=1\n"
            if setup.allows_short_sessions:
                text += SHORT_SESSION_SETTINGS
            if heap_mb < HEAP_MB:
                text += f"log.cleaner.dedupe.buffer.size={SMALL_CLEANER_BYTES}\n"
            (own / "server.properties").write_text(text)
        self._format()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._brokers)

    @property
    def target(self) -> Target:
        protocol = self.setup.protocol
        if protocol == "PLAINTEXT":
            return self.bootstrap
        authorities = str(self._certificates / "ca.pem") if protocol == "SASL_SSL" else ""
        security = ClientSecurity(protocol, MECHANISM, ADMINISTRATOR, self._password, authorities=authorities)
        return ClientSettings(self.bootstrap, security)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values() if process.poll() is None]

    def launch(self) -> None:
        for node_id, folder in enumerate(self._folders, 1):
            if node_id not in self._processes:
                with (folder / "kafka.log").open("ab") as log:
                    self._processes[node_id] = subprocess.Popen(
                        self._java("kafka.Kafka", str(folder / "server.properties")),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        preexec_fn=_die_with_parent,
                    )

    def check(self) -> None:
        for node_id, process in self._processes.items():
            if process.poll() is not None:
                raise ServerEnded(f"Kafka's node {node_id} ended: {self._log(node_id)[-LOG_TAIL_CHARACTERS:]}")

    def stop(self) -> None:
        self._end(signal.SIGTERM, list(self._processes))

    def kill(self, node_id: int | None = None) -> None:
        self._end(signal.SIGKILL, [known for known in self._processes if node_id in (None, known)])

    def _end(self, number: signal.Signals, node_ids: list[int]) -> None:
        ending = [self._processes.pop(node_id) for node_id in node_ids]
        for process in ending:
            process.send_signal(number)
        for process in ending:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)

    def _security(self, index: int) -> str:
        """Return the settings of one node's listeners, and issue its certificate."""
        setup = self.setup
        ports = {"broker": self._brokers[index], "controller": self._controllers[index]}
        if setup.protocol == "PLAINTEXT":
            return PLAINTEXT_SETTINGS.format(**ports)
        is_encrypted = setup.protocol == "SASL_SSL"
        text = SASL_SETTINGS.format(
            **ports,
            internal=self._internal[index],
            protocol=setup.protocol,
            inner_protocol="SSL" if is_encrypted else "PLAINTEXT",
            mechanism=MECHANISM,
            mechanism_key=MECHANISM.lower(),
        )
        nodes = ["User:ANONYMOUS"]
        if is_encrypted:
            folder = self._certificates
            authority = create_authority(folder) if index == 0 else load_authority(folder)
            certificate, key = authority.issue(folder, f"node-{index + 1}", LOOPBACK)
            keystore = folder / f"node-{index + 1}-keystore.pem"
            keystore.touch(0o600)
            keystore.write_bytes(key.read_bytes() + certificate.read_bytes())
            text += TLS_SETTINGS.format(
                keystore=keystore, authorities=authority.certificate_path, version=TLS_VERSION, cipher=TLS_CIPHER
            )
            nodes = [f"User:CN=node-{number}" for number in range(1, setup.nodes + 1)]
        if setup.has_authorizer:
            text += AUTHORIZER_SETTINGS.format(super_users=";".join([f"User:{ADMINISTRATOR}", *nodes]))
        return text

    def _format(self) -> None:
        more = []
        if self.setup.protocol != "PLAINTEXT":
            more = ["--add-scram", f"{MECHANISM}=[name={ADMINISTRATOR},password={self._password}]"]
        tool = ("kafka.tools.StorageTool", "format", "-t", apache_kafka.CLUSTER_ID, *more, "-c")
        commands = [self._java(*tool, str(own / "server.properties")) for own in self._folders]
        formatting = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands
        ]
        for process in formatting:
            said, _ = process.communicate(timeout=FORMAT_TIMEOUT_S)
            if process.returncode != 0:
                raise ServerEnded(f"Kafka's storage tool could not format a folder: {said}")

    def _java(self, *arguments: str) -> list[str]:
        heap = [f"-Xmx{self._heap_mb}m", f"-Xms{self._heap_mb}m"]
        if self._heap_mb < HEAP_MB:
            heap.append("-XX:+ExitOnOutOfMemoryError")  # a broker that lost a thread to it would seem alive
        return ["java", *heap, *JVM, "-cp", f"{apache_kafka.JARS}/*", *arguments]

    def _log(self, node_id: int) -> str:
        return (self._folders[node_id - 1] / "kafka.log").read_text(errors="replace")


def _die_with_parent() -> None:
    """Run in the child before it becomes Java: no broker outlives the measuring process."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


SIDE = Side(NAME, KafkaServer)


def with_heap(heap_mb: int) -> Side:
    return Side(f"{NAME}, -Xmx{heap_mb}m", lambda folder, setup: KafkaServer(folder, setup, heap_mb))
