"""Maintain a table: merge its small files, and remove files and log entries that no reader needs any more.

Every byte is rewritten at most twice, so a table's write amplification is at most 3. A landing's file has generation 0.
Files of one date and one generation are merged when there are `MERGE_FILES` of them (fewer if newer dates are in use),
into files of the next generation. Files of generation 2 and large files are final. The name of a merged file has its
generation.

`deltalake` cannot merge chosen files, only everything below a size, which rewrites its own results again and again. So
the commit is written here: one more entry in the table's log, created only if no other writer has created it. The entry
removes and adds files with the same rows (`dataChange` is false). It is valid unless a concurrent commit has removed
one of these files, or has changed the table's columns or protocol; then the merged file is discarded. Tables with
features beyond those of `land`, and tables whose writers use a lock and not conditional writes, are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Event, Lock, Thread

import pyarrow as pa
import pyarrow.dataset as pads
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.delta_log import invalidates, is_plain, local_path, put_entry, remove_unused, uses_lock
from chronik.pipeline.land.hidden_files import remove_hidden
from chronik.pipeline.land.schema import DATE
from chronik.pipeline.land.task import NO_DATE, NewFile, OpenFile
from chronik.pipeline.storage import TableFiles, is_remote

MERGE_FILES = 32
MERGE_OLD_FILES = 8
"""The number for dates that are not among the two newest of the table."""
SMALL_BYTES = 64 * 1024 * 1024
MERGED_BYTES = 256 * 1024 * 1024
GENERATIONS = 2
COMMIT_TRIES = 100
VACUUM_EVERY_S = 24 * 3600.0
MERGED = "merged"
KEEP_FILES = "delta.deletedFileRetentionDuration"
KEEP_LOG = "delta.logRetentionDuration"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TableFile:
    path: str
    size_bytes: int
    date: str | None
    first_offset: int

    @property
    def generation(self) -> int:
        name = self.path.rpartition("/")[2]
        number = name.removeprefix(MERGED).partition("-")[0]
        return int(number) if name.startswith(MERGED) and number.isdigit() else 0


@dataclass(frozen=True, slots=True)
class Merge:
    """Files of one date that become one file."""

    date: str | None
    generation: int
    files: tuple[TableFile, ...]


def merges(files: Sequence[TableFile]) -> Iterator[Merge]:
    """Plan the merges of a table. Pure."""
    newest = sorted({file.date for file in files if file.date is not None})[-2:]
    tiers: dict[tuple[str | None, int], list[TableFile]] = {}
    for file in files:
        if file.size_bytes < SMALL_BYTES and file.generation < GENERATIONS:
            tiers.setdefault((file.date, file.generation), []).append(file)
    for (date, generation), tier in sorted(tiers.items(), key=lambda item: (item[0][0] or "", item[0][1])):
        if len(tier) < (MERGE_FILES if date in newest else MERGE_OLD_FILES):
            continue
        chosen: list[TableFile] = []
        for file in sorted(tier, key=lambda file: (file.first_offset, file.path)):
            if chosen and sum(each.size_bytes for each in chosen) + file.size_bytes > MERGED_BYTES:
                yield Merge(date, generation + 1, tuple(chosen))
                chosen = []
            chosen.append(file)
        if len(chosen) > 1:
            yield Merge(date, generation + 1, tuple(chosen))


@dataclass(frozen=True, slots=True)
class Maintained:
    """What one run did, and what the log tells about earlier ones."""

    merged_files: int = 0
    new_files: int = 0
    rewritten_bytes: int = 0
    removed_files: int = 0
    write_amplification: float | None = None


def maintain(
    uri: str,
    token: str,
    now_ms: int,
    *,
    vacuum: bool = True,
    keep_files_h: int | None = None,
    keep_log_d: int | None = None,
) -> Maintained:
    """Maintain the table once. `token`: a name that no earlier run had. Raises PipelineError."""
    try:
        table = DeltaTable(uri)
        settings = _changed(table.metadata().configuration, keep_files_h, keep_log_d)
        if settings:
            table.alter.set_table_properties(settings, raise_if_not_exists=False)
        merged = new = size_bytes = 0
        names = count()
        for merge in list(merges(_files(table))) if _can_merge(table) else ():
            file = _merge(table, merge, f"{token}-{next(names)}", now_ms)
            if file is not None:
                merged, new, size_bytes = merged + len(merge.files), new + 1, size_bytes + file.size_bytes
        removed: list[str] = []
        if vacuum:
            table.update_incremental()
            removed = table.vacuum(dry_run=False, full=True)
            table.cleanup_metadata()
            removed += remove_hidden(table, now_ms)
        return Maintained(merged, new, size_bytes, len(removed), write_amplification(table))
    except (DeltaError, OSError) as error:
        raise PipelineError(f"cannot maintain the table {uri}: {error}; its rows are intact") from None


def write_amplification(table: DeltaTable) -> float | None:
    """Return all bytes written per landed byte, as far as the table's log reaches back. None if nothing has landed."""
    landed = rewritten = 0
    for commit in table.history():
        own = commit.get("chronik")
        if isinstance(own, dict):
            landed += own.get("bytes", 0)
            rewritten += own.get("rewritten", 0)
    return (landed + rewritten) / landed if landed else None


