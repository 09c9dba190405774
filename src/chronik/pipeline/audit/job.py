"""The audit: compare acknowledged, readable, delivered and landed records, as one Spark job.

`prepare` queries the cluster and examines the files, without Spark; `run` is the job. The order makes a consistent cut:
the contents of the files, the table and the group are fixed first, and the log end offsets are read after that. So
everything they name lies below the log ends.

Every side is rows of offsets, shuffled into blocks of consecutive offsets. One function compares all sides of a block
(`blocks`) and returns findings to the driver. Their number depends on the number of blocks and faults, not on the
number of records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from chronik.client.properties import Target
from chronik.pipeline.audit.blocks import (
    ABORTED,
    ACKED,
    BY_POSITION,
    DELIVERED,
    LANDED,
    MARK,
    READABLE,
    Block,
    Bounds,
    Finding,
)
from chronik.pipeline.audit.cluster import (
    committed_offsets,
    http_nodes,
    is_compacted,
    log_bounds,
    offsets_at,
    partitions_of,
)
from chronik.pipeline.audit.files import TOMBSTONE, FileRange, JsonLines, file_ranges, read_lines, snapshot
from chronik.pipeline.audit.log import FETCH, HEADERS, RECORDS, LogRange, read_log
from chronik.pipeline.audit.result import AuditResult, summarise
from chronik.pipeline.audit.rows import KEYED_SCHEMA, PACKED_SCHEMA, ROW_SCHEMA, packed, rows_of, rows_table
from chronik.pipeline.audit.table import LandedFiles, TableRange, find_tables, read_table, table_ranges
from chronik.pipeline.deleted import DeletedKeys, DeletedList
from chronik.pipeline.errors import PipelineError, task_errors
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.ranges import RecordRange, split

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AUTO = "auto"
BLOCK_BITS, BLOCK_BITS_MAX = 16, 20
BATCHES_BLOCK_BITS = 19
"""If only batches are known, blocks may be larger, because their cost depends on the number of batches."""
BLOCKS_MAX = 1_000
RECORDS_PER_TASK = 2_000_000
BLOCKS_PER_TASK = 8
SENT = "sent:"
"""Prefix of the name of a file that Spark has distributed to its workers."""
FINDING_SCHEMA = pa.schema(
    {"kind": pa.string(), "side": pa.int32(), "partition": pa.int32()}
    | dict.fromkeys(("start", "stop", "number", "extra"), pa.int64())
)


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What to compare. `start_ms`: omit records before that time. `log`: auto, or one of the methods of audit.log."""

    bootstrap: Target
    topic: str
    ledger: str | None = None
    receipts: str | None = None
    table: str | None = None
    group: str | None = None
    start_ms: int | None = None
    log: str = AUTO
    deleted: str | None = None
    """The list of keys whose records should not be in the table."""
    begins: Mapping[int, int] | None = None
    ends: Mapping[int, int] | None = None
    """Audit only these offsets of each partition; the ends are exclusive. An omitted partition has no offsets."""
    catalog: Mapping[str, str] = field(default_factory=dict)
    """Settings of the catalog of an Iceberg table. Empty: the file in its folder."""


