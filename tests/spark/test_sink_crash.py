"""Exactly once through the sink: drivers, JVMs, workers and brokers are killed, and a read_committed reader counts."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.spark_python import processes_of
from tests.support.topics import numbered

from chronik.client.transactions import Transactions
from chronik.pipeline.session import java_fault
from chronik.pipeline.sink.delivery import PREFIX
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.ranges import RecordRange
from chronik.pipeline.source.reading import ReadSettings, read_range
from chronik.testing.cluster import TestCluster
from chronik.wire.errors import ErrorCode, KafkaError

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = 3
RECORDS_PER_PARTITION = 400
ROWS_PER_MICRO_BATCH = PARTITIONS * RECORDS_PER_PARTITION
RECORDS_PER_KILL = 3 * RECORDS_PER_PARTITION
NUMBERS_PER_PARTITION = 10_000_000
CHECKED_RUNS = 0.5
"""The share of runs after which a check ends the transaction of a killed driver. Otherwise the next driver ends it."""
RUN_S_MAX = 240.0
KILL_WITHIN_S = 1.0
RUNS_MAX = 60
KINDS = ("driver", "everything", "worker", "broker")


@pytest.fixture(autouse=True)
def _java() -> None:
    fault = java_fault()
    if fault is not None:
        pytest.skip(fault)


class Driver:
    """One run of the job of `tests.support.sink_job`."""

    def __init__(self, bootstrap: str, source: str, target: str, folder: Path, until: str) -> None:
        self.log = folder / "driver.log"
        self.checkpoint = folder / "checkpoint"
        arguments = [bootstrap, source, target, str(self.checkpoint), str(ROWS_PER_MICRO_BATCH), until]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "tests.support.sink_job", *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def commits(self) -> int:
        return sum(file.name.isdigit() for file in self.checkpoint.glob("commits/*"))

    def wait_for_commits(self, more: int) -> None:
        """Wait for `more` new commits, or for the end of the run."""
        wanted = self.commits() + more
        eventually(lambda: self.process.poll() is not None or self.commits() >= wanted, RUN_S_MAX, "commits")

    def kill(self, kind: str) -> None:
        if kind == "worker":
            for pid in self._workers():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif kind == "driver":
            self.process.kill()  # its JVM ends later by itself
            self.process.wait()
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def wait_for_processes(self) -> None:
        """Wait until no process of this run is left: a JVM outlives its driver by seconds, and may still commit."""
        gone = "the processes of a killed driver have exited"
        eventually(lambda: not processes_of(self.process.pid), RUN_S_MAX, gone)

    def _workers(self) -> list[int]:
        """Return the processes of this run that encode rows or commit micro-batches: Spark's daemons start them all."""
        return processes_of(self.process.pid, "pyspark.daemon")


@contextmanager
def driver(bootstrap: str, source: str, target: str, folder: Path, until: str) -> Iterator[Driver]:
    started = Driver(bootstrap, source, target, folder, until)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill("everything")


def visible(bootstrap: str, topic: str) -> Counter[bytes]:
    """Return how often a read_committed reader finds each value."""
    names = [(topic, partition) for partition in range(PARTITIONS)]
    with BlockingCluster(bootstrap) as cluster:
        ends = cluster.offsets(names, -1, committed_only=True)
    settings = ReadSettings(bootstrap, committed_only=True)
    counts: Counter[bytes] = Counter()
    for (_, partition), end in ends.items():
        for batch in read_range(RecordRange(topic, partition, 0, end), "", settings):
            counts.update(batch.column("value").to_pylist())
    return counts


