"""Fixtures and hooks for tests on clusters of real processes: the nodes' logs if a test fails, results of long runs."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_soak import SoakResults

CLUSTERS = pytest.StashKey[list[Nodes]]()
FAILED = pytest.StashKey[bool]()
"""Whether any phase of the test has failed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        for nodes in item.config.stash.get(CLUSTERS, []):
            for node_id in nodes.ids:
                report.sections.append((f"log of node {node_id} in {nodes.folder}", nodes.log_tail(node_id)))
    return report


def nodes_of(config: pytest.Config, nodes: Nodes) -> Iterator[Nodes]:
    """Start the nodes, and show their logs if a test fails."""
    clusters = config.stash.setdefault(CLUSTERS, [])
    clusters.append(nodes)
    with nodes:
        nodes.start_all()
        yield nodes
    clusters.remove(nodes)


@pytest.fixture
def results(request: pytest.FixtureRequest) -> Iterator[SoakResults]:
    """Written whether the test passes or fails: a failed run has results, too."""
    results = SoakResults(request.node.name)
    yield results
    results.write(passed=not request.node.stash.get(FAILED, False))
