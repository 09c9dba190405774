"""The same landing with separate worker processes, and with Spark's own connector, which must agree with our source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.run_chronik import Outcome
from tests.support import topics
from tests.support.landing import IN_ONE_SESSION, landed, sql
from tests.support.node import Node
from tests.support.spark_jars import MISSING, connector_jars
from tests.support.topics import NOW_MS, numbered

from chronik.client.ledger import Ledger
from chronik.pipeline.session import java_fault

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUN_S_MAX = 400.0
pytestmark = pytest.mark.timeout(600)

Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _java() -> None:
    fault = java_fault()
    if fault is not None:
        pytest.skip(fault)


@pytest.fixture
def jars() -> str:
    found = connector_jars()
    if not found:
        pytest.skip(MISSING)
    return found


def filled(node: Node, topic: str) -> None:
    topics.create(node.bootstrap, topic, 2)
    topics.append(node.bootstrap, topic, 0, [(None, None, [("a", b"1"), ("a", None)], topics.NOW_MS)], numbered(39))
    topics.append(node.bootstrap, topic, 1, numbered(20))


def test_separate_worker_processes_land_and_audit_a_topic(shared_node: Node, tmp_path: Path) -> None:
    """The whole pipeline; the ledger is sent to the workers."""
    topics.create(shared_node.bootstrap, "land-workers", 2)
    ledger, to = str(tmp_path / "acked.jsonl"), str(tmp_path / "tables")
    with Ledger(ledger) as written:
        for partition in (0, 1):
            records = [(b"k", b'{"n": %d}' % n, [("h", b"1")], NOW_MS + n) for n in range(50)]
            topics.append(shared_node.bootstrap, "land-workers", partition, records)
            for offset, (key, value, headers, time_ms) in enumerate(records):
                written.record("land-workers", partition, offset, time_ms, key, value, headers)
    where = ["land-workers", "-b", shared_node.bootstrap, "--group", "land-workers-group"]
    executors = ("memory=512m", "extraJavaOptions=-XX:TieredStopAtLevel=1")
    cluster = ["--master", "local-cluster[2,1,1024]"]
    cluster += [option for value in executors for option in ("--conf", f"spark.executor.{value}")]
    land = ["land", *where, *cluster, "--to", to, "--once"]
    audit = ["audit", *where, *cluster, "--ledger", ledger, "--table", to, "--json"]
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_SESSION, json.dumps([land, audit])],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert landed(tmp_path / "tables" / "land-workers") == [(p, offset) for p in (0, 1) for offset in range(50)]
    told = json.loads(done.stdout)
    assert told["verdict"] == "complete"
    assert [told[side] for side in ("acked", "readable", "delivered", "landed")] == [100, 100, 100, 100]
    assert told["verified"] == 100


def test_spark_submit_runs_the_command_on_its_own_master(shared_node: Node, tmp_path: Path) -> None:
    """As docs/pipeline.md describes; the command must not replace spark-submit's master."""
    topics.create(shared_node.bootstrap, "land-submit", 1)
    topics.append(shared_node.bootstrap, "land-submit", 0, numbered(20))
    job = tmp_path / "job.py"
    job.write_text(
        "import sys\nfrom pyspark.sql import SparkSession\nfrom chronik.cli import main\n\n"
        "stop = SparkSession.stop\n"
        "SparkSession.stop = lambda self: (print('master', self.sparkContext.master), stop(self))\n"
        "sys.exit(main())\n"
    )
    bin_folder = Path(sys.executable).parent
    activated = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
    submit = [str(bin_folder / "spark-submit"), "--master", "local[1]", "--conf", "spark.ui.enabled=false"]
    land = ["pipeline", "land", "land-submit", "-b", shared_node.bootstrap, "--once", "--to", str(tmp_path / "tables")]

    def submitted(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*submit, str(job), *land, *options]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_S_MAX, env=activated, cwd=tmp_path, check=False
        )

    done = submitted()
    assert done.returncode == 0, done.stderr[-4000:]
    assert "master local[1]" in done.stdout
    assert landed(tmp_path / "tables" / "land-submit") == [(0, offset) for offset in range(20)]
    refused = submitted("--source", "none")
    assert refused.returncode == 2 and "--source none is unknown" in refused.stdout


def test_the_source_reads_the_same_rows_as_the_kafka_connector_of_spark(
    spark: SparkSession, shared_node: Node, jars: str
) -> None:
    name = "land-interop"
    filled(shared_node, name)
    options = {"kafka.bootstrap.servers": shared_node.bootstrap, "subscribe": name, "includeHeaders": "true"}
    made = spark.range(200).selectExpr(
        "cast(string(id) as binary) key",
        "cast(concat('by spark ', id) as binary) value",
        "cast(id % 2 as int) partition",
        "if(id < 100, array(struct('h' as key, cast('x' as binary) as value)), null) headers",
    )
    made.write.format("kafka").options(**options, topic=name).save()
    theirs, ours = (
        sorted(spark.read.format(source).options(**options).load().collect(), key=lambda row: (row[3], row[4]))
        for source in ("kafka", "chronik")
    )
    assert theirs == ours
    assert len(ours) == 260


def test_both_sources_land_the_same_rows(shared_node: Node, tmp_path: Path, jars: str, command: Command) -> None:
    filled(shared_node, "land-sources")
    land = ("pipeline", "land", "land-sources", "-b", shared_node.bootstrap, "--once", "--to")
    kafka = ("--group", "land-sources-group", "--source", "kafka", "--conf", f"spark.jars={jars}")
    done = command(*land, str(tmp_path / "kafka"), *kafka)
    assert done.code == 0, done.err
    committed = {("land-sources", 0): 40, ("land-sources", 1): 20}
    assert topics.committed(shared_node.bootstrap, "land-sources-group") == committed
    done = command(*land, str(tmp_path / "chronik"))
    assert done.code == 0, done.err
    everything = 'select * from landed order by "partition", "offset"'
    theirs, ours = (sql(tmp_path / source / "land-sources", everything) for source in ("kafka", "chronik"))
    assert theirs == ours
    assert len(ours) == 60
