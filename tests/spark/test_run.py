"""`chronik pipeline run` on real Spark: landings, sinks and audits that fail and recover on their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.landing import landed
from tests.support.node import Node
from tests.support.topics import numbered

from chronik.client.pipelines import PipelineState, read_states
from chronik.pipeline.session import java_fault
from chronik.pipeline.source.blocking import BlockingCluster

CHRONIK = Path(sys.executable).with_name("chronik")
RUN_S_MAX = 240.0

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(java_fault() is not None, reason=str(java_fault())),
]

FILE = """
name = "shop"
bootstrap = "{bootstrap}"
listen = "127.0.0.1:{port}"
retry_longest = 1
[spark]
master = "local[2]"
[[landing]]
topics = ["orders", "later"]
to = "tables"
trigger = 0
deleted = "deleted.txt"
[[sink]]
name = "copy"
topic = "orders"
to = "copied"
checkpoint = "copy"
select = ["key", "upper(cast(value as string)) as value"]
where = "cast(key as string) != 'k1'"
trigger = 0
[[audit]]
every = 1
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    """One run of the command, as a process."""

    def __init__(self, folder: Path, bootstrap: str, file: str = FILE) -> None:
        self.port = free_port()
        (folder / "shop.toml").write_text(file.format(bootstrap=bootstrap, port=self.port))
        self.errors = folder / f"{self.port}.log"
        with self.errors.open("wb") as errors:
            command = [str(CHRONIK), "pipeline", "run", str(folder / "shop.toml")]
            self.process = subprocess.Popen(command, stderr=errors, start_new_session=True)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def job(self, name: str) -> dict[str, Any]:
        status, text = self.get("/status")
        jobs = json.loads(text)["jobs"] if status == 200 else []
        return next((job for job in jobs if job["name"] == name), {"state": ""})

    def audit(self, name: str) -> dict[str, Any]:
        """Return the last audit of a job, empty before the first one."""
        return self.job(name).get("audit") or {}

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.errors.read_text().splitlines()]

    def wait(self, condition: Any, what: str) -> None:
        def is_met() -> bool:
            assert self.process.poll() is None, self.errors.read_text()
            return bool(condition())

        eventually(is_met, RUN_S_MAX, what)


@pytest.fixture
def own_node(start_node: Callable[..., Node]) -> Node:
    return start_node()


@pytest.fixture
def services() -> Iterator[list[Service]]:
    started: list[Service] = []
    yield started
    for service in started:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(service.process.pid, number)
                service.process.wait(30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def state_of(node: Node, now_ms: int = 0) -> PipelineState:
    with BlockingCluster(node.bootstrap) as cluster:
        (state,) = cluster.run(read_states(cluster.cluster, now_ms))
    return state


def values(node: Node, topic: str) -> list[bytes | None]:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": node.bootstrap, "group.id": "x", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes | None] = []
    while (message := consumer.poll(2.0)) is not None:
        found.append(message.value())
    consumer.close()
    return found


def test_a_service_survives_what_happens_in_months(own_node: Node, tmp_path: Path, services: list[Service]) -> None:
    at = own_node.bootstrap
    topics.create(at, "orders")
    topics.create(at, "copied")
    topics.append(at, "orders", 0, numbered(10))
    (tmp_path / "deleted.txt").write_text("k3\n")
    own_node.kill()  # the brokers are down as the service starts
    service = Service(tmp_path, at)
    services.append(service)
    service.wait(lambda: "is waiting" in service.get("/readyz")[1] or "is starting" in service.get("/readyz")[1], "up")
    assert service.get("/healthz") == (200, "alive\n")
    own_node.start()
    service.wait(lambda: service.job("orders")["state"] == "running", "orders lands")
    service.wait(lambda: service.job("later")["state"] == "failed", "a topic that does not exist")
    service.wait(lambda: service.audit("orders").get("verdict") == "complete", "the audit is complete")
    audit = service.audit("orders")
    assert (audit["verified"], audit["deleted"], audit["gaps"]) == ({"0": 10}, 1, 0)
    assert landed(tmp_path / "tables" / "orders") == [(0, offset) for offset in range(10) if offset != 3]
    service.wait(lambda: service.job("copy")["rows"] == 10, "the sink has read all")
    assert values(own_node, "copied") == [b"V%d" % number for number in range(10) if number != 1]
    topics.create(at, "later")
    topics.append(at, "later", 0, numbered(3))
    service.wait(lambda: service.job("later")["rows"] == 3 and service.get("/readyz")[0] == 200, "it lands by itself")
    state = state_of(own_node)
    assert (state.name, state.state, state.pid) == ("shop", "running", service.process.pid)
    metrics = service.get("/metrics")[1]
    assert 'chronik_pipeline_rows_total{job="orders"' in metrics
    assert 'chronik_pipeline_audit_complete{job="orders"' in metrics

    # Two services on one file.
    second = subprocess.run([str(CHRONIK), "pipeline", "run", str(tmp_path / "shop.toml")], capture_output=True)
    assert second.returncode == 2 and b"uses the checkpoint" in second.stderr.splitlines()[-1], second.stderr

    # What a killed service has landed is audited by the next one (alerts: test_service_audits.py).
    topics.append(at, "orders", 0, numbered(5, 10))
    os.kill(service.process.pid, signal.SIGKILL)
    service.process.wait()
    again = Service(tmp_path, at)
    services.append(again)
    again.wait(lambda: again.audit("orders").get("verified") == {"0": 15}, "what the first run left is audited")
    topics.append(at, "orders", 0, numbered(5, 15))
    again.wait(lambda: again.audit("orders").get("verified") == {"0": 20}, "what is new is audited")
    assert landed(tmp_path / "tables" / "orders") == [(0, offset) for offset in range(20) if offset != 3]

    # SIGTERM while records arrive.
    topics.append(at, "orders", 0, numbered(500, 20))
    again.process.send_signal(signal.SIGTERM)
    assert again.process.wait(60) == 0
    assert again.lines()[-1]["event"] == "pipeline_stopped"
    assert state_of(own_node).state == "stopped"
    offsets = [offset for _, offset in landed(tmp_path / "tables" / "orders")]
    assert offsets == [offset for offset in range(len(offsets) + 1) if offset != 3]
    assert len(DeltaTable(str(tmp_path / "tables" / "later")).file_uris()) == 1
