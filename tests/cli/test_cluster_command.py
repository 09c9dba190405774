"""`chronik cluster` as shells use it: every call is its own process, and finds the state that earlier calls left."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import tomllib
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.cli.run_chronik import CHRONIK, Outcome, chronik

from chronik.local.cluster import LocalCluster, free_port
from chronik.local.errors import LocalClusterError
from chronik.node.membership.cluster_secret import SECRET_NAME


class Shell:
    """Runs `chronik cluster` on one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port(1)

    def run(self, *arguments: str) -> Outcome:
        return chronik("cluster", *arguments, "--dir", str(self.folder))

    def up(self) -> Outcome:
        return self.run("up", "--nodes", "1", "--port", str(self.port))

    def node(self) -> dict[str, Any]:
        (node,) = self.run("status", "--json").json()["nodes"]
        assert isinstance(node, dict)
        return node


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path / "data")
    yield made
    left = LocalCluster(str(made.folder))
    for node in left.running:
        left.kill(node.id)


def test_up_returns_when_the_node_serves_clients_and_prints_its_addresses(shell: Shell) -> None:
    up = shell.up()
    assert up.code == 0, up.err
    assert f"bootstrap 127.0.0.1:{shell.port}\n" in up.out
    assert f"page http://127.0.0.1:{shell.port - 3000}/\n" in up.out
    with urllib.request.urlopen(f"http://127.0.0.1:{shell.port - 3000}/readyz", timeout=5) as ready:
        assert ready.status == 200
    assert chronik("topic", "create", "t", "-b", f"127.0.0.1:{shell.port}").code == 0


def test_up_on_a_running_cluster_reports_so_and_changes_nothing(shell: Shell) -> None:
    shell.up()
    before = (shell.node()["pid"], (shell.folder / "node-1" / "node.toml").stat().st_mtime_ns)
    again = shell.up()
    assert again.code == 0
    assert "already running" in again.out
    assert f"bootstrap 127.0.0.1:{shell.port}\n" in again.out
    assert (shell.node()["pid"], (shell.folder / "node-1" / "node.toml").stat().st_mtime_ns) == before


def test_two_concurrent_up_commands_create_one_cluster(shell: Shell) -> None:
    with ThreadPoolExecutor(2) as both:
        first, second = both.submit(shell.up), both.submit(shell.up)
    assert (first.result().code, second.result().code) == (0, 0)
    assert sum("already running" in done.result().out for done in (first, second)) == 1
    assert shell.node()["state"] == "running"


def test_status_has_the_fields_that_scripts_rely_on(shell: Shell) -> None:
    shell.up()
    status = shell.run("status", "--json").json()
    assert status.keys() >= {"controller", "nodes", "under_replicated", "leaderless"}
    assert (status["controller"], status["under_replicated"], status["leaderless"]) == (1, 0, 0)
    (node,) = status["nodes"]
    assert (node["id"], node["state"]) == (1, "running")
    assert (node["kafka"], node["http"]) == (f"127.0.0.1:{shell.port}", f"127.0.0.1:{shell.port - 3000}")
    os.kill(node["pid"], 0)
    shown = shell.run("status")
    assert "1 (controller)" in shown.out and "under-replicated: 0" in shown.out


def test_status_groups_nodes_by_rack(shell: Shell) -> None:
    cluster = LocalCluster(str(shell.folder))
    cluster.create(3, free_port(3))
    for node, rack in zip(cluster.nodes, ("machine-b", "machine-a", "machine-b"), strict=True):
        node.change({"rack": rack})
    cluster.launch(1)
    try:
        nodes = shell.run("status", "--json").json()["nodes"]
        assert [(node["id"], node["rack"]) for node in nodes] == [(1, "machine-b"), (2, "machine-a"), (3, "machine-b")]
        shown = shell.run("status").out
        assert shown.index("machine-a") < shown.index("machine-b")
        assert [line.split()[0] for line in shown.splitlines() if "machine-" in line] == ["2", "1", "3"]
    finally:
        cluster.kill(1)


