"""The Spark rows of `make bench`: our source beside Spark's own connector, on the same topics, session and machine.

    .venv/bin/python bench/spark_rows.py [--part source|stream|audit|land] [--quick]

One node, one Spark session `local[2]` with the connector's jars from .tools; its start is not counted. The two sources
take turns and the best round of each counts. Batches have 16 KB, as Java's producer makes them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import topics  # noqa: E402
from tests.support.node import Node  # noqa: E402

from bench.filling import fill  # noqa: E402
from chronik.pipeline.audit.job import AuditRequest, prepare, run  # noqa: E402
from chronik.pipeline.land.topic_landing import ROWS_PER_BATCH_SETTING, LandSettings, TopicLanding, topic_ids  # noqa: E402
from chronik.pipeline.session import spark_session  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESULTS = ROOT / "bench" / "results" / "latest.json"
JARS = ROOT / ".tools" / "spark-kafka-4.2"
ROUNDS = 4
"""The first round of each source is for the compilers."""
MICRO_BATCHES, WARM_MICRO_BATCHES = 40, 15
WAIT_S_MAX = 120.0
LAND_BATCHES, LAND_ROUNDS = 4, 3
OURS, THEIRS = "chronik", "kafka"


class Bench:
    """One node and one session; rows are printed as they are measured."""

    def __init__(self, node: Node, spark: SparkSession, folder: Path, connector: str | None, scale: float) -> None:
        self.node, self.spark, self.folder, self.scale = node, spark, folder, scale
        self.connector = connector
        self.rows: list[dict[str, Any]] = []
        self._limits = {(row["workload"], row["metric"]): row["limit"] for row in read_results()}
        self._filled: dict[str, int] = {}

    @property
    def sources(self) -> list[str]:
        return [OURS] if self.connector is None else [OURS, THEIRS]

    def add(
        self, workload: str, metric: str, unit: str, value: float, peer: float | None, peer_name: str | None, goal: str
    ) -> None:
        """Add a row. `ratio` is above 1 if ours is better; without a peer, the goal applies to the value itself."""
        better_is_less = unit in ("ms", "s")
        ratio = None if peer is None else peer / value if better_is_less else value / peer
        relation, _, bound = goal.partition(" ")
        judged = value if ratio is None or relation.startswith("<") else ratio
        met = judged < float(bound) if relation == "<" else judged >= float(bound)
        row = {"workload": workload, "metric": metric, "unit": unit, "chronik": round(value, 4)}
        row |= {"peer": None if peer is None else round(peer, 4), "peer_name": peer_name}
        row |= {"ratio": None if ratio is None else round(ratio, 3), "goal": goal, "met": met}
        row["limit"] = None if met else self._limits.get((workload, metric))
        self.rows.append(row)
        against = "" if ratio is None else f", {peer_name} {peer:,.1f}: ratio {ratio:.2f}"
        said = "met   " if met else "MISSED"
        print(f"{said}  {workload}, {metric}: {value:,.1f} {unit}{against} (goal {goal})", flush=True)

    def topic(self, size_bytes: int, count: int) -> tuple[str, int]:
        """Return a topic with about `count` records of that size, over all partitions, and their exact number."""
        count = int(count * self.scale)
        name = f"spark-{size_bytes}-{count}"
        if name not in self._filled:
            self._filled[name] = fill(self.node.bootstrap, name, size_bytes, count)
        return name, self._filled[name]

    def frame(self, source: str, topic: str) -> Any:
        where = {"kafka.bootstrap.servers": self.node.bootstrap, "subscribe": topic}
        return self.spark.read.format(source).options(**where, startingOffsets="earliest").load()

    def take_turns(self, rounds: int, work: Callable[[str], float]) -> dict[str, float]:
        """Return the best seconds of each source."""
        best: dict[str, float] = {}
        for number in range(rounds):
            for source in self.sources:
                seconds = work(source)
                print(f"    round {number}, {source}: {seconds:.2f} s", flush=True)
                best[source] = min(best.get(source, seconds), seconds) if number else float("inf")
        return best


def source(bench: Bench) -> None:
    for size_bytes, count in ((100, 3_000_000), (1000, 600_000)):
        topic, records = bench.topic(size_bytes, count)
        for sink in ("noop", "parquet"):

            def write(source: str, sink: str = sink, topic: str = topic) -> float:
                frame = bench.frame(source, topic)
                started_s = time.perf_counter()
                writer = frame.write.format(sink).mode("overwrite")
                writer.save(str(bench.folder / "table")) if sink == "parquet" else writer.save()
                return time.perf_counter() - started_s

            best = bench.take_turns(ROUNDS, write)
            theirs = records / best[THEIRS] if THEIRS in best else None
            workload = f"Spark reads {'100 B' if size_bytes == 100 else '1 KB'} into {sink}"
            bench.add(workload, "rows", "1/s", records / best[OURS], theirs, bench.connector, ">= 1.0")


def stream(bench: Bench) -> None:
    """Append one record to a stream that has caught up, and measure the micro-batch that reads it."""
    topics.create(bench.node.bootstrap, "spark-stream", 1)
    topics.append(bench.node.bootstrap, "spark-stream", 0, topics.numbered(1))
    took = {source: _micro_batches_ms(bench, source) for source in bench.sources}
    ours, theirs = took[OURS], took.get(THEIRS)
    bench.add("Spark, a stream that has caught up", "median micro-batch", "ms", ours, theirs, bench.connector, "< 300")


def _micro_batches_ms(bench: Bench, source: str) -> float:
    where = {"kafka.bootstrap.servers": bench.node.bootstrap, "subscribe": "spark-stream"}
    frame = bench.spark.readStream.format(source).options(**where, startingOffsets="earliest").load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(bench.folder / f"stream-{source}"))
    query = writer.trigger(processingTime="0 seconds").start()
    seen: dict[int, dict[str, Any]] = {}
    try:
        while len(seen) < WARM_MICRO_BATCHES + MICRO_BATCHES:
            until_s, before = time.monotonic() + WAIT_S_MAX, len(seen)
            if seen:
                topics.append(bench.node.bootstrap, "spark-stream", 0, topics.numbered(1))
            while len(seen) == before:
                if time.monotonic() > until_s or not query.isActive:
                    raise RuntimeError(f"the stream of {source} is stuck: {query.exception()}")
                seen |= {one["batchId"]: one for one in query.recentProgress if one["numInputRows"]}
                time.sleep(0.02)
    finally:
        query.stop()
    measured = [one for _, one in sorted(seen.items())][WARM_MICRO_BATCHES:]
    for phase in sorted(measured[0]["durationMs"]):
        print(f"    {source} {phase}: {statistics.median(one['durationMs'].get(phase, 0) for one in measured)} ms")
    return statistics.median(one["durationMs"]["triggerExecution"] for one in measured)


def audit(bench: Bench) -> None:
    topic, records = bench.topic(100, 10_000_000)
    took: dict[str, float] = {}
    for log in ("headers", "records") * 2:
        started_s = time.perf_counter()
        result = run(bench.spark, prepare(AuditRequest(bench.node.bootstrap, topic, log=log)))
        took[log] = min(took.get(log, float("inf")), time.perf_counter() - started_s)
        print(f"    {log}: {took[log]:.2f} s", flush=True)
        assert (result.verdict, result.total(1)) == ("complete", records), result.to_json()
    workload = f"Spark audits {records:,} records of 100 B"
    bench.add(workload, "by batch headers", "s", took["headers"], took["records"], "by reading the records", ">= 10")


def land(bench: Bench) -> None:
    """Measure all micro-batches but the first, which pays for starting processes and for imports."""
    topic, records = bench.topic(100, 2_000_000)
    bench.spark.conf.set(ROWS_PER_BATCH_SETTING, str(-(-records // LAND_BATCHES)))
    ids = topic_ids(bench.node.bootstrap, [topic])
    runs = iter(range(1000))

    def once(source: str) -> float:
        number = next(runs)
        to = str(bench.folder / f"tables-{number}")
        settings = LandSettings(
            bench.node.bootstrap, to, f"{to}/.checkpoints", f"r{number}", once=True, source=source, wall_ms=lambda: 0
        )
        job = TopicLanding(bench.spark, topic, ids[topic], settings, None, time.monotonic)
        job.start()
        while not job.wait(0.1):
            pass
        assert job.rows == records, (job.rows, records)
        shutil.rmtree(to)
        took_ms = [one["durationMs"]["triggerExecution"] for one in job._query.recentProgress]
        print(f"    {source}: {took_ms} ms", flush=True)
        assert len(took_ms) == LAND_BATCHES, took_ms
        return sum(took_ms[1:]) / 1000 * LAND_BATCHES / (LAND_BATCHES - 1)

    best = bench.take_turns(LAND_ROUNDS, once)
    theirs = records / best[THEIRS] if THEIRS in best else None
    bench.add("chronik pipeline land, 100 B", "rows", "1/s", records / best[OURS], theirs, bench.connector, ">= 1.0")


PARTS: dict[str, Callable[[Bench], None]] = {"source": source, "stream": stream, "audit": audit, "land": land}


def read_results() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def write_rows(rows: list[dict[str, Any]]) -> int:
    """Replace the rows of the same names; other rows stay. Return the exit code: a missed goal is not a failure."""
    fresh = {(row["workload"], row["metric"]): row for row in rows}
    kept = [fresh.pop((row["workload"], row["metric"]), row) for row in read_results()]
    RESULTS.write_text(json.dumps([*kept, *fresh.values()], indent=1) + "\n")
    return 0


@contextmanager
def running(quick: bool) -> Iterator[Bench]:
    jars = sorted(JARS.glob("*.jar"))
    versions = [jar.stem.rpartition("-")[2] for jar in jars if jar.name.startswith("spark-sql-kafka")]
    if not jars:
        print("no peer: the jars of Spark's own connector are missing (scripts/test-tools gets them)")
    connector = f"spark-sql-kafka-0-10 {versions[0]}" if versions else None
    folder = Path(tempfile.mkdtemp(prefix="chronik-bench-"))
    node = Node(folder, {"durability": "replicated"}).start()
    try:
        conf = {"spark.jars": ",".join(map(str, jars))} if jars else {}
        spark = spark_session("chronik-bench", "local[2]", conf)
        try:
            yield Bench(node, spark, folder, connector, 0.05 if quick else 1.0)
        finally:
            spark.stop()
        node.terminate()
    finally:
        if node.is_running:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)


def measure(parts: list[str], quick: bool) -> list[dict[str, Any]]:
    with running(quick) as bench:
        for part in parts:
            PARTS[part](bench)
        return bench.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append", help="this one only; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the records; nothing is written")
    options = parser.parse_args()
    rows = measure(options.part or list(PARTS), options.quick)
    if not options.quick:
        write_rows(rows)


if __name__ == "__main__":
    main()
