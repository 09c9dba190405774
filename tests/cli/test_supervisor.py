"""`chronik start --processes N` on real processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from tests.support.eventually import eventually
from tests.support.ports import free_ports

import chronik.cli.supervisor
from chronik.cli.supervisor import Supervisor, cores_of
from chronik.client.topics import Topics
from chronik.node.config import NodeConfig
from chronik.pipeline.source.blocking import BlockingCluster

pytestmark = pytest.mark.timeout(180)
NODES = 3
DEADLINE_S = 60.0


def free_block() -> int:
    """Return a port that is free together with the next ones, and those of HTTP and other nodes below it."""
    while True:
        (port,) = free_ports(1)
        try:
            for below in (0, 3000, 4000):
                for number in range(NODES):
                    with socket.socket() as probe:
                        probe.bind(("127.0.0.1", port - below + number))
            return port
        except (OSError, OverflowError):
            continue


@contextmanager
def supervisor(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    flags = ["--processes", str(NODES), "--listen", f"127.0.0.1:{port}", "--data-dir", str(folder)]
    with open(folder.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "chronik.cli", "start", *flags], stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(DEADLINE_S)


def children(process: subprocess.Popen[bytes]) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(each) for each in listed]


def has_ended(pid: int) -> bool:
    """Whether the process has ended. If nobody waits for it, it stays as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def log_of(folder: Path) -> str:
    return folder.with_suffix(".log").read_text()


def test_nodes_of_a_machine_form_a_cluster_restart_and_stop_together(tmp_path: Path) -> None:
    folder, port = tmp_path / "machine", free_block()
    with supervisor(folder, port) as process:
        eventually(lambda: log_of(folder).count("is ready: kafka") == NODES, DEADLINE_S, "three nodes")
        with BlockingCluster(f"127.0.0.1:{port}") as cluster:
            cluster.run(Topics(cluster.cluster).create("t", 3, NODES, {}))
        producer = Producer({"bootstrap.servers": f"127.0.0.1:{port}"})
        for number in range(30):
            producer.produce("t", b"%d" % number, partition=number % 3)
        assert producer.flush(DEADLINE_S) == 0
        killed = children(process)[0]
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: len(children(process)) == NODES and killed not in children(process), DEADLINE_S)
        assert "ended (exit code -9): it starts again in 1 s" in log_of(folder)
        settings = {"bootstrap.servers": f"127.0.0.1:{port}", "group.id": "g", "auto.offset.reset": "earliest"}
        consumer = Consumer(settings)
        consumer.subscribe(["t"])
        values: set[bytes | None] = set()

        def has_all() -> bool:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                values.add(message.value())
            return len(values) == 30

        eventually(has_all, DEADLINE_S, "all records")
        consumer.close()
        pids = children(process)
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
        assert all(has_ended(pid) for pid in pids)
    assert log_of(folder).count("is ready: kafka") == NODES + 1
    assert (folder / "cluster-secret").stat().st_mode & 0o077 == 0


def test_a_node_that_cannot_start_stops_the_machines_other_nodes(tmp_path: Path) -> None:
    folder, port = tmp_path / "machine", free_block()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        with supervisor(folder, port) as process:
            assert process.wait(DEADLINE_S) == 2
    assert f"port {port + 1} is taken" in log_of(folder)
    assert "node 2 cannot start: the other nodes of this machine are stopped" in log_of(folder)


def test_nodes_stop_if_their_supervisor_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "machine"
    with supervisor(folder, free_block()) as process:
        eventually(lambda: log_of(folder).count("is ready: kafka") == NODES, DEADLINE_S, "three nodes")
        pids = children(process)
        process.kill()
        eventually(lambda: all(has_ended(pid) for pid in pids), DEADLINE_S, "all nodes end")


async def test_a_node_that_cannot_be_started_again_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's other nodes continue: if the supervisor ended, they would end, too."""
    outcomes: list[int | OSError] = [1, OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), 0]
    supervisor = Supervisor(NodeConfig(processes=1), [])

    class Ended:
        def __init__(self, code: int) -> None:
            self.code = code

        async def wait(self) -> int:
            if not outcomes:
                supervisor._on_signal()
            return self.code

        def send_signal(self, number: int) -> None:
            pass

    async def start(*_: object, **__: object) -> Ended:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return Ended(outcome)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(chronik.cli.supervisor, "BACKOFF_S_MIN", 0.001)
    async with asyncio.timeout(DEADLINE_S):
        assert await supervisor.run() == 0
    assert not outcomes


def test_cores_are_divided_only_if_each_node_gets_two() -> None:
    assert [list(cores_of(range(8), 4, number)) for number in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [list(cores_of(range(8), 3, number)) for number in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert not cores_of(range(7), 4, 0)
