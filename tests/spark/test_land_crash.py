"""Exactly once, as a user would see it: the driver is killed at random times, a broker is killed, and DuckDB counts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.landing import sql
from tests.support.spark_python import processes_of

from chronik.pipeline.catalog import open_catalog
from chronik.pipeline.session import java_fault
from chronik.testing.cluster import TestCluster
from chronik.wire.records import NewRecord

CHRONIK = Path(sys.executable).with_name("chronik")
PARTITIONS = 3
RECORDS_PER_BATCH = 1000
RUN_S_MAX = 600.0
KILL_WITHIN_S = 2.0
ATTEMPTS = 4
"""Runs for each kill: a run may end before its kill. More records follow then."""


@pytest.fixture(autouse=True)
def _java() -> None:
    fault = java_fault()
    if fault is not None:
        pytest.skip(fault)


class Driver:
    """One run of `chronik pipeline land --once`."""

    def __init__(self, bootstrap: str, topic: str, folder: Path, rows_per_batch: int, *options: str) -> None:
        self.log = folder / "driver.log"
        self._table = folder / "tables" / topic
        command = ["pipeline", "land", topic, "--to", str(folder / "tables"), "--once", "--group", "g", "-b", bootstrap]
        spark = ["--master", "local[2]", "--conf", f"spark.chronik.maxOffsetsPerTrigger={rows_per_batch}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(CHRONIK), *command, *spark, *options], stdout=log, stderr=log, start_new_session=True
            )

    def commits(self) -> int:
        return sum(len(list(self._table.glob(log))) for log in ("_delta_log/*.json", "metadata/*.metadata.json"))

    def wait_for_commits(self, more: int) -> None:
        """Wait for `more` new commits, or for the end of the run."""
        wanted = self.commits() + more
        eventually(lambda: self.process.poll() is not None or self.commits() >= wanted, RUN_S_MAX, "commits")

    def finish(self) -> int:
        return self.process.wait(RUN_S_MAX)

    def workers(self) -> list[int]:
        """Return the Python processes of this run that tasks run in."""
        return processes_of(self.process.pid, "pyspark.daemon")

    def kill_workers(self) -> int:
        """Return how many were killed."""
        killed = 0
        for pid in self.workers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        return killed

    def kill(self) -> None:
        """Kill the driver alone: its JVM ends later by itself, and the next start has to tolerate it until then."""
        self.process.kill()
        self.process.wait()


@contextmanager
def driver(bootstrap: str, topic: str, folder: Path, rows_per_batch: int, *options: str) -> Iterator[Driver]:
    started = Driver(bootstrap, topic, folder, rows_per_batch, *options)
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
    rounds, done = 1, 0
    for _ in range(ATTEMPTS * kills):
        with driver(chronik_cluster.bootstrap, topic, tmp_path, rows_per_batch) as job:
            job.wait_for_commits(chance.randint(1, 3))
            pause_s = chance.uniform(0, KILL_WITHIN_S)
            try:
                job.process.wait(pause_s)
            except subprocess.TimeoutExpired:
                job.kill()
                done += 1
                print(f"kill {done}: {pause_s:.2f} s after commit {job.commits() - 1}")
        assert job.process.returncode in (0, -signal.SIGKILL), job.log.read_text()
        if done == kills:
            break
        if job.process.returncode == 0:  # it ended before its kill
            fill(chronik_cluster.bootstrap, topic, records)
            rounds += 1
    assert done == kills
    fill(chronik_cluster.bootstrap, topic, records)  # the last run has something to do in any case
    rounds += 1
    with driver(chronik_cluster.bootstrap, topic, tmp_path, rows_per_batch) as job:
        job.wait_for_commits(1)
        chronik_cluster.kill(chronik_cluster.leader(topic, chance.randrange(PARTITIONS)))
        assert job.finish() == 0, job.log.read_text()
    table = tmp_path / "tables" / topic
    each = rounds * (records // PARTITIONS // RECORDS_PER_BATCH * RECORDS_PER_BATCH)
    query = 'count(*), count(distinct "offset"), min("offset"), max("offset")'
    found = sql(table, f'select "partition", {query} from landed group by all order by all')
    assert found == [(partition, each, each, 0, each - 1) for partition in range(PARTITIONS)]
    assert topics.committed(chronik_cluster.bootstrap, "g") == {(topic, number): each for number in range(PARTITIONS)}


UPSERT, ICEBERG = ("--mode", "upsert"), ("--table-format", "iceberg")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [UPSERT, ICEBERG], ids=["upsert", "iceberg"])
def test_tables_of_other_kinds_are_exact_despite_kills_of_anything(
    chronik_cluster: TestCluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Drivers, Python workers and brokers are killed in turn."""
    records, kills = 600_000, 10
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    topic = chronik_cluster.topic(partitions=PARTITIONS, retention_ms="-1")
    fill_and_delete(chronik_cluster.bootstrap, topic, records)
    rows_per_batch = records // (5 * (kills + 1))
    rounds, done = 1, 0
    for _ in range(ATTEMPTS * kills):
        with driver(chronik_cluster.bootstrap, topic, tmp_path, rows_per_batch, *options) as job:
            job.wait_for_commits(chance.randint(1, 2))
            pause_s = chance.uniform(0, KILL_WITHIN_S)
            try:
                job.process.wait(pause_s)
            except subprocess.TimeoutExpired:
                victim = ("driver", "worker", "broker")[done % 3]
                print(f"kill {done + 1}: {victim}, {pause_s:.2f} s after commit {job.commits() - 1}")
                if victim == "broker":
                    chronik_cluster.kill(chronik_cluster.leader(topic, chance.randrange(PARTITIONS)))
                is_done = job.kill_workers() > 0 if victim == "worker" else True
                done += is_done
                if victim != "driver" and done < kills:
                    job.wait_for_commits(1)
                job.kill()
        chronik_cluster.heal()
        if done == kills:
            break
        if job.process.returncode == 0:
            fill_and_delete(chronik_cluster.bootstrap, topic, records)
            rounds += 1
    assert done == kills
    with driver(chronik_cluster.bootstrap, topic, tmp_path, rows_per_batch, *options) as job:
        assert job.finish() == 0, job.log.read_text()
    each = records // PARTITIONS // RECORDS_PER_BATCH * RECORDS_PER_BATCH
    if options == UPSERT:
        # The keys are in all partitions with equal timestamps, so the last one has the current state.
        found = sql(tmp_path / "tables" / topic, 'select key, "partition", "offset" from landed')
        first = rounds * each - RECORDS_PER_BATCH
        assert sorted(found) == sorted((b"k%d" % key, 2, first + key) for key in range(100, RECORDS_PER_BATCH))
        return
    ends = {number: rounds * (each + (100 if number == 0 else 0)) for number in range(PARTITIONS)}
    assert iceberg_places(tmp_path, topic) == [
        (number, offset) for number, end in ends.items() for offset in range(end)
    ]


