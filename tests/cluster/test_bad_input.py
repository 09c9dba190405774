"""Nodes that do not belong together: each logs what is wrong and what to do, and the cluster loses nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_fixtures import nodes_of
from tests.cluster.support_strangers import said_by, stray
from tests.cluster.test_minority import append, once_each, read
from tests.support.eventually import eventually

from chronik.node.membership.cluster_secret import SECRET_NAME

CANNOT = 2
GIVES_UP_TIMEOUT_S = 60.0


def refused(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the human-readable line with which a start with these settings ends; nothing may hang."""
    started = stray(folder, settings, {})
    try:
        eventually(lambda: started.has_ended, GIVES_UP_TIMEOUT_S, "the node gives up")
        assert started.code == CANNOT, (started.code, started.output[-3000:])
        return said_by(started.output)
    finally:
        started.kill()


def stranger(nodes: Nodes, **settings: Any) -> dict[str, Any]:
    """Return the settings of an extra process that lists the cluster's nodes as its peers and knows their secret."""
    peers = [{"id": node.id, "internal": str(node.internal)} for node in nodes if node.id != settings.get("node_id")]
    return {"cluster_secret_file": str(nodes.data_folder(1) / SECRET_NAME), "peers": peers, **settings}


class Filled(NamedTuple):
    """A topic with one acknowledged record."""

    topic: str
    before: bytes


def continues(nodes: Nodes, filled: Filled) -> None:
    """Check that the cluster accepts records, and still has the acknowledged one."""
    after = append(nodes, filled.topic, "after")
    once_each(read(nodes, filled.topic), filled.before, after)
    nodes.wait_in_sync()
    nodes.no_surprises()


@pytest.fixture(scope="module")
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three nodes that every test leaves as they were; the last test stops one."""
    yield from nodes_of(request.config, Nodes(tmp_path_factory.mktemp("cluster")))


@pytest.fixture
def filled(nodes: Nodes) -> Filled:
    topic = nodes.new_topic(1)
    return Filled(topic, append(nodes, topic, "before"))


@pytest.mark.timeout(180)
def test_nodes_of_different_clusters_refuse_each_other(nodes: Nodes, filled: Filled, tmp_path: Path) -> None:
    own_id = nodes.node(1).config.cluster_id
    line = refused(tmp_path, stranger(nodes, node_id=9, cluster_id="another-cluster-entirely"))
    assert str(own_id) in line
    assert "another-cluster-entirely" in line
    logging = [node_id for node_id in nodes.ids if "another-cluster-entirely" in nodes.log_text(node_id)]
    assert logging, "the cluster's side logs it too"
    for node_id in logging:
        lines = [text for text in nodes.log_text(node_id).splitlines() if "another-cluster-entirely" in text]
        assert len(lines) == 1, "once, not at each attempt"
    continues(nodes, filled)


@pytest.mark.timeout(180)
def test_a_second_node_with_the_same_id_is_refused_and_the_first_keeps_running(
    nodes: Nodes, filled: Filled, tmp_path: Path
) -> None:
    cluster_id = nodes.node(1).config.cluster_id
    owner = nodes.node(2).process.pid
    line = refused(tmp_path, stranger(nodes, node_id=2, cluster_id=cluster_id))
    assert "2" in line
    assert "node_id" in line
    assert nodes.node(2).process.pid == owner
    assert nodes.node(2).is_ready
    continues(nodes, filled)


@pytest.mark.timeout(180)
def test_a_node_refuses_to_start_on_the_data_folder_of_another_node(
    nodes: Nodes, filled: Filled, tmp_path: Path
) -> None:
    nodes.stop(3)
    copy = tmp_path / "data"
    shutil.copytree(nodes.node(3).folder, copy)
    line = refused(tmp_path, stranger(nodes, node_id=7, cluster_id=nodes.node(1).config.cluster_id))
    assert str(copy) in line
    assert "node 3" in line
    nodes.start(3)
    continues(nodes, filled)


@pytest.mark.timeout(180)
def test_a_cluster_node_refuses_to_start_without_peers_in_its_config(
    nodes: Nodes, filled: Filled, tmp_path: Path
) -> None:
    nodes.stop(3)
    settings = stranger(nodes, node_id=3, data_dir=nodes.node(3).folder, peers=[])
    line = refused(tmp_path, settings)
    assert "peers" in line
    nodes.start(3)
    continues(nodes, filled)


@pytest.mark.parametrize(
    "peers",
    [
        [{"id": 2, "internal": "127.0.0.1:5001"}, {"id": 2, "internal": "127.0.0.1:5002"}],
        [{"id": 2, "internal": "nonsense"}],
        [{"id": 2, "internal": "127.0.0.1:5001", "color": "red"}],
    ],
    ids=["one id twice", "no address", "unknown key"],
)
def test_a_node_refuses_to_start_with_invalid_peers(tmp_path: Path, peers: list[dict[str, Any]]) -> None:
    line = refused(tmp_path, {"node_id": 1, "peers": peers})
    assert "peers" in line


@pytest.mark.timeout(180)
def test_a_node_without_a_majority_logs_the_missing_nodes_and_loses_nothing(nodes: Nodes, filled: Filled) -> None:
    started = len(nodes.log_text(3))
    nodes.kill(1)
    nodes.kill(2)

    def names_the_missing(since: int) -> bool:
        lines = [line for line in nodes.log_text(3)[since:].splitlines() if "majority_lost" in line]
        return any("node 1" in line and "node 2" in line for line in lines)

    eventually(lambda: names_the_missing(started), 30, "the log names the missing nodes")
    # A restart of the remaining node changes nothing.
    nodes.kill(3)
    before = len(nodes.log_text(3))
    assert nodes.start(3) is False
    eventually(lambda: names_the_missing(before), 30, "the log names the missing nodes again")
    assert nodes.node(3).get("/readyz")[0] == 503
    nodes.start(1)
    nodes.start(2)
    continues(nodes, filled)


@pytest.mark.timeout(180)
def test_a_node_without_a_majority_is_healthy_but_not_ready(nodes: Nodes) -> None:
    nodes.kill(1)
    nodes.kill(2)
    eventually(lambda: nodes.node(3).get("/readyz")[0] == 503, 30, "/readyz reports that it is not ready")
    assert nodes.node(3).get("/healthz")[0] == 200
    nodes.start(1)
    eventually(lambda: nodes.node(3).is_ready, 30, "two of three serve")
