"""The schema registry of a node: lookups by id, what they cost producers, and the memory that it takes unused.

Producing and lookups share the processors, so the throughput beside the lookups pays for the process that sends them,
too. Lookups that a process with fixed answers gets show how much that is. All kinds of runs take turns in both orders.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.node import Node

from bench.earlier import ROOT, earlier_source
from bench.one_node import MEGABYTE, OwnRows, bench, running_node
from bench.processes import usage_of
from chronik.client.schema_registry import RegistryClient
from chronik.local.cluster import START_NODE, clean_environment
from chronik.local.temporary_cluster import TemporaryCluster

RATE, CONNECTIONS = 2_000, 16
PRODUCED_BYTES = 1_000
ROUNDS = 4
STARTS = 3
IDLE_S = 5.0
WARM_S = 2.0
LOOKUPS_S_MAX = 120.0
SCHEMA = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}


def registry(rows: OwnRows, *, quick: bool) -> None:
    with running_node(durability="replicated") as node:
        registered = RegistryClient(node.http).request(
            "POST", "/subjects/orders-value/versions", {"schema": json.dumps(SCHEMA)}
        )
        path = f"/schemas/ids/{registered['id']}"
        lookups_alone(rows, node, path, 3.0 if quick else 30.0)
        lookups_beside_producing(rows, node, path, 200_000 if quick else 3_000_000, 1 if quick else ROUNDS)
    idle_memory(rows, 1 if quick else STARTS)


def lookups_alone(rows: OwnRows, node: Node, path: str, seconds: float) -> None:
    _lookups(node, path, WARM_S)
    before_s = usage_of([node.pid]).cpu_s
    found = _lookups(node, path, seconds)
    cpu_us = (usage_of([node.pid]).cpu_s - before_s) / found["lookups"] * 1e6
    rows.say(f"    {cpu_us:.0f} us of the node's CPU for each lookup, p50 {found['p50_ms']:.2f} ms")
    rows.add("schema lookups by id, 2,000/s", "answered", "1/s", found["per_s"], f">= {RATE * 0.99:g}")
    rows.add("schema lookups by id, 2,000/s", "p99", "ms", found["p99_ms"], "<= 10.0")


def lookups_beside_producing(rows: OwnRows, node: Node, path: str, records: int, rounds: int) -> None:
    rates: dict[str, list[float]] = {"no": [], "the node's": [], "fixed": []}
    found: dict[str, list[dict[str, Any]]] = {"the node's": [], "fixed": []}
    _produced(node, records // 4)
    with _fixed_answers() as port:
        ports = {"the node's": node.http_port, "fixed": port}
        for number in range(rounds):
            for kind in rates if number % 2 == 0 else reversed(rates):
                if kind == "no":
                    rates[kind].append(_produced(node, records))
                    continue
                with _looking_up(ports[kind], path) as printed:
                    rates[kind].append(_produced(node, records))
                found[kind].append(printed)
            last = ", ".join(f"{kind} lookups {each[-1]:,.0f}" for kind, each in rates.items())
            rows.say(f"    round {number}: records/s beside {last}")
    without, beside, fixed = (statistics.median(each) for each in rates.values())
    median = {
        (kind, name): statistics.median(one[name] for one in each)
        for kind, each in found.items()
        for name in ("per_s", "p99_ms")
    }
    rows.say(
        f"    lookups that another process answers: ratio {fixed / without:.3f}, p99 {median['fixed', 'p99_ms']:.1f} ms"
    )
    workload = "produce 1 KB beside 2,000 schema lookups/s"
    rows.add(workload, "throughput by that without", "ratio", beside / without, ">= 0.95")
    rows.add(workload, "lookups", "1/s", median["the node's", "per_s"], f">= {RATE * 0.99:g}")
    rows.add(workload, "lookups, p99", "ms", median["the node's", "p99_ms"], "<= 10.0")


def _produced(node: Node, records: int) -> float:
    return float(bench(node, "produce", records=records, size=PRODUCED_BYTES)["records_per_s"])


@contextmanager
def _fixed_answers() -> Iterator[int]:
    """Run a process that answers lookups with the same bytes, and return its port."""
    script = [sys.executable, str(ROOT / "bench" / "fixed_answers.py")]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _command(port: int, path: str, seconds: float) -> list[str]:
    script = [sys.executable, str(ROOT / "bench" / "lookups.py"), "127.0.0.1", str(port), path]
    return [*script, str(RATE), str(seconds), str(CONNECTIONS)]


def _lookups(node: Node, path: str, seconds: float) -> dict[str, Any]:
    done = subprocess.run(_command(node.http_port, path, seconds), stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def _looking_up(port: int, path: str) -> Iterator[dict[str, Any]]:
    """Look up until the block ends; afterwards what is yielded has the result."""
    found: dict[str, Any] = {}
    with subprocess.Popen(_command(port, path, LOOKUPS_S_MAX), stdout=subprocess.PIPE) as process:
        try:
            yield found
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=LOOKUPS_S_MAX)
            found.update(json.loads(printed))
        finally:
            process.kill()
    if found["errors"]:
        raise RuntimeError(f"lookups beside the producer failed: {found}")


def idle_memory(rows: OwnRows, starts: int) -> None:
    """Compare with the source before the registry; both are pure, and compiled to bytecode before."""
    with earlier_source() as source:
        resident = {path: list[float]() for path in (source, ROOT / "src")}
        for _ in range(starts):
            for path, taken in resident.items():
                taken.append(_idle_mb(path))
        before, now = (statistics.median(taken) for taken in resident.values())
    rows.say(f"    resident: {before:.1f} MB before the registry, {now:.1f} MB now")
    rows.add("idle node, pure, by that before the registry", "resident added", "MB", now - before, "<= 5.0")


def _idle_mb(source: Path) -> float:
    environment = {**clean_environment(), "PYTHONPATH": str(source)}
    with TemporaryCluster(1, command=START_NODE, environment=environment) as cluster:
        pid = cluster.nodes[0].process.pid
        if pid is None:
            raise RuntimeError(f"the node of {source} is not running")
        time.sleep(IDLE_S)
        return usage_of([pid]).resident_bytes / MEGABYTE
