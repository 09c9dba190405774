"""Nodes of a cluster are upgraded one by one, and rolled back, while clients produce and consume (docs/deploy.md)."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.support_cluster import NODES, Nodes
from tests.cluster.support_fixtures import nodes_of
from tests.cluster.support_workload import Workload, all_replicas_agree

from chronik.testing.tied_node import TIED_NODE
from chronik.wire.api import ApiKey

pytestmark = pytest.mark.timeout(600)

PREVIOUS = "f55a314b41523b4738474ff43e440256c5e53f21"
"""The source that nodes run before the upgrade: no version is released yet, so it is the one that landed before."""
NEW_API = ApiKey.SHARE_FETCH
"""A node of the previous source does not have it."""
ROOT = Path(__file__).parents[2]
PARTITIONS = 2
PROGRESS = 50


class UpgradedNodes(Nodes):
    """Nodes that all start with the previous source. `previous` has the ids of those that will start with it again."""

    def __init__(self, folder: Path, source: Path) -> None:
        self._source = source
        self.previous = set(range(1, NODES + 1))
        super().__init__(folder)

    def command_of(self, node_id: int) -> tuple[str, ...]:
        if node_id in self.previous:
            return ("/usr/bin/env", f"PYTHONPATH={self._source}", *TIED_NODE)
        return super().command_of(node_id)

    def replace(self, node_id: int) -> None:
        """Stop a node cleanly and start it with the other source; wait until it has caught up."""
        self.stop(node_id)
        self.previous ^= {node_id}
        self.start(node_id)
        assert self.is_previous(node_id) == (node_id in self.previous)
        self.wait_in_sync()

    def is_previous(self, node_id: int) -> bool:
        """Return which source a running node has, by the APIs that it announces."""
        software = {"client_software_name": "test", "client_software_version": "1"}
        with self.connect(node_id) as client:
            announced = client.call(ApiKey.API_VERSIONS, 3, software).api_keys
        return NEW_API not in {api.api_key for api in announced}


@pytest.fixture(scope="module")
def previous_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the previous source, from the history of this checkout; without that, skip with the reason."""
    if shutil.which("git") is None:
        pytest.skip("no source to upgrade from: git is not installed")
    git = subprocess.run(["git", "-C", str(ROOT), "archive", PREVIOUS, "src"], capture_output=True)
    if git.returncode != 0:
        pytest.skip(f"no source to upgrade from: {git.stderr.decode(errors='replace').strip()}")
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(git.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


@pytest.fixture
def upgraded_nodes(request: pytest.FixtureRequest, previous_source: Path, tmp_path: Path) -> Iterator[UpgradedNodes]:
    nodes = UpgradedNodes(tmp_path / "cluster", previous_source)
    for _ in nodes_of(request.config, nodes):
        yield nodes


def test_an_upgrade_node_by_node_loses_nothing(upgraded_nodes: UpgradedNodes, tmp_path: Path) -> None:
    nodes = upgraded_nodes
    assert all(map(nodes.is_previous, nodes.ids))
    replace_under_load(nodes, tmp_path)
    assert nodes.previous == set()


@pytest.mark.soak
def test_a_roll_back_node_by_node_loses_nothing(upgraded_nodes: UpgradedNodes, tmp_path: Path) -> None:
    nodes = upgraded_nodes
    for node_id in nodes.ids:
        nodes.replace(node_id)
    replace_under_load(nodes, tmp_path)
    assert nodes.previous == set(nodes.ids)


def replace_under_load(nodes: UpgradedNodes, folder: Path) -> None:
    """Replace the source of every node in turn under load; everything acknowledged is read, and replicas agree."""
    topic = nodes.new_topic(PARTITIONS)
    with Workload(nodes, topic, PARTITIONS, rereads=True) as workload:
        workload.proceed(PROGRESS)
        for node_id in nodes.ids:
            nodes.replace(node_id)
            workload.proceed(PROGRESS)
        workload.finish(folder / "history.jsonl")
    nodes.no_surprises()
    all_replicas_agree(nodes, workload.recorder.acknowledged())
