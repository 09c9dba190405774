"""`make bench`: what a node must reach, measured with `chronik bench`, into bench/results/latest.json.

Each row: {workload, metric, unit, chronik, peer, peer_name, ratio, goal, met, limit}. `limit` is written by hand where
a goal is out of reach, with the reason; a new run keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import spark_rows  # noqa: E402
from tests.support.node import CHRONIK, Node  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "latest.json"
MEGABYTE = 1_000_000
GIGABYTE = 1_000_000_000
IDLE_CONNECTIONS = 1_000
LARGE_RECORD_BYTES = 100_000
FREE_BYTES_SPARE = 5 * GIGABYTE


class Rows:
    """The figures so far, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._limits = {(row["workload"], row["metric"]): row["limit"] for row in read_results()}

    def add(self, workload: str, metric: str, unit: str, value: float, goal: str) -> None:
        relation, _, bound = goal.partition(" ")
        met = value <= float(bound) if relation == "<=" else value >= float(bound)
        limit = None if met else self._limits.get((workload, metric))
        row = {"workload": workload, "metric": metric, "unit": unit, "chronik": round(value, 4)}
        row |= {"peer": None, "peer_name": None, "ratio": None, "goal": goal, "met": met, "limit": limit}
        self.rows.append(row)
        print(f"{'met   ' if met else 'MISSED'}  {workload}, {metric}: {value:.3f} {unit} (goal {goal})", flush=True)


def read_results() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


@contextmanager
def running_node(**settings: Any) -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="chronik-bench-"))
    node = Node(folder, settings)
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


def throughput(rows: Rows, durability: str, cpu_ms_per_mb: float, records: int) -> None:
    """Produce and consume of 1 KB records with librdkafka's own batching, and which process is the busiest."""
    with running_node(durability=durability) as node:
        for kind in ("produce", "consume"):
            figures = bench(node, kind, records=records, size=1000)
            workload = f"{kind} 1 KB, {durability}"
            rows.add(workload, "broker CPU", "ms/MB", figures["broker_cpu_ms_per_mb"], f"<= {cpu_ms_per_mb}")
            share = figures["broker_cpu_s"] / figures["client_cpu_s"]
            rows.add(workload, "broker CPU by client CPU", "ratio", share, "<= 1.0")


def requests(rows: Rows, durability: str, p50_ms: float, seconds: float) -> None:
    """One-record requests: many on 10 connections, one at a time on one."""
    with running_node(durability=durability) as node:
        figures = bench(node, "requests", clients=10, seconds=seconds)
        workload = f"one-record requests, {durability}"
        rows.add(f"{workload}, 10 connections", "requests", "1/s", figures["records_per_s"], ">= 25000")
        figures = bench(node, "requests", clients=1, depth=1, seconds=seconds)
        rows.add(f"{workload}, 1 connection", "p50", "ms", figures["latency_ms"]["p50"], f"<= {p50_ms}")


def idle_connections(rows: Rows, seconds: float) -> None:
    """The same load before, with, and after the idle connections, since the machine drifts too."""
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


def start_and_memory(rows: Rows) -> None:
    with running_node() as node:
        command = [str(CHRONIK), "topic", "create", "many", "--partitions", "100", "-b", node.bootstrap]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        node.terminate()
        rows.add("start, 100 partitions", "ready after", "s", ready_after_s(node), "<= 1.0")
        rows.add("start, 100 partitions", "resident", "MB", resident_bytes(node) / MEGABYTE, "<= 80")


def recovery(rows: Rows, log_bytes: int) -> None:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < log_bytes + FREE_BYTES_SPARE:
        print(f"skipped: restart with {log_bytes / GIGABYTE:g} GB of log, only {free / GIGABYTE:.1f} GB are free")
        return
    with running_node(durability="replicated") as node:
        bench(node, "produce", records=log_bytes // LARGE_RECORD_BYTES, size=LARGE_RECORD_BYTES, topic="large")
        node.kill()
        rows.add(
            f"restart after kill -9, {log_bytes / GIGABYTE:g} GB", "ready after", "s", ready_after_s(node), "<= 5.0"
        )


def touch_memory(size_bytes: int) -> None:
    """Touch as much memory as the runs will fill with page cache.

    A virtual machine gets a page from its host when it first touches it: measured here, appending to a file cost 1-2 ms
    per MB of system time on fresh memory, and 0.2 on memory that had been used before.
    """
    print(f"touching {size_bytes / GIGABYTE:.0f} GB of memory first, so that the runs do not pay for that", flush=True)
    page = os.sysconf("SC_PAGE_SIZE")
    touch = (
        f"import mmap; m = mmap.mmap(-1, {size_bytes}); [m.__setitem__(i, 1) for i in range(0, {size_bytes}, {page})]"
    )
    subprocess.run([sys.executable, "-c", touch], check=True)


def free_memory_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def ready_after_s(node: Node) -> float:
    started = time.monotonic()
    node.start()
    return time.monotonic() - started


def resident_bytes(node: Node) -> int:
    pages = int(Path(f"/proc/{node.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs, to see that it works; nothing is written")
    parser.add_argument("--only", choices=["spark"], help="this part alone (see bench/spark_rows.py); others stay")
    quick, only = (options := parser.parse_args()).quick, options.only
    if only == "spark":
        found = spark_rows.measure(list(spark_rows.PARTS), quick)
        return 0 if quick else spark_rows.write_rows(found)
    seconds = 2.0 if quick else 10.0
    records = 100_000 if quick else 1_000_000
    rows = Rows()
    if not quick:
        touch_memory(min(12 * GIGABYTE, free_memory_bytes() * 3 // 4))
    throughput(rows, "replicated", 1.5, records)
    throughput(rows, "synced", 2.5, records)
    requests(rows, "replicated", 0.3, seconds)
    requests(rows, "synced", 1.0, seconds)
    idle_connections(rows, seconds)
    start_and_memory(rows)
    recovery(rows, GIGABYTE // 2 if quick else 10 * GIGABYTE)
    rows.rows += spark_rows.measure(list(spark_rows.PARTS), quick)
    if not quick:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(rows.rows, indent=1) + "\n")
        print(f"written: {RESULTS.relative_to(ROOT)}")
    missed = [row for row in rows.rows if not row["met"]]
    print(f"{len(rows.rows) - len(missed)} goals met, {len(missed)} missed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
