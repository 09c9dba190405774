"""A cluster for the tests of the page and its API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chronik.testing.cluster import TestCluster


@pytest.fixture(scope="module")
def _used_cluster(_chronik_processes: TestCluster) -> Iterator[TestCluster]:
    """Topics and groups are taken away once for each file here: every test makes those that it looks at."""
    yield _chronik_processes
    _chronik_processes.heal()
    _chronik_processes.tidy()


@pytest.fixture
def chronik_cluster(_used_cluster: TestCluster) -> TestCluster:
    """The plugin's cluster, with all nodes up and in sync."""
    _used_cluster.heal()
    return _used_cluster
