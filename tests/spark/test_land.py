"""Landing topics in tables with a real Spark session, from a real node."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.landing import landed, sql
from tests.support.node import Node
from tests.support.topics import numbered

from chronik.client.ledger import Ledger
from chronik.pipeline.audit.job import AuditRequest, prepare
from chronik.pipeline.audit.job import run as audit
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.schema import parse_schema
from chronik.pipeline.land.topic_landing import ROWS_PER_BATCH_SETTING, LandSettings, TopicLanding, topic_ids
from chronik.pipeline.source.blocking import BlockingCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUN_S_MAX = 120.0

pytestmark = pytest.mark.timeout(300)  # the first test starts Spark and compiles the decoder

_runs = count()


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    spark.conf.set(ROWS_PER_BATCH_SETTING, "100")
    yield
    spark.conf.unset(ROWS_PER_BATCH_SETTING)


def landing(
    spark: SparkSession, node: Node, topic: str, folder: Path, *, schema: str | None = None, once: bool = True
) -> TopicLanding:
    settings = LandSettings(
        bootstrap=node.bootstrap,
        to=str(folder),
        checkpoint=str(folder / ".checkpoints"),
        token=f"run{next(_runs)}",
        group=f"{topic}-group",
        once=once,
        trigger_s=0,
        wall_ms=lambda: time.time_ns() // 1_000_000,
    )
    fields = None if schema is None else parse_schema(schema, "the schema")
    return TopicLanding(spark, topic, topic_ids(node.bootstrap, [topic])[topic], settings, fields, time.monotonic)


def run(job: TopicLanding) -> TopicLanding:
    job.start()
    try:
        eventually(lambda: job.wait(0.2), RUN_S_MAX)
    finally:
        job.stop()
    return job


def each(partition: int, number: int) -> list[tuple[int, int]]:
    return [(partition, offset) for offset in range(number)]


@pytest.mark.usefixtures("small_batches")
def test_a_topic_lands_once_even_after_a_restart_or_a_lost_checkpoint(
    spark: SparkSession, shared_node: Node, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "land-once"
    topics.create(at, name, 2)
    topics.append(at, name, 0, numbered(150))
    topics.append(at, name, 1, numbered(30))
    job = run(landing(spark, shared_node, name, tmp_path))
    assert job.rows == 180
    # The rate is that of the last micro-batch's rows, which Spark does not see, because it gets ranges.
    took_ms = job._query.lastProgress["durationMs"]["triggerExecution"]
    assert job.figures is not None and round(job.figures.rows_per_s * took_ms / 1000) == 80
    assert topics.committed(at, f"{name}-group") == {(name, 0): 150, (name, 1): 30}
    topics.append(at, name, 1, numbered(20))
    assert run(landing(spark, shared_node, name, tmp_path)).rows == 20
    assert landed(tmp_path / name) == each(0, 150) + each(1, 50)
    assert sql(tmp_path / name, "select distinct value from landed where key = 'k7'::blob") == [(b"v7",)]
    shutil.rmtree(tmp_path / ".checkpoints")
    topics.append(at, name, 0, numbered(5))
    assert run(landing(spark, shared_node, name, tmp_path)).rows == 5
    assert landed(tmp_path / name) == each(0, 155) + each(1, 50)
    assert topics.committed(at, f"{name}-group") == {(name, 0): 155, (name, 1): 50}


def test_json_lands_as_columns_and_invalid_values_as_dead_letters(
    spark: SparkSession, shared_node: Node, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "land-json"
    topics.create(at, name)
    values = [b'{"id": 1, "name": "ann"}', b'{"id": "x"}', b"no json", b'{"id": 2}']
    topics.append(at, name, 0, [(None, value, (), topics.NOW_MS) for value in values])
    job = run(landing(spark, shared_node, name, tmp_path, schema="id BIGINT NOT NULL, name STRING"))
    assert (job.rows, job.dead_letters) == (2, 2)
    assert sql(tmp_path / name, "select id, name from landed order by id") == [(1, "ann"), (2, None)]
    dead = sql(tmp_path / f"{name}_dead_letters", 'select "offset", value, reason from landed order by 1')
    assert [row[:2] for row in dead] == [(1, values[1]), (2, values[2])]
    assert "at `$.id`" in dead[0][2]
    with pytest.raises(PipelineError, match="is not a schema"):
        parse_schema("id BIGNIT", "s.sql")


def test_a_running_landing_follows_its_topic_and_fails_if_it_is_recreated(
    spark: SparkSession, shared_node: Node, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "land-again"
    topics.create(at, name)
    topics.append(at, name, 0, numbered(5))
    job = landing(spark, shared_node, name, tmp_path, once=False)
    job.start()
    try:
        eventually(lambda: landed(tmp_path / name) == each(0, 5), RUN_S_MAX)
        topics.append(at, name, 0, numbered(3))
        eventually(lambda: landed(tmp_path / name) == each(0, 8), RUN_S_MAX)
        eventually(lambda: not job.wait(0.1) and topics.committed(at, f"{name}-group") == {(name, 0): 8}, RUN_S_MAX)
        assert job.figures is not None and dict(job.figures.lag) == {0: 0}
        topics.delete(at, name)
        topics.create(at, name)
        topics.append(at, name, 0, numbered(20))
        # Which error depends on when the query reads: for a moment the topic does not exist.
        with pytest.raises(PipelineError, match=r"was deleted and recreated|does not exist|no such topic"):
            eventually(lambda: job.wait(0.2), RUN_S_MAX)
    finally:
        job.stop()
    assert landed(tmp_path / name) == each(0, 8)
    with pytest.raises(PipelineError, match="recreated since the table"):
        landing(spark, shared_node, name, tmp_path)


def test_the_checkpoint_of_another_job_is_rejected(spark: SparkSession, shared_node: Node, tmp_path: Path) -> None:
    at = shared_node.bootstrap
    for name in ("land-one", "land-two"):
        topics.create(at, name)
        topics.append(at, name, 0, numbered(5))
    run(landing(spark, shared_node, "land-one", tmp_path))
    shutil.copytree(tmp_path / ".checkpoints" / "land-one", tmp_path / ".checkpoints" / "land-two")
    with pytest.raises(PipelineError, match="land-one-0 is in the checkpoint"):
        run(landing(spark, shared_node, "land-two", tmp_path))
    assert landed(tmp_path / "land-two") == []
    shutil.rmtree(tmp_path / "land-one")
    topics.append(at, "land-one", 0, numbered(5))
    with pytest.raises(PipelineError, match="the checkpoint is at batch 1, and the table"):
        run(landing(spark, shared_node, "land-one", tmp_path))


def test_records_of_aborted_and_open_transactions_do_not_land(
    spark: SparkSession, shared_node: Node, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "land-transactions"
    topics.create(at, name, 1)
    producer = Producer({"bootstrap.servers": at, "transactional.id": name})
    producer.init_transactions(30)
    with Ledger(tmp_path / "acked.jsonl") as ledger:

        def write(outcome: str) -> None:
            reports = ledger.transaction()
            producer.begin_transaction()
            for number in range(3):
                producer.produce(name, b"%s %d" % (outcome.encode(), number), b"k", on_delivery=reports.confluent)
            producer.flush(30)
            if outcome == "committed":
                producer.commit_transaction(30)
                reports.commit()
            elif outcome == "aborted":
                producer.abort_transaction(30)
                reports.abort()

        for outcome in ("committed", "aborted", "committed", "open"):
            write(outcome)
        tables = tmp_path / "tables"
        run(landing(spark, shared_node, name, tables))
        first = [(0, offset) for offset in (0, 1, 2, 8, 9, 10)]
        assert landed(tables / name) == first
        producer.abort_transaction(30)
        write("committed")
    with BlockingCluster(at) as cluster:
        end = partial(cluster.offsets, [(name, 0)], -1, committed_only=True)
        eventually(lambda: end() == {(name, 0): 20}, RUN_S_MAX, "the last marker is written")
    run(landing(spark, shared_node, name, tables))
    assert landed(tables / name) == [*first, (0, 16), (0, 17), (0, 18)]
    request = AuditRequest(at, name, ledger=str(tmp_path / "acked.jsonl"), table=str(tables))
    result = audit(spark, prepare(request)).to_json()
    assert (result["verdict"], result["acked"], result["readable"], result["landed"]) == ("complete", 9, 9, 9)
    # A producer that has aborted what the log presents as committed.
    with Ledger(tmp_path / "acked.jsonl") as ledger:
        reports = ledger.transaction()
        reports.record(name, 0, 17, topics.NOW_MS, b"k", b"committed 1")
        reports.abort()
    found = audit(spark, prepare(request)).to_json()["partitions"][0]["unexpected_ranges"]
    assert [(each["side"], each["first"]) for each in found] == [("readable", 17), ("landed", 17)]
