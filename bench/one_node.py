"""One Chronik node against its own goals, measured with `chronik bench`, without a peer."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.node import CHRONIK, Node
from tests.support.tested_build import is_compiled

from bench.processes import usage_of
from bench.restarts import GIGABYTE, LARGE_RECORD_BYTES, no_room_for
from bench.rows import Row, own_row

MEGABYTE = 1_000_000
IDLE_CONNECTIONS = 1_000


class OwnRows:
    """The rows so far, printed as they are measured."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.rows: list[Row] = []
        self.say = say

    def add(self, workload: str, metric: str, unit: str, value: float, goal: str) -> None:
        self.put(own_row(workload, metric, unit, value, goal))

    def put(self, row: Row) -> None:
        self.rows.append(row)
        verdict = "met   " if row["met"] else "MISSED"
        peer = "" if row["peer_name"] is None else f", {row['peer_name']} {row['peer']:,}: ratio {row['ratio']}"
        workload, metric, unit, goal = (row[name] for name in ("workload", "metric", "unit", "goal"))
        self.say(f"{verdict}  {workload}, {metric}: {row['chronik']:,} {unit}{peer} (goal {goal})")


def measure(say: Callable[[str], None], *, quick: bool) -> list[Row]:
    seconds = 2.0 if quick else 10.0
    records = 100_000 if quick else 1_000_000
    rows = OwnRows(say)
    throughput(rows, "replicated", 1.5, records)
    throughput(rows, "synced", 2.5, records)
    requests(rows, "replicated", 0.3, seconds)
    requests(rows, "synced", 1.0, seconds)
    idle_connections(rows, seconds)
    start_and_memory(rows)
    recovery(rows, GIGABYTE // 2 if quick else 10 * GIGABYTE)
    return rows.rows


@contextmanager
def running_node(*, runs_checkout: bool = False, **settings: Any) -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="chronik-bench-"))
    node = Node(folder, settings, runs_checkout=runs_checkout)
    try:
        yield node.start()
        node.terminate()
    finally:
        if node.is_running:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)


def bench(node: Node, kind: str, **options: Any) -> dict[str, Any]:
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    http = node.http.removeprefix("http://")
    command = [str(CHRONIK), "bench", kind, *flags, "--http", http, "--json", "-b", node.bootstrap]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def throughput(rows: OwnRows, durability: str, cpu_ms_per_mb: float, records: int) -> None:
    """Produce and consume 1 KB records with librdkafka's own batching, and find the busiest process."""
    with running_node(durability=durability) as node:
        for kind in ("produce", "consume"):
            figures = bench(node, kind, records=records, size=1000)
            workload = f"{kind} 1 KB, {durability}"
            rows.add(workload, "broker CPU", "ms/MB", figures["broker_cpu_ms_per_mb"], f"<= {cpu_ms_per_mb}")
            share = figures["broker_cpu_s"] / figures["client_cpu_s"]
            rows.add(workload, "broker CPU by client CPU", "ratio", share, "<= 1.0")


def requests(rows: OwnRows, durability: str, p50_ms: float, seconds: float) -> None:
    """One-record requests: many on 10 connections, one at a time on one connection."""
    workload = f"one-record requests, {durability}"
    with running_node(durability=durability) as node:
        many = bench(node, "requests", clients=10, seconds=seconds)
        rows.add(f"{workload}, 10 connections", "requests", "1/s", many["records_per_s"], ">= 25000")
        figures = bench(node, "requests", clients=1, depth=1, seconds=seconds)
        rows.add(f"{workload}, 1 connection", "p50", "ms", figures["latency_ms"]["p50"], f"<= {p50_ms}")
    if is_compiled():
        with running_node(runs_checkout=True, durability=durability) as node:
            pure = bench(node, "requests", clients=10, seconds=seconds)
        workload = f"{workload}, 10 connections, by those of a pure node"
        rows.add(workload, "requests", "ratio", many["records_per_s"] / pure["records_per_s"], ">= 1.1")
        cpu = "broker_cpu_us_per_record"
        rows.add(workload, "broker CPU", "ratio", many[cpu] / pure[cpu], "<= 0.9")


def idle_connections(rows: OwnRows, seconds: float) -> None:
    """Run the same load before, with, and after the idle connections, because the machine's speed drifts."""
    with running_node(durability="replicated") as node:

        def load() -> tuple[float, float]:
            figures = bench(node, "requests", clients=10, seconds=seconds)
            return figures["records_per_s"], figures["latency_ms"]["p99"]

        load()
        before = load()
        idle = [socket.create_connection(("127.0.0.1", node.kafka_port)) for _ in range(IDLE_CONNECTIONS)]
        during = load()
        for connection in idle:
            connection.close()
        after = load()
        workload = f"{IDLE_CONNECTIONS} idle connections"
        rows.add(workload, "throughput by that without", "ratio", 2 * during[0] / (before[0] + after[0]), ">= 0.9")
        rows.add(workload, "p99 by that without", "ratio", 2 * during[1] / (before[1] + after[1]), "<= 1.1")


def start_and_memory(rows: OwnRows) -> None:
    with running_node() as node:
        command = [str(CHRONIK), "topic", "create", "many", "--partitions", "100", "-b", node.bootstrap]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        node.terminate()
        rows.add("start, 100 partitions", "ready after", "s", ready_after_s(node), "<= 1.0")
        resident = usage_of([node.pid]).resident_bytes
        rows.add("start, 100 partitions", "resident", "MB", resident / MEGABYTE, "<= 80")


def recovery(rows: OwnRows, log_bytes: int) -> None:
    if reason := no_room_for(log_bytes):
        rows.say(f"skipped: restart with {log_bytes / GIGABYTE:g} GB of log: {reason}")
        return
    with running_node(durability="replicated") as node:
        bench(node, "produce", records=log_bytes // LARGE_RECORD_BYTES, size=LARGE_RECORD_BYTES, topic="large")
        node.kill()
        rows.add(
            f"restart after kill -9, {log_bytes / GIGABYTE:g} GB", "ready after", "s", ready_after_s(node), "<= 5.0"
        )


def ready_after_s(node: Node) -> float:
    started = time.monotonic()
    node.start()
    return time.monotonic() - started
