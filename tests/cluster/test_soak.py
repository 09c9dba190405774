"""The long versions (`make soak`): the promised counts and durations, and the times they take."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.cli.run_chronik import CHRONIK
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_offsets import OffsetWatch, seconds_until_followers_know
from tests.cluster.support_soak import SoakResults
from tests.cluster.support_workload import Workload, all_replicas_agree
from tests.cluster.test_verify import RECORDS, is_complete, verify
from tests.faults.support_faults import NEEDS_LINKS, SINGLE, inject

from chronik.cli.failover_stream import FailoverStream

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

FAULT_RUN_S = 60.0
PAUSE_S = 20.0
QUIET_S_MAX = 5.0
PARTITIONS = 3
GAP_ROUNDS = 5
GAP_RECORDS = 5_000
RATE_PER_S = 1_000.0
VERIFY_RUNS = 20
MILLION = 1_000_000
PROPAGATED_RECORDS = 400
MB = 1024 * 1024

LEADER_KILLED_MS_MAX = 3_000.0
CLEAN_STOP_MS_MAX = 300.0
WATERMARK_P99_MS_MAX = 10.0
START_S_MAX = 3.0
RESIDENT_MB_MAX = 100.0
THOUSAND_PARTITIONS_S_MAX = 10.0


@pytest.mark.parametrize("fault", SINGLE)
def test_a_minute_of(fault: str, start_nodes: StartNodes, results: SoakResults, tmp_path: Path) -> None:
    nodes = start_nodes(cuttable=fault in NEEDS_LINKS)
    topic = nodes.new_topic(PARTITIONS)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    ends_s = time.monotonic() + FAULT_RUN_S
    with (
        OffsetWatch(nodes, topic, range(PARTITIONS)),
        Workload(nodes, topic, PARTITIONS, rate_per_s=RATE_PER_S) as workload,
    ):
        workload.proceed(1)
        while time.monotonic() < ends_s:
            time.sleep(chance.uniform(0.0, QUIET_S_MAX))  # any moment will do
            began_s = workload.recorder.now_s()
            inject(fault, nodes, workload, chance, PAUSE_S)
            workload.proceed(1)
            nodes.wait_in_sync()
            results.fault(fault)
            results.unavailable(fault, workload.longest_gap_ms(began_s))
        report = workload.conclude(tmp_path / "history.jsonl")
        results.history(report)
        if report.worst_lag is not None:
            results.measure(f"{fault}: worst real-time lag of a consumer", report.worst_lag.seconds, "s")
        assert report.is_clean, f"{report}\nthe history is in {tmp_path}, the seed is {seed}"
        assert report.acknowledged == report.sent, str(report)
    all_replicas_agree(nodes, workload.recorder.acknowledged())
    nodes.no_surprises()


@pytest.mark.parametrize("role", ["leader", "controller"])
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_how_long_writes_wait_when_a_node_is(end: str, role: str, nodes: Nodes, results: SoakResults) -> None:
    """Measured by a producer with librdkafka's defaults. The controller leads a partition, too."""
    goal_ms = LEADER_KILLED_MS_MAX if end == "killed" else CLEAN_STOP_MS_MAX
    for _ in range(GAP_ROUNDS):
        topic = nodes.new_topic(PARTITIONS)
        controller = nodes.controller()
        hit = controller if role == "controller" else next(node_id for node_id in nodes.ids if node_id != controller)
        stream = FailoverStream(nodes.bootstrap, topic, PARTITIONS, GAP_RECORDS, RATE_PER_S)
        found = stream.run(partial(nodes.kill if end == "killed" else nodes.stop, hit))
        assert found.account.complaint() is None
        results.fault(f"{role} {end}")
        results.measure(f"{role} {end}: acks=all goes on", found.longest_pause_s * 1000, "ms", goal_ms)
        nodes.start(hit)
        nodes.wait_in_sync()
    nodes.no_surprises()


@pytest.mark.parametrize("acks", ["0", "1", "all"])
@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
def test_twenty_runs_of_five_thousand_records(nodes: Nodes, client: str, acks: str, results: SoakResults) -> None:
    for _ in range(VERIFY_RUNS):
        found = verify(nodes, client, acks, RECORDS)
        is_complete(found, acks, RECORDS)
        results.measure(f"verify {client} acks={acks}: produce", found["produce_s"], "s")
        results.measure(f"verify {client} acks={acks}: consume", found["consume_s"], "s")


@pytest.mark.parametrize("acks", ["0", "1", "all"])
@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
def test_a_million_records(nodes: Nodes, client: str, acks: str, results: SoakResults) -> None:
    found = verify(nodes, client, acks, MILLION, timeout_s=1500.0)
    is_complete(found, acks, MILLION)
    results.measure(f"verify a million {client} acks={acks}: produce", found["produce_s"], "s")
    results.measure(f"verify a million {client} acks={acks}: consume", found["consume_s"], "s")


def test_start_and_memory(tmp_path: Path, results: SoakResults) -> None:
    with Nodes(tmp_path / "cluster") as nodes:
        began_s = time.monotonic()
        nodes.start_all()
        results.measure("three nodes from start to ready", time.monotonic() - began_s, "s", START_S_MAX)
        nodes.new_topic(300)
        nodes.wait_in_sync()
        for node_id in nodes.ids:
            resident_mb = nodes.resident_bytes(node_id) / MB
            results.measure("resident with 300 partitions", resident_mb, "MB", RESIDENT_MB_MAX)
        nodes.stop_all()
        began_s = time.monotonic()
        nodes.start_all()
        results.measure("three nodes with 300 partitions from start to ready", time.monotonic() - began_s, "s")
        nodes.no_surprises()


def test_watermarks_reach_followers(nodes: Nodes, results: SoakResults) -> None:
    alone = sorted(seconds_until_followers_know(nodes, nodes.new_topic(1), PROPAGATED_RECORDS))
    results.measure("watermark at a follower, idle cluster: p99", p99_ms(alone), "ms", WATERMARK_P99_MS_MAX)
    # In a separate process: in this one, the measurement would include waiting for the interpreter's lock.
    load = [str(CHRONIK), "bench", "produce", "--records", str(MILLION), "--rate", f"{RATE_PER_S:g}", "--size", "100"]
    with subprocess.Popen([*load, "--acks", "all", "--partitions", "3", "-b", nodes.bootstrap]) as producer:
        loaded = sorted(seconds_until_followers_know(nodes, nodes.new_topic(1), PROPAGATED_RECORDS))
        assert producer.poll() is None
        producer.send_signal(signal.SIGINT)
    name = f"watermark at a follower, {RATE_PER_S:,.0f} records/s beside it: p99"
    results.measure(name, p99_ms(loaded), "ms", WATERMARK_P99_MS_MAX)


def p99_ms(ascending: Sequence[float]) -> float:
    return ascending[len(ascending) * 99 // 100] * 1000


def test_a_thousand_partitions(nodes: Nodes, results: SoakResults, tmp_path: Path) -> None:
    with Workload(nodes, nodes.new_topic(PARTITIONS), PARTITIONS, members=0) as workload:
        workload.proceed(100)
        began_s = workload.recorder.now_s()
        nodes.new_topic(1_000)
        took_s = workload.recorder.now_s() - began_s
        results.measure("creating 1,000 partitions", took_s, "s", THOUSAND_PARTITIONS_S_MAX)
        workload.proceed(100)
        gap_ms = workload.longest_gap_ms(began_s)
        results.measure("longest pause of a producer while 1,000 partitions are made", gap_ms, "ms")
        results.history(workload.finish(tmp_path / "history.jsonl"))
