"""A sink of the service: records of one topic, filtered and changed by SQL, become records of another topic.

It is one streaming query from `format("chronik")` to `format("chronik")`. Its checkpoint and its transactions make it
exactly once, whatever ends the service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from chronik.client.properties import Target
from chronik.pipeline.errors import PipelineError, Unavailable, failure_of, reason_of
from chronik.pipeline.land.progress import Figures, ProgressAccount, offsets_of
from chronik.pipeline.service.settings import SinkSettings
from chronik.pipeline.session import activate
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.options import connection_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS_PER_BATCH_MAX = 250_000
"""The encoded rows of a micro-batch pass through the driver."""
COLUMNS = ("key", "value", "headers")


class TopicSink:
    """The query of one sink, as a job's `Work`. `rows` are the records that it has read."""

    def __init__(
        self,
        spark: SparkSession,
        settings: SinkSettings,
        target: Target,
        starting: Mapping[str, str],
        wall_ms: Callable[[], int],
    ) -> None:
        """Raises PipelineError if one of the topics does not exist."""
        self.rows = self.dead_letters = self.size_bytes = 0
        self.last_commit_ms: int | None = None
        self.landed_ends: Mapping[int, int] = {}
        self._spark = spark
        self._settings = settings
        self._target = target
        self._starting = starting
        self._wall_ms = wall_ms
        self._account = ProgressAccount()
        self._query: Any = None
        self._batch = -1
        with BlockingCluster(target) as cluster:
            cluster.require_topics([settings.topic, settings.to])

    @property
    def figures(self) -> Figures | None:
        return self._account.figures

    @property
    def has_progressed(self) -> bool:
        return self.figures is not None

    def start(self) -> None:
        settings = self._settings
        where = connection_options(self._target)
        options = {
            **where,
            "subscribe": settings.topic,
            "includeHeaders": "true",
            "kafka.isolation.level": "read_committed",
            "maxOffsetsPerTrigger": str(ROWS_PER_BATCH_MAX),
            **self._starting,
        }
        try:
            activate(self._spark)
            rows = self._spark.readStream.format("chronik").options(**options).load()
            if settings.where is not None:
                rows = rows.where(settings.where)
            rows = rows.selectExpr(*(settings.select or COLUMNS))
            written = rows.writeStream.format("chronik").options(
                **where,
                topic=settings.to,
                delivery=settings.delivery,
                checkpointLocation=settings.checkpoint,
                **{"kafka.compression.type": settings.compression},
            )
            trigger = f"{settings.trigger:g} seconds"
            self._query = written.queryName(f"sink {settings.name}").trigger(processingTime=trigger).start()
        except Exception as error:
            raise self._failure(error) from None

    def wait(self, seconds: float) -> bool:
        try:
            has_ended = bool(self._query.awaitTermination(seconds))
        except Exception as error:
            raise self._failure(error) from None
        self._take_progress()
        return has_ended

    def stop(self) -> None:
        if self._query is not None and self._query.isActive:
            self._query.stop()

    def commit_last(self) -> None:
        if self._query is not None:
            self._take_progress()

    def _take_progress(self) -> None:
        newest = self._query.lastProgress
        if newest and newest["batchId"] > self._batch:
            for progress in self._query.recentProgress:
                if progress["batchId"] > self._batch and progress["numInputRows"]:
                    self._batch = progress["batchId"]
                    self.rows += progress["numInputRows"]
                    self.last_commit_ms = self._wall_ms()
        if newest:
            self._account.take(newest)
            ends = offsets_of(newest["sources"][0].get("endOffset")) if newest.get("sources") else {}
            self.landed_ends = {partition: end for (_, partition), end in ends.items()} or self.landed_ends

    def _failure(self, error: Exception) -> PipelineError:
        name = self._settings.name
        failure = failure_of(error)
        if failure is not None:
            return failure
        if type(error).__name__ in ("AnalysisException", "ParseException"):
            return PipelineError(f"the sink {name} cannot run its select and where: {reason_of(error)}")
        return Unavailable(f"the sink {name} stopped: {reason_of(error)[:300]}")
