"""The executors' part of a landing: read records, and write them to Parquet files of a Delta table.

Nothing here adds a file to the table. If a task fails or a driver dies, the files it wrote but did not report are in no
commit. No reader sees them, and a vacuum of the table removes them. File names are unique: they contain the run's token
and the task's number.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as fs
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.types import StructType

from chronik.pipeline.deleted import DeletedKeys
from chronik.pipeline.errors import PipelineError, is_refusal, store_failure, task_errors
from chronik.pipeline.land.landed_offsets import LandedOffsets, first_and_last, widened
from chronik.pipeline.land.schema import DATE, REASON, RECORD_SCHEMA, JsonColumns, dead_letter_schema, table_schema
from chronik.pipeline.source.columns import CALENDAR_US_MAX, CALENDAR_US_MIN
from chronik.pipeline.source.ranges import from_rows
from chronik.pipeline.source.reading import ReadSettings, read_range
from chronik.pipeline.storage import TableFiles, is_remote
from chronik.pipeline.typed.decoding import Decoding, MissingSchemas

REPORT_SCHEMA = "report string"
ROWS = "rows"
DEAD_LETTERS = "dead letters"
STAGED = "staged"
RANGE = "range"
"""Not a file: the offsets that were read, for tables whose rows do not show what has landed."""
NO_DATE = "__HIVE_DEFAULT_PARTITION__"
ROW_GROUP_ROWS = 128 * 1024
ROW_GROUP_BYTES = 32 * 1024 * 1024
FILE_BYTES_MAX = 256 * 1024 * 1024
OPEN_FILES_MAX = 16
MEASURED = ("partition", "offset", "timestamp")
RISING = ("offset", "timestamp")
"""Encoded as differences: faster and smaller than a dictionary of values that never repeat (bench/parquet.py)."""

logger = logging.getLogger(__name__)


class NewFile(msgspec.Struct, frozen=True):
    """A file that a task has written, with what the driver needs to commit it."""

    table: str
    path: str
    size_bytes: int
    date: str | None
    rows: int
    stats: str
    offsets: dict[int, tuple[int, int]]
    """First and last offset of each partition in the file."""


class Report(msgspec.Struct, frozen=True):
    """What a task returns. `missing`: schemas that it does not know. If there are any, no task's files are used."""

    files: list[NewFile] = []
    missing: list[tuple[str, int]] = []
    ranges: list[tuple[int, int, int]] = []
    """The offsets that the task has read: partition, start and stop."""


class Rows(Protocol):
    """Where a task's rows go."""

    def add(self, rows: Any) -> None: ...
    def finish(self) -> list[NewFile]: ...


@dataclass(frozen=True)
class WriteTask:
    """What Spark sends to the executors: `frame.mapInArrow(task, REPORT_SCHEMA)`. Yields one line, its Report."""

    rows_uri: str
    dead_letters_uri: str
    name: str
    """Identifies this attempt at this batch. The task appends its own number to form a file name."""
    fields: StructType | None
    landed: LandedOffsets
    reading: ReadSettings | None = None
    """How to read the ranges in the rows, or None if the rows are the records themselves."""
    decoding: Decoding | None = None
    """How to decode records by their registered schemas, instead of by `fields`."""
    deleted: DeletedKeys | None = None
    """Records that must not land."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        ranges: list[tuple[int, int, int]] = []
        try:
            report = Report(files=self.write(batches, f"{self.name}-{context.taskAttemptId()}", ranges), ranges=ranges)
        except MissingSchemas as found:
            report = Report(missing=sorted(found.missing))
        line = msgspec.json.encode(report).decode()
        yield pa.RecordBatch.from_arrays([pa.array([line], pa.string())], ["report"])

    def write(
        self, batches: Iterator[Any], name: str, ranges: list[tuple[int, int, int]] | None = None
    ) -> list[NewFile]:
        """Write the files of these batches. Raises MissingSchemas, with those of all batches.

        `ranges`: a list that the ranges which were read are added to.
        """
        schema = table_schema(self.fields) if self.decoding is None else typed_schema(self.decoding.columns)
        dead_letters = FileSet(DEAD_LETTERS, self.dead_letters_uri, dead_letter_schema(), name)
        rows = self._rows(schema, name, dead_letters)
        parser = None if self.fields is None else JsonColumns(self.fields)
        missing: set[tuple[str, int]] = set()
        for batch in self._records(batches, [] if ranges is None else ranges):
            with task_errors(partial(_place, self.rows_uri, batch)):
                fresh = with_calendar_times(batch.select(RECORD_SCHEMA.names).cast(RECORD_SCHEMA))
                if self.landed:
                    fresh = self.landed.without(fresh)
                if self.deleted:
                    fresh = self.deleted.without(fresh)
                if not fresh.num_rows:
                    continue
                if missing and self.decoding is not None:
                    missing |= self.decoding.missing_in(fresh)
                    continue
                parts = [fresh]
                if parser is not None:
                    parts, bad = self._parsed(parser, fresh)
                    dead_letters.add(bad)
                elif self.decoding is not None:
                    try:
                        fresh, bad, reasons = self.decoding.split(fresh)
                    except MissingSchemas as found:
                        missing |= found.missing
                        continue
                    dead_letters.add(bad.append_column(pa.field(REASON, pa.string()), pa.array(reasons, pa.string())))
                    parts = self._changes(fresh)
                for part in parts:
                    rows.add(part)
        if missing:
            raise MissingSchemas(missing)
        with task_errors(f"writing files of {self.rows_uri}"):
            return rows.finish() + dead_letters.finish()

    def _parsed(self, parser: JsonColumns, batch: Any) -> tuple[list[Any], Any]:
        """Return rows with the schema's columns, and dead letters."""
        rows, bad = parser.split(batch)
        return [rows], bad

    def _changes(self, rows: Any) -> list[Any]:
        return [rows]

    def _rows(self, schema: Any, name: str, dead_letters: FileSet) -> Rows:
        return FileSet(ROWS, self.rows_uri, schema, name)

    def _records(self, batches: Iterator[Any], ranges: list[tuple[int, int, int]]) -> Iterator[Any]:
        for batch in batches:
            if self.reading is None:
                yield batch
            else:
                for requested, topic_id in from_rows(batch):
                    ranges.append((requested.partition, requested.start, requested.stop))
                    yield from read_range(requested, topic_id, self.reading)


