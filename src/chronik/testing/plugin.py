"""The pytest plugin: `chronik_cluster` gives a test a real cluster (three nodes, or `chronik_nodes` of the ini file).

    def test_orders_survive_a_crash(chronik_cluster):
        topic = chronik_cluster.topic(partitions=1)
        producer = KafkaProducer(bootstrap_servers=chronik_cluster.bootstrap, acks="all")
        chronik_cluster.kill(chronik_cluster.leader(topic))
        producer.send(topic, b"still there").get(timeout=10)

`secure_chronik_cluster` gives a test the same with TLS, SCRAM users and ACLs: `.properties` is the path of the
administrator's client settings (librdkafka's names), and `.client_settings.security` has them parsed.

The processes start once for a run of pytest; each test starts with all nodes up, no topics and no groups, quotas,
users or ACLs, except for the administrator. Nothing is left behind, however the run ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from chronik.testing.cluster import TestCluster

DEFAULT_NODES = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("chronik_nodes", f"nodes of the chronik_cluster fixture (default {DEFAULT_NODES})")


@pytest.fixture(scope="session")
def _chronik_processes(request: pytest.FixtureRequest) -> Iterator[TestCluster]:
    # Imported on first use: pytest loads the plugin in every run in which chronik is installed.
    from chronik.testing.cluster import TestCluster

    with TestCluster(_node_count(request.config.getini("chronik_nodes"))) as cluster:
        yield cluster


def _node_count(setting: str) -> int:
    if not setting:
        return DEFAULT_NODES
    if not setting.isdecimal() or int(setting) == 0:
        raise pytest.UsageError(f"chronik_nodes = {setting} is not a number of nodes: use 1 or more")
    return int(setting)


@pytest.fixture(scope="session")
def _secure_chronik_processes(request: pytest.FixtureRequest) -> Iterator[TestCluster]:
    from chronik.testing.cluster import TestCluster

    with TestCluster(_node_count(request.config.getini("chronik_nodes")), is_secure=True) as cluster:
        yield cluster


@pytest.fixture
def chronik_cluster(_chronik_processes: TestCluster) -> Iterator[TestCluster]:
    """A real cluster: `.bootstrap`, `.nodes`, `.topic()`, `.leader(topic)`, `.kill(n)`, `.stop(n)`, `.pause(n)`, ..."""
    _chronik_processes.heal()  # in case the cleanup after the previous test failed
    yield _chronik_processes
    _chronik_processes.heal()
    _chronik_processes.tidy()


@pytest.fixture
def secure_chronik_cluster(_secure_chronik_processes: TestCluster) -> Iterator[TestCluster]:
    """As `chronik_cluster`, with TLS, SCRAM users and ACLs. `.properties` is the administrator's client settings."""
    _secure_chronik_processes.heal()
    yield _secure_chronik_processes
    _secure_chronik_processes.heal()
    _secure_chronik_processes.tidy()
