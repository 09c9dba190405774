"""One Spark session for the whole run; without one, tests are skipped with the reason.

Each further JVM takes half a minute on a busy machine, so commands run in this session, too (`command`), unless a test
is about a separate process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from tests.cli.run_chronik import Outcome
from tests.support.node import Node
from tests.support.spark_jars import connector_jars

from chronik.cli import app
from chronik.pipeline.session import java_fault, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Read: TypeAlias = Callable[..., "DataFrame"]
Command: TypeAlias = Callable[..., Outcome]


@pytest.fixture(scope="session", autouse=True)
def _forked(spark_python: None) -> None:
    pass


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'chronik[spark]'")
    fault = java_fault()
    if fault is not None:
        pytest.skip(fault)
    jars = connector_jars()
    session = spark_session("chronik-tests", "local[2]", {"spark.jars": jars} if jars else None)
    yield session
    session.stop()


@pytest.fixture
def read(spark: SparkSession, shared_node: Node) -> Read:
    """`read(subscribe="t", startingOffsets="earliest")`."""

    def load(**options: Any) -> DataFrame:
        return (
            spark.read.format("chronik").options(**{"kafka.bootstrap.servers": shared_node.bootstrap}, **options).load()
        )

    return load


@pytest.fixture
def read_stream(spark: SparkSession, shared_node: Node) -> Read:
    def load(**options: Any) -> DataFrame:
        where = {"kafka.bootstrap.servers": shared_node.bootstrap}
        return spark.readStream.format("chronik").options(**where, **options).load()

    return load


@pytest.fixture
def command_without_spark(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `chronik ARGUMENTS...` in this process; fail if it starts Spark."""

    def start(*_: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr("chronik.pipeline.session.spark_session", start)
    return lambda *arguments: _run(capfd, arguments)


@pytest.fixture
def command(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run `chronik ARGUMENTS...` in this process and in the existing session, which stays open."""
    monkeypatch.setattr(type(spark), "stop", lambda _: None)
    return lambda *arguments: _run(capfd, (*arguments, "--master", "local[2]"))


def _run(capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> Outcome:
    capfd.readouterr()
    code = app.main(list(arguments))
    return Outcome(code, *capfd.readouterr())
