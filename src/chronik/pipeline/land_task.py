"""Write a micro-batch's rows to files on the executors: one task per part of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from chronik.pipeline.dead_letters import JsonColumns
from chronik.pipeline.land_batch import DEAD_LETTERS, ROWS
from chronik.pipeline.land_files import FileSet, NewFile
from chronik.pipeline.land_ranges import LandedOffsets
from chronik.pipeline.land_schema import OWN, dead_letter_schema, table_schema
from chronik.pipeline.range_rows import from_rows
from chronik.pipeline.reading import ReadSettings, read_range

__all__ = ["REPORT_SCHEMA", "WriteTask", "read_reports"]

REPORT_SCHEMA = "file string"


@dataclass(frozen=True)
class WriteTask:
    """What Spark sends to the executors: `frame.mapInArrow(task, REPORT_SCHEMA)`. Yields one line per file."""

    rows_uri: str
    dead_letters_uri: str
    name: str
    """Identifies this attempt at this batch. The task appends its own number to form a file name."""
    fields: StructType | None
    landed: LandedOffsets
    reading: ReadSettings | None = None
    """How to read the ranges in the rows, or None if the rows are the records themselves."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        files = [_encode(file) for file in self.write(batches, f"{self.name}-{context.taskAttemptId()}")]
        yield pa.RecordBatch.from_arrays([pa.array(files, pa.string())], ["file"])

    def write(self, batches: Iterator[Any], name: str) -> list[NewFile]:
        rows = FileSet(ROWS, self.rows_uri, table_schema(self.fields), name)
        dead_letters = FileSet(DEAD_LETTERS, self.dead_letters_uri, dead_letter_schema(), name)
        json = None if self.fields is None else JsonColumns(self.fields)
        for batch in self._records(batches):
            fresh = _own_columns(batch)
            if self.landed:
                fresh = self.landed.without(fresh)
            if not fresh.num_rows:
                continue
            if json is None:
                rows.add(fresh)
            else:
                good, bad = json.split(fresh)
                rows.add(good)
                dead_letters.add(bad)
        return rows.finish() + dead_letters.finish()

    def _records(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if self.reading is None:
                yield batch
            else:
                for wanted, topic_id in from_rows(batch):
                    yield from read_range(wanted, topic_id, self.reading)


def read_reports(lines: list[str]) -> list[NewFile]:
    return [msgspec.json.decode(line, type=NewFile) for line in lines]


def _encode(file: NewFile) -> str:
    return msgspec.json.encode(file).decode()


def _own_columns(batch: Any) -> Any:
    """Cast the columns to the table's types, whichever source delivered them."""
    schema = pa.schema(OWN)
    columns = [batch.column(column.name).cast(column.type) for column in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
