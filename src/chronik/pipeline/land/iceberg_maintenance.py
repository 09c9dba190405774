"""Maintain an Iceberg table: merge small files of a day, expire old snapshots, and remove files that none needs.

A merge is one snapshot that replaces files by others with the same rows. Like every commit here, it requires that the
snapshot which was read is still the current one. If a landing was faster, the merged files are removed and the merge is
left to a later run.

A snapshot expires some days after another one has replaced it, so that readers can finish. pyiceberg does not remove
the files of expired snapshots. So files are removed here that are older than the vacuum period, are in a folder of a
landing or with the table's metadata, and are in no remaining snapshot. Files of failed attempts are among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.dataset as pads
import pyarrow.fs as fs

from chronik.pipeline.catalog import NAMESPACE, guarded, open_catalog
from chronik.pipeline.land.delta import Conflict
from chronik.pipeline.land.hidden_files import KEEP_H
from chronik.pipeline.land.iceberg import commit_snapshot
from chronik.pipeline.land.maintenance import Maintained, Merge, TableFile, merges
from chronik.pipeline.land.schema import DATE
from chronik.pipeline.land.task import NO_DATE, NewFile, OpenFile
from chronik.pipeline.storage import TableFiles

KEEP_SNAPSHOTS_D = 5
KEEP_FILES_H = 7 * 24
MERGED = "merged"


def maintain_at(
    address: str,
    options: Mapping[str, str],
    token: str,
    now_ms: int,
    keep_d: int | None = None,
    keep_files_h: int | None = None,
) -> Maintained:
    """Maintain the table at an address. Raises PipelineError."""
    folder, _, name = address.rstrip("/").rpartition("/")
    catalog = open_catalog(folder or ".", options)
    full_name = (options.get("namespace", NAMESPACE), name)
    return maintain_iceberg(catalog, full_name, token, now_ms, keep_files_h=keep_files_h, keep_d=keep_d)


def maintain_iceberg(
    catalog: Any,
    name: tuple[str, str],
    token: str,
    now_ms: int,
    *,
    expire: bool = True,
    keep_files_h: int | None = None,
    keep_d: int | None = None,
) -> Maintained:
    """Maintain the table once. `token`: a name that no earlier run had. Raises PipelineError."""
    where = f"cannot maintain the table {'.'.join(name)}"

    def run() -> Maintained:
        table = catalog.load_table(name)
        done = _merge_all(table, token)
        if not expire:
            return done
        now = datetime.fromtimestamp(now_ms / 1000, UTC)
        _expire(table, now - timedelta(days=keep_d or KEEP_SNAPSHOTS_D))
        keep_h = KEEP_FILES_H if keep_files_h is None else max(keep_files_h, KEEP_H)
        return replace(done, removed_files=_remove_unused(table, now - timedelta(hours=keep_h)))

    maintained: Maintained = guarded(run, where)
    return maintained


def _merge_all(table: Any, token: str) -> Maintained:
    merged = new = size_bytes = 0
    for number, merge in enumerate(list(merges(_files(table)))):
        file = _merge(table, merge, f"{token}-{number}")
        if file is None:
            break
        merged, new, size_bytes = merged + len(merge.files), new + 1, size_bytes + file.size_bytes
        table.refresh()
    return Maintained(merged, new, size_bytes)


def _expire(table: Any, before: datetime) -> None:
    """Expire the snapshots that had been replaced by then: all that are older than the one that was current."""
    before_ms = int(before.timestamp() * 1000)
    became_current = [entry.timestamp_ms for entry in table.metadata.snapshot_log if entry.timestamp_ms < before_ms]
    if not became_current or all(each.timestamp_ms >= became_current[-1] for each in table.metadata.snapshots):
        return
    replaced = datetime.fromtimestamp(became_current[-1] / 1000, UTC)
    table.maintenance.expire_snapshots().older_than(replaced).commit()


def _remove_unused(table: Any, before: datetime) -> int:
    """Remove files that are older and in no snapshot. Return their number."""
    root = table.location().rstrip("/") + "/"
    files = TableFiles(root.removeprefix("file://"))
    old = []
    for folder in files.store.get_file_info(fs.FileSelector(files.full(""), allow_not_found=True)):
        kinds = (".parquet",) if folder.base_name.startswith(f"{DATE}=") else (".avro", ".metadata.json")
        if kinds[0] == ".parquet" or folder.base_name == "metadata":
            for file in files.store.get_file_info(fs.FileSelector(folder.path)):
                if file.base_name.endswith(kinds) and file.mtime is not None and file.mtime < before:
                    old.append((file.path, f"{root}{folder.base_name}/{file.base_name}"))
    if not old:
        return 0
    table.refresh()
    used = _used(table)
    if not all(path.startswith(root) for path in used):
        return 0  # the same file may have another address there
    unused = [path for path, address in old if address not in used]
    for path in unused:
        files.store.delete_file(path)
    return len(unused)


def _used(table: Any) -> set[str]:
    """Return the addresses of all files of all snapshots, and of their metadata.

    A landing only adds files, so its snapshot has all files of a landing before it. It does not have the manifest of
    what a merge before it deleted, and readers of the merge's snapshot need that.
    """
    metadata, io = table.metadata, table.io
    used = {table.metadata_location, *(entry.metadata_file for entry in metadata.metadata_log)}
    included = {each.parent_snapshot_id for each in metadata.snapshots if _is_landing(each)}
    included -= {each.parent_snapshot_id for each in metadata.snapshots if not _is_landing(each)}
    for snapshot in metadata.snapshots:
        used.add(snapshot.manifest_list)
        if snapshot.snapshot_id in included and _is_landing(snapshot):
            continue
        for manifest in snapshot.manifests(io):
            if manifest.manifest_path not in used:
                used.add(manifest.manifest_path)
                used |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(io)}
    return used


def _is_landing(snapshot: Any) -> bool:
    return snapshot.summary is not None and "chronik.query" in snapshot.summary.additional_properties


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
