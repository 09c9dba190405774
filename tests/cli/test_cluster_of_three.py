"""`chronik cluster` on three nodes: what users see while nodes start, die and leave."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.cli.run_chronik import CHRONIK, Outcome, chronik
from tests.support.eventually import eventually

from chronik.cli.failover_stream import FailoverStream
from chronik.cli.options import with_cluster
from chronik.client.topics import Topics
from chronik.local.temporary_cluster import TemporaryCluster

IN_SYNC_TIMEOUT_S = 30.0


@pytest.fixture
def three() -> Iterator[TemporaryCluster]:
    with TemporaryCluster(3) as cluster:
        yield cluster


def run(cluster: TemporaryCluster, *arguments: str) -> Outcome:
    return chronik("cluster", *arguments, "--dir", cluster.folder, timeout_s=120.0)


def watched(cluster: TemporaryCluster, *arguments: str) -> Outcome:
    """As `run`, but standard error is a terminal, and `err` is everything that it showed."""
    screen, terminal = pty.openpty()
    shown: list[bytes] = []

    def watch() -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            while data := os.read(screen, 65536):
                shown.append(data)

    watcher = threading.Thread(target=watch)
    watcher.start()
    command = [str(CHRONIK), "cluster", *arguments, "--dir", cluster.folder]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=terminal, text=True, timeout=120, env=environment, check=False
    )
    os.close(terminal)
    watcher.join()
    os.close(screen)
    return Outcome(done.returncode, done.stdout, b"".join(shown).decode())


def status(cluster: TemporaryCluster) -> dict[str, Any]:
    return run(cluster, "status", "--json").json()


def states(cluster: TemporaryCluster) -> list[str]:
    return [node["state"] for node in status(cluster)["nodes"]]


def make_topic(cluster: TemporaryCluster, name: str, partitions: int) -> dict[int, int]:
    """Create a topic and return the leaders by partition."""
    with_cluster(cluster.bootstrap, lambda online: Topics(online).create(name, partitions, None, {}))
    return with_cluster(cluster.bootstrap, lambda online: online.leaders(name))


def in_sync(cluster: TemporaryCluster) -> bool:
    found = status(cluster)
    assert (found["under_replicated"], found["leaderless"]) == (0, 0)
    return True


def test_status_shows_that_a_node_was_killed_and_restarted(three: TemporaryCluster) -> None:
    leaders = make_topic(three, "orders", 6)
    assert sorted(set(leaders.values())) == [1, 2, 3]
    before = status(three)
    assert before["controller"] in (1, 2, 3)
    assert [node["state"] for node in before["nodes"]] == ["running"] * 3
    victim = before["controller"]
    assert run(three, "kill", str(victim)).code == 0

    def noticed() -> bool:
        found = status(three)
        assert found["controller"] not in (None, victim)
        assert found["under_replicated"] >= 6
        assert found["leaderless"] == 0
        assert found["nodes"][victim - 1]["state"] == "stopped"
        return True

    eventually(noticed, IN_SYNC_TIMEOUT_S)
    started = run(three, "start", str(victim))
    assert started.code == 0, started.err
    eventually(lambda: in_sync(three), IN_SYNC_TIMEOUT_S)


def test_up_starts_only_the_nodes_that_are_not_running(three: TemporaryCluster) -> None:
    before = [node["pid"] for node in status(three)["nodes"]]
    three.kill(2)
    up = run(three, "up")
    assert up.code == 0, up.err
    after = [node["pid"] for node in status(three)["nodes"]]
    assert (after[0], after[2]) == (before[0], before[2])
    assert states(three) == ["running"] * 3


def test_start_reports_that_the_node_waits_for_a_majority(three: TemporaryCluster) -> None:
    three.stop_all()
    started = run(three, "start", "2")
    assert started.code == 0
    assert "waits for a majority" in started.out and "chronik cluster start 1" in started.out
    assert status(three)["controller"] is None
    assert "a majority" in run(three, "status").out or "no node answers" in run(three, "status").out
    assert run(three, "up").code == 0
    assert states(three) == ["running"] * 3


def test_topic_commands_report_that_there_is_no_controller(three: TemporaryCluster) -> None:
    make_topic(three, "orders", 3)
    survivor = status(three)["controller"] % 3 + 1
    dead = [node for node in three.nodes if node.id != survivor]
    for node in dead:
        three.kill(node.id)
    begun_s = time.monotonic()
    commands = [["describe", "orders"], ["create", "more"]]
    with ThreadPoolExecutor(len(commands)) as threads:  # each waits for a controller
        refusals = list(threads.map(lambda command: chronik("topic", *command, "-b", three.bootstrap), commands))
    assert time.monotonic() - begun_s < 25, "they do not wait for their deadline of 30 s"
    for refused in refusals:
        assert refused.code == 2
        assert "the cluster has no controller" in refused.error_line
        assert f"node {survivor} answers" in refused.error_line and "start the nodes" in refused.error_line
        # A node that was fenced before the controller was lost has no address in the metadata.
        assert any(node.bootstrap in refused.error_line for node in dead), refused.error_line
    listed = chronik("topic", "list", "--json", "-b", three.bootstrap)
    assert [topic["name"] for topic in listed.json()["topics"]] == ["orders"]
    assert "may be outdated: the cluster has no controller" in listed.error_line
    recover = chronik("topic", "recover", "orders", "--partition", "0", "--from", str(survivor), "-b", three.bootstrap)
    assert recover.code == 2
    assert "nothing was changed: the cluster has no controller" in recover.error_line
    assert run(three, "up").code == 0
    assert chronik("topic", "describe", "orders", "-b", three.bootstrap).code == 0


def test_replicas_move_to_an_added_node_and_back_under_load(three: TemporaryCluster) -> None:
    make_topic(three, "orders", 8)
    make_topic(three, "stream", 4)
    stream = FailoverStream(three.bootstrap, "stream", 4, 6_000, 500.0)
    outcomes: list[Outcome] = []

    def resize() -> None:
        outcomes.append(watched(three, "add"))
        outcomes.append(watched(three, "remove", "4"))

    result = stream.run(resize)
    added, removed = outcomes
    assert added.code == 0, added.err
    assert "node 4 has its share" in added.out
    assert "moving data to node 4" in added.err and re.search(r"\d+ of \d+ partitions", added.err)
    assert removed.code == 0, removed.err
    assert "node 4 has left; 3 nodes remain" in removed.out
    assert "moving data from node 4" in removed.err and re.search(r"\d+ of \d+ partitions", removed.err)
    assert result.account.complaint() is None
    assert len(status(three)["nodes"]) == 3
    eventually(lambda: in_sync(three), IN_SYNC_TIMEOUT_S)


def test_remove_reduces_the_replication_factor_only_if_requested(
    three: TemporaryCluster,
) -> None:
    make_topic(three, "orders", 4)
    refused = run(three, "remove", "3")
    assert refused.code == 2
    assert "chronik cluster add" in refused.error_line and "--fewer-replicas" in refused.error_line
    assert (len(status(three)["nodes"]), states(three)) == (3, ["running"] * 3)
    assert in_sync(three)
    removed = run(three, "remove", "3", "--fewer-replicas")
    assert removed.code == 0, removed.err
    assert "2 nodes remain" in removed.out
    assert "the cluster stops when one node stops" in removed.err
    assert in_sync(three)
    found = chronik("verify", "--acks", "all", "--json", "-b", three.nodes[0].bootstrap).json()
    assert (found["verdict"], found["consumed"]) == ("PASS", 5000)


def test_a_wrong_node_id_or_state_is_a_one_line_error_with_advice(three: TemporaryCluster) -> None:
    for arguments, says in (
        (("remove", "7"), "it has 1, 2, 3"),
        (("start", "7"), "it has 1, 2, 3"),
        (("remove", "x"), "chronik cluster remove --help"),
    ):
        refused = run(three, *arguments)
        assert refused.code == 2
        assert says in refused.error_line
    assert "was not paused" in run(three, "resume", "1").out
    again = run(three, "start", "1")
    assert (again.code, "already running" in again.out) == (0, True)
    three.pause(2)
    for command in ("start 2", "add", "remove 1", "up"):
        assert "chronik cluster resume 2" in run(three, *command.split()).error_line
    three.kill(2)
    for command in ("add", "remove 1", "stop 2", "pause 2", "kill 2"):
        assert "chronik cluster start 2" in run(three, *command.split()).error_line


def test_an_interrupted_up_leaves_nothing_running(three: TemporaryCluster) -> None:
    three.stop_all()
    command = [str(CHRONIK), "cluster", "up", "--dir", three.folder]
    for _ in range(5):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
            eventually(lambda: any(node.process.state for node in three.nodes), what="a node is being started")
            up.send_signal(signal.SIGINT)
            _, told = up.communicate(timeout=30)
        if up.returncode != 0:
            break
        three.stop_all()  # it finished before the signal arrived
    assert up.returncode == 130
    assert "Traceback" not in told
    assert [node.process.state for node in three.nodes] == [None] * 3
    assert run(three, "up").code == 0
