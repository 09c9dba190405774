"""The format `chronik` for reading and writing, and its writers.

Spark creates a writer on the driver and sends it to the tasks, for each micro-batch anew. A task's result, its commit
message, goes to `commit` on the driver, in another process. Spark passes on the result of one successful attempt of
each task.

Exactly once: tasks encode their rows and return the batches; `commit` appends them all in one transaction. Tasks
therefore have no effect outside Spark: attempts that fail, run twice or end late cannot add a record. Rows of one
partition may come from any number of tasks, and a Kafka transaction accepts the batches of a partition only in
sequence, so one process has to append them. The transaction is open only during the commit.

At least once: tasks append their batches themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4  # noqa: TID251  # Spark creates the writer of a batch, and passes nothing unique

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.sink.delivery import deliver, deliver_once
from chronik.pipeline.sink.encoder import Batches, RowEncoder
from chronik.pipeline.sink.options import SinkOptions
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.spark_source import ChronikSource

logger = logging.getLogger(__name__)

QUERY_ID = "sql.streaming.queryId"
"""The local property that names the streaming query to its tasks. The checkpoint preserves the id."""
APPEND_FROM_BYTES = 8 * 1024 * 1024
RESULT_BYTES_MAX = 1024 * 1024 * 1024
"""One task's batches. Arrow and Spark pass a result of at most 2 GB."""


class ChronikFormat(ChronikSource):
    """`format("chronik")`: the source, and the sink. `pipeline.sink.options` documents the options of the sink."""

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise PipelineError('a topic cannot be overwritten: use mode("append")')
        return BatchWriter(SinkOptions.parse(self._given, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return StreamWriter(SinkOptions.parse(self._given, schema))


@dataclass(frozen=True, slots=True)
class TaskResult(WriterCommitMessage):
    """The encoded batches of a task; empty if the task has appended them itself."""

    query_id: str | None
    batches: Batches


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame once: in one transaction, under an id of its own."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._name = f"batch-{uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        return _write(iterator, self._options)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _, batches = _joined(messages)
        with BlockingCluster(self._options.bootstrap) as cluster:
            deliver_once(cluster, self._name, batches, self._options.timeout_ms)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes one micro-batch of a streaming query. A repeated micro-batch has no effect once it is committed."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        return _write(iterator, self._options)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        query_id, batches = _joined(messages)
        if not batches:
            return
        if query_id is None:
            raise PipelineError("Spark does not name the query to its tasks: use delivery=at-least-once")
        with BlockingCluster(self._options.bootstrap) as cluster:
            if not deliver_once(cluster, query_id, batches, self._options.timeout_ms, batchId):
                logger.warning("micro-batch %d of query %s is committed already: skipped", batchId, query_id)


def _write(rows: Iterator[pa.RecordBatch], options: SinkOptions) -> TaskResult:
    """Encode the rows of one task, and append them if the delivery allows it."""
    task = TaskContext.get()
    first, query_id = (0, None) if task is None else (task.partitionId(), task.getLocalProperty(QUERY_ID))
    with BlockingCluster(options.bootstrap) as cluster:

        def partition_count(topic: str) -> int:
            return len(cluster.require_topics([topic])[topic].partitions)

        encoder = RowEncoder(partition_count, options.codec, topic=options.topic, first=first)
        for batch in rows:
            now = datetime.now(UTC)  # noqa: TID251  # a task has no clock but this machine's
            encoder.add(batch, int(now.timestamp() * 1000))
            if options.is_exactly_once and encoder.size_bytes > RESULT_BYTES_MAX:
                raise PipelineError(
                    f"a task has more than {RESULT_BYTES_MAX >> 20} MB for one transaction: limit the micro-batch "
                    "(maxOffsetsPerTrigger), compress (kafka.compression.type), or use delivery=at-least-once"
                )
            if not options.is_exactly_once and encoder.size_bytes > APPEND_FROM_BYTES:
                deliver(cluster, encoder.take())
        if options.is_exactly_once:
            return TaskResult(query_id, encoder.take())
        deliver(cluster, encoder.take())
        return TaskResult(query_id, {})


def _joined(messages: Sequence[WriterCommitMessage | None]) -> tuple[str | None, Batches]:
    """Return the query's id and the batches of all tasks, in the order of the tasks."""
    query_id: str | None = None
    batches: Batches = {}
    for message in messages:
        if isinstance(message, TaskResult):
            query_id = query_id or message.query_id
            for partition, encoded in message.batches.items():
                batches.setdefault(partition, []).extend(encoded)
    return query_id, batches
