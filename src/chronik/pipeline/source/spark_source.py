"""The Spark source `chronik`: a topic's records as rows, in batch and streaming queries.

Spark runs this in separate processes: planning in one Python process beside the driver, reading in the executors'
workers. Only pickled options and ranges pass between them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from datetime import datetime
from threading import Lock
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.types import StructType

from chronik.client.properties import ClientSettings, PropertiesError, load_settings
from chronik.client.security import PLAINTEXT_SECURITY
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.columns import arrow_schema
from chronik.pipeline.source.group_offsets import GroupOffsets
from chronik.pipeline.source.options import RANGES_ONLY, SourceOptions
from chronik.pipeline.source.planner import Planner, Position
from chronik.pipeline.source.ranges import RANGES_SCHEMA, to_row
from chronik.pipeline.source.reading import ReadSettings, read_range

logger = logging.getLogger(__name__)


class ChronikSource(DataSource):
    """`format("chronik")`. `pipeline.source.options` documents the options."""

    listener_commits = False
    """Whether a GroupCommitter of the session commits the offsets of queries, and not the source itself."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)

    @classmethod
    def name(cls) -> str:
        return "chronik"

    def schema(self) -> StructType:
        if self._given_flag(RANGES_ONLY):
            return from_arrow_schema(RANGES_SCHEMA)
        return from_arrow_schema(arrow_schema(self._given_flag("includeHeaders")), prefer_timestamp_ntz=False)

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(SourceOptions.parse(self._given, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(SourceOptions.parse(self._given, streaming=True), self.listener_commits)

    def _given_flag(self, name: str) -> bool:
        """Read a flag before the options are parsed: Spark needs the schema before it chooses batch or streaming."""
        given = {key.lower(): value.strip().lower() for key, value in self._given.items()}
        return given.get(name.lower()) == "true"


def _read(partition: InputPartition, options: SourceOptions) -> Iterator[Any]:
    """Read one task of `Planner.ranges`."""
    if partition.value is None:
        return iter(())  # Spark passes this if a batch read has nothing to read
    requested, topic_id = partition.value
    if options.ranges_only:
        return iter((to_row(requested, topic_id),))
    settings = ReadSettings(options.bootstrap, options.with_headers, options.committed_only, options.fail_on_data_loss)
    if options.stalled_s_max is not None:
        settings = replace(settings, stalled_s_max=options.stalled_s_max)
    return read_range(requested, topic_id, settings)


class BatchReader(DataSourceReader):
    """Reads between the start and the end in the options, both fixed when the query is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        with BlockingCluster(self._options.bootstrap) as cluster:
            planner = Planner(self._options, cluster, logger.warning)
            return [InputPartition(task) for task in planner.batch_ranges()]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(partition, self._options)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads continuously. Stays in one process while its query runs. Executors get a copy without a connection."""

    def __init__(self, options: SourceOptions, listener_commits: bool = False) -> None:
        self._options = options
        # The listener gets nothing but positions, which are public, so it cannot connect with secrets from options.
        settings = ClientSettings.of(options.bootstrap)
        is_secret = settings.path is None and settings.security != PLAINTEXT_SECURITY
        self._listener_commits = listener_commits and not is_secret
        self._cluster: BlockingCluster | None = None
        self._target: Position | None = None
        self._latest: Position | None = None
        self._group = GroupOffsets("" if self._listener_commits else options.group)
        self._last_trigger_s: float | None = None

    def __getstate__(self) -> tuple[SourceOptions, bool]:
        return self._options, self._listener_commits

    def __setstate__(self, state: tuple[SourceOptions, bool]) -> None:
        StreamReader.__init__(self, *state)

    def initialOffset(self) -> dict[str, Any]:
        return self._to_json(self._planner().start())

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._planner().latest()

    def getDefaultReadLimit(self) -> ReadLimit:
        rows_max = self._options.rows_per_trigger_max
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Plan the next micro-batch. Spark calls this when the previous one is done, so `start` can be committed.

        Not in `commit`: Spark omits that call after the last AvailableNow micro-batch.
        """
        position = Position.from_json(start)
        self._group.commit(self._open(), position.offsets, self._open().loop.time())
        planner = self._planner()
        self._latest = self._target or planner.latest()
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = planner.advance(position, self._latest, rows_max)
        return self._to_json(position if self._waits_for_more(position, self._latest) else end)

    def _waits_for_more(self, start: Position, latest: Position) -> bool:
        """Return whether the next micro-batch has fewer offsets than requested, and has not waited long enough."""
        now_s, least = self._open().loop.time(), self._options.rows_per_trigger_min
        if least and self._target is None and self._last_trigger_s is not None:
            offsets = sum(end - start.offsets.get(partition, 0) for partition, end in latest.offsets.items())
            if offsets < least and now_s - self._last_trigger_s < self._options.trigger_delay_s_max:
                return True
        self._last_trigger_s = now_s
        return False

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the latest offset of the last plan. It is only for lag figures, so do not query the cluster again."""
        return None if self._latest is None else self._to_json(self._latest)

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        tasks = self._planner().ranges(Position.from_json(start), Position.from_json(end))
        return [InputPartition(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(partition, self._options)

    def _to_json(self, position: Position) -> dict[str, Any]:
        settings = ClientSettings.of(self._options.bootstrap)
        group = self._options.group if self._listener_commits else ""
        return position.to_json(settings.bootstrap, group, settings.path or "")

    def _planner(self) -> Planner:
        return Planner(self._options, self._open(), logger.warning)

    def _open(self) -> BlockingCluster:
        if self._cluster is None:
            self._cluster = BlockingCluster(self._options.bootstrap)
        return self._cluster


class GroupCommitter(StreamingQueryListener):
    """Commits finished micro-batches of every query with `kafka.group.id` at once, so that lag tools see the query.

    The source itself commits a micro-batch when Spark requests the next one, which is late with a long trigger
    interval. Spark passes a listener nothing but positions, so each position names its cluster and group.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._groups: dict[tuple[str, int], GroupOffsets] = {}

    def onQueryStarted(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        now_s = datetime.fromisoformat(event.progress.timestamp).timestamp()
        for index, source in enumerate(event.progress.sources):
            if source.endOffset is not None:
                with self._lock:
                    self._commit((str(event.progress.id), index), source.endOffset, now_s)

    def onQueryTerminated(self, event: Any) -> None:
        with self._lock:
            for reader in [reader for reader in self._groups if reader[0] == str(event.id)]:
                del self._groups[reader]

    def _commit(self, reader: tuple[str, int], written: str, now_s: float) -> None:
        """Commit a position to the group that it names, if it names one."""
        try:
            position = json.loads(written)
            bootstrap, group, path = position["bootstrap"], position["group"], position.get("properties", "")
        except (ValueError, KeyError, TypeError):
            return
        try:
            offsets = Position.from_json(position).offsets
            target = load_settings(path, bootstrap) if path else bootstrap
        except (PipelineError, PropertiesError) as error:
            logger.warning("offsets are not committed to group %s: %s", group, error)
            return
        self._groups.setdefault(reader, GroupOffsets(group)).commit(target, offsets, now_s)
