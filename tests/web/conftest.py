"""A cluster for the tests of the page and its API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chronik.testing.cluster import TestCluster


@pytest.fixture(scope="module")
def _used_cluster(_chronik_processes: TestCluster) -> Iterator[TestCluster]:
    """Remove topics and groups once for each file: every test creates those that it uses."""
    yield _chronik_processes
    _chronik_processes.heal()
    _chronik_processes.tidy()


@pytest.fixture
def chronik_cluster(_used_cluster: TestCluster) -> TestCluster:
    """The plugin's cluster, with all nodes up and in sync."""
    _used_cluster.heal()
    return _used_cluster
