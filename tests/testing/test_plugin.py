"""The pytest plugin, in its own run of pytest, as in a user's project."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.support.eventually import eventually

from chronik.local.node_process import inspect
from chronik.testing import plugin
from chronik.testing.cluster import TestCluster
from chronik.testing.plugin import _node_count

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 120.0

SUITE = """
from pathlib import Path

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient


def put(cluster, topic, value):
    producer = KafkaProducer(bootstrap_servers=cluster.bootstrap, acks="all")
    producer.send(topic, value, partition=0).get(timeout=20)
    producer.close()


def read(cluster, topic, count):
    consumer = KafkaConsumer(bootstrap_servers=cluster.bootstrap, consumer_timeout_ms=10_000)
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek_to_beginning()
    values = [next(consumer).value for _ in range(count)]
    consumer.close()
    return values


def test_records_go_through_it(chronik_cluster):
    topic = chronik_cluster.topic(partitions=1)
    put(chronik_cluster, topic, b"one")
    assert read(chronik_cluster, topic, 1) == [b"one"]
    Path("pids").write_text(" ".join(str(node.process.pid) for node in chronik_cluster.nodes))


def test_a_record_survives_the_death_of_its_leader(chronik_cluster):
    topic = chronik_cluster.topic(partitions=1)
    put(chronik_cluster, topic, b"before")
    chronik_cluster.kill(chronik_cluster.leader(topic))
    put(chronik_cluster, topic, b"after")
    assert read(chronik_cluster, topic, 2) == [b"before", b"after"]


def test_a_node_may_be_left_paused_or_stopped(chronik_cluster):
    last = chronik_cluster.nodes[-1].id
    chronik_cluster.pause(last)
    chronik_cluster.resume(last)
    chronik_cluster.stop(last)


def test_every_test_finds_all_nodes_up_and_no_topics(chronik_cluster):
    assert all(node.is_ready for node in chronik_cluster.nodes)
    admin = KafkaAdminClient(bootstrap_servers=chronik_cluster.bootstrap)
    assert [name for name in admin.list_topics() if not name.startswith("__")] == []
    admin.close()
"""


SECURE_SUITE = """
from pathlib import Path
import subprocess, sys

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError


def settings(cluster, user=None, password=None):
    security = cluster.client_settings.security
    return {
        "bootstrap_servers": cluster.bootstrap,
        "security_protocol": security.protocol,
        "sasl_mechanism": security.mechanism,
        "sasl_plain_username": user or security.username,
        "sasl_plain_password": password or security.password,
        "ssl_cafile": security.authorities,
    }


def chronik(cluster, *arguments, password=""):
    command = [sys.executable, "-m", "chronik.cli", *arguments, "--properties", cluster.properties]
    subprocess.run(command, input=password + "\\n", text=True, check=True, timeout=60)


def put(topic, value, **settings):
    producer = KafkaProducer(**settings)
    try:
        producer.send(topic, value, partition=0).get(timeout=20)
    finally:
        producer.close(timeout=5)


def test_users_have_the_rights_that_a_test_gives_them(secure_chronik_cluster):
    cluster = secure_chronik_cluster
    topic = cluster.topic(partitions=1)
    chronik(cluster, "user", "create", "alice", password="wonderland-1")
    alice = settings(cluster, "alice", "wonderland-1")
    with pytest.raises(KafkaError):
        put(topic, b"refused", max_block_ms=5_000, **alice)
    chronik(cluster, "acl", "add", "--principal", "User:alice", "--operation", "WRITE", "--topic", topic)
    put(topic, b"written", **alice)
    consumer = KafkaConsumer(consumer_timeout_ms=10_000, **settings(cluster))
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek_to_beginning()
    assert [record.value for record in consumer][:1] == [b"written"]
    consumer.close()
    Path("pids").write_text(" ".join(str(node.process.pid) for node in cluster.nodes))


def test_every_test_finds_no_users_and_no_acls(secure_chronik_cluster):
    for what in ("user", "acl", "quota"):
        command = [sys.executable, "-m", "chronik.cli", what, "list", "--json", "--properties"]
        done = subprocess.run([*command, secure_chronik_cluster.properties], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done
        assert "alice" not in done.stdout
"""


def pytest_command(folder: Path, suite: str, settings: str = "") -> list[str]:
    (folder / "test_suite.py").write_text(suite)
    (folder / "pytest.ini").write_text(f"[pytest]\n{settings}\n")
    is_installed = any(found.name == "chronik" for found in entry_points(group="pytest11"))
    plugin = [] if is_installed else ["-p", "chronik.testing.plugin"]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "test_suite.py"]


def is_gone(pid: int) -> bool:
    found = inspect(pid)
    return found is None or found[0] == "Z"


@pytest.mark.parametrize(
    ("suite", "settings", "nodes"), [(SUITE, "", 3), (SECURE_SUITE, "chronik_nodes = 1", 1)], ids=["plain", "secure"]
)
def test_plugin_gives_user_tests_a_real_cluster_and_cleans_up(
    tmp_path: Path, suite: str, settings: str, nodes: int
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        pytest_command(tmp_path, suite, settings),
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == nodes
    assert all(is_gone(pid) for pid in pids)
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_nodes_exit_when_the_pytest_run_is_killed(tmp_path: Path) -> None:
    suite = """
from pathlib import Path
import signal

def test_that_never_ends(chronik_cluster):
    (node,) = chronik_cluster.nodes
    Path("pid.new").write_text(str(node.process.pid))
    Path("pid.new").rename("pid")
    signal.pause()
"""
    with subprocess.Popen(
        pytest_command(tmp_path, suite, "chronik_nodes = 1"),
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    ) as run:
        pid = int(eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 60.0))
        run.send_signal(signal.SIGKILL)
    eventually(lambda: is_gone(pid), what=f"node process {pid} is gone")


def test_a_run_without_a_cluster_imports_only_the_plugin(tmp_path: Path) -> None:
    """The plugin is loaded in every run of pytest for any project, if chronik is installed."""
    suite = """
import sys

def test_of_something_else():
    loaded = {name for name in sys.modules if name.partition(".")[0] in ("chronik", "kio", "typer", "rich", "msgspec")}
    assert loaded == {"chronik", "chronik.testing", "chronik.testing.plugin"}
"""
    done = subprocess.run(
        [*pytest_command(tmp_path, suite, "chronik_nodes = many"), "-p", "no:hypothesispytest"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("setting", ["many", "0", "-1"])
def test_an_invalid_number_of_nodes_is_a_usage_error(setting: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"chronik_nodes = {setting}"):
        _node_count(setting)


def test_the_package_registers_its_pytest_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"chronik": plugin.__name__}


def test_a_test_cluster_works_without_the_plugin() -> None:
    with TestCluster(1) as cluster:
        topic = cluster.topic(partitions=2, retention_ms="60000")
        assert cluster.leader(topic, 1) == 1
        assert cluster.controller == 1
        (node,) = cluster.nodes
        cluster.kill(1)
        assert node.process.state is None
        cluster.heal()
        assert node.is_ready
        cluster.tidy()
        folder = Path(node.folder)
    assert not folder.exists()
