"""Stall windows of all traced topics: read the traces from `__chronik_traces`, and fold them by partition in Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute

from chronik.client.properties import Target
from chronik.metadata.image import TRACES_TOPIC
from chronik.observe.traces import decode_trace
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.options import connection_options
from chronik.pipeline.stalls.detector import LEAST_MS, Stall, StallDetector, Window, judge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENT_DDL = "kind string, n bigint, time_ms double, node int, topic string, partition int, client_id string"
OUT_SCHEMA = pa.schema(
    {"topic": pa.string(), "partition": pa.int32(), "events": pa.int64(), "first_ms": pa.float64()}
    | {"last_ms": pa.float64(), "unreadable": pa.int64(), "windows": pa.string()}
)


@dataclass(frozen=True, slots=True)
class Traced:
    topic: str
    partition: int
    events: int
    first_ms: float
    last_ms: float


@dataclass(frozen=True, slots=True)
class TraceResult:
    stalls: Sequence[Stall]
    traced: Sequence[Traced]
    unreadable: int
    least_s: float

    @property
    def span_ms(self) -> tuple[float, float]:
        """Return the time span of all traces, or (0, 0) if there are none."""
        first = min((one.first_ms for one in self.traced), default=0.0)
        return first, max((one.last_ms for one in self.traced), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return what `chronik pipeline traces --json` prints."""
        first_ms, last_ms = self.span_ms
        return {
            "from_ms": first_ms,
            "until_ms": last_ms,
            "least_s": self.least_s,
            "events": sum(one.events for one in self.traced),
            "unreadable": self.unreadable,
            "stalls": [msgspec.to_builtins(stall) for stall in self.stalls],
            "partitions": [
                {
                    "topic": one.topic,
                    "partition": one.partition,
                    "events": one.events,
                    "stalls": len(mine := self.stalls_in(one)),
                    "stalled_s": round(sum(stall.seconds for stall in mine), 3),
                    "causes": sorted({stall.cause for stall in mine}),
                }
                for one in self.traced
            ],
        }

    def stalls_in(self, one: Traced) -> list[Stall]:
        return [stall for stall in self.stalls if (stall.topic, stall.partition) == (one.topic, one.partition)]


def check_traces(bootstrap: Target) -> None:
    """Raises PipelineError if there is nothing to read, before Spark is started for it."""
    with BlockingCluster(bootstrap) as cluster:
        if TRACES_TOPIC not in cluster.topics([TRACES_TOPIC]):
            raise PipelineError(f"there are no traces at {bootstrap}: start tracing with chronik trace on TOPIC")


def stalls_of(
    spark: SparkSession,
    bootstrap: Target,
    start_ms: int | None = None,
    least_ms: float = LEAST_MS,
    topic: str | None = None,
) -> TraceResult:
    """Return all windows of at least `least_ms` since `start_ms`, of one topic or of all."""
    from pyspark.sql.pandas.types import from_arrow_schema

    events = _events(spark, bootstrap, start_ms, topic).persist()
    try:
        folded = events.groupBy("topic", "partition").applyInArrow(_folding(least_ms), from_arrow_schema(OUT_SCHEMA))
        rows = folded.collect()
        traced = [Traced(row.topic, row.partition, row.events, row.first_ms, row.last_ms) for row in rows]
        windows = [window for row in rows for window in msgspec.json.decode(row.windows, type=list[Window])]
        now_ms = max((one.last_ms for one in traced), default=0.0)
        long = [window for window in windows if (window.until_ms or now_ms) - window.since_ms >= least_ms]
        others = _fetches_elsewhere(spark, events, long, now_ms)
    finally:
        events.unpersist()
    judged = [judge(window, now_ms, others=others.get(at, 0), least_ms=least_ms) for at, window in enumerate(long)]
    stalls = [stall for stall in judged if stall is not None]
    stalls.sort(key=lambda stall: (stall.from_ms, stall.topic, stall.partition))
    traced.sort(key=lambda one: (one.topic, one.partition))
    return TraceResult(stalls, traced, sum(row.unreadable for row in rows), least_ms / 1000)


def _events(spark: SparkSession, bootstrap: Target, start_ms: int | None, topic: str | None) -> DataFrame:
    from pyspark.sql import functions as sql

    options = {**connection_options(bootstrap), "subscribe": TRACES_TOPIC, "failOnDataLoss": "false"}
    if start_ms is not None:
        options |= {"startingTimestamp": str(start_ms), "startingOffsetsByTimestampStrategy": "latest"}
    text = spark.read.format("chronik").options(**options).load().select(sql.col("value").cast("string").alias("text"))
    event = sql.from_json("text", EVENT_DDL)
    rows = text.select("text", event.alias("event")).select("text", "event.*").where("topic is not null")
    return rows if topic is None else rows.where(sql.col("topic") == topic)


def _folding(least_ms: float) -> Any:
    def fold(key: tuple[Any, ...], table: Any) -> Any:
        topic, partition = key[0].as_py(), key[1].as_py()
        # Each node numbers its events, and the nodes' clocks are roughly synchronised.
        order = pa.compute.sort_indices(table, sort_keys=[(name, "ascending") for name in ("time_ms", "node", "n")])
        detector = StallDetector(topic, partition, least_ms)
        windows: list[Window] = []
        unreadable = 0
        for text in table.column("text").take(order):
            try:
                event = decode_trace(text.as_py())
            except ValueError:
                unreadable += 1
                continue
            windows += detector.feed(event)
        windows += detector.finish()
        first_ms, last_ms = (bound.as_py() for bound in pa.compute.min_max(table.column("time_ms")).values())
        written = msgspec.json.encode(windows).decode()
        row = (topic, partition, table.num_rows, first_ms, last_ms, unreadable, written)
        return pa.Table.from_pylist([dict(zip(OUT_SCHEMA.names, row, strict=True))], schema=OUT_SCHEMA)

    return fold


def _fetches_elsewhere(
    spark: SparkSession, events: DataFrame, windows: Sequence[Window], now_ms: float
) -> dict[int, int]:
    """Return for each window how often its last client fetched other partitions of the topic meanwhile."""
    from pyspark.sql import functions as sql

    rows = [
        (at, window.topic, window.partition, window.client, window.since_ms, window.until_ms or now_ms)
        for at, window in enumerate(windows)
        if window.client
    ]
    if not rows:
        return {}
    stalled = spark.createDataFrame(
        rows, "at int, in_topic string, in_partition int, of_client string, since_ms double, until_ms double"
    )
    fetches = events.where("kind = 'fetch-started'").select("topic", "partition", "client_id", "time_ms")
    elsewhere = sql.expr(
        "topic = in_topic and client_id = of_client and partition != in_partition "
        "and time_ms > since_ms and time_ms < until_ms"
    )
    counted = fetches.join(sql.broadcast(stalled), elsewhere).groupBy("at").count().collect()
    return {row["at"]: row["count"] for row in counted}
