"""The command behind `make bench`: which parts run, and what is written."""

from __future__ import annotations

import argparse
import importlib
import json
import resource
from pathlib import Path

from tests.support import apache_kafka

from bench import kafka_server, one_node, report
from bench.processes import free_memory_bytes, touch_memory
from bench.restarts import GIGABYTE
from bench.rows import Row, merged
from bench.samples import Samples
from bench.servers import Durability, Setup
from bench.side_by_side import (
    NAMES,
    Comparison,
    Plan,
    group_plans,
    growth_plans,
    security_plans,
    setup_plans,
    smallest_heap_mb,
)
from bench.workloads import Scale

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
LATEST = RESULTS / "latest.json"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
ONE_NODE, SPARK = "one-node", "spark"
OWN_PARTS = {
    "registry": ("bench.registry", "registry"),
    "sql": ("bench.sql", "sql"),
    "typed": ("bench.landings", "typed"),
    "json": ("bench.landings", "json_landing"),
    "audit-table": ("bench.audit_table", "audit_table"),
}
REPETITIONS = 5
DURABILITIES: tuple[Durability, ...] = ("replicated", "synced", "default")
TOUCHED_BYTES_MAX = 12 * GIGABYTE


def say(text: str) -> None:
    print(text, flush=True)


def main(description: str | None) -> int:
    options = parse(description)
    samples = Samples(None if options.quick else RESULTS / "side_by_side.json", is_adding=options.add)
    rows: list[Row] = json.loads(LATEST.read_text()) if LATEST.exists() and not options.quick else []
    if options.report:
        return write(samples, merged(rows, samples.rows()))
    allow_open_files()
    if not options.quick and not options.no_touch:
        size_bytes = min(TOUCHED_BYTES_MAX, free_memory_bytes() * 3 // 4)
        say(f"touching {size_bytes / GIGABYTE:.0f} GB of memory first, so that the runs do not pay for that")
        touch_memory(size_bytes)
    own = one_node.measure(say, quick=options.quick) if ONE_NODE in options.only else []
    for name in (name for name in options.only if name in OWN_PARTS):
        own += own_part(name, quick=options.quick)
    if SPARK in options.only:
        from bench import spark_rows  # imported here, because it imports Spark's packages

        own += spark_rows.measure(list(spark_rows.PARTS), options.quick)
    failures: list[str] = []
    compared = [name for name in options.only if name in NAMES]
    if compared and (reason := apache_kafka.missing()):
        say(f"skipped: {', '.join(compared)}: {reason}")
    elif compared:
        comparison = Comparison(samples, Scale(quick=options.quick), say)
        comparison.run(plans(options, compared, samples))
        failures = comparison.failures
    for failure in failures:
        say(f"FAILED  {failure}")
    measured = merged(rows, [*own, *samples.rows()])
    if options.quick:
        summarize(measured)
    else:
        write(samples, measured)
    return 1 if failures else 0


def own_part(name: str, *, quick: bool) -> list[Row]:
    """Measure a part of the pipeline or the registry, whose module imports what only this part needs."""
    module, function = OWN_PARTS[name]
    measured = one_node.OwnRows(say)
    getattr(importlib.import_module(module), function)(measured, quick=quick)
    return measured.rows


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = (ONE_NODE, *OWN_PARTS, SPARK, *NAMES)
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=parts, metavar="PART", help=f"of {', '.join(parts)}"
    )
    parser.add_argument("--nodes", type=int, choices=(1, 3), help="only on so many nodes")
    parser.add_argument("--durability", choices=DURABILITIES, help="only with this one")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--add", action="store_true", help="keep the repetitions that earlier runs left")
    parser.add_argument("--no-touch", action="store_true", help="memory was in use just before: do not touch it first")
    parser.add_argument("--no-small-heap", action="store_true", help="without Apache Kafka's smallest heap")
    parser.add_argument("--quick", action="store_true", help="short runs, once, one heap; nothing is written")
    parser.add_argument("--report", action="store_true", help="measure nothing, write tables and plots again")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    if options.quick:
        options.repetitions, options.no_small_heap = 1, True
    return options


def plans(options: argparse.Namespace, names: list[str], samples: Samples) -> list[Plan]:
    setups = [
        Setup(nodes, durability)
        for nodes in (1, 3)
        for durability in DURABILITIES
        if options.nodes in (None, nodes) and options.durability in (None, durability)
    ]
    found = list(setup_plans(names, setups, options.repetitions, None))
    if not options.no_small_heap and any(plan.setup == Setup() for plan in found):
        if samples.smallest_heap_mb is None:
            say("looking for the smallest heap that Apache Kafka works with")
            samples.smallest_heap_mb = smallest_heap_mb(say)
        small = kafka_server.with_heap(samples.smallest_heap_mb)
        found = list(setup_plans(names, setups, options.repetitions, small))
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found += growth_plans(names, options.repetitions, files_max, say)
    found += group_plans(names, options.repetitions, files_max, say)
    found += security_plans(names, options.nodes, options.repetitions, files_max, say)
    return found


def write(samples: Samples, rows: list[Row]) -> int:
    RESULTS.mkdir(parents=True, exist_ok=True)
    LATEST.write_text(json.dumps(rows, indent=1) + "\n")
    written = [LATEST, *report.write(samples, rows, RESULTS, DOCUMENT)]
    say("written: " + ", ".join(str(path.relative_to(ROOT)) for path in written))
    summarize(rows)
    return 0


def summarize(rows: list[Row]) -> None:
    missed = [row for row in rows if not row["met"]]
    for row in missed:
        figure = row["chronik"] if row["ratio"] is None else row["ratio"]
        say(f"MISSED  {row['workload']}, {row['metric']}: {figure:g} (goal {row['goal']})")
    say(f"{len(rows) - len(missed)} goals met, {len(missed)} missed")


def allow_open_files() -> None:
    """Raise the open file limit to its maximum: child processes need it for thousands of partitions and clients."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
