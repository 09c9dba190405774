"""Maintain an Iceberg table: merge small files of a day, expire old snapshots, and remove files that none needs.

A merge is one snapshot that replaces files by others with the same rows. Like every commit here, it requires that the
snapshot which was read is still the current one. If a landing was faster, the merged files are removed and the merge is
left to a later run.

Every commit writes the metadata of all snapshots, so there must be few. All of the last minutes are kept, the last one
of each hour of the last day, and the last one of each day before that. Readers of an expired snapshot have 23 hours
more: a file that is replaced is either in the last snapshot of an hour before, or younger than an hour, and then too
new to be removed. The last snapshot of a landing and those that follow show whether the table was rolled back, so all
of them are kept for some days.

pyiceberg does not remove the files of expired snapshots. So files are removed here that are older than the vacuum
period, are in a folder of a landing or with the table's metadata, and are in no remaining snapshot. Files of failed
attempts are among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.dataset as pads
import pyarrow.fs as fs

from chronik.pipeline.catalog import find_table, guarded
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.delta import Conflict
from chronik.pipeline.land.hidden_files import KEEP_H
from chronik.pipeline.land.iceberg import BOUNDED, commit_snapshot, landed_snapshot
from chronik.pipeline.land.maintenance import Maintained, Merge, TableFile, merges
from chronik.pipeline.land.schema import DATE
from chronik.pipeline.land.task import NO_DATE, NewFile, OpenFile
from chronik.pipeline.storage import TableFiles

KEEP_SNAPSHOTS_D = 5
KEEP_FILES_H = 7 * 24
KEEP_ALL = "chronik.snapshots.keep-all-minutes"
"""A property of the table: how long all snapshots are kept."""
KEEP_ALL_MIN = 10
EXPIRE_MIN = 16
"""Snapshots that have to be superfluous before a landing's maintenance commits their expiry."""
MANIFESTS_MAX = 100
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 24 * 3_600_000
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
    table = find_table(address, options)
    if table is None:
        raise PipelineError(f"there is no Iceberg table at {address}, DIR/TOPIC: check it, and --catalog")
    return maintain_iceberg(table.catalog, table.name(), token, now_ms, keep_files_h=keep_files_h, keep_d=keep_d)


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
        _expire(table, now_ms, keep_d or KEEP_SNAPSHOTS_D, 1 if expire else EXPIRE_MIN)
        if not expire:
            return done
        _bound_metadata(table)
        now = datetime.fromtimestamp(now_ms / 1000, UTC)
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


def superfluous(
    became_current_ms: Mapping[int, int],
    now_ms: int,
    keep_all_min: int = KEEP_ALL_MIN,
    keep_d: int = KEEP_SNAPSHOTS_D,
    evidence: AbstractSet[int] = frozenset(),
) -> set[int]:
    """Return the snapshots that can expire, by when each one became current. Pure.

    One that was replaced more than `keep_d` days ago expires. Of those that were replaced more than `keep_all_min`
    minutes ago, the last one of each hour is kept. Of those that were replaced more than a day ago, the last one of
    each day is kept.
    `evidence`: snapshots that are all kept until they were replaced for `keep_d` days.
    """
    ordered = sorted(became_current_ms.items(), key=lambda item: item[1])
    replaced_ms = [at_ms for _, at_ms in ordered[1:]]
    kept: dict[tuple[int, int], int] = {}
    for (snapshot, at_ms), until_ms in zip(ordered, [*replaced_ms, now_ms], strict=True):
        replaced_ago_ms = now_ms - until_ms
        if replaced_ago_ms > keep_d * DAY_MS:
            continue
        if replaced_ago_ms < keep_all_min * MINUTE_MS or snapshot in evidence:
            kept[0, snapshot] = snapshot
        else:
            slot_ms = HOUR_MS if replaced_ago_ms < DAY_MS else DAY_MS
            kept[slot_ms, at_ms // slot_ms] = snapshot
    return became_current_ms.keys() - set(kept.values()) - {each for each, _ in ordered[-1:]}


def _expire(table: Any, now_ms: int, keep_d: int, count_min: int) -> None:
    """Expire superfluous snapshots, unless another commit is faster: then a later run does it."""
    from pyiceberg.exceptions import CommitFailedException

    table.refresh()
    metadata = table.metadata
    current = {entry.snapshot_id: entry.timestamp_ms for entry in metadata.snapshot_log}
    times = {each.snapshot_id: current.get(each.snapshot_id, each.timestamp_ms) for each in metadata.snapshots}
    last = metadata.snapshot_by_id(landed_snapshot(table) or 0)
    since = metadata.last_sequence_number if last is None else last.sequence_number
    evidence = {each.snapshot_id for each in metadata.snapshots if (each.sequence_number or 0) >= since}
    expired = superfluous(times, now_ms, int(table.properties.get(KEEP_ALL, KEEP_ALL_MIN)), keep_d, evidence)
    expired -= {ref.snapshot_id for ref in metadata.refs.values()}
    if len(expired) >= count_min:
        with suppress(CommitFailedException):
            table.maintenance.expire_snapshots().by_ids(sorted(expired)).commit()


def _bound_metadata(table: Any) -> None:
    """Set the properties that keep the metadata small, and merge the manifests if there are many."""
    from pyiceberg.exceptions import CommitFailedException

    with suppress(CommitFailedException, Conflict):
        missing = {name: value for name, value in BOUNDED.items() if name not in table.properties}
        if missing:
            with table.transaction() as transaction:
                transaction.set_properties(missing)
        snapshot = table.current_snapshot()
        if snapshot is not None and len(snapshot.manifests(table.io)) > MANIFESTS_MAX:
            transaction = table.transaction()
            with transaction.update_snapshot(
                snapshot_properties={"chronik.manifests": "merged"}
            ).merge_append() as update:
                pass
            commit_snapshot(table, transaction, update)


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