def typed_schema(columns: Sequence[Any]) -> Any:
    return pa.schema([*RECORD_SCHEMA, *(pa.field(column.name, column.type) for column in columns)])


def _place(uri: str, batch: Any) -> str:
    spans = [f"partition {number}, offsets {first} to {last}" for number, first, last in first_and_last(batch)]
    return f"landing in {uri}, {'; '.join(spans)},"


def with_calendar_times(rows: Any) -> Any:
    """Replace timestamps outside the years 1 to 9999 with null: few engines, and no date column, can represent them.

    A producer chooses its timestamps, so one that confuses seconds and microseconds must not stop a landing.
    """
    times = rows.column("timestamp")
    bounds = pc.min_max(times.cast(pa.int64()))
    low, high = bounds["min"].as_py(), bounds["max"].as_py()
    if low is None or (low >= CALENDAR_US_MIN and high <= CALENDAR_US_MAX):
        return rows
    numbers = times.cast(pa.int64())
    is_valid = pc.and_(pc.greater_equal(numbers, CALENDAR_US_MIN), pc.less_equal(numbers, CALENDAR_US_MAX))
    calendar = pc.if_else(is_valid, times, pa.scalar(None, times.type))
    return rows.set_column(rows.schema.get_field_index("timestamp"), rows.schema.field("timestamp"), calendar)


class FileSet:
    """One task's files in one table, one open file per date. Rows are buffered until they fill a row group."""

    def __init__(self, table: str, uri: str, schema: Any, name: str) -> None:
        self._table = table
        self._schema = pa.schema([column for column in schema if column.name != DATE])
        self._name = name
        self._numbers = 0
        self._open: dict[str | None, OpenFile] = {}
        self._done: list[NewFile] = []
        self._files = TableFiles(uri)

    def add(self, rows: Any) -> None:
        """Add rows with the table's columns except the date, which is derived from the timestamp (in UTC)."""
        if not rows.num_rows:
            return
        dates = pc.cast(rows.column("timestamp"), pa.date32())
        different = pc.unique(dates).to_pylist()
        for date in different:
            part = rows if len(different) == 1 else rows.filter(pc.is_in(dates, pa.array([date], pa.date32())))
            file = self._file(None if date is None else date.isoformat())
            file.add(part)
            if file.size_bytes >= FILE_BYTES_MAX:
                self._close(file)

    def finish(self) -> list[NewFile]:
        for file in list(self._open.values()):
            self._close(file)
        return self._done

    def _file(self, date: str | None) -> OpenFile:
        file = self._open.pop(date, None)
        if file is None:
            if len(self._open) >= OPEN_FILES_MAX:
                self._close(next(iter(self._open.values())))
            path = f"{DATE}={date or NO_DATE}/{self._name}-{self._numbers}.parquet"
            self._numbers += 1
            file = OpenFile(self._table, self._files, path, date, self._schema)
        self._open[date] = file  # the most recently used file comes last
        return file

    def _close(self, file: OpenFile) -> None:
        del self._open[file.date]
        self._done.append(file.close())


