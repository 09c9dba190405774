"""The landed side of an audit: the rows of a Delta or Iceberg table and of its dead letters, with their checksums.

Tasks read the Parquet files that the table's log lists, with pyarrow: no extra jars are needed, any address works that
`deltalake` takes, and nested headers do not pass from Java to Python. Checksums are computed on whole columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chronik.pipeline.audit.blocks import LANDED
from chronik.pipeline.audit.rows import record_rows
from chronik.pipeline.catalog import CATALOG_FILE, NAMESPACE, guarded, open_catalog
from chronik.pipeline.errors import PipelineError, task_errors
from chronik.pipeline.source.columns import HEADERS
from chronik.pipeline.storage import TableFiles, is_remote

DEAD_LETTERS = "_dead_letters"
PLACE = {"partition": pa.int32(), "offset": pa.int64(), "timestamp": pa.timestamp("us", tz="UTC")}
CONTENT = {"key": pa.binary(), "value": pa.binary(), "headers": HEADERS}
RECORD = {*PLACE, *CONTENT, "date"}
ROWS_PER_BATCH = 64 * 1024
TASKS_PER_CORE = 2
UNREADABLE = {"deletionVectors", "columnMapping"}


@dataclass(frozen=True, slots=True)
class LandedFiles:
    """The files of one table at one version, with their sizes. `has_content`: whether its rows hold the records' bytes.

    `derived`: columns that were parsed from values, or added by other jobs. An audit does not compare them.
    """

    name: str
    files: tuple[LandedFile, ...]
    has_content: bool
    derived: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableRange:
    """One task: some files of a table."""

    uri: str
    paths: tuple[str, ...]
    has_content: bool
    block_bits: int
    begins: Mapping[int, int]
    """Rows of these partitions below these offsets are left out."""


class LandedFile(NamedTuple):
    path: str
    size_bytes: int
    last_offset: int | None
    """The highest offset in it; None if the table's log does not say."""


