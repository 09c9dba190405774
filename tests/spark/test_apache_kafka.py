"""`format("chronik")` in a real Spark session, against Apache Kafka: the source does not need our own nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import topics
from tests.support.apache_kafka import ApacheKafka
from tests.support.spark_jars import connector_jars
from tests.support.topics import numbered

from chronik.wire.compression import CODECS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUERY_S_MAX = 90

pytestmark = pytest.mark.timeout(300)  # the first test starts Spark and Apache Kafka


def options(kafka: ApacheKafka, topic: str, **more: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": kafka.bootstrap, "subscribe": topic, **more}


def test_a_batch_read_returns_the_same_rows_as_the_kafka_connector_of_spark(
    spark: SparkSession, apache_kafka: ApacheKafka
) -> None:
    name = "spark-on-apache"
    topics.create(apache_kafka.bootstrap, name, 2)
    for codec in range(len(CODECS)):
        topics.append(apache_kafka.bootstrap, name, codec % 2, numbered(100), codec=codec)
    topics.append(apache_kafka.bootstrap, name, 0, [(None, None, [("h", b"1"), ("h", None)], topics.NOW_MS)])

    def rows(source: str) -> list[Any]:
        frame = spark.read.format(source).options(**options(apache_kafka, name, includeHeaders="true")).load()
        return sorted(frame.collect(), key=lambda row: (row.partition, row.offset))

    ours = rows("chronik")
    assert [(row.partition, row.offset) for row in ours] == [
        *((0, offset) for offset in range(301)),
        *((1, offset) for offset in range(200)),
    ]
    assert [row.value for row in ours[:100]] == [b"v%d" % i for i in range(100)]
    assert [tuple(header) for header in ours[300].headers] == [("h", b"1"), ("h", None)]
    if connector_jars():
        assert ours == rows("kafka")


def test_a_stream_reads_to_the_end_resumes_and_commits_to_its_group(
    spark: SparkSession, apache_kafka: ApacheKafka, tmp_path: Path
) -> None:
    at, name, group = apache_kafka.bootstrap, "spark-stream-on-apache", "spark-on-apache-group"
    topics.create(at, name, 2)
    seen: list[tuple[int, int]] = []

    def take(frame: DataFrame, _: int) -> None:
        seen.extend((row.partition, row.offset) for row in frame.select("partition", "offset").collect())

    def to_the_end() -> None:
        given = options(apache_kafka, name, startingOffsets="earliest", **{"kafka.group.id": group})
        frame = spark.readStream.format("chronik").options(**given, maxOffsetsPerTrigger="100").load()
        writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path))
        assert writer.trigger(availableNow=True).start().awaitTermination(QUERY_S_MAX)

    topics.append(at, name, 0, numbered(150))
    to_the_end()
    topics.append(at, name, 1, numbered(30))
    to_the_end()
    assert seen == [(0, offset) for offset in range(150)] + [(1, offset) for offset in range(30)]
    assert topics.committed(at, group) == {(name, 0): 150, (name, 1): 30}
