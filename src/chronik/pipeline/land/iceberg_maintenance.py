"""Maintain an Iceberg table: merge small files of a day, and expire old snapshots.

A merge is one snapshot that replaces files by others with the same rows. Like every commit here, it requires that the
snapshot which was read is still the current one. If a landing was faster, the merged files are removed and the merge is
left to a later run. pyiceberg does not remove the files of expired snapshots; `remove_orphan_files` of Spark does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.dataset as pads

from chronik.pipeline.catalog import NAMESPACE, guarded, open_catalog
from chronik.pipeline.land.delta import Conflict
from chronik.pipeline.land.iceberg import commit_snapshot
from chronik.pipeline.land.maintenance import Maintained, Merge, TableFile, merges
from chronik.pipeline.land.schema import DATE
from chronik.pipeline.land.task import NO_DATE, NewFile, OpenFile
from chronik.pipeline.storage import TableFiles

KEEP_SNAPSHOTS_D = 5
MERGED = "merged"


def maintain_at(
    address: str, options: Mapping[str, str], token: str, now_ms: int, keep_d: int | None = None
) -> Maintained:
    """Maintain the table at an address. Raises PipelineError."""
    folder, _, name = address.rstrip("/").rpartition("/")
    catalog = open_catalog(folder or ".", options)
    return maintain_iceberg(catalog, (options.get("namespace", NAMESPACE), name), token, now_ms, keep_d=keep_d)


def maintain_iceberg(
    catalog: Any,
    name: tuple[str, str],
    token: str,
    now_ms: int,
    *,
    expire: bool = True,
    keep_d: int | None = None,
) -> Maintained:
    """Maintain the table once. `token`: a name that no earlier run had. Raises PipelineError."""
    where = f"cannot maintain the table {'.'.join(name)}"
    maintained: Maintained = guarded(lambda: _maintain(catalog.load_table(name), token, now_ms, expire, keep_d), where)
    return maintained


def _maintain(table: Any, token: str, now_ms: int, expire: bool, keep_d: int | None) -> Maintained:
    merged = new = size_bytes = 0
    for number, merge in enumerate(list(merges(_files(table)))):
        file = _merge(table, merge, f"{token}-{number}")
        if file is None:
            break
        merged, new, size_bytes = merged + len(merge.files), new + 1, size_bytes + file.size_bytes
        table.refresh()
    expired = 0
    if expire:
        before = datetime.fromtimestamp(now_ms / 1000, UTC) - timedelta(days=keep_d or KEEP_SNAPSHOTS_D)
        count = len(table.metadata.snapshots)
        table.maintenance.expire_snapshots().older_than(before).commit()
        table.refresh()
        expired = count - len(table.metadata.snapshots)
    return Maintained(merged, new, size_bytes, expired)


def _files(table: Any) -> list[TableFile]:
    root = table.location().rstrip("/") + "/"
    found = []
    for task in table.scan().plan_files():
        path = task.file.file_path
        date = path.removeprefix(root).partition(f"{DATE}=")[2].partition("/")[0]
        if path.startswith(root) and date and not task.delete_files:
            day = None if date == NO_DATE else date
            found.append(TableFile(path.removeprefix(root), task.file.file_size_in_bytes, day, 0))
    return found


def _merge(table: Any, merge: Merge, name: str) -> NewFile | None:
    """Write and commit one merged file. Return None if another commit was faster."""
    from pyiceberg.table import _parquet_files_to_data_files

    location = table.location().rstrip("/")
    files = TableFiles(location.removeprefix("file://"))
    schema = table.schema().as_arrow()
    paths = [files.full(file.path) for file in merge.files]
    rows = pads.dataset(paths, schema=schema, format="parquet", filesystem=files.store)
    path = f"{DATE}={merge.date or NO_DATE}/{MERGED}{merge.generation}-{name}.parquet"
    written = OpenFile("", files, path, merge.date, schema)
    for batch in rows.to_batches():
        if batch.num_rows:
            written.add(batch)
    file = written.close()
    replaced = {f"{location}/{old.path}" for old in merge.files}
    transaction = table.transaction()
    summary = {"chronik.merged": str(len(replaced))}
    try:
        with transaction.update_snapshot(snapshot_properties=summary).overwrite() as update:
            for task in table.scan().plan_files():
                if task.file.file_path in replaced:
                    update.delete_data_file(task.file)
            for data_file in _parquet_files_to_data_files(transaction.table_metadata, [f"{location}/{path}"], table.io):
                update.append_data_file(data_file)
        commit_snapshot(table, transaction, update)
    except Conflict:
        with suppress(OSError):
            files.store.delete_file(files.full(path))
        return None
    return file
