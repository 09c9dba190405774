"""Fixtures for tests of whole clusters: three real nodes, and their logs if a test fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.cluster.support_cluster import NODES, Nodes
from tests.cluster.support_fixtures import nodes_of, pytest_runtest_makereport, results
from tests.cluster.support_tools import KafkaTools
from tests.support.node import SMALL_FILES

__all__ = ["pytest_runtest_makereport", "results"]

StartNodes: TypeAlias = Callable[..., Nodes]


@pytest.fixture
def start_nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartNodes]:
    """Start clusters for one test: `start_nodes(cuttable=True)`; `settings` are keys of node.toml."""
    started: list[Iterator[Nodes]] = []

    def start(count: int = NODES, *, cuttable: bool = False, disk_switches: bool = False, **settings: Any) -> Nodes:
        folder = tmp_path / f"cluster-{len(started) + 1}"
        nodes = Nodes(folder, count, {**SMALL_FILES, **settings}, cuttable=cuttable, disk_switches=disk_switches)
        started.append(nodes_of(request.config, nodes))
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
    yield from nodes_of(request.config, Nodes(tmp_path_factory.mktemp("shared-cluster"), settings=SMALL_FILES))


@pytest.fixture(scope="session")
def kafka_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaTools]:
    """Apache Kafka's command line tools; if they are unavailable, the test is skipped with the reason."""
    try:
        tools = KafkaTools(tmp_path_factory.mktemp("kafka-tools"))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    yield tools
    tools.close()