def test_commands_stop_start_kill_pause_and_resume_one_node(shell: Shell) -> None:
    shell.up()
    first = shell.node()["pid"]
    assert shell.run("pause", "1").code == 0
    assert shell.node()["state"] == "paused"
    assert "chronik cluster resume 1" in shell.up().error_line
    assert shell.run("resume", "1").code == 0
    assert shell.node()["state"] == "running"
    assert shell.run("stop", "1").code == 0
    assert (shell.node()["state"], shell.node()["pid"]) == ("stopped", None)
    assert (shell.folder / "node-1" / "clean-shutdown").exists()
    assert shell.run("start", "1").code == 0
    assert shell.node()["pid"] != first
    assert shell.run("kill", "1").code == 0
    assert shell.node()["state"] == "stopped"
    assert not (shell.folder / "node-1" / "clean-shutdown").exists()
    assert shell.up().code == 0
    assert shell.node()["state"] == "running"


def test_down_stops_a_paused_node(shell: Shell) -> None:
    shell.up()
    shell.run("pause", "1")
    assert shell.run("down").code == 0
    assert shell.node()["state"] == "stopped"


def test_data_survives_down_and_up(shell: Shell) -> None:
    shell.up()
    at = ("-b", f"127.0.0.1:{shell.port}")
    chronik("topic", "create", "kept", *at)
    assert shell.run("down").code == 0
    assert "no node" in shell.run("down").out
    assert shell.run("up").code == 0
    assert "kept" in chronik("topic", "list", *at).out


def test_a_pid_file_that_names_an_unrelated_process_is_ignored(shell: Shell) -> None:
    shell.up()
    shell.run("kill", "1")
    (shell.folder / "node-1" / "node.pid").write_text(f"{os.getpid()}\n")
    assert shell.node()["state"] == "stopped"
    assert "not running" in shell.run("kill", "1").error_line
    assert shell.run("up").code == 0
    assert shell.node()["state"] == "running"


@pytest.mark.parametrize("content", ["", "not a number\n", "999999999\n"])
def test_a_node_with_an_invalid_pid_file_is_stopped(shell: Shell, content: str) -> None:
    cluster = LocalCluster(str(shell.folder))
    cluster.create(1, shell.port)
    (shell.folder / "node-1" / "node.pid").write_text(content)
    assert shell.node()["state"] == "stopped"


def test_the_node_log_consists_of_json_lines(shell: Shell) -> None:
    shell.up()
    shell.run("down")
    lines = (shell.folder / "node-1" / "node.log").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines][-1] == "stopped"


def test_a_port_in_use_is_a_one_line_error_and_nothing_is_written(shell: Shell) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", shell.port - 4000))
        other.listen()
        refused = shell.up()
    assert refused.code == 2
    assert f"port {shell.port - 4000} is taken" in refused.error_line
    assert "--port" in refused.error_line
    assert not (shell.folder / "node-1").exists()


def test_up_reports_why_a_node_failed_to_start_and_leaves_nothing_running(shell: Shell) -> None:
    cluster = LocalCluster(str(shell.folder))
    cluster.create(1, shell.port)
    cluster.nodes[0].change({"topic_defaults": {"no.such.config": 1}})
    refused = shell.run("up")
    assert refused.code == 2
    assert refused.error_line.startswith("chronik: node 1 did not start: topic_defaults")
    assert shell.node()["state"] == "stopped"


