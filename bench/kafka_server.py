"""Apache Kafka in KRaft mode, each node both broker and controller, from the jars that the tests use.

Settings are those of Kafka's server.properties and start script (1 GB heap, G1). As its documentation advises for few
nodes, replication factors do not exceed the number of nodes. A smaller heap gets a smaller log cleaner buffer, which
takes 128 MB at the start by default. Files of a deleted topic are removed after 1 s instead of 60, so that they do not
disturb the next part.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
from pathlib import Path

from tests.support import apache_kafka
from tests.support.ports import free_ports

from bench.servers import ServerEnded, Setup, Side

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
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
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

_libc = ctypes.CDLL(None)


class KafkaServer:
    """One to three brokers that are also the controllers."""

    def __init__(self, folder: Path, setup: Setup, heap_mb: int = HEAP_MB) -> None:
        self.setup = setup
        self._heap_mb = heap_mb
        ports = free_ports(2 * setup.nodes)
        self._brokers, controllers = ports[: setup.nodes], ports[setup.nodes :]
        self._folders = [folder / f"kafka-{index}" for index in range(1, setup.nodes + 1)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        voters = ",".join(f"{index}@127.0.0.1:{port}" for index, port in enumerate(controllers, 1))
        for index, own in enumerate(self._folders):
            own.mkdir(parents=True)
            text = SETTINGS.format(
                node_id=index + 1,
                voters=voters,
                broker=self._brokers[index],
                controller=controllers[index],
                folder=own,
                replicas=setup.nodes,
                in_sync_least=2 if setup.nodes > 2 else 1,
            )
            if setup.durability == "synced":
                text += "log.flush.interval.messages=1\n"
            if heap_mb < HEAP_MB:
                text += f"log.cleaner.dedupe.buffer.size={SMALL_CLEANER_BYTES}\n"
            (own / "server.properties").write_text(text)
        self._format()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._brokers)

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

    def _format(self) -> None:
        commands = [
            self._java(
                "kafka.tools.StorageTool", "format", "-t", apache_kafka.CLUSTER_ID, "-c", str(own / "server.properties")
            )
            for own in self._folders
        ]
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