def find_tables(address: str, topic: str, catalog: Mapping[str, str] | None = None) -> list[LandedFiles]:
    """Find the table at `address` or `address/topic`, and its dead letters. Raises PipelineError if there is none.

    `catalog`: settings of the catalog of Iceberg tables. Without, it is the file in the folder of the tables.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    base = address.rstrip("/")
    iceberg = _iceberg_tables(base, topic, catalog or {})
    if iceberg:
        return iceberg
    try:
        for table in (base, f"{base}/{topic}"):
            if DeltaTable.is_deltatable(table):
                return [_files(name) for name in (table, table + DEAD_LETTERS) if DeltaTable.is_deltatable(name)]
    except (DeltaError, OSError) as error:
        raise PipelineError(f"the table {base} cannot be read: {error}") from None
    raise PipelineError(f"there is no table at {base}, nor at {base}/{topic}: has chronik pipeline land run?")


def _iceberg_tables(base: str, topic: str, settings: Mapping[str, str]) -> list[LandedFiles]:
    """Return the Iceberg table of the topic and its dead letters. Empty if there is no such table."""
    for folder in (base.rpartition("/")[0] or ".", base):
        if not settings and (is_remote(folder) or not os.path.exists(f"{folder}/{CATALOG_FILE}")):
            continue
        catalog = open_catalog(folder, settings)
        namespace = settings.get("namespace", NAMESPACE)
        name = base.rpartition("/")[2] if folder != base else topic
        if guarded(lambda: catalog.table_exists((namespace, name)), "cannot read the catalog"):  # noqa: B023
            tables = [(namespace, each) for each in (name, name + DEAD_LETTERS)]
            existing = [each for each in tables if guarded(lambda: catalog.table_exists(each), "cannot read")]  # noqa: B023
            return [_iceberg_files(guarded(lambda: catalog.load_table(each), "cannot read")) for each in existing]  # noqa: B023
    return []


def _iceberg_files(table: Any) -> LandedFiles:
    root = table.location().rstrip("/")
    columns = [field.name for field in table.schema().fields]
    missing = [name for name in PLACE if name not in columns]
    if missing:
        raise PipelineError(f"the table {root} has no column {missing[0]}: was it created by chronik pipeline land?")
    found = []
    for task in guarded(lambda: list(table.scan().plan_files()), f"the table {root} cannot be read"):
        if task.delete_files or not task.file.file_path.startswith(f"{root}/"):
            raise PipelineError(f"the table {root} has row deletes or files elsewhere: rewrite its files first")
        path = task.file.file_path.removeprefix(f"{root}/")
        found.append(LandedFile(path, task.file.file_size_in_bytes, None))
    has_content = CONTENT.keys() <= set(columns)
    return LandedFiles(root.removeprefix("file://"), tuple(found), has_content, _derived(root, columns))


def _derived(table: str, columns: Iterable[str]) -> tuple[str, ...]:
    """Return the columns that are no part of a record. In dead letters, `reason` is why they are there."""
    own = RECORD | {"reason"} if table.endswith(DEAD_LETTERS) else RECORD
    return tuple(name for name in columns if name not in own)


def _files(table: str) -> LandedFiles:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        opened = DeltaTable(table)
        columns = [field.name for field in opened.schema().fields]
        actions = pa.table(opened.get_add_actions(flatten=True)).to_pylist()
        divided = set(opened.metadata().partition_columns)
        features = UNREADABLE.intersection(opened.protocol().reader_features or ())
        mode = opened.metadata().configuration.get("chronik.mode")
    except (DeltaError, OSError) as error:
        raise PipelineError(f"the table {table} cannot be read: {error}") from None
    if mode == "upsert":
        raise PipelineError(
            f"the table {table} has one row per key (--mode upsert), so records that were superseded are missing on "
            "purpose: audit a table with --mode append"
        )
    missing = [name for name in PLACE if name not in columns or name in divided]
    if missing:
        raise PipelineError(f"the table {table} has no column {missing[0]}: was it created by chronik pipeline land?")
    if features:
        raise PipelineError(f"the table {table} uses {min(features)}, which an audit cannot read: purge or copy it")
    uri = table if is_remote(table) else os.path.abspath(table)
    files = tuple(LandedFile(action["path"], action["size_bytes"], action.get("max.offset")) for action in actions)
    has_content = CONTENT.keys() <= set(columns) and not CONTENT.keys() & divided
    return LandedFiles(uri, files, has_content, _derived(table, columns))


def table_ranges(
    tables: Sequence[LandedFiles], block_bits: int, parallel: int, begins: Mapping[int, int] | None = None
) -> list[TableRange]:
    """Divide the files among tasks of about equal size. Files without an offset from `begins` on are left out."""
    tasks: list[TableRange] = []
    lowest = min((begins or {}).values(), default=0)
    for table in tables:
        files = [file for file in table.files if file.last_offset is None or file.last_offset >= lowest]
        parts: list[list[str]] = [[] for _ in range(max(1, min(len(files), TASKS_PER_CORE * parallel)))]
        sizes = [0] * len(parts)
        for file in sorted(files, key=lambda file: -file.size_bytes):
            smallest = sizes.index(min(sizes))
            parts[smallest].append(file.path)
            sizes[smallest] += file.size_bytes
        task = TableRange(table.name, (), table.has_content, block_bits, dict(begins or {}))
        tasks += [replace(task, paths=tuple(part)) for part in parts if part]
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
                rows = _from_begins(batch.select(list(columns)).cast(pa.schema(columns)), task.begins)
                if rows.num_rows:
                    yield record_rows(LANDED, rows, task.block_bits)


def _from_begins(rows: Any, begins: Mapping[int, int]) -> Any:
    """Leave out rows that are not audited. Rows of unknown partitions stay, because they are faults."""
    if not any(begins.values()):
        return rows
    partitions, offsets = (rows.column(name).to_numpy(zero_copy_only=False) for name in ("partition", "offset"))
    keep = np.ones(rows.num_rows, np.bool_)
    for partition, begin in begins.items():
        keep &= (partitions != partition) | (offsets >= begin)
    return rows if keep.all() else rows.filter(pa.array(keep))