def _changed(configured: Mapping[str, str | None], keep_files_h: int | None, keep_log_d: int | None) -> dict[str, str]:
    requested = {}
    if keep_files_h is not None:
        requested[KEEP_FILES] = f"interval {keep_files_h} hours"
    if keep_log_d is not None:
        requested[KEEP_LOG] = f"interval {keep_log_d} days"
    return {name: value for name, value in requested.items() if configured.get(name) != value}


def _can_merge(table: DeltaTable) -> bool:
    return is_plain(table) and not uses_lock() and table.metadata().partition_columns == [DATE]


def _files(table: DeltaTable) -> list[TableFile]:
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    return [
        TableFile(
            action["path"],
            action["size_bytes"],
            None if action[f"partition.{DATE}"] is None else str(action[f"partition.{DATE}"]),
            action.get("min.offset") or 0,
        )
        for action in actions
    ]


def _merge(table: DeltaTable, merge: Merge, name: str, now_ms: int) -> NewFile | None:
    """Write and commit one merged file. Return None if another commit has taken one of its files."""
    files = TableFiles(table.table_uri if is_remote(table.table_uri) else local_path(table))
    schema = pa.schema([column for column in pa.schema(table.schema().to_arrow()) if column.name != DATE])
    paths = [files.full(file.path) for file in merge.files]
    rows = pads.dataset(paths, schema=schema, format="parquet", filesystem=files.store)
    path = f"{DATE}={merge.date or NO_DATE}/{MERGED}{merge.generation}-{name}.parquet"
    written = OpenFile("", files, path, merge.date, schema)
    for batch in rows.to_batches():
        if batch.num_rows:
            written.add(batch)
    file = written.close()
    if _commit(table, merge, file, name, now_ms):
        return file
    remove_unused(table, [path])
    return None


def _commit(table: DeltaTable, merge: Merge, file: NewFile, name: str, now_ms: int) -> bool:
    """Add one entry to the table's log, unless a commit since the table's snapshot makes it invalid."""
    own = {"rewritten": file.size_bytes, "files": len(merge.files)}
    values = {DATE: merge.date}
    info = {"timestamp": now_ms, "operation": "OPTIMIZE", "operationParameters": {}, "chronik": own}
    shared = {"partitionValues": values, "dataChange": False}
    add = {"path": file.path, "size": file.size_bytes, "modificationTime": now_ms, "stats": file.stats, **shared}
    removes = [
        {"path": old.path, "size": old.size_bytes, "deletionTimestamp": now_ms, "extendedFileMetadata": True, **shared}
        for old in merge.files
    ]
    actions = [{"add": add}, *({"remove": remove} for remove in removes)]
    taken = {old.path for old in merge.files}
    for version in range(table.version() + 1, table.version() + 1 + COMMIT_TRIES):
        other = put_entry(table, version, info, actions, name)
        if other is None:
            return True
        if invalidates(other, taken):
            return False
    return False


class Maintainer:
    """Maintains the tables of one landing in a thread of its own, one run after another. Landings never wait for it."""

    def __init__(
        self, maintain_table: Callable[[str, bool], Maintained], uris: Sequence[str], clock: Callable[[], float]
    ) -> None:
        self._maintain = maintain_table
        self._uris = uris
        self._clock = clock
        self._vacuumed_s = clock()
        self._is_failing = False
        self._is_due = Event()
        self._is_closing = False
        self._running = Lock()
        self._thread: Thread | None = None

    def wake(self) -> None:
        """Start a run soon. Calls during a run cause one more."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="chronik-maintenance", daemon=True)
            self._thread.start()
        self._is_due.set()

    def stop(self) -> None:
        """Start no further run. A run that is under way ends by itself, or with the process: either is safe."""
        self._is_closing = True
        self._is_due.set()

    def run(self, *, is_last: bool = False) -> None:
        """Maintain the tables now. The last run removes files if it merged any. A failure is logged once."""
        with self._running:
            now_s = self._clock()
            is_vacuum_due = now_s - self._vacuumed_s >= VACUUM_EVERY_S
            try:
                for uri in self._uris:
                    done = self._maintain(uri, is_vacuum_due)
                    if is_last and done.new_files and not is_vacuum_due:
                        self._maintain(uri, True)
            except PipelineError as error:
                if not self._is_failing:
                    logger.warning("%s", error)
                self._is_failing = True
                return
            self._is_failing = False
            if is_vacuum_due:
                self._vacuumed_s = now_s

    def _work(self) -> None:
        while not self._is_closing:
            self._is_due.wait()
            self._is_due.clear()
            if not self._is_closing:
                self.run()
