"""The sink without Spark: encoded rows, and their delivery to a real node and to Apache Kafka."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from kafka.partitioner.default import murmur2 as reference
from pyspark import TaskContext
from pyspark.serializers import CPickleSerializer
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)
from tests.support import topics
from tests.support.node import Node
from tests.support.topics import NOW_MS, numbered

from chronik.client import producer
from chronik.client.cluster import Cluster
from chronik.client.endpoint import parse_bootstrap
from chronik.client.producer import TransactionalProducer
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.sink import delivery
from chronik.pipeline.sink.delivery import PREFIX, deliver, deliver_once, last_number
from chronik.pipeline.sink.encoder import BATCH_BYTES, RowEncoder, murmur2
from chronik.pipeline.sink.options import SinkOptions
from chronik.pipeline.sink.spark_sink import QUERY_ID, ChronikFormat
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.ranges import RecordRange
from chronik.pipeline.source.reading import ReadSettings, read_range
from chronik.wire.batch import decode_batch, encode_batch
from chronik.wire.compression import CODECS, ZSTD

pytestmark = pytest.mark.timeout(180)

TIMEOUT_MS = 60_000
TOO_LARGE_BYTES = 2_000_000
MICRO_BATCHES = 12
LIFE_S_MAX = 0.15
STALL_S_MAX = 0.05


TEXT, BINARY, INT, LONG, DATE = StringType(), BinaryType(), IntegerType(), LongType(), DateType()
HEADERS = ArrayType(StructType([StructField("key", TEXT), StructField("value", BINARY)]))


def parse(columns: dict[str, DataType], **options: str) -> SinkOptions:
    schema = StructType([StructField(name, kind) for name, kind in columns.items()])
    return SinkOptions.parse({"kafka.bootstrap.servers": "127.0.0.1:1", **options}, schema)


def encoder(**options: Any) -> RowEncoder:
    return RowEncoder(lambda _: 6, options.pop("codec", 0), **{"topic": "t", "first": 0, **options})


def arrow(**columns: Any) -> Any:
    return pa.RecordBatch.from_pydict(columns)


def encode(rows: Any, **options: Any) -> dict[tuple[str, int], list[Any]]:
    """Return the records by partition."""
    used = encoder(**options)
    used.add(rows, NOW_MS)
    taken = used.take()
    return {
        target: [record for batch in batches for record in decode_batch(batch)] for target, batches in taken.items()
    }


@pytest.mark.parametrize("key", [b"", b"k", b"ab", b"abc", b"abcd", b"\xff" * 5, bytes(range(256))])
def test_keys_hash_as_in_kafkas_producers(key: bytes) -> None:
    assert murmur2(key) == reference(key) & 0x7FFFFFFF


def test_rows_become_records_of_the_partition_that_they_or_their_key_name() -> None:
    headers = pa.array(
        [[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None],
        pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
    )
    rows = arrow(key=[b"k", None], value=["text", None], topic=["a", "b"], partition=[None, 5], headers=headers)
    records = encode(rows, topic=None)
    assert list(records) == [("a", murmur2(b"k") % 6), ("b", 5)]
    assert [tuple(record)[1:] for batch in records.values() for record in batch] == [
        (NOW_MS, b"k", b"text", [("h", b"1"), ("h", None)]),
        (NOW_MS, None, None, []),
    ]
    assert list(encode(rows)) == [("t", murmur2(b"k") % 6), ("t", 5)]  # the option takes precedence


def test_rows_without_keys_change_the_partition_with_each_full_batch() -> None:
    value = b"x" * (BATCH_BYTES // 4)
    used = encoder(first=4, codec=ZSTD)
    used.add(arrow(value=[value] * 10), NOW_MS)
    taken = used.take()
    assert [target for _, target in taken] == [4, 5, 0]
    assert [len(list(decode_batch(batch))) for batches in taken.values() for batch in batches] == [4, 4, 2]
    assert used.take() == {}


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"key": BINARY}, {"topic": "t"}, "no column value"),
        ({"value": BINARY}, {}, "no column topic"),
        ({"value": LONG}, {"topic": "t"}, "column value is bigint: cast it to string or binary"),
        ({"value": TEXT, "partition": LONG}, {"topic": "t"}, "column partition is bigint: cast it to int"),
        ({"value": TEXT}, {"topic": "t", "delivery": "once"}, "delivery must be one of exactly-once, at-least"),
        ({"value": TEXT}, {"topic": "t", "subscribe": "t"}, "option subscribe is unknown"),
    ],
)
def test_the_error_names_the_wrong_column_or_option(columns: Any, options: Any, said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        parse(columns, **options)


def test_options_and_columns_of_sparks_kafka_sink_are_accepted() -> None:
    columns = {"headers": HEADERS, "topic": TEXT, "other": DATE}
    given = {"kafka.compression.type": "zstd", "kafka.linger.ms": "5", "checkpointLocation": "/somewhere"}
    options = parse({"key": TEXT, "value": BINARY, "partition": INT, **columns}, **given)
    assert options == SinkOptions("127.0.0.1:1", None, True, CODECS.index("zstd"), TIMEOUT_MS)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"value": [b"v"], "topic": [None]}, "a row has no topic"),
        ({"value": [b"v"], "topic": ["t"], "partition": [6]}, "names partition 6 of t, which has 6 partitions"),
    ],
)
def test_a_row_without_a_target_is_an_error(columns: Any, said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        encode(arrow(**columns), topic=None)


# Delivery.


@pytest.fixture(params=["chronik", "chronik, generation 1", "apache kafka", "apache kafka, generation 1"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockingCluster]:
    if "generation 1" in request.param:
        monkeypatch.setattr(producer, "IMPLICIT_FROM", 100)  # no cluster has finalized that level
    broker = request.getfixturevalue("apache_kafka" if "apache" in request.param else "shared_node")
    with BlockingCluster(broker.bootstrap) as used:
        yield used


def batches(topic: str, *first: int) -> dict[tuple[str, int], list[bytes]]:
    """Return three records for each of two partitions, in two batches."""
    return {(topic, at): [encode_batch(numbered(2, n)), encode_batch(numbered(1, n + 2))] for at, n in enumerate(first)}


def read(cluster: BlockingCluster, topic: str, partition: int) -> list[bytes]:
    """Return what a read_committed consumer reads up to the end of the log."""
    end = cluster.offsets([(topic, partition)], -1)[topic, partition]
    settings = ReadSettings(cluster.bootstrap, committed_only=True)
    rows = read_range(RecordRange(topic, partition, 0, end), "", settings)
    return [value for batch in rows for value in batch.column("value").to_pylist()]


def values(*first: int) -> list[bytes]:
    return [b"v%d" % number for start in first for number in range(start, start + 3)]


def unique(cluster: BlockingCluster, request: pytest.FixtureRequest) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[-80:]
    topics.create(cluster.bootstrap, name, 2)
    return name


def test_a_repeated_micro_batch_is_skipped(cluster: BlockingCluster, request: pytest.FixtureRequest) -> None:
    name = unique(cluster, request)
    assert deliver_once(cluster, name, batches(name, 0, 100), TIMEOUT_MS, 0)
    assert deliver_once(cluster, name, batches(name, 10), TIMEOUT_MS, 1)
    for number in (0, 1):
        assert not deliver_once(cluster, name, batches(name, 50, 50), TIMEOUT_MS, number)
    assert deliver_once(cluster, name, batches(name, 20, 120), TIMEOUT_MS, 5)
    assert not deliver_once(cluster, name, batches(name, 50, 50), TIMEOUT_MS, 4)
    assert read(cluster, name, 0) == values(0, 10, 20)
    assert read(cluster, name, 1) == values(100, 120)


def test_a_driver_that_was_replaced_cannot_commit(
    cluster: BlockingCluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old driver stalls after it has written its records. The new one repeats the micro-batch."""
    name, commit = unique(cluster, request), TransactionalProducer.commit

    def replace() -> None:
        with BlockingCluster(cluster.bootstrap) as other:
            assert deliver_once(other, name, batches(name, 20, 120), TIMEOUT_MS, 3)

    async def commit_late(old: TransactionalProducer) -> None:
        monkeypatch.setattr(TransactionalProducer, "commit", commit)
        await asyncio.to_thread(replace)
        await commit(old)

    monkeypatch.setattr(TransactionalProducer, "commit", commit_late)
    with pytest.raises(PipelineError, match=r"another run of the query .* has taken over"):
        deliver_once(cluster, name, batches(name, 0, 100), TIMEOUT_MS, 3)
    assert read(cluster, name, 0) == values(20)
    assert read(cluster, name, 1) == values(120)


