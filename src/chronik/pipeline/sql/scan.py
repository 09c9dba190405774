"""One scan of a topic by DuckDB: threads fetch and decode the ranges, DuckDB takes the batches from a bounded queue.

The first rows are decoded without compiled code, which takes a second to load. A query with a LIMIT often needs no
more. A query that uses no column of the records (a count) takes the number of records from the batches' headers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, Full, Queue
from typing import Any

import pyarrow as pa

from chronik.client.properties import Target
from chronik.pipeline.errors import PipelineError, task_errors
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.columns import Chunk, arrow_schema
from chronik.pipeline.source.decoder import ArrowDecoder, PythonChunk
from chronik.pipeline.source.ranges import RecordRange, split
from chronik.pipeline.source.reading import LogShortened, PartitionFetches
from chronik.pipeline.sql.pushdown import Filter
from chronik.wire.batch import BatchHeader
from chronik.wire.compression import Buffer
from chronik.wire.records import decode_records

THREADS_MAX = 4
BATCHES_WAITING_MAX = 4
"""Batches in the queue of a scan. With one batch in each thread, this bounds its memory."""
ROWS_MAX = 32_768
BATCH_BYTES_MAX = 8 * 1024 * 1024
FIRST_ROWS = 1_000
"""How many offsets are decoded without compiled code."""
WAIT_S = 0.1
CONSTANT = frozenset({"topic", "partition"})
"""Columns that are the same for all records of a partition."""


@dataclass
class ScanProgress:
    """What all scans of a query have done. Threads only add to it, and the terminal shows it."""

    rows: int = 0
    bytes: int = 0
    offsets: int = 0
    offsets_total: int = 0
    lost: list[str] = field(default_factory=list)
    """Offsets that were deleted while the query ran."""
    unfit: dict[str, int] = field(default_factory=dict)
    """Records of each topic that do not fit their schema."""


@dataclass(frozen=True)
class ScanSettings:
    target: Target
    committed_only: bool
    topic_ids: dict[str, str]
    progress: ScanProgress
    stopped: threading.Event
    """Set when the query ends, by its last row or by Ctrl-C."""
    failures: list[PipelineError]
    """Why scans have failed: DuckDB keeps only the text."""
    threads: list[threading.Thread]
    """All threads of the query. They end soon after `stopped` is set."""


class Scan:
    """Reads ranges once. `batches` is consumed by one thread at a time; DuckDB takes care of that."""

    def __init__(
        self,
        ranges: Sequence[RecordRange],
        columns: Sequence[str],
        filter_: Filter,
        settings: ScanSettings,
        schema: Any,
        typed: Callable[[Any], Any] | None = None,
    ) -> None:
        """`typed` appends the typed columns to a batch, and is None if no such column is needed."""
        self._ranges = list(ranges)
        self._columns = list(columns)
        self._filter = filter_
        self._settings = settings
        self._schema = pa.schema([schema.field(name) for name in columns])
        self._typed = typed
        self._needed = filter_.needed(columns)
        self._queue: Queue[Any] = Queue(BATCHES_WAITING_MAX)
        settings.progress.offsets_total += sum(each.stop - each.start for each in ranges)

    def reader(self) -> Any:
        return pa.RecordBatchReader.from_batches(self._schema, self._batches())

    def _batches(self) -> Iterator[Any]:
        waiting = self._ranges
        if self._typed is None and not self._needed <= CONSTANT:
            first, waiting = _first_rows(waiting)
            for requested in first:
                yield from self._read(requested, PythonChunk)
        if waiting:
            yield from self._parallel(waiting)

    def _parallel(self, ranges: Sequence[RecordRange]) -> Iterator[Any]:
        tasks: Queue[RecordRange] = Queue()
        parts = split(ranges, THREADS_MAX)
        for part in parts:
            tasks.put(part)
        threads = [
            threading.Thread(target=self._work, args=(tasks,), name=f"chronik-sql-{number}", daemon=True)
            for number in range(min(THREADS_MAX, len(parts)))
        ]
        self._settings.threads.extend(threads)
        for thread in threads:
            thread.start()
        running = len(threads)
        while running and not self._settings.stopped.is_set():
            try:
                taken = self._queue.get(timeout=WAIT_S)
            except Empty:
                continue
            if taken is None:
                running -= 1
            elif isinstance(taken, BaseException):
                raise taken
            else:
                yield taken

    def _work(self, tasks: Queue[RecordRange]) -> None:
        try:
            while not self._settings.stopped.is_set():
                try:
                    requested = tasks.get_nowait()
                except Empty:
                    break
                for batch in self._read(requested, CountChunk if self._needed <= CONSTANT else None):
                    self._put(batch)
        except BaseException as error:
            self._put(error)
        else:
            self._put(None)

    def _put(self, item: Any) -> None:
        put_unless(self._settings.stopped, self._queue, item)

    def _read(self, requested: RecordRange, chunk: type[Chunk] | None) -> Iterator[Any]:
        span = f"reading {requested.partition_name}, offsets {requested.start} to {requested.stop - 1}"
        try:
            with task_errors(span, "is the cluster healthy? See chronik cluster status"):
                for rows in self._decoded(requested, chunk):
                    yield self._finished(rows)
        except PipelineError as error:
            self._settings.failures.append(error)
            raise

    def _finished(self, rows: Any) -> Any:
        """Apply the filter, which DuckDB does not repeat."""
        self._settings.progress.rows += rows.num_rows
        if self._typed is not None:
            rows = self._typed(rows)
        kept = self._filter.apply(rows)
        return kept.select(self._columns)

    def _decoded(self, requested: RecordRange, chunk: type[Chunk] | None) -> Iterator[Any]:
        settings, progress = self._settings, self._settings.progress
        decode = partial(
            CountingDecoder if chunk is CountChunk else ArrowDecoder,
            with_headers="headers" in self._needed,
            rows_max=FIRST_ROWS if chunk is PythonChunk else ROWS_MAX,
            bytes_max=BATCH_BYTES_MAX,
            chunk=chunk,
        )
        topic_id = settings.topic_ids.get(requested.topic, "")
        with BlockingCluster(settings.target) as cluster:
            decoder = decode(requested)
            for response in PartitionFetches(cluster, requested, topic_id, settings.committed_only).responses():
                if settings.stopped.is_set():
                    return
                before = decoder.next_offset
                if not isinstance(response, LogShortened):
                    yield from decoder.feed(memoryview(response.records), response.aborted_transactions or ())
                    progress.bytes += len(response.records)
                elif response.resume_at is None:
                    raise PipelineError(
                        f"{response}: records were lost, or the topic was recreated; run the query again"
                    )
                else:
                    progress.lost.append(str(response))
                    yield from decoder.finish()
                    decoder = decode(requested._replace(start=response.resume_at))
                progress.offsets += min(decoder.next_offset, requested.stop) - before
            yield from decoder.finish()


class CountChunk:
    """Counts the records in the range instead of decoding them: its rows have the constant columns only."""

    def __init__(self, requested: RecordRange, *, with_headers: bool, rows_max: int, bytes_max: int) -> None:
        self._requested = requested
        self._rows_max = rows_max
        schema = arrow_schema(False)
        self._schema = pa.schema([schema.field(name) for name in ("topic", "partition")])
        self._topics = pa.array([requested.topic] * rows_max, pa.string())
        self._partitions = pa.array([requested.partition] * rows_max, pa.int32())
        self.rows = 0
        self._waiting = 0

    def begin(self, header: BatchHeader, payload: Buffer) -> None:
        self._waiting = header.record_count
        if not is_inside(header, self._requested):
            records = decode_records(
                bytes(payload), header.record_count, header.base_offset, header.base_timestamp, None
            )
            offsets = range(self._requested.start, self._requested.stop)
            self._waiting = sum(record.offset in offsets for record in records)

    def decode_batch(self) -> bool:
        taken = min(self._waiting, self._rows_max - self.rows)
        self.rows += taken
        self._waiting -= taken
        return self._waiting == 0

    def cut(self) -> Any:
        columns = [self._topics.slice(0, self.rows), self._partitions.slice(0, self.rows)]
        self.rows = 0
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


class CountingDecoder(ArrowDecoder):
    """Does not decompress a batch that is counted by its header."""

    def _payload(self, records: memoryview, start: int, header: BatchHeader) -> Buffer:
        if is_inside(header, self._requested):
            return b""
        return super()._payload(records, start, header)


def put_unless(stopped: threading.Event, queue: Queue[Any], item: Any) -> None:
    """Wait for a place in the queue, until the query is stopped."""
    while not stopped.is_set():
        try:
            queue.put(item, timeout=WAIT_S)
            return
        except Full:
            continue


def is_inside(header: BatchHeader, requested: RecordRange) -> bool:
    return requested.start <= header.base_offset and header.last_offset < requested.stop


def _first_rows(ranges: Sequence[RecordRange]) -> tuple[list[RecordRange], list[RecordRange]]:
    """Split off the first offsets."""
    first, later, left = list[RecordRange](), list[RecordRange](), FIRST_ROWS
    for whole in ranges:
        middle = min(whole.stop, whole.start + left)
        left -= middle - whole.start
        if middle > whole.start:
            first.append(whole._replace(stop=middle))
        if middle < whole.stop:
            later.append(whole._replace(start=middle))
    return first, later