@dataclass(frozen=True, slots=True)
class GivenRanges:
    """A task whose rows the driver already knows: partition, start and stop."""

    side: int
    flags: int
    ranges: tuple[tuple[int, int, int], ...]
    block_bits: int


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What was found when the audit began. Nothing here grows with the number of records."""

    request: AuditRequest
    topic_id: str
    bounds: Mapping[int, Bounds]
    how: str
    nodes: tuple[str, ...]
    is_compacted: bool
    ledger: JsonLines | None = None
    receipts: JsonLines | None = None
    tables: tuple[LandedFiles, ...] = ()
    positions: Mapping[int, int] | None = None
    notes: tuple[str, ...] = ()
    deleted: DeletedKeys | None = None

    @property
    def given(self) -> tuple[int, ...]:
        is_delivery_known = self.receipts is not None or self.positions is not None
        is_given = {ACKED: self.ledger, READABLE: True, DELIVERED: is_delivery_known, LANDED: self.tables}
        return tuple(side for side, given in is_given.items() if given)

    @property
    def block_bits(self) -> int:
        """Return the smallest block size that does not give too many blocks."""
        by_record = self.how == RECORDS or self.ledger or self.receipts or self.tables
        bits = BLOCK_BITS if by_record else BATCHES_BLOCK_BITS
        while bits < BLOCK_BITS_MAX and self.records >> bits > BLOCKS_MAX:
            bits += 1
        return bits

    @property
    def records(self) -> int:
        return sum(bound.end - bound.first for bound in self.bounds.values())


def prepare(request: AuditRequest) -> AuditPlan:
    """Collect everything that needs no Spark. Raises a one-line PipelineError for whatever is missing."""
    notes: list[str] = []
    ledger = None if request.ledger is None else snapshot(request.ledger, "ledger")
    receipts = None if request.receipts is None else snapshot(request.receipts, "receipts")
    for lines in (ledger, receipts):
        if lines is not None and lines.torn:
            notes.append(f"the last line of {lines.path} is incomplete and ignored")
    if request.receipts is not None and request.group is not None:
        notes.append(f"the receipts show what was delivered: the offsets of group {request.group} are ignored")
    tables = () if request.table is None else tuple(find_tables(request.table, request.topic, request.catalog))
    bare = [table.name for table in tables if not table.has_content]
    notes += [f"{name} holds no key, value and headers: not compared" for name in bare]
    with BlockingCluster(request.bootstrap) as cluster:
        partitions, topic_id = partitions_of(cluster, request.topic)
        positions = None if request.group is None else committed_offsets(cluster, request.group, request.topic)
        logs = log_bounds(cluster, request.topic, partitions, committed_only=True)
        begins = {} if request.start_ms is None else offsets_at(cluster, request.topic, logs, request.start_ms)
        compacted = is_compacted(cluster, request.topic)
        nodes = http_nodes(cluster) if request.log in (AUTO, HEADERS) and not compacted else ()
    how = _how(request, nodes, compacted, notes)
    if request.begins is not None:
        begins = {partition: max(begins.get(partition, 0), first) for partition, first in request.begins.items()}
    if request.ends is not None:
        ends = {partition: min(end, request.ends.get(partition, 0)) for partition, (_, end) in logs.items()}
        logs = {partition: (min(start, ends[partition]), ends[partition]) for partition, (start, _) in logs.items()}
    bounds = {partition: Bounds(begins.get(partition, 0), *log) for partition, log in logs.items()}
    given = ledger, receipts, tables, positions
    deleted = None if request.deleted is None else DeletedList(request.deleted).current()
    return AuditPlan(request, topic_id, bounds, how, nodes, compacted, *given, tuple(notes), deleted)


def _how(request: AuditRequest, nodes: tuple[str, ...], compacted: bool, notes: list[str]) -> str:
    """Choose how to read the log: by headers if they suffice. Only records contain keys and contents."""
    if compacted:
        if request.log in (HEADERS, FETCH):
            notes.append("the topic is compacted: its records were read, for their keys")
        return RECORDS
    if request.deleted is not None:
        if request.log in (HEADERS, FETCH):
            notes.append("records were read, for the keys of deleted ones")
        return RECORDS
    if request.log == HEADERS and not nodes:
        raise PipelineError(
            f"no node of {request.bootstrap} lists batches over HTTP from here: leave --log out, and they are fetched"
        )
    if request.log != AUTO:
        return request.log
    if request.ledger is None and (request.table is not None or request.receipts is not None):
        return RECORDS  # only the log has the records' contents
    return HEADERS if nodes else FETCH


def run(spark: SparkSession, plan: AuditPlan) -> AuditResult:
    """Run the Spark job, then read the log bounds again, because they may have changed meanwhile.

    What then lies between the last stable offset and the high watermark is not missing: it follows an open transaction.
    """
    findings = [Finding(*row) for row in _findings(spark, plan).collect()]
    with BlockingCluster(plan.request.bootstrap) as cluster:
        now = log_bounds(cluster, plan.request.topic, sorted(plan.bounds))
    result = summarise(plan.request.topic, plan.bounds, plan.given, findings, now=now)
    result.derived = sorted({name for table in plan.tables for name in table.derived})
    result.log_from, result.is_compacted, result.notes = plan.how, plan.is_compacted, list(plan.notes)
    return result


def _findings(spark: SparkSession, plan: AuditPlan) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    parallel = spark.sparkContext.defaultParallelism
    if plan.is_compacted:
        rows = _latest_per_key(spark, plan, parallel)
    else:
        rows = _rows(spark, _tasks(spark, plan, parallel), PACKED_SCHEMA)
    blocks = sum((bound.end - bound.first >> plan.block_bits) + 1 for bound in plan.bounds.values())
    width = max(1, min(blocks, max(2 * parallel, -(-blocks // BLOCKS_PER_TASK))))
    grouped = rows.repartition(width, "partition", "block").groupBy("partition", "block")
    bounds, given, bits, compacted = dict(plan.bounds), plan.given, plan.block_bits, plan.is_compacted

    def compare(key: tuple[Any, ...], table: Any) -> Any:
        partition, block = key[0].as_py(), key[1].as_py()
        bound = bounds.get(partition, Bounds(0, 0, 0))
        first = block << bits
        with task_errors(f"comparing partition {partition}, offsets {first} to {first + (1 << bits) - 1},"):
            compared = Block(partition, first, 1 << bits, rows_of(table), bound, given, is_compacted=compacted)
            findings = [finding._asdict() for finding in compared.findings()]
        return pa.Table.from_pylist(findings, schema=FINDING_SCHEMA)

    return grouped.applyInArrow(compare, from_arrow_schema(FINDING_SCHEMA))


# Sides.

Task = LogRange | FileRange | TableRange | GivenRanges


def _tasks(spark: SparkSession, plan: AuditPlan, parallel: int) -> list[Task]:
    """Return the tasks of all sides."""
    topic, bits, keyed = plan.request.topic, plan.block_bits, plan.is_compacted
    tasks: list[Task] = []
    if plan.ledger is not None:
        path = _reachable(spark, plan.ledger.path)
        tasks += file_ranges(plan.ledger, path, topic, ACKED, bits, parallel, with_keys=keyed)
    if plan.receipts is not None:
        tasks += file_ranges(plan.receipts, _reachable(spark, plan.receipts.path), topic, DELIVERED, bits, parallel)
    elif plan.positions is not None:
        reached = {number: min(plan.positions.get(number, 0), bound.end) for number, bound in plan.bounds.items()}
        tasks.append(_given(plan, DELIVERED, BY_POSITION, reached))
    tasks += table_ranges(plan.tables, bits, parallel, {number: bound.begin for number, bound in plan.bounds.items()})
    marks = _given(plan, MARK, 0, {number: bound.end for number, bound in plan.bounds.items()})
    return [*tasks, marks, *_log_tasks(plan, parallel)]


def _given(plan: AuditPlan, side: int, flags: int, ends: Mapping[int, int]) -> GivenRanges:
    """Return a task with everything from the log starts, or where the audit starts, up to `ends`."""
    ranges = [(number, plan.bounds[number].first, end) for number, end in ends.items()]
    return GivenRanges(side, flags, tuple(one for one in ranges if one[1] < one[2]), plan.block_bits)


def _log_tasks(plan: AuditPlan, parallel: int) -> list[LogRange]:
    request = plan.request
    requested = [
        RecordRange(request.topic, partition, bound.first, bound.end)
        for partition, bound in sorted(plan.bounds.items())
        if bound.first < bound.end
    ]
    rows_max = RECORDS_PER_TASK if plan.how == RECORDS else 0
    read = plan.how, plan.nodes, plan.block_bits, plan.is_compacted, plan.deleted
    return [LogRange(part, plan.topic_id, request.bootstrap, *read) for part in split(requested, parallel, rows_max)]


def _rows(spark: SparkSession, tasks: Sequence[Task], schema: Any = ROW_SCHEMA) -> DataFrame:
    """Read the rows of all tasks, with one Spark task for each."""
    from pyspark.sql.pandas.types import from_arrow_schema

    is_packed = schema is PACKED_SCHEMA

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                with task_errors(f"reading {_subject(tasks[number])}"):
                    yield from map(packed, _read(tasks[number])) if is_packed else _read(tasks[number])

    return spark.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(read, from_arrow_schema(schema))


def _subject(task: Task) -> str:
    if isinstance(task, LogRange):
        part = task.requested
        return f"{part.partition_name}, offsets {part.start} to {part.stop - 1},"
    if isinstance(task, FileRange):
        return f"{task.name}, bytes {task.start} to {task.stop},"
    return f"the table {task.uri}" if isinstance(task, TableRange) else "the given ranges"


def _read(task: Task) -> Iterator[Any]:
    if isinstance(task, LogRange):
        return read_log(task)
    if isinstance(task, FileRange):
        return read_lines(_here(task))
    if isinstance(task, TableRange):
        return read_table(task)
    partition, start, stop = np.array(task.ranges, np.int64).reshape(-1, 3).T
    return iter([rows_table(task.side, partition, start, stop, flags=task.flags, block_bits=task.block_bits)])


def _latest_per_key(spark: SparkSession, plan: AuditPlan, parallel: int) -> DataFrame:
    """Reduce a compacted topic: of the log, keep the latest record of each key; of the ledger, what must still exist.

    A record may be missing if a later record of its key is readable, or if it has no value and its key is gone.
    """
    from pyspark.sql import functions as sql

    tasks = _tasks(spark, plan, parallel)
    keyed = _rows(spark, [task for task in tasks if _has_keys(task)], KEYED_SCHEMA)
    others = _rows(spark, [task for task in tasks if not _has_keys(task)])
    latest = (
        keyed.groupBy("side", "partition", "key")
        .agg(sql.max_by(sql.struct(*others.columns), "start").alias("row"))
        .select("row.*", "key")
    )
    readable = latest.where(f"side = {READABLE}")
    acked = latest.where(f"side = {ACKED}")
    newest = readable.select("partition", "key", sql.col("start").alias("newest"))
    excused = f"newest > start or (newest is null and flags & {TOMBSTONE} > 0)"
    required = acked.join(newest, ["partition", "key"], "left").where(f"not coalesce({excused}, false)")
    parts = readable, required, keyed.where(f"side = {ABORTED}")
    return reduce(lambda one, part: one.unionAll(part.select(*others.columns)), parts, others)


def _has_keys(task: Task) -> bool:
    return isinstance(task, LogRange | FileRange) and task.with_keys


def _reachable(spark: SparkSession, path: str) -> str:
    """Return the path at which workers find a driver's file. Spark distributes it unless the workers run here."""
    master = spark.sparkContext.master or ""
    if master == "local" or master.startswith("local["):
        return os.path.abspath(path)
    spark.sparkContext.addFile(path)
    return SENT + os.path.basename(path)


def _here(task: FileRange) -> FileRange:
    """Resolve the path of a distributed file, in the worker."""
    if not task.path.startswith(SENT):
        return task
    from pyspark import SparkFiles

    return replace(task, path=SparkFiles.get(task.path.removeprefix(SENT)))
