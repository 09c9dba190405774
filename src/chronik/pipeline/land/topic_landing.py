"""Land topics in Delta tables exactly once: one streaming query, one checkpoint and one table per topic.

The executors write Parquet (`task`), the driver commits to the table (`delta`). Records of aborted transactions do not
land, and those of an open transaction land when it is committed. Afterwards, the driver commits the landed offsets
to a consumer group, so that lag tools see the job. The job never resumes from the group's offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from chronik.client.properties import Target
from chronik.pipeline.errors import PipelineError, failure_line
from chronik.pipeline.land.delta import BatchLander, LandedBatch, LandingTable
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.progress import Figures, ProgressAccount, offsets_of
from chronik.pipeline.land.schema import dead_letter_schema, table_schema
from chronik.pipeline.land.task import REPORT_SCHEMA, NewFile, WriteTask, remove_files
from chronik.pipeline.source.blocking import BlockingCluster, topic_id
from chronik.pipeline.source.options import connection_options
from chronik.pipeline.source.reading import ReadSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

OWN_SOURCE = "chronik"
ROWS_PER_BATCH_MAX = 1_000_000
ROWS_PER_BATCH_SETTING = "spark.chronik.maxOffsetsPerTrigger"
START_TIMEOUT_S = 60.0
ROWS_PER_CHUNK = 32 * 1024
"""Rows that a task reads at once. Larger than Spark's best size, because these rows do not pass through Spark."""


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
    trigger_s: float = 1.0
    source: str = OWN_SOURCE

    @property
    def reading(self) -> ReadSettings | None:
        """Return how tasks read the records themselves, or None if Spark's own Kafka connector delivers them."""
        if self.source != OWN_SOURCE:
            return None
        return ReadSettings(self.bootstrap, with_headers=True, committed_only=True, rows_max=ROWS_PER_CHUNK)

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
        self, spark: SparkSession, topic: str, topic_id: str, settings: LandSettings, fields: StructType | None
    ) -> None:
        self.topic = topic
        self.rows = 0
        self.dead_letters = 0
        self._spark = spark
        self._settings = settings
        self._fields = fields
        self.table = settings.table(topic)
        self._dead_letters_table = settings.table(dead_letters_name(topic))
        tables = [LandingTable.open(self.table, table_schema(fields), topic, topic_id)]
        if fields is not None:
            tables.append(LandingTable.open(self._dead_letters_table, dead_letter_schema(), topic, topic_id))
        self._lander = BatchLander(*tables)
        self._query: Any = None
        self._query_id: Future[str] = Future()
        self._attempts = 0
        self._rows_of: dict[int, int] = {}
        """Rows landed by the last two micro-batches: Spark reports a micro-batch's progress while the next one runs."""
        self._account = ProgressAccount()
        self._committed: object = None

    def start(self) -> None:
        settings = self._settings
        writer = self._read().writeStream.foreachBatch(self._land).queryName(f"land {self.topic}")
        writer = writer.option("checkpointLocation", f"{settings.checkpoint.rstrip('/')}/{self.topic}")
        if settings.once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{settings.trigger_s:g} seconds")
        try:
            self._query = writer.start()
        except Exception as error:
            raise _one_line(self.topic, error) from None
        self._query_id.set_result(str(self._query.id))

    def wait(self, seconds: float) -> bool:
        """Return whether the query has ended by itself. Raises PipelineError if it has failed."""
        try:
            ended = self._query.awaitTermination(seconds)
        except Exception as error:
            raise _one_line(self.topic, error) from None
        self._take_progress()
        if ended:
            self._lander.compact()
        return bool(ended)

    def stop(self) -> None:
        """Stop the query at any point. A micro-batch that is not committed is read again on the next run."""
        if self._query is not None and self._query.isActive:
            self._query.stop()

    def commit_last(self) -> None:
        """Commit the offsets of the last micro-batch to the group, after `stop`."""
        if self._query is not None:
            self._take_progress()

    @property
    def figures(self) -> Figures | None:
        return self._account.figures

    def _read(self) -> DataFrame:
        settings = self._settings
        options = {
            **connection_options(settings.bootstrap, own=settings.source == OWN_SOURCE),
            "subscribe": self.topic,
            "includeHeaders": "true",
            "kafka.isolation.level": "read_committed",
            "maxOffsetsPerTrigger": self._spark.conf.get(ROWS_PER_BATCH_SETTING, str(ROWS_PER_BATCH_MAX)) or "",
            **settings.starting,
        }
        if settings.source == OWN_SOURCE:
            options["rangesOnly"] = "true"
        return self._spark.readStream.format(settings.source).options(**options).load()

    def _land(self, frame: DataFrame, batch: int) -> None:
        """Land one micro-batch. Spark calls this in its own thread."""

        def write(landed: LandedOffsets) -> Any:
            self._attempts += 1
            uris = self.table, self._dead_letters_table
            name = f"{self._settings.token}-{batch}-{self._attempts}"
            task = WriteTask(*uris, name, self._fields, landed, self._settings.reading)
            try:
                reports = frame.mapInArrow(task, REPORT_SCHEMA).collect()
            except Exception as error:
                for uri in uris:
                    remove_files(uri, name)  # they would fill up a full disk
                raise _one_line(self.topic, error) from None
            return [msgspec.json.decode(report.file, type=NewFile) for report in reports]

        landed: LandedBatch = self._lander.land(self._query_id.result(START_TIMEOUT_S), batch, write)
        self.rows += landed.rows
        self.dead_letters += landed.dead_letters
        self._rows_of = {batch - 1: self._rows_of.get(batch - 1, 0), batch: landed.rows + landed.dead_letters}

    def _take_progress(self) -> None:
        """Update the figures, and commit landed offsets to the group: this is the only place that commits them."""
        progress = self._query.lastProgress
        if not progress:
            return
        # Spark counts what the source delivers, which is ranges here.
        self._account.take({**progress, "numInputRows": self._rows_of.get(progress["batchId"], 0)})
        end = progress["sources"][0].get("endOffset") if progress.get("sources") else None
        offsets = offsets_of(end)
        if self._settings.group and offsets and end != self._committed:
            with BlockingCluster(self._settings.bootstrap) as cluster:
                if cluster.commit(self._settings.group, offsets):
                    self._committed = end


def _one_line(topic: str, error: Exception) -> PipelineError:
    """Reduce Spark's stack trace to one line: the PipelineError in it, if there is one."""
    line = failure_line(error)
    if line is not None:
        return PipelineError(line)
    text = str(error)
    if "No space left on device" in text:
        remedy = "free some space and start again, nothing is lost"
        return PipelineError(f"landing {topic} stopped: no space left on device; {remedy}")
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return PipelineError(f"landing {topic} stopped: {first[:300]}")
