"""The traces of a real node, read by Spark: its own events, and stalls planted beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.run_chronik import Outcome
from tests.conftest import StartNode
from tests.pipeline.support_traces import START_MS, Story, consuming, stopped_consumer
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.node import Node
from tests.support.topics import numbered

from chronik.client.batches import Batches
from chronik.metadata.image import TRACES_TOPIC
from chronik.observe.traces import encode_trace
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.stalls.job import check_traces, stalls_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)

Command = Callable[..., Outcome]


@pytest.fixture(scope="module")
def traced(start_shared_node: StartNode) -> Node:
    """A node with traces of its own topic `real`, and planted ones of `planted`, three partitions."""
    node = start_shared_node()
    at = node.bootstrap
    topics.create(at, "real", 1)
    topics.alter(at, "real", {"chronik.trace": "true"})
    topics.append(at, "real", 0, numbered(5))
    with BlockingCluster(at) as cluster:
        cluster.run(Batches(cluster.cluster).fetch("real", 0, 0))
        eventually(lambda: TRACES_TOPIC in cluster.topics([TRACES_TOPIC]), 20)
        eventually(lambda: cluster.offsets([(TRACES_TOPIC, 0)], -1)[TRACES_TOPIC, 0] > 0, 20)
    moving = Story("planted", 1)
    for second in range(30):
        moving.produced(second, second + 1)
        moving.fetch(second, second, second + 1, size=100)
    for story in (stopped_consumer("planted", 0), moving, consuming(3, "planted", 2)):
        events = [(b"1", encode_trace(event), (), int(event.time_ms)) for event in story.events]
        topics.append(at, TRACES_TOPIC, 0, events)
    return node


def test_the_job_finds_planted_stalls_and_their_causes(spark: SparkSession, traced: Node) -> None:
    check_traces(traced.bootstrap)
    result = stalls_of(spark, traced.bootstrap, topic="planted")
    (stall,) = result.stalls
    assert (stall.topic, stall.partition, stall.from_ms) == ("planted", 0, START_MS + 3000)
    assert (stall.cause, stall.evidence["fetches_elsewhere"]) == ("partition-imbalance", 25)
    told = result.to_json()
    assert [(row["partition"], row["stalls"], row["causes"]) for row in told["partitions"]] == [
        (0, 1, ["partition-imbalance"]),
        (1, 0, []),
        (2, 0, []),
    ]


def test_the_job_can_read_all_events_of_a_real_node(spark: SparkSession, traced: Node) -> None:
    told = stalls_of(spark, traced.bootstrap, topic="real").to_json()
    assert told["events"] > 0
    assert (told["unreadable"], told["stalls"]) == (0, [])


def test_the_command_prints_json_and_writes_a_report(traced: Node, tmp_path: Path, command: Command) -> None:
    report = tmp_path / "stalls.html"
    where = ("-b", traced.bootstrap, "--from", str(int(START_MS)))
    done = command("pipeline", "traces", *where, "--report", str(report), "--json")
    assert done.err == ""
    told = done.json()
    assert "partition-imbalance" in [stall["cause"] for stall in told["stalls"]]
    page = report.read_text()
    assert "<svg" in page
    assert "kept fetching other partitions" in page
    assert "http" not in page


def test_the_command_explains_how_to_enable_traces_if_there_are_none(
    shared_node: Node, command_without_spark: Command
) -> None:
    done = command_without_spark("pipeline", "traces", "-b", shared_node.bootstrap)
    assert done.code == 2
    assert "start tracing with chronik trace on TOPIC" in done.error_line
