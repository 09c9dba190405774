"""Helpers for landing tests: batches as Spark passes them, and tables as other tools read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql.types import StructType

from chronik.pipeline.land.delta import Write
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.task import NewFile, WriteTask
from chronik.pipeline.land.topic_landing import dead_letters_name
from chronik.pipeline.source.columns import HEADERS

TIME = 1_700_000_000_000_000
"""Microseconds, 2023-11-14."""
_names = count()
IN_ONE_SESSION = """
import json, sys
from pyspark.sql import SparkSession
from chronik.cli import app

stop, SparkSession.stop = SparkSession.stop, lambda self: None  # the second command finds the session of the first
for command in json.loads(sys.argv[1]):
    code = app.main(["pipeline", *command])
    if code:
        sys.exit(code)
stop(SparkSession.getActiveSession())
"""
"""A program that runs `chronik pipeline` commands, a list in JSON, one after another in the same JVM."""


def records(
    partition: int, offsets: Iterable[int], values: Sequence[bytes | None] | None = None, times: Any = None
) -> Any:
    """Return an Arrow batch as the source makes it; without `values`, record i has the value vi."""
    numbers = list(offsets)
    return pa.record_batch(
        {
            "key": pa.array([b"k%d" % number for number in numbers], pa.binary()),
            "value": pa.array(values or [b"v%d" % number for number in numbers], pa.binary()),
            "topic": pa.array(["t"] * len(numbers)),
            "partition": pa.array([partition] * len(numbers), pa.int32()),
            "offset": pa.array(numbers, pa.int64()),
            "timestamp": pa.array(times or [TIME + number for number in numbers], pa.timestamp("us", tz="UTC")),
            "headers": pa.array([[{"key": "h", "value": b"1"}]] * len(numbers), HEADERS),
        }
    )


def writer(folder: Path, *batches: Any, fields: StructType | None = None, topic: str = "t") -> Write:
    """Do the executors' work in this process."""

    def write(landed: LandedOffsets) -> list[NewFile]:
        task = WriteTask(str(folder / topic), str(folder / dead_letters_name(topic)), "x", fields, landed)
        return task.write(iter(batches), f"part-{next(_names)}")

    return write


def sql(table: Path, query: str) -> list[tuple[Any, ...]]:
    """Query the table's current files with DuckDB and its own Parquet reader, as `landed`."""
    files = DeltaTable(str(table)).file_uris()
    if not files:
        return []
    with duckdb.connect() as connection:
        view = f"create view landed as select * from read_parquet({files!r}, hive_partitioning = true)"
        connection.execute(view)
        return connection.execute(query).fetchall()


def landed(table: Path) -> list[tuple[int, int]]:
    """Return each row's partition and offset; a record that landed twice is listed twice."""
    return sql(table, 'select "partition", "offset" from landed order by all')
