"""Fixtures for all tests: real node processes, their logs when a test fails, and Apache Kafka for comparison."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from tests.support.apache_kafka import ApacheKafka, missing
from tests.support.forked_node import CAN_FORK
from tests.support.node import Node
from tests.support.ports import HIGHEST_PORT, LOWEST_PORT, is_free
from tests.support.scheduling import (
    BACKGROUND_TIMEOUT_S,
    Scheduling,
    in_order,
    is_in_background,
    lower_priority,
)
from tests.support.spark_archive import jvm_flags
from tests.support.spark_python import forked_python
from tests.support.tested_build import check

from chronik.local import cluster
from chronik.node.config import INTERNAL_PORT_BELOW_KAFKA

pytest_plugins = ["tests.support.browser"]

# No property test here depends on time, so slowness on a busy machine is not a failure.
settings.register_profile("no-time", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("no-time")

StartNode: TypeAlias = Callable[..., Node]

NODES = pytest.StashKey[list[Node]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: a long fuzz or crash run, only in `make soak`")
    if not config.option.markexpr:
        config.option.markexpr = "not soak"
    config.stash[NODES] = []
    if is_in_background(config):
        lower_priority()
    # Otherwise a new cluster takes the port of a node that another test process has stopped for a moment.
    patch.object(cluster, "_is_free", is_free).start()
    lowest = LOWEST_PORT + INTERNAL_PORT_BELOW_KAFKA
    patch.multiple(cluster, FREE_PORT_FROM=lowest, FREE_PORT_UPTO=HIGHEST_PORT).start()
    os.environ.setdefault("SPARK_SUBMIT_OPTS", jvm_flags())
    # Otherwise the asyncio plugin makes a loop to restore it after its first test, and never closes it.
    asyncio.set_event_loop(None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background jobs ignore SIGINT. Child processes would too, and some tests stop commands with Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    try:
        return f"nodes: {check()}"
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the long files first if several workers share the tests."""
    if not hasattr(config, "workerinput"):
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    items[:] = [item for path in in_order(files) for item in files[path]]
    if is_in_background(config):
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(BACKGROUND_TIMEOUT_S))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return Scheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for node in item.config.stash[NODES]:
            report.sections.append((f"log of {node}", node.log_tail()))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop every node that is still running at the end of the run."""
    for node in session.config.stash[NODES]:
        if node.is_running:
            node.kill()


def _start(config: pytest.Config, nodes: list[Node], folder: Path, settings: dict[str, Any]) -> Node:
    """Start a node, registered with its owner and the failure reports before it runs."""
    node = Node(folder, settings)
    nodes.append(node)
    config.stash[NODES].append(node)
    return node.start()


def _stop(config: pytest.Config, nodes: list[Node]) -> None:
    """Stop every running node cleanly, then raise the first failure."""
    failures: list[Exception] = []
    for node in nodes:
        try:
            if node.is_running:
                node.terminate()
            elif node.process is not None:
                raise AssertionError(f"{node} had exited {node.process.returncode} by itself\n{node.log_tail()}")
        except Exception as failure:
            failures.append(failure)
        config.stash[NODES].remove(node)
    if failures:
        raise failures[0]


@pytest.fixture
def start_node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartNode]:
    """Start nodes with custom settings: `start_node(durability="replicated")`."""
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        return _start(request.config, nodes, tmp_path / f"started-{len(nodes) + 1}", settings)

    yield start
    _stop(request.config, nodes)


@pytest.fixture
def node(start_node: StartNode) -> Node:
    """A node for this test only, with the default settings."""
    return start_node()


@pytest.fixture(scope="session")
def start_shared_node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartNode]:
    """Start nodes that run until the end of the test run."""
    nodes: list[Node] = []
    yield lambda **settings: _start(request.config, nodes, tmp_path_factory.mktemp("shared-node"), settings)
    _stop(request.config, nodes)


@pytest.fixture(scope="session")
def shared_node(start_shared_node: StartNode) -> Node:
    """One node for all tests that use unique topic and group names and leave the node running.

    Tests write records with old timestamps, so the retention check must not run during a test. Members of consumer
    groups and share groups send heartbeats often, so that a test sees a rebalance soon; locks may be short.
    """
    return start_shared_node(
        retention_check_interval_ms=24 * 60 * 60 * 1000,
        group_consumer_min_heartbeat_interval_ms=100,
        group_consumer_heartbeat_interval_ms=250,
        group_share_min_heartbeat_interval_ms=100,
        group_share_heartbeat_interval_ms=250,
        group_share_min_record_lock_duration_ms=1_000,
    )


@pytest.fixture(scope="session")
def spark_python() -> Iterator[None]:
    """Let every JVM of Spark, from now on, fork its Python processes instead of starting interpreters."""
    if not CAN_FORK:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, forked_python(Path(folder)) as executable:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = str(executable)
        yield
        del os.environ["PYSPARK_PYTHON"], os.environ["PYSPARK_DRIVER_PYTHON"]


@pytest.fixture(scope="session")
def apache_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    """One Apache Kafka broker, for checks that must pass there too; skipped with the reason if it is unavailable."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    kafka = ApacheKafka(tmp_path_factory.mktemp("apache-kafka"))
    try:
        yield kafka.start()
    finally:
        kafka.stop()
