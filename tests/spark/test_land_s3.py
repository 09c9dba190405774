"""Landings in an object store by real Spark: a driver is killed, checkpoints are lost, and the audit is complete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.cli.run_chronik import CHRONIK
from tests.support import topics
from tests.support.eventually import eventually
from tests.support.landing import IN_ONE_SESSION
from tests.support.node import Node
from tests.support.s3_server import bucket

from chronik.client.ledger import Ledger
from chronik.pipeline.session import java_fault

PARTITIONS, RECORDS = 2, 6_000
ROWS_PER_BATCH = 600
RUN_S_MAX = 600.0


@pytest.fixture
def s3() -> Iterator[str]:
    fault = java_fault()
    if fault is not None:
        pytest.skip(fault)
    with bucket() as name:
        yield name


def version(uri: str) -> int:
    return DeltaTable(uri).version() if DeltaTable.is_deltatable(uri) else -1


@pytest.mark.timeout(1800)
def test_a_killed_driver_and_a_lost_checkpoint_leave_each_record_once_in_s3(
    shared_node: Node, s3: str, tmp_path: Path
) -> None:
    at, name, to = shared_node.bootstrap, "land-s3", f"s3://{s3}/tables"
    topics.create(at, name, PARTITIONS)
    with Ledger(tmp_path / "acked.jsonl") as ledger:
        for partition in range(PARTITIONS):
            records = [(b"k%d" % number, b"v%d" % number, (), topics.NOW_MS + number) for number in range(RECORDS)]
            topics.append(at, name, partition, *[records[first : first + 500] for first in range(0, RECORDS, 500)])
            for offset, (key, value, _, time_ms) in enumerate(records):
                ledger.record(name, partition, offset, time_ms, key, value)
    spark = ["--master", "local[2]", "-b", at]
    small = ["--conf", f"spark.chronik.maxOffsetsPerTrigger={ROWS_PER_BATCH}"]
    land = ["land", name, "--to", to, "--once", *spark]
    log = tmp_path / "driver.log"
    with log.open("ab") as output:
        killed = subprocess.Popen(
            [str(CHRONIK), "pipeline", *land, *small, "--checkpoint", str(tmp_path / "first")],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        eventually(lambda: killed.poll() is not None or version(f"{to}/{name}") >= 2, RUN_S_MAX, "commits")
        assert killed.poll() is None, log.read_text()
        killed.kill()
        killed.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(killed.pid, signal.SIGKILL)  # its JVM, too
    landed = DeltaTable(f"{to}/{name}").to_pyarrow_table(columns=["offset"]).num_rows
    assert 0 < landed < PARTITIONS * RECORDS
    again = [*land, "--checkpoint", str(tmp_path / "second")]
    audit = ["audit", name, "--table", to, "--ledger", str(tmp_path / "acked.jsonl"), "--json", *spark]
    state = ["land", name, "--to", f"{to}/state", "--once", "--mode", "upsert", *spark]
    upserts = [[*state, "--checkpoint", str(tmp_path / folder)] for folder in ("state", "lost")]
    program = [sys.executable, "-c", IN_ONE_SESSION, json.dumps([again, *upserts, audit])]
    done = subprocess.run(program, capture_output=True, text=True, timeout=RUN_S_MAX)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    counts = result["verdict"], result["acked"], result["readable"], result["landed"]
    assert counts == ("complete", *[PARTITIONS * RECORDS] * 3)
    assert (result["gaps"], result["duplicates"], result["mismatches"]) == (0, 0, 0)
    # Each key is in both partitions with one timestamp, so the higher partition has its state.
    rows = DeltaTable(f"{to}/state/{name}").to_pyarrow_table(columns=["key", "partition", "offset"]).to_pylist()
    assert sorted((row["partition"], row["offset"]) for row in rows) == [(1, offset) for offset in range(RECORDS)]
    assert {row["key"] for row in rows} == {b"k%d" % number for number in range(RECORDS)}
