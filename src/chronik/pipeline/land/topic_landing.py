"""Land topics in Delta tables exactly once: one streaming query, one checkpoint and one table per topic.

The executors write Parquet (`task`), the driver commits to the table (`delta`). Records of aborted transactions do not
land, and those of an open transaction land when it is committed. Afterwards, the driver commits the landed offsets
to a consumer group, so that lag tools see the job. The job never resumes from the group's offsets.

A query that fails because brokers do not answer, or because Spark lost a worker, is started again from its checkpoint,
until it has failed for `retry_for_s` without a finished micro-batch. That is safe: a repeated micro-batch lands once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from threading import Event
from typing import TYPE_CHECKING, Any

import msgspec

from chronik.client.properties import Target
from chronik.pipeline.catalog import NAMESPACE, open_catalog
from chronik.pipeline.deleted import DeletedList
from chronik.pipeline.errors import PipelineError, Unavailable, failure_of, reason_of, store_failure
from chronik.pipeline.land.backfill import Range, range_options
from chronik.pipeline.land.delta import BatchLander, Landable, LandedBatch, LandingTable
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.maintenance import Maintained, Maintainer, maintain
from chronik.pipeline.land.options import TableOptions
from chronik.pipeline.land.progress import Figures, ProgressAccount, offsets_of
from chronik.pipeline.land.retry import Retries
from chronik.pipeline.land.schema import RECORD_COLUMNS, dead_letter_schema, table_schema
from chronik.pipeline.land.state_table import StateLander, StateTable, range_of
from chronik.pipeline.land.state_task import MergedBucket, MergeTask, StageTask
from chronik.pipeline.land.task import REPORT_SCHEMA, Report, WriteTask, remove_files
from chronik.pipeline.source.blocking import BlockingCluster, topic_id
from chronik.pipeline.source.group_offsets import GroupOffsets
from chronik.pipeline.source.options import RANGES_ONLY, connection_options
from chronik.pipeline.source.reading import ReadSettings
from chronik.pipeline.typed.debezium import HIDDEN
from chronik.pipeline.typed.topic_schemas import TopicSchemas

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

OWN_SOURCE = "chronik"
ROWS_PER_BATCH_MAX = 1_000_000
ROWS_PER_TASK = 250_000
"""Offsets that one task of a backfill reads at most. A task's files are one for each date."""
ROWS_PER_BATCH_SETTING = "spark.chronik.maxOffsetsPerTrigger"
START_TIMEOUT_S = 60.0
TRIGGER_S = 10.0
MAINTAIN_EVERY_BATCHES = 16
RETRY_FOR_S = 600.0
ROWS_PER_CHUNK = 32 * 1024
"""Rows that a task reads at once. Larger than Spark's best size, because these rows do not pass through Spark."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LandSettings:
    """The settings that all topics of a job share."""

    bootstrap: Target
    to: str
    checkpoint: str
    token: str
    """A name that no earlier run had. File names contain it."""
    starting: Mapping[str, str] = field(default_factory=lambda: {"startingOffsets": "earliest"})
    group: str = ""
    once: bool = False
    trigger_s: float = TRIGGER_S
    retry_for_s: float | None = RETRY_FOR_S
    """How long to start a failing query again. None: never, because the caller opens the landing again."""
    source: str = OWN_SOURCE
    options: TableOptions = field(default_factory=TableOptions)
    keep_files_h: int | None = None
    keep_log_d: int | None = None
    """How long files and log entries are kept that the table's current version does not need. None: as they are set."""
    deleted: str | None = None
    """The list of keys whose records must not land."""
    wall_ms: Callable[[], int] = field(kw_only=True)

    @property
    def reading(self) -> ReadSettings | None:
        """Return how tasks read the records themselves, or None if Spark's own Kafka connector delivers them."""
        if self.source != OWN_SOURCE:
            return None
        after_loss = "choose a new --checkpoint (no record lands twice) to continue"
        return ReadSettings(
            self.bootstrap, with_headers=True, committed_only=True, rows_max=ROWS_PER_CHUNK, after_loss=after_loss
        )

    def table(self, name: str) -> str:
        return f"{self.to.rstrip('/')}/{name}"


def dead_letters_name(topic: str) -> str:
    return f"{topic}_dead_letters"


def topic_ids(bootstrap: Target, topics: list[str]) -> dict[str, str]:
    """Look up topic ids before Spark starts, so that a wrong name fails at once. Raises PipelineError."""
    with BlockingCluster(bootstrap) as cluster:
        return {name: topic_id(topic) for name, topic in cluster.require_topics(topics).items()}


