"""A topic as a table of DuckDB: a dataset that DuckDB asks for columns, with a filter, whenever a query scans it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.dataset as ds

from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.source.columns import arrow_schema
from chronik.pipeline.source.ranges import Partition, RecordRange
from chronik.pipeline.sql.pushdown import Filter, partition_facts, ranges_of, time_ms_min
from chronik.pipeline.sql.scan import Scan, ScanSettings

RECORD_SCHEMA = arrow_schema(with_headers=True)
ERROR = "decode_error"
"""The column with the reason why the typed columns of a record are null."""
TAKEN = frozenset({*(name.lower() for name in RECORD_SCHEMA.names), ERROR})


class TypedColumns(Protocol):
    """Decodes values (and keys) of a topic. Threads share it."""

    @property
    def columns(self) -> Sequence[Any]:
        """The typed columns, as Arrow fields."""

    def append(self, batch: Any) -> tuple[Any, int]:
        """Return the rows with the typed columns and ERROR, and how many rows have an error."""


class TopicTable(ds.Dataset):  # type: ignore[misc]
    """One topic between fixed bounds. Threads of DuckDB call `scanner`.

    DuckDB recognizes Arrow's datasets by their class. It calls nothing but `schema` and `scanner`, and relies on the
    scanner to apply the filter.
    """

    def __init__(self, bounds: Sequence[RecordRange], settings: ScanSettings, typed: TypedColumns | None) -> None:
        self._bounds = list(bounds)
        self._settings = settings
        self._typed = typed
        self._typed_names = frozenset[str]()
        fields = list(RECORD_SCHEMA)
        if typed is not None:
            added = [*typed.columns, pa.field(ERROR, pa.string())]
            self._typed_names = frozenset(column.name for column in added)
            fields += added
        self.names = [column.name for column in fields]
        # DuckDB asks for the first column if it needs none: one that is not decoded.
        self._columns = pa.schema(sorted(fields, key=lambda column: str(column.name) != "partition"))

    @property
    def schema(self) -> Any:
        return self._columns

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> Scanner:
        """Plan one scan. DuckDB passes both by these names."""
        chosen = self._columns.names if columns is None else list(columns)
        condition = Filter(filter, self._columns)
        needed = condition.needed(chosen)
        ranges = ranges_of(condition, self._bounds)
        if "timestamp" in condition.needed(()):
            ranges = self._after_time(condition, ranges)
        typed = self._append_typed if needed & self._typed_names else None
        return Scanner(Scan(ranges, chosen, condition, self._settings, self._columns, typed))

    def _after_time(self, condition: Filter, ranges: Sequence[RecordRange]) -> list[RecordRange]:
        """Begin at the first record that is late enough. Times need not rise, so a latest time has no such offset."""
        starts: dict[Partition, int] = {}
        by_time: dict[int, list[Partition]] = {}
        for partition in dict.fromkeys((each.topic, each.partition) for each in ranges):
            time_ms = time_ms_min(condition, partition_facts(*partition))
            if time_ms is not None:
                by_time.setdefault(time_ms, []).append(partition)
        if by_time:
            with BlockingCluster(self._settings.target) as cluster:
                for time_ms, partitions in by_time.items():
                    starts |= cluster.offsets(partitions, time_ms)
        later = []
        for each in ranges:
            start = starts.get((each.topic, each.partition), each.start)
            if 0 <= start < each.stop:  # -1: no record is that late
                later.append(each._replace(start=max(start, each.start)))
        return later

    def _append_typed(self, batch: Any) -> Any:
        assert self._typed is not None
        rows, errors = self._typed.append(batch)
        if errors:
            unfit, topic = self._settings.progress.unfit, self._bounds[0].topic
            unfit[topic] = unfit.get(topic, 0) + errors
        return rows


class Scanner:
    """What DuckDB takes the batches from."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan

    def to_reader(self) -> Any:
        return self._scan.reader()
