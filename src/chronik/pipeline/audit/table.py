"""The landed side of an audit: the rows of a Delta table and of its dead letters, with their checksums.

Tasks read the Parquet files that the table's log lists, with pyarrow: no extra jars are needed, any address works that
`deltalake` takes, and nested headers do not pass from Java to Python. Checksums are computed on whole columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chronik.pipeline.audit.blocks import LANDED
from chronik.pipeline.audit.rows import record_rows
from chronik.pipeline.errors import PipelineError, task_errors
from chronik.pipeline.source.columns import HEADERS
from chronik.pipeline.storage import TableFiles, is_remote

DEAD_LETTERS = "_dead_letters"
PLACE = {"partition": pa.int32(), "offset": pa.int64(), "timestamp": pa.timestamp("us", tz="UTC")}
CONTENT = {"key": pa.binary(), "value": pa.binary(), "headers": HEADERS}
RECORD = {*PLACE, *CONTENT, "date", "reason"}
ROWS_PER_BATCH = 64 * 1024
TASKS_PER_CORE = 2
UNREADABLE = {"deletionVectors", "columnMapping"}


@dataclass(frozen=True, slots=True)
class LandedFiles:
    """The files of one table at one version, with their sizes. `has_content`: whether its rows hold the records' bytes.

    `derived`: columns that were parsed from values, or added by other jobs. An audit does not compare them.
    """

    name: str
    files: tuple[tuple[str, int], ...]
    has_content: bool
    derived: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableRange:
    """One task: some files of a table."""

    uri: str
    paths: tuple[str, ...]
    has_content: bool
    block_bits: int


def find_tables(address: str, topic: str) -> list[LandedFiles]:
    """Find the table at `address` or `address/topic`, and its dead letters. Raises PipelineError if there is none."""
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    base = address.rstrip("/")
    try:
        for table in (base, f"{base}/{topic}"):
            if DeltaTable.is_deltatable(table):
                return [_files(name) for name in (table, table + DEAD_LETTERS) if DeltaTable.is_deltatable(name)]
    except (DeltaError, OSError) as error:
        raise PipelineError(f"the table {base} cannot be read: {error}") from None
    raise PipelineError(f"there is no Delta table at {base}, nor at {base}/{topic}: has chronik pipeline land run?")


def _files(table: str) -> LandedFiles:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        opened = DeltaTable(table)
        columns = [field.name for field in opened.schema().fields]
        actions = pa.table(opened.get_add_actions(flatten=True)).select(["path", "size_bytes"]).to_pylist()
        divided = set(opened.metadata().partition_columns)
        features = UNREADABLE.intersection(opened.protocol().reader_features or ())
    except (DeltaError, OSError) as error:
        raise PipelineError(f"the table {table} cannot be read: {error}") from None
    missing = [name for name in PLACE if name not in columns or name in divided]
    if missing:
        raise PipelineError(f"the table {table} has no column {missing[0]}: was it created by chronik pipeline land?")
    if features:
        raise PipelineError(f"the table {table} uses {min(features)}, which an audit cannot read: purge or copy it")
    uri = table if is_remote(table) else os.path.abspath(table)
    files = tuple((action["path"], action["size_bytes"]) for action in actions)
    has_content = CONTENT.keys() <= set(columns) and not CONTENT.keys() & divided
    return LandedFiles(uri, files, has_content, tuple(name for name in columns if name not in RECORD))


def table_ranges(tables: Sequence[LandedFiles], block_bits: int, parallel: int) -> list[TableRange]:
    """Divide the files among tasks of about equal size."""
    tasks: list[TableRange] = []
    for table in tables:
        parts: list[list[str]] = [[] for _ in range(max(1, min(len(table.files), TASKS_PER_CORE * parallel)))]
        sizes = [0] * len(parts)
        for path, size_bytes in sorted(table.files, key=lambda file: -file[1]):
            smallest = sizes.index(min(sizes))
            parts[smallest].append(path)
            sizes[smallest] += size_bytes
        tasks += [TableRange(table.name, tuple(part), table.has_content, block_bits) for part in parts if part]
    return tasks


def read_table(task: TableRange) -> Iterator[Any]:
    """Yield Arrow batches of ROW_SCHEMA."""
    columns = {**PLACE, **(CONTENT if task.has_content else {})}
    files = TableFiles(task.uri)
    for path in task.paths:
        with (
            task_errors(f"reading {path} of the table {task.uri}"),
            files.store.open_input_file(files.full(path)) as file,
        ):
            for batch in pq.ParquetFile(file).iter_batches(ROWS_PER_BATCH, columns=list(columns)):
                yield record_rows(LANDED, batch.select(list(columns)).cast(pa.schema(columns)), task.block_bits)
