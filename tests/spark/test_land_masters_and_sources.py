"""The same landing with separate worker processes, and with Spark's own connector, which must agree with our source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import topics
from tests.support.landing import landed, sql
from tests.support.node import Node
from tests.support.topics import numbered

from chronik.pipeline.session import java_fault

CHRONIK = Path(sys.executable).with_name("chronik")
JARS = Path(__file__).resolve().parents[2] / ".tools" / "spark-kafka-4.2"
RUN_S_MAX = 240.0
INTEROP = """
import sys
from chronik.pipeline.session import spark_session

bootstrap, topic, jars = sys.argv[1:]
spark = spark_session("interop", "local[2]", {"spark.jars": jars})
options = {"kafka.bootstrap.servers": bootstrap, "subscribe": topic, "includeHeaders": "true"}
made = spark.range(200).selectExpr(
    "cast(string(id) as binary) key", "cast(concat('by spark ', id) as binary) value", "cast(id % 2 as int) partition",
    "if(id < 100, array(struct('h' as key, cast('x' as binary) as value)), null) headers")
made.write.format("kafka").options(**options, topic=topic).save()
theirs, ours = (
    sorted(spark.read.format(name).options(**options).load().collect(), key=lambda row: (row.partition, row.offset))
    for name in ("kafka", "chronik"))
assert theirs == ours, [pair for pair in zip(theirs, ours) if pair[0] != pair[1]][:3]
assert len(ours) == 260, len(ours)
"""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def _java() -> None:
    fault = java_fault()
    if fault is not None:
        pytest.skip(fault)


@pytest.fixture
def jars() -> str:
    found = ",".join(str(jar) for jar in sorted(JARS.glob("*.jar")))
    if not found:
        pytest.skip(
            "the jars of Spark's own connector are missing: scripts/test-tools gets them where Maven is reachable"
        )
    return found


def filled(node: Node, topic: str) -> None:
    topics.create(node.bootstrap, topic, 2)
    topics.append(node.bootstrap, topic, 0, [(None, None, [("a", b"1"), ("a", None)], topics.NOW_MS)], numbered(39))
    topics.append(node.bootstrap, topic, 1, numbered(20))


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def land(node: Node, topic: str, folder: Path, *options: str) -> Path:
    where = ["--to", str(folder), "-b", node.bootstrap, "--once"]
    run(str(CHRONIK), "pipeline", "land", topic, *where, *options)
    return folder / topic


def test_a_topic_lands_by_separate_worker_processes(shared_node: Node, tmp_path: Path) -> None:
    filled(shared_node, "land-workers")
    memory = ["--conf", "spark.executor.memory=512m"]
    table = land(shared_node, "land-workers", tmp_path, "--master", "local-cluster[2,1,1024]", *memory)
    assert landed(table) == [(0, offset) for offset in range(40)] + [(1, offset) for offset in range(20)]


def test_sparks_own_connector_reads_and_writes_what_our_source_reads(
    shared_node: Node, tmp_path: Path, jars: str
) -> None:
    filled(shared_node, "land-interop")
    run(sys.executable, "-c", INTEROP, shared_node.bootstrap, "land-interop", jars)


def test_both_sources_land_the_same(shared_node: Node, tmp_path: Path, jars: str) -> None:
    filled(shared_node, "land-sources")
    group = ["--group", "land-sources-group", "--master", "local[2]"]
    kafka = ["--source", "kafka", "--conf", f"spark.jars={jars}"]
    theirs = land(shared_node, "land-sources", tmp_path / "kafka", *group, *kafka)
    committed = {("land-sources", 0): 40, ("land-sources", 1): 20}
    assert topics.committed(shared_node.bootstrap, "land-sources-group") == committed
    ours = land(shared_node, "land-sources", tmp_path / "chronik", "--master", "local[2]")
    everything = 'select * from landed order by "partition", "offset"'
    assert sql(theirs, everything) == sql(ours, everything)
    assert len(sql(ours, everything)) == 60
