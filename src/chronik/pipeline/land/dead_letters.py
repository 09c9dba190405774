"""The dead letters of one table, whose files a replay replaces by files with what still fails: in Delta or Iceberg.

The replacement is one commit. It is invalid if another commit has taken one of the files: a merge, or another replay.
Landings, which only add files, do not disturb it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from chronik.pipeline.catalog import guarded
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.delta import Conflict, LandingTable
from chronik.pipeline.land.delta_log import invalidates, is_plain, put_entry, remove_unused, uses_lock
from chronik.pipeline.land.schema import DATE, dead_letter_schema
from chronik.pipeline.land.task import NewFile, remove_paths

COMMIT_TRIES = 100


class Taken(Exception):
    """Another commit has removed one of the files since the snapshot."""


@dataclass(frozen=True, slots=True)
class DeadFile:
    """A file of dead letters, by its path in the table."""

    path: str
    size_bytes: int
    date: str | None = None


class DeadLetters(Protocol):
    """The table at one snapshot, which `refresh` advances. Used by one thread."""

    uri: str

    def refresh(self) -> None: ...
    def files(self) -> list[DeadFile]: ...
    def replace(self, old: Sequence[DeadFile], new: Sequence[NewFile], name: str, now_ms: int) -> None:
        """Replace files by others, in one commit. `name`: that no other attempt has. Raises Taken."""


class DeltaDeadLetters:
    """The dead letters of a Delta table."""

    def __init__(self, uri: str, topic: str, topic_id: str) -> None:
        self.uri = uri
        try:
            if not DeltaTable.is_deltatable(uri):
                raise missing(uri)
            LandingTable.open(uri, dead_letter_schema(), topic, topic_id)
            self._table = DeltaTable(uri)
        except (DeltaError, OSError) as error:
            raise PipelineError(f"cannot read the table {uri}: {error}") from None
        if not is_plain(self._table) or uses_lock():
            raise PipelineError(f"the table {uri} has features or a lock that a replay does not know")

    def refresh(self) -> None:
        self._table.update_incremental()

    def files(self) -> list[DeadFile]:
        actions = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
        dates = [action[f"partition.{DATE}"] for action in actions]
        return [
            DeadFile(each["path"], each["size_bytes"], None if date is None else str(date))
            for each, date in zip(actions, dates, strict=True)
        ]

    def replace(self, old: Sequence[DeadFile], new: Sequence[NewFile], name: str, now_ms: int) -> None:
        info = {"timestamp": now_ms, "operation": "DELETE", "operationParameters": {"predicate": '["replayed"]'}}
        actions: list[Mapping[str, Any]] = []
        for each in new:
            shared = {"partitionValues": {DATE: each.date}, "dataChange": True}
            add = {"path": each.path, "size": each.size_bytes, "modificationTime": now_ms, "stats": each.stats}
            actions.append({"add": {**add, **shared}})
        for file in old:
            shared = {"partitionValues": {DATE: file.date}, "dataChange": True}
            remove = {"path": file.path, "size": file.size_bytes, "deletionTimestamp": now_ms}
            actions.append({"remove": {**remove, "extendedFileMetadata": True, **shared}})
        taken = {file.path for file in old}
        for version in range(self._table.version() + 1, self._table.version() + 1 + COMMIT_TRIES):
            other = put_entry(self._table, version, info, actions, name)
            if other is None:
                self._table.update_incremental()
                return
            if invalidates(other, taken):
                remove_unused(self._table, [file.path for file in new])
                raise Taken
        raise _busy(self.uri)


class IcebergDeadLetters:
    """The dead letters of an Iceberg table. `table` is pyiceberg's."""

    def __init__(self, table: Any, uri: str) -> None:
        self.uri = uri
        self._table = table

    def refresh(self) -> None:
        guarded(self._table.refresh, f"cannot read the table {self.uri}")

    def files(self) -> list[DeadFile]:
        return [DeadFile(path, file.file_size_in_bytes) for path, file in self._data_files().items()]

    def _data_files(self) -> dict[str, Any]:
        root = self._table.location().rstrip("/") + "/"
        found = {}
        for task in guarded(lambda: list(self._table.scan().plan_files()), f"cannot read the table {self.uri}"):
            if task.delete_files or not task.file.file_path.startswith(root):
                raise PipelineError(f"the table {self.uri} has row deletes or files elsewhere: rewrite its files first")
            found[task.file.file_path.removeprefix(root)] = task.file
        return found

    def replace(self, old: Sequence[DeadFile], new: Sequence[NewFile], name: str, now_ms: int) -> None:
        for _ in range(COMMIT_TRIES):
            existing = self._data_files()
            if not {file.path for file in old} <= existing.keys():
                remove_paths(self.uri, [file.path for file in new])
                raise Taken
            removed = [existing[file.path] for file in old]
            try:
                guarded(lambda: self._commit(removed, new, name), f"cannot commit to the table {self.uri}")  # noqa: B023
                return
            except Conflict:
                continue  # it has refreshed the snapshot
        raise _busy(self.uri)

    def _commit(self, removed: Sequence[Any], new: Sequence[NewFile], name: str) -> None:
        from pyiceberg.table import _parquet_files_to_data_files

        from chronik.pipeline.land.iceberg import commit_snapshot

        root = self._table.location().rstrip("/")
        paths = [f"{root}/{file.path}" for file in new]
        transaction = self._table.transaction()
        with transaction.update_snapshot(snapshot_properties={"chronik.replay": name}).overwrite() as update:
            for file in removed:
                update.delete_data_file(file)
            for data_file in _parquet_files_to_data_files(transaction.table_metadata, paths, self._table.io):
                update.append_data_file(data_file)
        commit_snapshot(self._table, transaction, update)


def missing(uri: str) -> PipelineError:
    """Return the error of a table that has no dead letters. `uri` is the address that they would have."""
    return PipelineError(f"{uri.removesuffix('_dead_letters')} has no dead letters: there is no table {uri}")


def _busy(uri: str) -> PipelineError:
    return PipelineError(f"other jobs commit to {uri} at the same time: start the replay again")