def test_a_failed_micro_batch_leaves_nothing_and_can_be_repeated(
    cluster: BlockingCluster, request: pytest.FixtureRequest
) -> None:
    name = unique(cluster, request)
    broken = batches(name, 0, 100)
    broken[name, 1].append(encode_batch([(None, bytes(TOO_LARGE_BYTES), (), NOW_MS)]))
    with pytest.raises(PipelineError, match=r"(?i)message_too_large"):
        deliver_once(cluster, name, broken, TIMEOUT_MS, 0)
    assert cluster.run(last_number(cluster.cluster, PREFIX + name)) == -1
    assert deliver_once(cluster, name, batches(name, 20), TIMEOUT_MS, 0)
    assert read(cluster, name, 0) == values(20)
    assert read(cluster, name, 1) == []


@pytest.mark.parametrize("cluster", ["chronik", "chronik, generation 1"], indirect=True)
def test_each_micro_batch_is_written_once_by_drivers_that_die_or_come_back(
    cluster: BlockingCluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver is cut off at any moment, or stalls and continues beside the next ones."""
    name, seed = unique(cluster, request), random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    def stalling(step: Any) -> Any:
        async def stall(*arguments: Any) -> None:
            await asyncio.sleep(chance.uniform(0, STALL_S_MAX))
            await step(*arguments)

        return stall

    for step in ("append", "commit_offsets", "commit"):
        monkeypatch.setattr(TransactionalProducer, step, stalling(getattr(TransactionalProducer, step)))

    async def drive(number: int) -> bool:
        async with Cluster(parse_bootstrap(cluster.bootstrap)) as own:
            rows = batches(name, 10 * number, 10 * number)
            return await delivery._deliver_once(own, PREFIX + name, rows, TIMEOUT_MS, number)

    async def scenario() -> Counter[str]:
        drivers: list[asyncio.Task[bool]] = []
        for number in range(MICRO_BATCHES):
            is_written = False
            while not is_written:
                driver = asyncio.create_task(drive(number))
                drivers.append(driver)
                fate = chance.choice(("finishes", "dies", "stalls"))
                await asyncio.wait([driver], timeout=None if fate == "finishes" else chance.uniform(0, LIFE_S_MAX))
                is_written = driver.done() and driver.exception() is None
                if fate == "dies":
                    driver.cancel()
        outcomes = await asyncio.gather(*drivers, return_exceptions=True)
        return Counter(
            type(outcome).__name__ if isinstance(outcome, BaseException) else str(outcome) for outcome in outcomes
        )

    print(cluster.run(scenario()))
    assert not deliver_once(cluster, name, batches(name, 0), TIMEOUT_MS, MICRO_BATCHES - 1)
    for partition in range(2):
        assert read(cluster, name, partition) == values(*(10 * number for number in range(MICRO_BATCHES)))


def test_at_least_once_appends_without_a_transaction(shared_node: Node, request: pytest.FixtureRequest) -> None:
    with BlockingCluster(shared_node.bootstrap) as cluster:
        name = unique(cluster, request)
        deliver(cluster, batches(name, 0, 100))
        assert read(cluster, name, 0) == values(0)
        assert cluster.offsets([(name, 0), (name, 1)], -1) == {(name, 0): 3, (name, 1): 3}  # no markers


def test_writers_pass_through_sparks_serializer_and_join_the_tasks_rows_in_order(
    shared_node: Node, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of a micro-batch without Spark: driver, two tasks, and the process that commits."""
    through_spark: Any = CPickleSerializer()

    def sent(value: Any) -> Any:
        return through_spark.loads(through_spark.dumps(value))

    task = SimpleNamespace(partitionId=lambda: 0, getLocalProperty={QUERY_ID: "sink-serialized"}.get)
    monkeypatch.setattr(TaskContext, "get", lambda: task)
    with BlockingCluster(shared_node.bootstrap) as cluster:
        name = unique(cluster, request)
        sink = ChronikFormat({"kafka.bootstrap.servers": shared_node.bootstrap, "Topic": name})
        schema = StructType([StructField("value", TEXT), StructField("partition", INT)])
        for number in (0, 1, 1):
            writer = sent(sink.streamWriter(schema, overwrite=False))
            tasks = [arrow(value=[f"v{n}" for n in range(first, first + 3)], partition=[0] * 3) for first in (0, 10)]
            results = [sent(writer.write(iter([rows]))) for rows in tasks]
            sink.streamWriter(schema, overwrite=False).commit(results, number)
        assert read(cluster, name, 0) == values(0, 10, 0, 10)
        assert topics.committed(shared_node.bootstrap, "chronik-sink-sink-serialized") == {(name, 0): 1}
