"""What other engines read from a landed table: DuckDB, Polars, and the library of the table's format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
from deltalake import DeltaTable

from chronik.pipeline.catalog import open_catalog


def delta_readers(uri: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each engine and the whole table as it reads it."""
    table = DeltaTable(uri)
    yield "deltalake", table.to_pyarrow_table()
    yield "Polars", pl.read_delta(uri).to_arrow()
    with duckdb.connect() as connection:
        connection.register("landed", table.to_pyarrow_dataset())
        yield "DuckDB", connection.sql("select * from landed").to_arrow_table()


def iceberg_readers(folder: Path, name: str) -> Iterator[tuple[str, Any]]:
    """The environment needs POLARS_ICEBERG_PLANNER=pyiceberg: Polars' own planner knows no SQL catalog."""
    table = open_catalog(str(folder), {}).load_table(("chronik", name))
    yield "pyiceberg", table.scan().to_arrow()
    yield "Polars", pl.scan_iceberg(table).collect().to_arrow()
    connection = table.scan().to_duckdb("landed")
    yield "DuckDB", connection.sql("select * from landed").to_arrow_table()


def values(table: Any, *columns: str) -> list[tuple[Any, ...]]:
    """Return the rows in the order of their offsets. A time is its number of microseconds, a map a list of pairs."""
    found = table.sort_by("offset").select(list(columns))
    numbers = [_micros(column) if pa.types.is_timestamp(column.type) else column for column in found.columns]
    return list(zip(*(column.to_pylist() for column in numbers), strict=True))


def _micros(times: Any) -> Any:
    return times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())
