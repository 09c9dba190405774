"""`format("chronik")` in a real Spark session, against a real node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.node import Node
from tests.support.topics import NOW_MS, numbered

from chronik import pipeline
from chronik.pipeline.errors import failure_line
from chronik.wire.compression import LZ4

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUERY_S_MAX = 90

pytestmark = pytest.mark.timeout(300)  # the first test starts Spark and compiles the decoder

Read = Callable[..., "DataFrame"]


def places(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((row.partition, row.offset) for row in frame.select("partition", "offset").collect())


def each(partition: int, count: int) -> list[tuple[int, int]]:
    return [(partition, offset) for offset in range(count)]


class Landing:
    """The rows of a streaming query, by micro-batch."""

    def __init__(self, frame: DataFrame, checkpoint: Path) -> None:
        self.batches: dict[int, list[tuple[int, int]]] = {}
        self._writer = frame.writeStream.foreachBatch(self._take).option("checkpointLocation", str(checkpoint))

    def _take(self, frame: DataFrame, number: int) -> None:
        self.batches[number] = places(frame)

    def to_the_end(self) -> list[tuple[int, int]]:
        query = self._writer.trigger(availableNow=True).start()
        assert query.awaitTermination(QUERY_S_MAX)
        return self.places

    def start(self, **trigger: Any) -> Any:
        return self._writer.trigger(**trigger).start()

    @property
    def places(self) -> list[tuple[int, int]]:
        return sorted(place for batch in self.batches.values() for place in batch)


def test_rows_equal_the_records(shared_node: Node, read: Read) -> None:
    at, name = shared_node.bootstrap, "spark-rows"
    topics.create(at, name, 1)
    headers = [("h", b"1"), ("h", None)]
    topics.append(at, name, 0, [(b"k", b"v", headers, NOW_MS), (None, None, (), NOW_MS + 1), (b"", b"", (), NOW_MS)])
    rows = read(subscribe=name, includeHeaders="true").orderBy("offset").collect()
    assert [(row.key, row.value) for row in rows] == [(b"k", b"v"), (None, None), (b"", b"")]
    assert [(row.topic, row.partition, row.offset, row.timestampType) for row in rows] == [
        (name, 0, offset, 0) for offset in range(3)
    ]
    assert [tuple(header) for header in rows[0].headers] == headers
    assert rows[1].headers is None
    times = read(subscribe=name).selectExpr("unix_millis(timestamp) as ms").orderBy("ms").collect()
    assert [row.ms for row in times] == [NOW_MS, NOW_MS, NOW_MS + 1]


def test_spark_discovers_the_source_with_the_columns_of_its_kafka_source(shared_node: Node, read: Read) -> None:
    topics.create(shared_node.bootstrap, "spark-columns", 1)
    frame = read(subscribe="spark-columns")
    assert frame.dtypes == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
    ]
    assert frame.count() == 0


def test_large_ranges_are_split_into_tasks(shared_node: Node, read: Read) -> None:
    at, name = shared_node.bootstrap, "spark-splits"
    topics.create(at, name, 2)
    topics.append(at, name, 0, *[numbered(500)] * 6, codec=LZ4)
    topics.append(at, name, 1, numbered(500))
    frame = read(subscribe=name, minPartitions="7")
    assert frame.rdd.getNumPartitions() == 7
    assert places(frame) == each(0, 3000) + each(1, 500)


def test_a_stream_reads_to_the_end_resumes_at_its_checkpoint_and_commits(
    shared_node: Node, read_stream: Read, tmp_path: Path
) -> None:
    at, name, group = shared_node.bootstrap, "spark-stream", "spark-stream-group"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(250))
    options = {"subscribe": name, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "100", "kafka.group.id": group}
    first = Landing(read_stream(**options), tmp_path)
    assert first.to_the_end() == each(0, 250)
    assert [len(batch) for _, batch in sorted(first.batches.items())] == [100, 100, 50]
    assert topics.committed(at, group) == {(name, 0): 250}
    topics.grow(at, name, 2)
    topics.append(at, name, 1, numbered(30))
    topics.append(at, name, 0, numbered(10))
    second = Landing(read_stream(**options), tmp_path)
    assert second.to_the_end() == each(0, 260)[250:] + each(1, 30)
    assert topics.committed(at, group) == {(name, 0): 260, (name, 1): 30}


def test_a_running_stream_reads_new_partitions_and_commits_at_once(
    shared_node: Node, read_stream: Read, tmp_path: Path
) -> None:
    at, name, group = shared_node.bootstrap, "spark-running", "spark-running-group"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(5))
    options = {"subscribe": name, "startingOffsets": "earliest", "kafka.group.id": group}
    landing = Landing(read_stream(**options), tmp_path)
    query = landing.start(processingTime="0 seconds")
    try:
        eventually(lambda: landing.places == each(0, 5), QUERY_S_MAX)
        topics.grow(at, name, 2)
        topics.append(at, name, 1, numbered(3))
        eventually(lambda: landing.places == each(0, 5) + each(1, 3), QUERY_S_MAX)
        eventually(lambda: topics.committed(at, group) == {(name, 0): 5, (name, 1): 3}, QUERY_S_MAX)
    finally:
        query.stop()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscribe": "spark-no-such-topic"}, "topic spark-no-such-topic does not exist"),
        ({"subscribe": "t", "kafka.bootstrap.servers": "127.0.0.1:1"}, "no answer from 127.0.0.1:1"),
        ({"subscribe": "t", "startingOffset": "earliest"}, "option startingoffset is unknown"),
    ],
    ids=["unknown topic", "unreachable", "unknown option"],
)
def test_a_spark_error_contains_the_one_line_reason(
    spark: SparkSession, shared_node: Node, options: dict[str, str], said: str
) -> None:
    where = {"kafka.bootstrap.servers": shared_node.bootstrap} | options
    with pytest.raises(Exception) as raised:
        spark.read.format("chronik").options(**where).load().count()
    line = failure_line(raised.value)
    assert line is not None
    assert said in line


def test_a_stream_fails_if_its_topic_was_recreated_while_it_was_stopped(
    shared_node: Node, read_stream: Read, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "spark-again"
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(5))
    options = {"subscribe": name, "startingOffsets": "earliest"}
    assert Landing(read_stream(**options), tmp_path).to_the_end() == each(0, 5)
    topics.delete(at, name)
    topics.create(at, name, 1)
    topics.append(at, name, 0, numbered(9))
    again = Landing(read_stream(**options), tmp_path)
    with pytest.raises(Exception) as raised:
        again.to_the_end()
    assert "was deleted and recreated" in (failure_line(raised.value) or "")
    assert again.places == []


def test_the_package_registers_the_source_in_the_active_session(
    spark: SparkSession, shared_node: Node, read: Read
) -> None:
    """The last test here: from now on the session has the registered source, not the one that it discovered."""
    topics.create(shared_node.bootstrap, "spark-registered", 1)
    pipeline.session.register_active()
    assert spark in pipeline.session._registered
    assert read(subscribe="spark-registered").count() == 0
