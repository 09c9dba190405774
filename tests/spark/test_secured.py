"""Spark with a cluster that requires TLS, SCRAM and ACLs: source, sink and `chronik pipeline land`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import topics
from tests.support.landing import landed
from tests.support.topics import numbered

from chronik.testing.cluster import TestCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.spark.conftest import Command

QUERY_S_MAX = 180

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def secured() -> Iterator[TestCluster]:
    with TestCluster(1, is_secure=True) as cluster:
        yield cluster


def test_spark_reads_writes_and_lands_over_sasl_ssl(
    spark: SparkSession, command: Command, secured: TestCluster, tmp_path: Path
) -> None:
    at = secured.client_settings
    for name in ("orders", "copies"):
        topics.create(at, name, 2)
    for partition in range(2):
        topics.append(at, "orders", partition, numbered(50, 100 * partition))
    options = {"kafka.properties.file": secured.properties}
    rows = spark.readStream.format("chronik").options(**options, subscribe="orders", startingOffsets="earliest").load()
    writer = rows.select("partition", "key", "value").writeStream.format("chronik").options(**options, topic="copies")
    query = writer.option("checkpointLocation", str(tmp_path / "sink")).trigger(availableNow=True).start()
    assert query.awaitTermination(QUERY_S_MAX)
    assert secured.client_settings.security.password not in str(query.lastProgress)
    land = ("pipeline", "land", "copies", "--once", "--to", str(tmp_path / "tables"))
    done = command(*land, "--properties", secured.properties)
    assert done.code == 0, done
    # The marker of the transaction has an offset, and is no row.
    assert landed(tmp_path / "tables" / "copies") == [(partition, at) for partition in range(2) for at in range(50)]
    refused = command(*land, "-b", secured.bootstrap)
    assert refused.code != 0 and "if its listener uses TLS, set security.protocol" in refused.err
