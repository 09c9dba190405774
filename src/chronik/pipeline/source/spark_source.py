"""The Spark source `chronik`: a topic's records as rows, in batch and streaming queries.

Spark runs this in separate processes: planning in one Python process beside the driver, reading in the executors'
workers. Only pickled options and ranges pass between them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, MutableMapping, Sequence
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
from chronik.pipeline.source.options import SourceOptions
from chronik.pipeline.source.planner import Planner, Position
from chronik.pipeline.source.ranges import RANGES_SCHEMA, to_row
from chronik.pipeline.source.reading import ReadSettings, read_range

logger = logging.getLogger(__name__)


class ChronikSource(DataSource):
    """`format("chronik")`. `pipeline.source.options` documents the options."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)

    @classmethod
    def name(cls) -> str:
        return "chronik"

    def schema(self) -> StructType:
        if self._given_flag("rangesOnly"):
            return from_arrow_schema(RANGES_SCHEMA)
        return from_arrow_schema(arrow_schema(self._given_flag("includeHeaders")), prefer_timestamp_ntz=False)

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(SourceOptions.parse(self._given, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(SourceOptions.parse(self._given, streaming=True))

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
    return read_range(requested, topic_id, settings)


class BatchReader(DataSourceReader):
    """Reads between the start and the end in the options, both fixed when the query is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        with BlockingCluster(self._options.bootstrap) as cluster:
            planner = Planner(self._options, cluster, logger.warning)
            return [InputPartition(task) for task in planner.ranges(planner.start(), planner.end())]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(partition, self._options)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads continuously. Stays in one process while its query runs. Executors get a copy without a connection."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._cluster: BlockingCluster | None = None
        self._target: Position | None = None
        self._latest: Position | None = None
        self._committed: Position | None = None

    def __getstate__(self) -> SourceOptions:
        return self._options

    def __setstate__(self, options: SourceOptions) -> None:
        StreamReader.__init__(self, options)

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
        self._commit(position)
        planner = self._planner()
        self._latest = self._target or planner.latest()
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._to_json(planner.advance(position, self._latest, rows_max))

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

    def _commit(self, position: Position) -> None:
        group = self._options.group
        if group and position != self._committed and self._open().commit(group, position.offsets):
            self._committed = position

    def _to_json(self, position: Position) -> dict[str, Any]:
        settings, group = ClientSettings.of(self._options.bootstrap), self._options.group
        if settings.path is None and settings.security != PLAINTEXT_SECURITY:
            group = ""  # positions are public, so the listener could not connect; the source commits by itself
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
        self._committed: dict[tuple[str, int], str] = {}

    def onQueryStarted(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        for index, source in enumerate(event.progress.sources):
            reader, end = (str(event.progress.id), index), source.endOffset
            with self._lock:
                if end is not None and self._committed.get(reader) != end and _commit_position(end):
                    self._committed[reader] = end

    def onQueryTerminated(self, event: Any) -> None:
        with self._lock:
            for reader in [reader for reader in self._committed if reader[0] == str(event.id)]:
                del self._committed[reader]


def _commit_position(written: str) -> bool:
    """Commit a position to the group that it names. Return False if it names none, or if the commit failed."""
    try:
        position = json.loads(written)
        bootstrap, group, path = position["bootstrap"], position["group"], position.get("properties", "")
    except (ValueError, KeyError, TypeError):
        return False
    try:
        offsets = Position.from_json(position).offsets
        with BlockingCluster(load_settings(path, bootstrap) if path else bootstrap) as cluster:
            return cluster.commit(group, offsets)
    except (PipelineError, PropertiesError) as error:
        logger.warning("offsets were not committed to group %s: %s", group, error)
        return False
