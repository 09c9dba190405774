"""What a landing meets in production, on real Spark: other landings, odd records, brokers and workers that fail."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.landing import landed, sql
from tests.support.node import Node
from tests.support.topics import numbered

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.delta import LandingTable
from chronik.pipeline.land.maintenance import MERGE_FILES, write_amplification
from chronik.pipeline.land.task import NewFile
from chronik.pipeline.land.topic_landing import ROWS_PER_BATCH_SETTING, LandSettings, TopicLanding, topic_ids

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUN_S_MAX = 120.0
LARGE_BYTES = 200_000

pytestmark = pytest.mark.timeout(300)

_runs = count()


def settings_of(node: Node, folder: Path, checkpoint: str) -> LandSettings:
    return LandSettings(
        bootstrap=node.bootstrap,
        to=str(folder),
        checkpoint=str(folder / checkpoint),
        token=f"fault{next(_runs)}",
        once=True,
        trigger_s=0,
        wall_ms=lambda: time.time_ns() // 1_000_000,
    )


def landing(spark: SparkSession, topic: str, settings: LandSettings) -> TopicLanding:
    return TopicLanding(spark, topic, topic_ids(settings.bootstrap, [topic])[topic], settings, None, time.monotonic)


def run(job: TopicLanding) -> TopicLanding:
    job.start()
    try:
        eventually(lambda: job.wait(0.1), RUN_S_MAX)
    finally:
        job.stop()
    return job


def each(partition: int, number: int) -> list[tuple[int, int]]:
    return [(partition, offset) for offset in range(number)]


@pytest.fixture
def rows_per_batch(spark: SparkSession) -> Iterator[Callable[[int], None]]:
    yield lambda rows: spark.conf.set(ROWS_PER_BATCH_SETTING, str(rows))
    spark.conf.unset(ROWS_PER_BATCH_SETTING)


def test_two_landings_with_their_own_checkpoints_land_each_record_once(
    spark: SparkSession,
    shared_node: Node,
    tmp_path: Path,
    rows_per_batch: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second landing commits partition 1 while the first one commits partition 0, so nothing conflicts."""
    at, name = shared_node.bootstrap, "land-twice"
    topics.create(at, name, 2)
    topics.append(at, name, 0, numbered(10))
    run(landing(spark, name, settings_of(shared_node, tmp_path, "c0")))  # so that the next ones overlap
    topics.append(at, name, 0, numbered(30))
    first = landing(spark, name, settings_of(shared_node, tmp_path, "c1"))
    only_1 = {"startingOffsets": json.dumps({name: {"0": -1, "1": 0}})}
    second = landing(spark, name, replace(settings_of(shared_node, tmp_path, "c2"), starting=only_1))
    commit, began = LandingTable.commit, list[str]()

    def commit_late(table: LandingTable, query: str, batch: int, files: Sequence[NewFile]) -> None:
        if files and not began:
            began.append(query)
            topics.append(at, name, 1, numbered(20))
            run(second)
        commit(table, query, batch, files)

    monkeypatch.setattr(LandingTable, "commit", commit_late)
    run(first)
    monkeypatch.undo()
    assert (first.rows, second.rows) == (30, 20)
    topics.append(at, name, 1, numbered(5))
    again = landing(spark, name, settings_of(shared_node, tmp_path, "c1"))
    # The same process continues, with what it knows about the table.
    again._lander = first._lander
    run(again)
    assert again.rows == 5
    assert landed(tmp_path / name) == each(0, 40) + each(1, 25)