def fill_and_delete(bootstrap: str, topic: str, records: int) -> None:
    """Append records, and tombstones of 100 keys."""
    fill(bootstrap, topic, records)
    tombstones: list[NewRecord] = [(b"k%d" % key, None, (), topics.NOW_MS + 10_000) for key in range(100)]
    topics.append(bootstrap, topic, 0, tombstones)


def iceberg_places(folder: Path, topic: str) -> list[tuple[int, int]]:
    table = open_catalog(str(folder / "tables"), {}).load_table(("chronik", topic)).scan().to_arrow()
    return sorted(zip(table.column("partition").to_pylist(), table.column("offset").to_pylist(), strict=True))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_one_run_into_iceberg_survives_killed_workers_and_a_killed_broker(
    chronik_cluster: TestCluster, tmp_path: Path
) -> None:
    topic = chronik_cluster.topic(partitions=PARTITIONS, retention_ms="-1")
    fill(chronik_cluster.bootstrap, topic, 30_000)
    with driver(chronik_cluster.bootstrap, topic, tmp_path, 3_000, *ICEBERG) as job:
        job.wait_for_commits(2)
        assert job.kill_workers() > 0, job.log.read_text()
        job.wait_for_commits(1)
        chronik_cluster.kill(chronik_cluster.leader(topic, 0))
        assert job.process.poll() is None, job.log.read_text()
        assert job.finish() == 0, job.log.read_text()
    places = [(number, offset) for number in range(PARTITIONS) for offset in range(10_000)]
    assert iceberg_places(tmp_path, topic) == places