class TopicLanding:
    """Lands one topic in its table. Call `start`, then `wait` until it returns True."""

    def __init__(
        self,
        spark: SparkSession,
        topic: str,
        topic_id: str,
        settings: LandSettings,
        fields: StructType | None,
        clock: Callable[[], float],
        schemas: TopicSchemas | None = None,
    ) -> None:
        """`fields` or `schemas` say how values become columns; with neither, there are only the record's columns."""
        self.topic = topic
        self.rows = 0
        self.dead_letters = 0
        self.size_bytes = 0
        self.last_commit_ms: int | None = None
        self.landed_ends: Mapping[int, int] = {}
        """The end of the last finished micro-batch in each partition: everything below it has landed."""
        self._spark = spark
        self._settings = settings
        self._fields = fields
        self.table = settings.table(topic)
        self._dead_letters_table = settings.table(dead_letters_name(topic))
        self._schemas = schemas
        is_typed = schemas is not None
        open_table = self._opener(topic_id)
        self._state = self._open_state(topic_id) if settings.options.is_upsert else None
        tables: list[Landable] = [self._state or open_table(self.table, table_schema(fields), is_typed)]
        if settings.options.has_dead_letters or fields is not None or is_typed:
            tables.append(open_table(self._dead_letters_table, dead_letter_schema(), False))
        self._rows_table = tables[0]
        if self._state is not None:
            parallel = spark.sparkContext.defaultParallelism
            self._lander: BatchLander = StateLander(
                self._state, tables[1], self._merge, parallel, settings.token, settings.wall_ms
            )
        else:
            self._lander = BatchLander(*tables)
        self._clock = clock
        self._retries = Retries(settings.retry_for_s or 0)
        self._retry_at_s: float | None = None
        self._maintainer = Maintainer(self._maintain, [table.uri for table in tables], clock)
        self._query: Any = None
        self._query_id: Future[str] = Future()
        self._attempts = self._maintained = 0
        self._rows_of: dict[int, int] = {}
        """Rows landed by the last two micro-batches: Spark reports a micro-batch's progress while the next one runs."""
        self._account = ProgressAccount()
        self._group = GroupOffsets(settings.group)
        self._deleted = None if settings.deleted is None else DeletedList(settings.deleted)

    def _opener(self, topic_id: str) -> Callable[[str, Any, bool], Landable]:
        """Return what opens a table of the chosen format: its address, its columns, and whether it may have more."""
        options, topic = self._settings.options, self.topic
        if not options.is_iceberg:
            return lambda uri, schema, more: LandingTable.open(uri, schema, topic, topic_id, may_have_more=more)
        from chronik.pipeline.land.iceberg import IcebergTable, can_promote

        catalog = self._catalog()
        namespace = options.catalog.get("namespace", NAMESPACE)
        if self._schemas is not None:
            self._schemas.can_promote = can_promote
        return lambda uri, schema, more: IcebergTable.open(
            catalog, uri, schema, topic, topic_id, namespace=namespace, may_have_more=more
        )

    def _catalog(self) -> Any:
        return open_catalog(self._settings.to, self._settings.options.catalog)

    def _open_state(self, topic_id: str) -> StateTable:
        options, fields, is_typed = self._settings.options, self._fields, self._schemas is not None
        if self._settings.source != OWN_SOURCE:
            raise PipelineError(f"--mode upsert needs the source {OWN_SOURCE}, which works with every Kafka cluster")
        own = sorted({field.name for field in fields or ()} & StateTable.OWN)
        if own:
            raise PipelineError(f"{own[0]} is a column of every table with --mode upsert: leave it out of --schema")
        unknown = sorted(set(options.key) - {field.name for field in fields or ()}) if fields is not None else []
        if unknown:
            raise PipelineError(f"--key {unknown[0]} is not in the schema {options.schema}")
        state = StateTable.open_state(
            self.table, fields, self.topic, topic_id, options.key, options.buckets, may_have_more=is_typed
        )
        with BlockingCluster(self._settings.bootstrap) as cluster:
            state.topic_partitions = len(cluster.require_topics([self.topic])[self.topic].partitions)
        return state

    def _merge(self, task: MergeTask) -> list[MergedBucket]:
        """Run a merge on the executors."""
        frame = self._spark.range(0, len(task.jobs), 1, len(task.jobs))
        try:
            lines = frame.mapInArrow(task, REPORT_SCHEMA).collect()
        except Exception as error:
            raise _one_line(self.topic, error) from None
        return [msgspec.json.decode(line.report, type=MergedBucket) for line in lines]

    def start(self) -> None:
        settings = self._settings
        name = f"land {self.topic} {settings.token[:8]}"
        try:
            writer = self._read().writeStream.foreachBatch(self._land).queryName(name)
            writer = writer.option("checkpointLocation", f"{settings.checkpoint.rstrip('/')}/{self.topic}")
            if settings.once:
                writer = writer.trigger(availableNow=True)
            else:
                writer = writer.trigger(processingTime=f"{settings.trigger_s:g} seconds")
            self._query = writer.start()
        except Exception as error:
            raise _one_line(self.topic, error) from None
        if not self._query_id.done():  # a query that is started again keeps its id
            self._query_id.set_result(str(self._query.id))

    def backfill(self, chosen: Range) -> None:
        """Land a range of offsets in one commit, instead of a query. Offsets that have landed are skipped.

        Raises PipelineError. Nothing has landed then, and no offset is committed to a group in any case.
        """
        self._query_id.set_result(f"backfill-{self._settings.token}")
        options = self._options() | range_options(self.topic, chosen) | {"maxRecordsPerPartition": str(ROWS_PER_TASK)}
        frame = self._spark.read.format(self._settings.source).options(**options).load()
        try:
            self._land(frame, 0)
        except PipelineError:
            raise
        except Exception as error:
            raise _one_line(self.topic, error) from None
        self._maintainer.run(is_last=True)

    def wait(self, seconds: float) -> bool:
        """Return whether the query has ended by itself. Raises PipelineError if it has failed for good."""
        if self._retry_at_s is not None:
            left_s = self._retry_at_s - self._clock()
            if left_s > 0:
                Event().wait(min(seconds, left_s))
                return False
            self._retry_at_s = None
            try:
                self.start()
            except PipelineError as error:
                self._retry_later(error)
                return False
        try:
            ended = self._query.awaitTermination(seconds)
        except Exception as error:
            self._retry_later(_one_line(self.topic, error))
            return False
        if self._query.lastProgress:
            failed_s = self._retries.succeeded(self._clock())
            if failed_s is not None:
                logger.warning("landing %s continues after %.0f s", self.topic, failed_s)
        self._take_progress()
        if ended:
            self._maintainer.run(is_last=True)
        return bool(ended)

    def _retry_later(self, failure: PipelineError) -> None:
        """Plan the next start of a failed query. Raises the failure if no further attempt can help."""
        if not isinstance(failure, Unavailable) or self._settings.retry_for_s is None:
            raise failure
        was_failing = self._retries.is_failing
        self._retry_at_s = self._retries.failed(self._clock())
        if self._retry_at_s is None:
            raise PipelineError(
                f"{failure}; {self.topic} could not be landed for {self._retries.retry_for_s:g} s (--retry-for), so "
                "fix that and start again: nothing is lost"
            )
        if not was_failing:
            logger.warning(
                "landing %s waits and tries again for %g s: %s", self.topic, self._retries.retry_for_s, failure
            )

    def stop(self) -> None:
        """Stop the query at any point. A micro-batch that is not committed is read again on the next run."""
        self._maintainer.stop()
        if self._query is not None and self._query.isActive:
            self._query.stop()

    def commit_last(self) -> None:
        """Commit the offsets of the last micro-batch to the group, after `stop`."""
        if self._query is not None:
            self._take_progress()

    @property
    def has_progressed(self) -> bool:
        """Whether a micro-batch of this run has ended."""
        return self.figures is not None

    @property
    def figures(self) -> Figures | None:
        return self._account.figures

    def _read(self) -> DataFrame:
        options = {
            **self._options(),
            "subscribe": self.topic,
            "maxOffsetsPerTrigger": self._spark.conf.get(ROWS_PER_BATCH_SETTING, str(ROWS_PER_BATCH_MAX)) or "",
            **self._settings.starting,
        }
        return self._spark.readStream.format(self._settings.source).options(**options).load()

    def _options(self) -> dict[str, str]:
        """Return the options of every read."""
        is_own = self._settings.source == OWN_SOURCE
        return {
            **connection_options(self._settings.bootstrap, own=is_own),
            "includeHeaders": "true",
            "kafka.isolation.level": "read_committed",
            **({RANGES_ONLY: "true"} if is_own else {}),
        }

    def _land(self, frame: DataFrame, batch: int) -> None:
        """Land one micro-batch. Spark calls this in its own thread."""

        def write(landed: LandedOffsets) -> Any:
            while True:
                self._attempts += 1
                uris = self.table, self._dead_letters_table
                name = f"{self._settings.token}-{batch}-{self._attempts}"
                decoding = None
                if self._schemas is not None:
                    taken = RECORD_COLUMNS if self._state is None else self._state.OWN
                    decoding = self._schemas.plan(self._rows_table.more_columns(), taken)
                    self._rows_table.require([each for each in decoding.columns if each not in HIDDEN])
                deleted = None if self._deleted is None else self._deleted.current()
                reading = self._settings.reading
                task = self._task(WriteTask(*uris, name, self._fields, landed, reading, decoding, deleted))
                try:
                    lines = frame.mapInArrow(task, REPORT_SCHEMA).collect()
                except Exception as error:
                    for uri in uris:
                        remove_files(uri, name)  # they would fill up a full disk
                    raise _one_line(self.topic, error) from None
                reports = [msgspec.json.decode(line.report, type=Report) for line in lines]
                missing = {each for report in reports for each in report.missing}
                if not missing or self._schemas is None:
                    files = [file for report in reports for file in report.files]
                    if self._state is not None:
                        files += [range_of(*each) for report in reports for each in report.ranges]
                    return files
                for uri in uris:
                    remove_files(uri, name)
                self._schemas.learn(missing)

        landed: LandedBatch = self._lander.land(self._query_id.result(START_TIMEOUT_S), batch, write)
        if (batch + 1) % MAINTAIN_EVERY_BATCHES == 0:
            self._maintainer.wake()
        self.rows += landed.rows
        self.dead_letters += landed.dead_letters
        self.size_bytes += landed.size_bytes
        if landed.rows or landed.dead_letters:
            self.last_commit_ms = self._settings.wall_ms()
        self._rows_of = {batch - 1: self._rows_of.get(batch - 1, 0), batch: landed.rows + landed.dead_letters}

    def _task(self, task: WriteTask) -> WriteTask:
        """Return the task that the mode needs."""
        if self._state is None:
            return task
        options = self._settings.options
        given = {each.name: getattr(task, each.name) for each in fields_of(task)}
        return StageTask(
            **given, key=options.key, buckets=self._state.buckets, has_envelope=options.envelope is not None
        )

    def _maintain(self, uri: str, vacuum: bool) -> Maintained:
        settings, self._maintained = self._settings, self._maintained + 1
        token = f"{settings.token}-m{self._maintained}"
        keep = settings.keep_files_h, settings.keep_log_d
        if settings.options.is_iceberg:
            from chronik.pipeline.land.iceberg_maintenance import maintain_iceberg

            namespace = settings.options.catalog.get("namespace", NAMESPACE)
            name = (namespace, uri.rpartition("/")[2])
            return maintain_iceberg(
                self._catalog(), name, token, settings.wall_ms(), expire=vacuum, keep_files_h=keep[0], keep_d=keep[1]
            )
        return maintain(uri, token, settings.wall_ms(), vacuum=vacuum, keep_files_h=keep[0], keep_log_d=keep[1])

    def _take_progress(self) -> None:
        """Update the figures, and commit landed offsets to the group."""
        progress = self._query.lastProgress
        if not progress:
            return
        # Spark counts what the source delivers, which is ranges here.
        self._account.take({**progress, "numInputRows": self._rows_of.get(progress["batchId"], 0)})
        end = progress["sources"][0].get("endOffset") if progress.get("sources") else None
        ends = offsets_of(end)
        self._group.commit(self._settings.bootstrap, ends, self._clock())
        self.landed_ends = {partition: offset for (_, partition), offset in ends.items()} or self.landed_ends


def _one_line(topic: str, error: Exception) -> PipelineError:
    """Reduce Spark's stack trace to one line: the PipelineError in it, if there is one."""
    failure = failure_of(error)
    if failure is not None:
        return failure
    if "No space left on device" in str(error):
        remedy = "free some space and start again, nothing is lost"
        return PipelineError(f"landing {topic} stopped: no space left on device; {remedy}")
    # Unless a store has refused something, a fault of Spark, such as a lost worker. Its next attempt may succeed.
    return store_failure(error)(f"landing {topic} stopped: {reason_of(error)[:300]}")
