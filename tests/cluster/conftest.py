"""Fixtures for tests of whole clusters: three real nodes, and their logs if a test fails."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pytest
from tests.cluster.support_cluster import NODES, Nodes
from tests.cluster.support_tools import KafkaTools

StartNodes: TypeAlias = Callable[..., Nodes]

N = TypeVar("N", bound=Nodes)
CLUSTERS = pytest.StashKey[list[Nodes]]()
FAILED = pytest.StashKey[bool]()
"""Whether any phase of the test has failed."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CLUSTERS] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        for nodes in item.config.stash[CLUSTERS]:
            for node_id in nodes.ids:
                report.sections.append((f"log of node {node_id} in {nodes.folder}", nodes.log_tail(node_id)))
    return report


def nodes_of(config: pytest.Config, nodes: N) -> Iterator[N]:
    """Start the nodes, and show their logs if a test fails."""
    config.stash[CLUSTERS].append(nodes)
    with nodes:
        nodes.start_all()
        yield nodes
    config.stash[CLUSTERS].remove(nodes)


@pytest.fixture
def start_nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartNodes]:
    """Start clusters for one test: `start_nodes(cuttable=True)`; `settings` are keys of node.toml."""
    started: list[Iterator[Nodes]] = []

    def start(count: int = NODES, *, cuttable: bool = False, **settings: Any) -> Nodes:
        folder = tmp_path / f"cluster-{len(started) + 1}"
        started.append(nodes_of(request.config, Nodes(folder, count, settings, cuttable=cuttable)))
        return next(started[-1])

    yield start
    for nodes in reversed(started):
        next(nodes, None)


@pytest.fixture
def nodes(start_nodes: StartNodes) -> Nodes:
    """Three nodes for one test."""
    return start_nodes()


@pytest.fixture(scope="session")
def shared_nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Three nodes for all tests that use their own topics and groups and leave every node running."""
    yield from nodes_of(request.config, Nodes(tmp_path_factory.mktemp("shared-cluster")))


@pytest.fixture(scope="session")
def kafka_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaTools]:
    """Apache Kafka's command line tools; if they are unavailable, the test is skipped with the reason."""
    try:
        tools = KafkaTools(tmp_path_factory.mktemp("kafka-tools"))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    yield tools
    tools.close()
