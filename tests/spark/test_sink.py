"""Writing with `format("chronik")` in a real Spark session, to a real node."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.node import Node
from tests.support.topics import numbered

from chronik.pipeline.errors import failure_line
from chronik.pipeline.source.blocking import BlockingCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.conftest import Read

QUERY_S_MAX = 180

pytestmark = pytest.mark.timeout(600)

COMMITTED = {"kafka.isolation.level": "read_committed"}


def copy(frame: DataFrame, node: Node, topic: str, checkpoint: Path, **options: str) -> str:
    """Run a query to the end of its source, and return its id."""
    writer = frame.writeStream.format("chronik").options(**{"kafka.bootstrap.servers": node.bootstrap}, **options)
    query = (
        writer.option("topic", topic).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    )
    assert query.awaitTermination(QUERY_S_MAX)
    return str(query.id)


def forget_last_commit(checkpoint: Path) -> int:
    """Act as a driver that dies after the transaction's commit and before Spark's own. Return the batch's number."""
    commits = checkpoint / "commits"
    last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
    for file in (commits / str(last), commits / f".{last}.crc"):
        file.unlink()
    return last


def values(frame: DataFrame) -> list[bytes]:
    return sorted(row.value for row in frame.select("value").collect())


def test_a_stream_writes_each_row_once_even_if_spark_repeats_a_micro_batch(
    shared_node: Node, read: Read, read_stream: Read, tmp_path: Path
) -> None:
    at, source, target = shared_node.bootstrap, "spark-sink-in", "spark-sink-out"
    topics.create(at, source, 2)
    topics.create(at, target, 3)
    for partition in range(2):
        topics.append(at, source, partition, numbered(60, 100 * partition))
    options = {"subscribe": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "50", "minPartitions": "4"}
    rows = read_stream(**options).select("key", "value")
    query = copy(rows, shared_node, target, tmp_path)
    expected = sorted(b"v%d" % (100 * partition + i) for partition in range(2) for i in range(60))
    # The markers of the last transaction may follow its commit.
    eventually(lambda: values(read(subscribe=target, **COMMITTED)) == expected, QUERY_S_MAX)
    last = forget_last_commit(tmp_path)
    assert copy(rows, shared_node, target, tmp_path) == query
    assert values(read(subscribe=target, **COMMITTED)) == expected
    assert topics.committed(at, f"chronik-sink-{query}") == {(target, 0): last}
    # Without the transaction, Spark's repetition is visible.
    assert forget_last_commit(tmp_path) == last
    copy(rows, shared_node, target, tmp_path, delivery="at-least-once")
    assert len(values(read(subscribe=target, **COMMITTED))) > len(expected)


def test_a_batch_is_one_transaction_with_the_columns_of_sparks_kafka_sink(
    spark: SparkSession, shared_node: Node, read: Read
) -> None:
    at, one, other = shared_node.bootstrap, "spark-sink-one", "spark-sink-other"
    for topic in (one, other):
        topics.create(at, topic, 2)
    header = "array(named_struct('key', 'h', 'value', cast('1' as binary)))"
    rows = spark.range(10).selectExpr(
        "concat('k', id) as key",
        "concat('v', id) as value",
        f"if(id % 3 = 0, {header}, null) as headers",
        f"if(id % 2 = 0, '{one}', '{other}') as topic",
        "if(id < 4, 1, null) as partition",
    )
    write(rows, at)
    found = partial(read, subscribe=f"{one},{other}", includeHeaders="true", **COMMITTED)
    eventually(lambda: found().count() == 10, QUERY_S_MAX)
    written = found().collect()
    assert sorted((row.key, row.value) for row in written) == [(b"k%d" % i, b"v%d" % i) for i in range(10)]
    for row in written:
        number = int(row.value[1:])
        assert row.topic == (one, other)[number % 2]
        assert number >= 4 or row.partition == 1
        assert [tuple(each) for each in row.headers or ()] == ([("h", b"1")] if number % 3 == 0 else [])
    with BlockingCluster(at) as cluster:
        ends = cluster.offsets([(topic, partition) for topic in (one, other) for partition in range(2)], -1)
    used = {(row.topic, row.partition) for row in written}
    assert sum(ends.values()) == 10 + len(used)  # one marker in each partition


def write(rows: DataFrame, bootstrap: str, **options: Any) -> None:
    writer = rows.write.format("chronik").options(**{"kafka.bootstrap.servers": bootstrap}, **options)
    writer.mode("append").save()


def test_a_failed_task_leaves_no_record(spark: SparkSession, shared_node: Node, read: Read) -> None:
    at, topic = shared_node.bootstrap, "spark-sink-failed"
    topics.create(at, topic, 1)
    rows = spark.range(0, 10, 1, 2).selectExpr("cast(id as string) as value", "if(id = 9, 4, 0) as partition")
    with pytest.raises(Exception) as raised:
        write(rows, at, topic=topic)
    assert "names partition 4" in (failure_line(raised.value) or "")
    assert read(subscribe=topic).count() == 0
