"""One Spark session for the whole run, and why there is none where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from tests.support.node import Node

from chronik.pipeline.session import java_fault, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Read: TypeAlias = Callable[..., "DataFrame"]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'chronik[spark]'")
    fault = java_fault()
    if fault is not None:
        pytest.skip(fault)
    session = spark_session("chronik-tests", "local[2]")
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