def micro_batches(checkpoint: Path, source: str) -> list[set[bytes]]:
    """Return the values of each micro-batch that Spark has planned, by the offsets in its checkpoint."""
    planned: list[set[bytes]] = []
    reached = dict.fromkeys(range(PARTITIONS), 0)
    files = sorted((file for file in checkpoint.glob("offsets/*") if file.name.isdigit()), key=lambda f: int(f.name))
    for file in files:
        lines = file.read_text().splitlines()
        if len(lines) < 3:
            break  # the driver was killed while it wrote this
        offsets = json.loads(lines[2])["topics"][source]["offsets"]
        ends = {partition: offsets.get(str(partition), 0) for partition in reached}
        planned.append(
            {value(partition, at) for partition in reached for at in range(reached[partition], ends[partition])}
        )
        reached = ends
    return planned


def value(partition: int, offset: int) -> bytes:
    return b"v%d" % (partition * NUMBERS_PER_PARTITION + offset)


async def end_open(transactions: Transactions, transactional_id: str) -> None:
    try:
        await transactions.fence(await transactions.describe(transactional_id))
    except KafkaError as error:
        # A driver that was killed early has not used its id yet.
        if error.code is not ErrorCode.transactional_id_not_found:
            raise


def check_whole(bootstrap: str, source: str, target: str, checkpoint: Path) -> int:
    """End what a killed driver left open, and check that each micro-batch is visible as a whole or not at all."""
    query = json.loads((checkpoint / "metadata").read_text())["id"]
    with BlockingCluster(bootstrap) as cluster:
        cluster.run(end_open(Transactions(cluster.cluster), PREFIX + query))
    counts = visible(bootstrap, target)
    assert all(count == 1 for count in counts.values()), counts.most_common(3)
    shown = [len(batch & counts.keys()) for batch in micro_batches(checkpoint, source)]
    whole = [len(batch) for batch in micro_batches(checkpoint, source)]
    assert all(seen in (0, size) for seen, size in zip(shown, whole, strict=True)), (shown, whole)
    return sum(seen > 0 for seen in shown)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("worker", "broker", "everything"), marks=pytest.mark.timeout(900)),
        pytest.param(KINDS * 7, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
    ids=["three kills", "twenty kills"],
)
def test_each_row_is_visible_once_and_no_micro_batch_in_part_despite_kills(
    chronik_cluster: TestCluster, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    at = chronik_cluster.bootstrap
    source, target = (chronik_cluster.topic(partitions=PARTITIONS, retention_ms="-1") for _ in range(2))
    left, written, runs = list(kinds), 0, 0
    while left:
        with driver(at, source, target, tmp_path, "killed") as job:
            while left and job.process.poll() is None:
                append(at, source, written, RECORDS_PER_KILL)
                written += RECORDS_PER_KILL
                job.wait_for_commits(1)
                try:
                    job.process.wait(chance.uniform(0, KILL_WITHIN_S))
                except subprocess.TimeoutExpired:
                    print(f"run {runs}: kill {left[0]} after commit {job.commits() - 1}", flush=True)
                    if left[0] == "broker":
                        chronik_cluster.heal()
                        chronik_cluster.kill(chronik_cluster.leader(target, chance.randrange(PARTITIONS)))
                    else:
                        job.kill(left[0])
                    left.pop(0)
        runs += 1
        assert runs <= RUNS_MAX, job.log.read_text()[-5000:]
        if (job.checkpoint / "metadata").exists() and chance.random() < CHECKED_RUNS:
            job.wait_for_processes()
            print(f"run {runs}: {check_whole(at, source, target, job.checkpoint)} whole micro-batches", flush=True)
    with driver(at, source, target, tmp_path, "the end") as job:
        assert job.process.wait(RUN_S_MAX) == 0, job.log.read_text()[-5000:]
    assert check_whole(at, source, target, job.checkpoint) >= written // RECORDS_PER_PARTITION
    expected = {value(partition, offset) for partition in range(PARTITIONS) for offset in range(written)}
    assert visible(at, target).keys() == expected


def append(bootstrap: str, topic: str, first: int, count: int) -> None:
    """Append the next records to each partition."""
    for partition in range(PARTITIONS):
        topics.append(bootstrap, topic, partition, numbered(count, partition * NUMBERS_PER_PARTITION + first))
