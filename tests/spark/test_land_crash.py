"""Exactly once, as a user would see it: the driver is killed at random times, a broker is killed, and DuckDB counts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.landing import sql

from chronik.pipeline.session import java_fault
from chronik.testing.cluster import TestCluster
from chronik.wire.records import NewRecord

CHRONIK = Path(sys.executable).with_name("chronik")
PARTITIONS = 3
RECORDS_PER_BATCH = 1000
RUN_S_MAX = 240.0
KILL_WITHIN_S = 2.0


@pytest.fixture(autouse=True)
def _java() -> None:
    fault = java_fault()
    if fault is not None:
        pytest.skip(fault)


class Driver:
    """One run of `chronik pipeline land --once`."""

    def __init__(self, bootstrap: str, topic: str, folder: Path, rows_per_batch: int) -> None:
        self.log = folder / "driver.log"
        self._table = folder / "tables" / topic
        command = ["pipeline", "land", topic, "--to", str(folder / "tables"), "--once", "--group", "g", "-b", bootstrap]
        spark = ["--master", "local[2]", "--conf", f"spark.chronik.maxOffsetsPerTrigger={rows_per_batch}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(CHRONIK), *command, *spark], stdout=log, stderr=log, start_new_session=True
            )

    def commits(self) -> int:
        return len(list(self._table.glob("_delta_log/*.json")))

    def wait_for_commits(self, more: int) -> None:
        """Wait for `more` new commits, or for the end of the run."""
        wanted = self.commits() + more
        eventually(lambda: self.process.poll() is not None or self.commits() >= wanted, RUN_S_MAX, "commits")

    def finish(self) -> int:
        return self.process.wait(RUN_S_MAX)

    def kill(self) -> None:
        """Kill the driver alone: its JVM ends later by itself, and the next start has to tolerate it until then."""
        self.process.kill()
        self.process.wait()


@contextmanager
def driver(bootstrap: str, topic: str, folder: Path, rows_per_batch: int) -> Iterator[Driver]:
    started = Driver(bootstrap, topic, folder, rows_per_batch)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            os.killpg(started.process.pid, signal.SIGKILL)
            started.process.wait()


def fill(bootstrap: str, topic: str, records: int) -> None:
    batch: list[NewRecord] = [(b"k%d" % i, b"v" * 100, (), topics.NOW_MS + i) for i in range(RECORDS_PER_BATCH)]
    for partition in range(PARTITIONS):
        count = records // PARTITIONS // RECORDS_PER_BATCH
        topics.append(bootstrap, topic, partition, *[batch] * count)


@pytest.mark.parametrize(
    ("records", "kills"),
    [
        pytest.param(60_000, 1, marks=pytest.mark.timeout(600)),
        pytest.param(2_001_000, 5, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_each_record_lands_once_despite_killed_drivers_and_a_killed_broker(
    chronik_cluster: TestCluster, tmp_path: Path, records: int, kills: int
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    topic = chronik_cluster.topic(partitions=PARTITIONS, retention_ms="-1")
    fill(chronik_cluster.bootstrap, topic, records)
    rows_per_batch = records // (5 * (kills + 1))
    for kill in range(kills):
        with driver(chronik_cluster.bootstrap, topic, tmp_path, rows_per_batch) as job:
            job.wait_for_commits(chance.randint(1, 3))
            pause_s = chance.uniform(0, KILL_WITHIN_S)
            try:
                job.process.wait(pause_s)
            except subprocess.TimeoutExpired:
                job.kill()
        assert job.process.returncode in (0, -signal.SIGKILL), job.log.read_text()
        print(f"kill {kill + 1}: {pause_s:.2f} s after commit {job.commits() - 1}")
    with driver(chronik_cluster.bootstrap, topic, tmp_path, rows_per_batch) as job:
        job.wait_for_commits(1)
        chronik_cluster.kill(chronik_cluster.leader(topic, chance.randrange(PARTITIONS)))
        assert job.finish() == 0, job.log.read_text()
    table = tmp_path / "tables" / topic
    each = records // PARTITIONS // RECORDS_PER_BATCH * RECORDS_PER_BATCH
    query = 'count(*), count(distinct "offset"), min("offset"), max("offset")'
    found = sql(table, f'select "partition", {query} from landed group by all order by all')
    assert found == [(partition, each, each, 0, each - 1) for partition in range(PARTITIONS)]
    assert topics.committed(chronik_cluster.bootstrap, "g") == {(topic, number): each for number in range(PARTITIONS)}