def test_a_timestamp_in_a_far_year_does_not_stop_a_landing(
    spark: SparkSession, shared_node: Node, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "land-poison"
    topics.create(at, name)
    topics.alter(at, name, {"message.timestamp.after.max.ms": str(2**63 - 1)})
    year_57845_ms = 1_763_000_000_000_000
    topics.append(at, name, 0, numbered(3), [(None, b"poison", (), year_57845_ms)], numbered(3))
    assert run(landing(spark, name, settings_of(shared_node, tmp_path, "c"))).rows == 7
    far = sql(tmp_path / name, 'select "offset", value from landed where "timestamp" is null')
    assert far == [(3, b"poison")]
    assert landed(tmp_path / name) == each(0, 7)


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[Node]:
    """A node that a test can kill."""
    node = Node(tmp_path / "node")
    node.start()
    yield node
    node.kill()


def python_workers() -> list[int]:
    """Return the Python processes that the Spark of this test forked for tasks: children of its daemon.

    Not all of the machine: other tests run at the same time, with a Spark of their own.
    """
    parents, daemons = {}, set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if b"pyspark.daemon" in (entry / "cmdline").read_bytes():
                    daemons.add(int(entry.name))

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [pid for pid in sorted(daemons) if parents[pid] in daemons and is_ours(pid)]


@pytest.fixture
def live_workers(spark: SparkSession) -> Iterator[None]:
    """Use up the killed workers of the test: Spark keeps them in its pool, and the next job that gets one fails."""
    yield
    for _ in range(8):
        with suppress(Exception):
            spark.range(0, 8, 1, 8).mapInArrow(lambda batches: batches, "id long").count()


def kill_workers() -> None:
    for pid in python_workers():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_a_landing_survives_brokers_that_are_down_and_killed_workers(
    spark: SparkSession,
    own_node: Node,
    tmp_path: Path,
    rows_per_batch: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    live_workers: None,
) -> None:
    at, name = own_node.bootstrap, "land-outage"
    topics.create(at, name)
    topics.append(at, name, 0, numbered(5))
    settings = replace(settings_of(own_node, tmp_path, "c"), once=False, group="outage", retry_for_s=RUN_S_MAX)
    job = landing(spark, name, settings)

    def lands(number: int) -> bool:
        job.wait(0.1)
        return landed(tmp_path / name) == each(0, number)

    def lines(start: str) -> int:
        return sum(record.getMessage().startswith(f"landing {name} {start}") for record in caplog.records)

    with caplog.at_level(logging.WARNING):
        job.start()
        try:
            eventually(lambda: lands(5), RUN_S_MAX)
            own_node.kill()
            eventually(lambda: job.wait(0.1) or lines("waits"), RUN_S_MAX, "the outage is noticed")
            own_node.start()
            topics.append(at, name, 0, numbered(5))
            eventually(lambda: lands(10) and lines("continues"), RUN_S_MAX, "the landing continues")
            assert (lines("waits"), lines("continues")) == (1, 1)
            rows_per_batch(20)
            topics.append(at, name, 0, numbered(390))
            appended = 400

            def kills_are_noticed() -> bool:
                nonlocal appended
                kill_workers()
                job.wait(0.05)
                topics.append(at, name, 0, numbered(1))
                appended += 1
                return lines("waits") == 2

            eventually(kills_are_noticed, RUN_S_MAX, "a killed worker is noticed")
            eventually(lambda: lands(appended), RUN_S_MAX, "all lands")
        finally:
            job.stop()
    # Two outages may last the same number of seconds.
    messages = [message for record in caplog.records if " continues after " not in (message := record.getMessage())]
    assert len(messages) == len(set(messages)), messages
    job = landing(spark, name, replace(settings, retry_for_s=0, checkpoint=str(tmp_path / "other")))
    own_node.kill()
    job.start()
    try:
        with pytest.raises(
            PipelineError, match=r"no answer from .* could not be landed for 0 s \(--retry-for\), so fix"
        ):
            eventually(lambda: job.wait(0.2), RUN_S_MAX)
    finally:
        job.stop()


def test_a_trickle_of_records_does_not_rewrite_the_table(
    spark: SparkSession,
    shared_node: Node,
    tmp_path: Path,
    rows_per_batch: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many micro-batches of a few records, in a date that has large files."""
    monkeypatch.setattr("chronik.pipeline.land.maintenance.SMALL_BYTES", LARGE_BYTES // 2)
    at, name = shared_node.bootstrap, "land-trickle"
    topics.create(at, name, 4)
    for partition in range(4):
        topics.append(at, name, partition, [(None, os.urandom(LARGE_BYTES), (), topics.NOW_MS)])
    settings = settings_of(shared_node, tmp_path, "c")
    run(landing(spark, name, settings))
    large = set(DeltaTable(str(tmp_path / name)).file_uris())
    for partition in range(4):
        topics.append(at, name, partition, numbered(16))
    rows_per_batch(4)
    assert run(landing(spark, name, settings)).rows == 64
    table = DeltaTable(str(tmp_path / name))
    assert large < set(table.file_uris()) and len(table.file_uris()) < 4 + MERGE_FILES
    written = sum(file.stat().st_size for file in Path(tmp_path, name).rglob("*.parquet"))
    landed_bytes = sum(commit["chronik"]["bytes"] for commit in table.history() if "bytes" in commit.get("chronik", {}))
    assert written <= 3 * landed_bytes
    amplification = write_amplification(table)
    assert amplification is not None and 1 < amplification <= 3
    assert sorted(landed(tmp_path / name)) == [pair for partition in range(4) for pair in each(partition, 17)]
