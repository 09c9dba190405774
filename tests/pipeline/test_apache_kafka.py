"""The source's reading half on Apache Kafka: compressed, transactional and trimmed topics."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer
from tests.support import topics
from tests.support.apache_kafka import ApacheKafka
from tests.support.topics import numbered

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.options import SourceOptions
from chronik.pipeline.source.planner import Planner
from chronik.pipeline.source.reading import ReadSettings, read_range
from chronik.wire.compression import CODECS

pytestmark = pytest.mark.timeout(180)


def rows(kafka: ApacheKafka, **given: str) -> list[dict[str, Any]]:
    options = SourceOptions.parse({"kafka.bootstrap.servers": kafka.bootstrap, **given}, streaming=False)
    settings = ReadSettings(options.bootstrap, options.with_headers, options.committed_only, options.fail_on_data_loss)
    with BlockingCluster(kafka.bootstrap) as cluster:
        planner = Planner(options, cluster, print)
        parts = planner.batch_ranges()
    return [row for part in parts for batch in read_range(*part, settings) for row in batch.to_pylist()]


@pytest.mark.parametrize("codec", range(len(CODECS)))
def test_the_source_reads_each_codec(apache_kafka: ApacheKafka, codec: int) -> None:
    name = f"codec-{CODECS[codec]}"
    topics.create(apache_kafka.bootstrap, name, 2)
    topics.append(apache_kafka.bootstrap, name, 1, numbered(100), numbered(100, 100), codec=codec)
    found = rows(apache_kafka, subscribe=name)
    assert [(row["partition"], row["offset"], row["value"]) for row in found] == [
        (1, i, b"v%d" % i) for i in range(200)
    ]


def test_aborted_records_are_visible_only_without_read_committed(apache_kafka: ApacheKafka) -> None:
    name = "transactions"
    topics.create(apache_kafka.bootstrap, name, 1)
    producer = Producer({"bootstrap.servers": apache_kafka.bootstrap, "transactional.id": "pipeline-test"})
    producer.init_transactions(60)
    for value, commits in ((b"kept", True), (b"dropped", False), (b"kept too", True)):
        producer.begin_transaction()
        producer.produce(name, value, b"k", headers=[("h", b"1")])
        producer.flush(30)
        (producer.commit_transaction if commits else producer.abort_transaction)(30)
    every = rows(apache_kafka, subscribe=name)
    committed = rows(apache_kafka, subscribe=name, **{"kafka.isolation.level": "read_committed"})
    assert [row["value"] for row in every] == [b"kept", b"dropped", b"kept too"]
    assert [(row["offset"], row["value"]) for row in committed] == [(0, b"kept"), (4, b"kept too")]


def test_a_read_committed_read_ends_at_an_open_transaction(apache_kafka: ApacheKafka) -> None:
    name = "open-transaction"
    topics.create(apache_kafka.bootstrap, name, 1)
    topics.append(apache_kafka.bootstrap, name, 0, numbered(3))
    producer = Producer({"bootstrap.servers": apache_kafka.bootstrap, "transactional.id": "pipeline-open"})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(name, b"not yet")
    producer.flush(30)
    committed = rows(apache_kafka, subscribe=name, **{"kafka.isolation.level": "read_committed"})
    assert [row["offset"] for row in committed] == [0, 1, 2]
    assert len(rows(apache_kafka, subscribe=name)) == 4
    producer.abort_transaction(30)


def test_records_missing_from_a_trimmed_log_are_an_error_or_a_gap(apache_kafka: ApacheKafka) -> None:
    name = "trimmed"
    topics.create(apache_kafka.bootstrap, name, 1)
    topics.append(apache_kafka.bootstrap, name, 0, *[numbered(10)] * 3)
    topics.trim(apache_kafka.bootstrap, name, 0, 13)
    start = f'{{"{name}": {{"0": 0}}}}'
    assert [row["offset"] for row in rows(apache_kafka, subscribe=name)] == list(range(13, 30))
    with pytest.raises(PipelineError, match="offsets 0 to 12 are no longer in the log"):
        rows(apache_kafka, subscribe=name, startingOffsets=start)
    lenient = rows(apache_kafka, subscribe=name, startingOffsets=start, failOnDataLoss="false")
    assert [row["offset"] for row in lenient] == list(range(13, 30))


def test_the_source_commits_offsets_to_a_group(apache_kafka: ApacheKafka) -> None:
    topics.create(apache_kafka.bootstrap, "grouped", 2)
    with BlockingCluster(apache_kafka.bootstrap) as cluster:
        cluster.commit("pipeline-group", {("grouped", 0): 5, ("grouped", 1): 7})
    assert topics.committed(apache_kafka.bootstrap, "pipeline-group") == {("grouped", 0): 5, ("grouped", 1): 7}
