"""The landed side of an audit: the rows of a Delta table and of its dead letters, with their checksums.

Spark reads the Parquet files that the table's log lists, so no extra jars are needed. Checksums are computed on whole
columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from chronik.pipeline.audit.blocks import LANDED
from chronik.pipeline.audit.rows import ROW_SCHEMA, record_rows
from chronik.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEAD_LETTERS = "_dead_letters"
PLACE = {"partition": "int", "offset": "bigint", "timestamp": "timestamp"}
CONTENT = {"key": "binary", "value": "binary", "headers": "array<struct<key: string, value: binary>>"}


@dataclass(frozen=True, slots=True)
class LandedFiles:
    """The files of one table at one version. `has_content`: whether its rows still hold the records' bytes."""

    name: str
    files: tuple[str, ...]
    has_content: bool


def find_tables(address: str, topic: str) -> list[LandedFiles]:
    """Find the table at `address` or `address/topic`, and its dead letters. Raises PipelineError if there is none."""
    from deltalake import DeltaTable

    base = address.rstrip("/")
    for table in (base, f"{base}/{topic}"):
        if DeltaTable.is_deltatable(table):
            return [_files(name) for name in (table, table + DEAD_LETTERS) if DeltaTable.is_deltatable(name)]
    raise PipelineError(f"there is no Delta table at {base}, nor at {base}/{topic}: has chronik pipeline land run?")


def _files(table: str) -> LandedFiles:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        opened = DeltaTable(table)
        columns = {field.name for field in opened.schema().fields}
        files = tuple(uri if "://" in uri else os.path.abspath(uri) for uri in opened.file_uris())
        divided = set(opened.metadata().partition_columns)
    except (DeltaError, OSError) as error:
        raise PipelineError(f"the table {table} cannot be read: {error}") from None
    missing = [name for name in PLACE if name not in columns or name in divided]
    if missing:
        raise PipelineError(f"the table {table} has no column {missing[0]}: was it created by chronik pipeline land?")
    return LandedFiles(table, files, CONTENT.keys() <= columns and not CONTENT.keys() & divided)


def landed_rows(spark: SparkSession, tables: Sequence[LandedFiles], block_bits: int) -> DataFrame | None:
    """Return the rows of all tables as audit rows, or None if there are no files."""
    frames = [_rows(spark, table, block_bits) for table in tables if table.files]
    return reduce(lambda one, other: one.unionAll(other), frames) if frames else None


def _rows(spark: SparkSession, table: LandedFiles, block_bits: int) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    columns = {**PLACE, **(CONTENT if table.has_content else {})}
    schema = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())

    def rows(batches: Iterator[Any]) -> Iterator[Any]:
        return (record_rows(LANDED, batch, block_bits) for batch in batches)

    return spark.read.schema(schema).parquet(*table.files).mapInArrow(rows, from_arrow_schema(ROW_SCHEMA))