def test_the_error_names_the_invalid_settings_file(shell: Shell) -> None:
    LocalCluster(str(shell.folder)).create(1, shell.port)
    settings = shell.folder / "node-1" / "node.toml"
    settings.write_text("durabilty = 'synced'\n")
    assert f"unknown key durabilty in {settings}" in shell.run("status").error_line
    settings.unlink()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("status",), "chronik cluster up"),
        (("down",), "chronik cluster up"),
        (("kill", "1"), "chronik cluster up"),
        (("up", "--nodes", "0"), "--nodes"),
        (("up", "--port", "4000"), "above 4000"),
        (("up", "--port", "70000"), "cannot be used"),
        (("stop", "one"), "integer"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_wrong_usage_is_a_one_line_error_with_advice(shell: Shell, arguments: tuple[str, ...], says: str) -> None:
    refused = shell.run(*arguments)
    assert refused.code == 2
    assert says in refused.error_line
    assert not (shell.folder / "node-1").exists()


def test_up_does_not_resize_an_existing_cluster(shell: Shell) -> None:
    LocalCluster(str(shell.folder)).create(1, shell.port)
    assert "holds a cluster of 1 nodes" in shell.run("up", "--nodes", "2").error_line
    assert "there is no node 2" in shell.run("start", "2").error_line
    assert "is the last node" in shell.run("remove", "1").error_line


def test_a_stopped_cluster_can_move_to_another_port_and_folder(shell: Shell, tmp_path: Path) -> None:
    shell.up()
    assert "chronik cluster down first" in shell.run("up", "--port", str(shell.port + 1)).error_line
    shell.run("down")
    shell.folder = shell.folder.rename(tmp_path / "elsewhere")
    shell.port = free_port(1)
    assert shell.up().code == 0
    assert shell.node()["kafka"] == f"127.0.0.1:{shell.port}"
    assert not (tmp_path / "data").exists()


def test_up_ignores_node_settings_in_the_environment(shell: Shell) -> None:
    environment = {
        **os.environ,
        "CHRONIK_NODE_ID": "7",
        "CHRONIK_LISTEN_KAFKA": "127.0.0.1:1",
        "CHRONIK_PEERS": "8=x:1",
        "CHRONIK_CLUSTER_SECRET": "too short",
    }
    command = [str(CHRONIK), "cluster", "up", "--nodes", "1", "--port", str(shell.port), "--dir", str(shell.folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert shell.node()["id"] == 1


def test_each_node_is_configured_with_its_peers(tmp_path: Path) -> None:
    cluster = LocalCluster(str(tmp_path))
    port = free_port(4)
    cluster.create(3, port)
    written = [tomllib.loads((tmp_path / f"node-{n}" / "node.toml").read_text()) for n in (1, 2, 3)]
    assert len({own["cluster_id"] for own in written}) == 1
    assert [own["listen"]["kafka"] for own in written] == [f"127.0.0.1:{port + n}" for n in range(3)]
    assert written[1]["peers"] == [
        {"id": 1, "internal": f"127.0.0.1:{port - 4000}"},
        {"id": 3, "internal": f"127.0.0.1:{port - 3998}"},
    ]
    assert {own["default_replication_factor"] for own in written} == {3}
    cluster.move_to(port + 1)
    assert [node.kafka.port for node in cluster.nodes] == [port + 1, port + 2, port + 3]
    assert cluster.nodes[0].config.peers[0].internal == f"127.0.0.1:{port - 3998}"
    cluster.move_to(port)
    fourth = cluster.add()
    assert (fourth.id, fourth.kafka.port) == (4, port + 3)
    assert all(len(node.config.peers) == 3 for node in cluster.nodes)
    assert fourth.config.cluster_id == written[0]["cluster_id"]


def secrets_in(folder: Path) -> list[str]:
    """Return the nodes' secrets; each is in a file that only this user may read."""
    paths = sorted(folder.glob(f"node-*/{SECRET_NAME}"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    return [path.read_text() for path in paths]


def test_the_nodes_of_a_cluster_share_a_unique_secret(tmp_path: Path) -> None:
    cluster, other = LocalCluster(str(tmp_path / "one")), LocalCluster(str(tmp_path / "other"))
    cluster.create(2, free_port(3))
    other.create(1, free_port(1))
    cluster.add()
    found = secrets_in(tmp_path / "one")
    assert len(found) == 3
    assert len(set(found)) == 1
    assert secrets_in(tmp_path / "other") != found[:1]
    for path in (tmp_path / "one").glob("node-*/node.toml"):
        assert found[0].strip() not in path.read_text()


def test_up_creates_the_secret_of_a_cluster_that_has_none(shell: Shell) -> None:
    assert shell.up().code == 0
    assert shell.run("down").code == 0
    (shell.folder / "node-1" / SECRET_NAME).unlink()
    assert shell.up().code == 0
    assert len(secrets_in(shell.folder)) == 1


def test_add_does_not_copy_a_secret_that_other_users_can_read(tmp_path: Path) -> None:
    cluster = LocalCluster(str(tmp_path))
    cluster.create(1, free_port(2))
    (tmp_path / "node-1" / SECRET_NAME).chmod(0o644)
    with pytest.raises(LocalClusterError, match="cannot copy the cluster secret"):
        cluster.add()
