"""Land topics in Delta tables exactly once: one streaming query, one checkpoint and one table per topic.

The executors write Parquet, the driver commits (`land_batch`). Afterwards, the landed offsets are committed to a
consumer group, so that lag tools see the job. The job never resumes from the group's offsets.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chronik.pipeline.blocking import BlockingCluster
from chronik.pipeline.delta import LandingTable
from chronik.pipeline.errors import PipelineError, failure_line
from chronik.pipeline.land_batch import BatchLander, LandedBatch
from chronik.pipeline.land_files import remove_files
from chronik.pipeline.land_ranges import LandedOffsets
from chronik.pipeline.land_schema import dead_letter_schema, table_schema
from chronik.pipeline.land_task import REPORT_SCHEMA, WriteTask, read_reports
from chronik.pipeline.progress import Figures, ProgressAccount, offsets_of
from chronik.pipeline.reading import ReadSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

__all__ = ["LandSettings", "TopicLanding", "dead_letters_name", "topic_ids"]

OWN_SOURCE = "chronik"
ROWS_PER_BATCH_MAX = 1_000_000
ROWS_PER_BATCH_SETTING = "spark.chronik.maxOffsetsPerTrigger"
START_TIMEOUT_S = 60.0
ROWS_PER_CHUNK = 32 * 1024
"""Rows that a task reads at once. Larger than Spark's best size, because these rows do not pass through Spark."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LandSettings:
    """The settings that all topics of a job share."""

    bootstrap: str
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
        return ReadSettings(self.bootstrap, with_headers=True, rows_max=ROWS_PER_CHUNK)

    def table(self, name: str) -> str:
        return f"{self.to.rstrip('/')}/{name}"


def dead_letters_name(topic: str) -> str:
    return f"{topic}_dead_letters"


def topic_ids(bootstrap: str, topics: list[str]) -> dict[str, str]:
    """Look up topic ids before Spark starts, so that a wrong name fails at once. Raises PipelineError."""
    with BlockingCluster(bootstrap) as cluster:
        found = cluster.topics(topics)
    for topic in topics:
        if topic not in found:
            raise PipelineError(f"topic {topic} does not exist at {bootstrap}: create it, or check its name")
    return {name: "" if layout.id is None or layout.id.int == 0 else str(layout.id) for name, layout in found.items()}


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
        self._rows_table = LandingTable.open(settings.table(topic), table_schema(fields), topic, topic_id)
        self._dead_table = None
        if fields is not None:
            uri = settings.table(dead_letters_name(topic))
            self._dead_table = LandingTable.open(uri, dead_letter_schema(), topic, topic_id)
        self._lander = BatchLander(self._rows_table, self._dead_table)
        self._query: Any = None
        self._query_id: Future[str] = Future()
        self._attempts = 0
        self._rows_of: dict[int, int] = {}
        """Rows landed by the last two micro-batches: Spark reports a micro-batch's progress while the next one runs."""
        self._account = ProgressAccount()
        self._committed: object = None

    @property
    def table(self) -> str:
        return self._rows_table.uri

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
            raise _told(self.topic, error) from None
        self._query_id.set_result(str(self._query.id))

    def wait(self, seconds: float) -> bool:
        """Return whether the query has ended by itself. Raises PipelineError if it has failed."""
        try:
            ended = self._query.awaitTermination(seconds)
        except Exception as error:
            raise _told(self.topic, error) from None
        self._take_progress()
        if ended:
            for table in (self._rows_table, self._dead_table):
                if table is not None:
                    table.compact()
        return bool(ended)

    def stop(self) -> None:
        """Stop the query at any point. A micro-batch that is not committed is read again on the next run."""
        if self._query is not None and self._query.isActive:
            self._query.stop()

    @property
    def figures(self) -> Figures | None:
        return self._account.figures

    def _read(self) -> DataFrame:
        settings = self._settings
        options = {
            "kafka.bootstrap.servers": settings.bootstrap,
            "subscribe": self.topic,
            "includeHeaders": "true",
            "maxOffsetsPerTrigger": self._spark.conf.get(ROWS_PER_BATCH_SETTING, str(ROWS_PER_BATCH_MAX)) or "",
            **settings.starting,
        }
        if settings.source == OWN_SOURCE:
            options["rangesOnly"] = "true"
            if settings.group:
                options["kafka.group.id"] = settings.group
        return self._spark.readStream.format(settings.source).options(**options).load()

    def _land(self, frame: DataFrame, batch: int) -> None:
        """Land one micro-batch. Spark calls this in its own thread."""

        def write(landed: LandedOffsets) -> Any:
            self._attempts += 1
            uris = self._settings.table(self.topic), self._settings.table(dead_letters_name(self.topic))
            name = f"{self._settings.token}-{batch}-{self._attempts}"
            task = WriteTask(*uris, name, self._fields, landed, self._settings.reading)
            try:
                reports = frame.mapInArrow(task, REPORT_SCHEMA).collect()
            except Exception as error:
                for uri in uris:
                    remove_files(uri, name)  # they would fill up a full disk
                raise _told(self.topic, error) from None
            return read_reports([report.file for report in reports])

        landed: LandedBatch = self._lander.land(self._query_id.result(START_TIMEOUT_S), batch, write)
        self.rows += landed.rows
        self.dead_letters += landed.dead_letters
        self._rows_of = {batch - 1: self._rows_of.get(batch - 1, 0), batch: landed.rows + landed.dead_letters}

    def _take_progress(self) -> None:
        """Update the figures and commit to the group: for a run's last micro-batch, nothing else commits in time."""
        progress = self._query.lastProgress
        if not progress:
            return
        # Spark counts what the source delivers, which is ranges here.
        self._account.take({**progress, "numInputRows": self._rows_of.get(progress["batchId"], 0)})
        end = progress["sources"][0].get("endOffset") if progress.get("sources") else None
        offsets = offsets_of(end)
        if not self._settings.group or not offsets or end == self._committed:
            return
        try:
            with BlockingCluster(self._settings.bootstrap) as cluster:
                cluster.commit(self._settings.group, offsets)
            self._committed = end
        except PipelineError as error:
            logger.warning("offsets were not committed to group %s: %s", self._settings.group, error)


def _told(topic: str, error: Exception) -> PipelineError:
    """Reduce Spark's stack trace to one line: the PipelineError in it, if there is one."""
    line = failure_line(error)
    if line is not None:
        return PipelineError(line)
    text = str(error)
    if "No space left on device" in text:
        return PipelineError(
            f"landing {topic} stopped: no space left on device; make room and start again, nothing is lost"
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return PipelineError(f"landing {topic} stopped: {first[:300]}")