class OpenFile:
    """One file that is being written, with the statistics of its rows. Used by one thread."""

    def __init__(self, table: str, files: TableFiles, path: str, date: str | None, schema: Any) -> None:
        self.date = date
        self.size_bytes = 0
        self._table = table
        self._path = path
        self._full_path = files.full(path)
        self._uri = files.uri
        store = files.store
        self._schema = schema
        self._waiting: list[Any] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._rows = 0
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}
        self._nulls = dict.fromkeys(MEASURED, 0)
        self._offsets: dict[int, tuple[int, int]] = {}
        self._store = store
        with self._write_errors():
            store.create_dir(self._full_path.rpartition("/")[0], recursive=True)
            self._writer = pq.ParquetWriter(self._full_path, schema, filesystem=store, **parquet_settings(schema))

    def add(self, rows: Any) -> None:
        self._measure(rows)
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        if self._waiting_rows >= ROW_GROUP_ROWS or self._waiting_bytes >= ROW_GROUP_BYTES:
            self._write()

    def close(self) -> NewFile:
        self._write()
        with self._write_errors():
            self._writer.close()
            size_bytes = self._store.get_file_info(self._full_path).size
        stats = {
            "numRecords": self._rows,
            "minValues": {name: _stat(value, 0) for name, value in self._low.items()},
            "maxValues": {name: _stat(value, 1) for name, value in self._high.items()},
            "nullCount": self._nulls,
        }
        return NewFile(self._table, self._path, size_bytes, self.date, self._rows, json.dumps(stats), self._offsets)

    def _write(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting, self._schema)
        with self._write_errors():
            self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        self.size_bytes += self._waiting_bytes
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def _measure(self, rows: Any) -> None:
        self._rows += rows.num_rows
        self._offsets = widened(self._offsets, first_and_last(rows))
        for name in MEASURED:
            column = rows.column(name)
            self._nulls[name] += column.null_count
            low, high = (bound.as_py() for bound in pc.min_max(column).values())
            if low is not None:
                self._low[name] = min(low, self._low.get(name, low))
                self._high[name] = max(high, self._high.get(name, high))

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Turn a file system error into a one-line error of ours, because Spark keeps the text but drops the type."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            kind = store_failure(error) if is_remote(self._uri) else PipelineError
            place = f"{self._uri}/{self._path}" if is_remote(self._uri) else self._full_path
            way = "allow access" if is_refusal(error) else "make room"
            remedy = f"{way} or choose another --to, then start again"
            raise kind(f"cannot write {place}: {reason}; {remedy}") from None


def parquet_settings(schema: Any) -> dict[str, Any]:
    """Use dictionaries only where values may repeat. For payloads, Parquet would build one and then abandon it."""
    flat = [column.name for column in schema if not pa.types.is_nested(column.type)]
    repeating = [name for name in flat if name not in ("value", *RISING)]
    encodings = dict.fromkeys(RISING, "DELTA_BINARY_PACKED")
    return {"compression": "zstd", "use_dictionary": repeating, "column_encoding": encodings}


def remove_files(uri: str, prefix: str) -> None:
    """Remove one attempt's files that will never be committed, as far as possible. A vacuum removes any left over."""
    try:
        files = TableFiles(uri)
        store = files.store
        folders = store.get_file_info(fs.FileSelector(files.full(""), allow_not_found=True))
        for folder in [entry for entry in folders if entry.base_name.startswith(f"{DATE}=")]:
            for file in store.get_file_info(fs.FileSelector(folder.path)):
                if file.base_name.startswith(prefix):
                    store.delete_file(file.path)
    except (OSError, PipelineError) as error:
        logger.warning("files of a failed attempt remain in %s: %s", uri, error)


def remove_paths(uri: str, paths: Sequence[str]) -> None:
    """Remove these files, as far as possible."""
    try:
        files = TableFiles(uri)
        for path in paths:
            files.store.delete_file(files.full(path))
    except (OSError, PipelineError) as error:
        logger.warning("files of a repeated attempt remain in %s: %s", uri, error)


def _stat(value: Any, up_ms: int) -> Any:
    """Format as Delta does, with timestamps in milliseconds. The maximum is therefore rounded up."""
    if isinstance(value, datetime):
        if value.microsecond % 1000:
            value += timedelta(milliseconds=up_ms)
        return value.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
    return value
