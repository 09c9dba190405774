"""The Delta table that one topic lands in. Micro-batches land in it exactly once, however the last attempt ended.

The table itself records what has landed, in Delta's application transactions. They are in the same commit as the files,
and never expire:

    chronik:batch:QUERY       the last micro-batch of a query
    chronik:offset:PARTITION  the highest landed offset + 1
    commit info "chronik"     {"query", "batch", "snapshot": its version, "bytes",
                              "offsets": {PARTITION: [first, last]}}

The transactions are read and committed on one snapshot. deltalake rejects a commit only if another commit with the same
application id followed that snapshot. A handle reopened for the commit would therefore write a batch twice.

Several landings may write to one table, and each of them may see any snapshot. One check keeps records unique: on the
snapshot of the commit, no landed offset lies between a new file's first and last offset of a partition, unless the file
was written without that offset. If another landing commits to such a partition after the snapshot, there is a conflict.

A restored table keeps its transactions and loses its rows. So a landing refuses a table that was restored after the
snapshot of its own last commit. The commit infos show that as far as the table's log reaches back.

A record is either in the topic's table or in its dead letters. No commit spans both tables, so the dead letters are
committed first, and the commit to the topic's table completes the batch. If a run ends between the two, the batch is
read again, and the dead letters that have landed are skipped.

With typed columns, the commit that has the first rows of a changed schema also changes the table's columns.

Landed records are skipped by their offsets. A lost checkpoint, a second query into the same table, or a schema change
between two attempts all deliver offsets that have already landed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, CommitProperties, Transaction

from chronik.pipeline.errors import PipelineError, store_failure
from chronik.pipeline.land.delta_log import live_paths
from chronik.pipeline.land.landed_offsets import LandedOffsets, widened
from chronik.pipeline.land.schema import DATE, RECORD_SCHEMA
from chronik.pipeline.land.task import DEAD_LETTERS, ROWS, STAGED, NewFile, remove_paths
from chronik.pipeline.storage import is_remote
from chronik.pipeline.typed.evolution import plain_type

TOPIC = "chronik.topic"
TOPIC_ID = "chronik.topic.id"
MODE = "chronik.mode"
TRIES = 8
RESTORE = "RESTORE"
HISTORY_COMMITS = 64
"""Commits that are read at first to find the query's own last one; more if it is not among them."""
NO_ROWS = [(DATE, "=", "0001-01-01"), (DATE, "=", "0001-01-02")]
"""A filter that matches no file. deltalake changes a table's schema only in a commit that replaces files: these."""
PRUNED_PARTITIONS_MAX = 64
"""Partitions that are named when files are excluded by their statistics. With more, only the lowest offset is."""

Write = Callable[[LandedOffsets], Sequence[NewFile]]
"""Read the batch and write its files, except for the given offsets. It can be called repeatedly."""


class Conflict(Exception):
    """Another process has committed for this query or these partitions since the snapshot. Refresh and retry."""


class Landable(Protocol):
    """A table of any format at one snapshot, which `refresh` and our own commits advance."""

    @property
    def uri(self) -> str: ...
    @property
    def version(self) -> int: ...
    def refresh(self) -> None: ...
    def more_columns(self) -> list[Any]: ...
    def require(self, columns: Sequence[Any]) -> None: ...
    def landed_batch(self, query: str) -> int | None: ...
    def next_offset(self, partition: int) -> int: ...
    def landed_offsets(self, firsts: Mapping[int, int]) -> LandedOffsets: ...
    def check_not_restored(self, query: str) -> None: ...
    def commit(self, query: str, batch: int, files: Sequence[NewFile]) -> None: ...


class LandingTable:
    """One table at one snapshot, which `refresh` and our own commits advance. Used by one thread."""

    DIVIDED_BY = DATE
    OWN = frozenset({*RECORD_SCHEMA.names, DATE})
    """The columns that are not the topic's typed ones."""
    MODE: str | None = None
    AFTER_RESTORE = "choose a new --checkpoint (they land again, and no record lands twice)"

    def __init__(self, uri: str, table: DeltaTable) -> None:
        self.uri = uri
        self._table = table
        self._checked: int | None = None
        """The version up to which the log was checked for a restore."""
        self._columns: Sequence[Any] = ()

    @classmethod
    def open(
        cls,
        uri: str,
        schema: Any,
        topic: str,
        topic_id: str,
        *,
        may_have_more: bool = False,
        properties: Mapping[str, str] | None = None,
    ) -> Self:
        """Open the table, or create it. Raises PipelineError if the existing table cannot hold this topic.

        `may_have_more`: whether an existing table may have other columns beside those of the schema.
        `properties`: more properties of a new table.
        """
        try:
            if not DeltaTable.is_deltatable(uri):
                DeltaTable.create(
                    uri,
                    schema,
                    mode="ignore",
                    partition_by=[cls.DIVIDED_BY],
                    configuration={TOPIC: topic, TOPIC_ID: topic_id, **(properties or {})},
                    raise_if_key_not_exists=False,
                )
            table = DeltaTable(uri)
        except (DeltaError, OSError) as error:
            raise PipelineError(f"cannot open or create the table {uri}: {error}") from None
        _check(uri, table, schema, topic, topic_id, may_have_more, cls.MODE)
        return cls(uri, table)

    @staticmethod
    def check(uri: str, topic: str, topic_id: str) -> None:
        """Raise PipelineError if there is a table that cannot hold this topic. Creates nothing."""
        try:
            table = DeltaTable(uri) if DeltaTable.is_deltatable(uri) else None
        except (DeltaError, OSError) as error:
            raise PipelineError(f"cannot open the table {uri}: {error}") from None
        if table is not None:
            mode = table.metadata().configuration.get(MODE)
            schema = RECORD_SCHEMA
            _check(uri, table, schema, topic, topic_id, may_have_more=True, mode=mode)

    @property
    def version(self) -> int:
        return self._table.version()

    def refresh(self) -> None:
        try:
            self._table.update_incremental()
        except (DeltaError, OSError) as error:
            raise store_failure(error)(f"cannot read the table {self.uri}: {error}") from None

    def more_columns(self) -> list[Any]:
        """Return the columns beside the record's own, as Arrow fields."""
        columns = [column for column in pa.schema(self._table.schema().to_arrow()) if column.name not in self.OWN]
        return [column.with_type(plain_type(column.type)) for column in columns]

    def require(self, columns: Sequence[Any]) -> None:
        """Set the columns, beside the record's own, that the next commit adds or widens. They include existing ones."""
        self._columns = columns

    def _changed_schema(self) -> Schema | None:
        """Return the table's schema with the required columns, or None if it has them."""
        existing = [(column.name, column.type) for column in self.more_columns()]
        if not self._columns or [(column.name, column.type) for column in self._columns] == existing:
            return None
        own = [field for field in self._table.schema().fields if field.name in self.OWN]
        return Schema([*own, *Schema.from_arrow(pa.schema(self._columns)).fields])

    def landed_batch(self, query: str) -> int | None:
        return self._table.transaction_version(f"chronik:batch:{query}")

    def next_offset(self, partition: int) -> int:
        """Return the highest landed offset + 1, or 0 if none has landed."""
        return self._table.transaction_version(f"chronik:offset:{partition}") or 0

    def landed_offsets(self, firsts: Mapping[int, int]) -> LandedOffsets:
        """Read the landed offsets of these partitions, each from its first offset on.

        They come from the rows themselves, the only source that shows every gap. Statistics exclude most files.
        """
        lowest = f"{min(firsts.values())}"
        parts = [f"(partition = {partition} and offset >= {first})" for partition, first in sorted(firsts.items())]
        where = " or ".join(parts) if len(parts) <= PRUNED_PARTITIONS_MAX else f"offset >= {lowest}"
        files = self._table.to_pyarrow_dataset(file_pruning_predicate=where)
        rows = files.scanner(columns=["partition", "offset"], filter=pc.field("offset") >= int(lowest)).to_batches()
        return LandedOffsets.of(batch for batch in rows if batch.num_rows)

    def check_not_restored(self, query: str) -> None:
        """Raise PipelineError if the table was restored since the snapshot of the query's last commit."""
        if self.landed_batch(query) is None:
            return  # a new query lands whatever is missing
        self._check_not_restored(query)

    def _check_not_restored(self, query: str | None) -> None:
        """Look at the commits since the snapshot of the last commit of this query, or without one, of any query."""
        if self._checked is None:
            commits = self._commits_since(query)
        else:
            commits = self._history(self.version - self._checked) if self.version > self._checked else []
        restored = next((commit for commit in commits if commit.get("operation") == RESTORE), None)
        if restored is not None:
            raise PipelineError(
                f"the table {self.uri} was restored to an earlier version (in version {restored['version']}), so rows "
                f"that this landing had written are missing: {self.AFTER_RESTORE}"
            )
        self._checked = self.version

    def _commits_since(self, query: str | None) -> list[dict[str, Any]]:
        """Return the commits after the snapshot of the query's last commit, as far as the log reaches back."""
        limit = HISTORY_COMMITS
        while True:
            commits = self._history(limit)
            for commit in commits:
                own = commit.get("chronik")
                if isinstance(own, dict) and "query" in own and query in (None, own["query"]):
                    snapshot = own.get("snapshot", commit["version"])
                    if len(commits) == limit and commits[-1]["version"] > snapshot + 1:
                        break
                    return [other for other in commits if other["version"] > snapshot]
            if len(commits) < limit:
                return commits
            limit *= 8

    def _history(self, limit: int) -> list[dict[str, Any]]:
        """Return the last `limit` commits, or more, newest first. Refreshes the snapshot.

        deltalake lists commits from the newest one on, but numbers them from the snapshot on. Both are the same if the
        table did not change meanwhile.
        """
        while True:
            version = self.version
            commits = self._table.history(limit)
            self.refresh()
            if self.version == version:
                return commits
            limit += self.version - version

    def commit(self, query: str, batch: int, files: Sequence[NewFile]) -> None:
        """Commit all files and their transactions atomically. Raises Conflict."""
        spans = widened({}, ((partition, *span) for file in files for partition, span in file.offsets.items()))
        ends = {partition: max(last + 1, self.next_offset(partition)) for partition, (_, last) in spans.items()}
        applications = [
            Transaction(f"chronik:batch:{query}", batch),
            *(Transaction(f"chronik:offset:{partition}", end) for partition, end in sorted(ends.items())),
        ]
        ranges = {str(partition): span for partition, span in sorted(spans.items())}
        info: dict[str, Any] = {"query": query, "batch": batch, "snapshot": self.version, "offsets": ranges}
        info["bytes"] = sum(file.size_bytes for file in files)
        before = self.version
        changed = self._changed_schema()
        changes, schema = changed is not None, changed or self._table.schema()
        try:
            self._table.create_write_transaction(
                [AddAction(file.path, file.size_bytes, {DATE: file.date}, 0, True, file.stats) for file in files],
                "overwrite" if changes else "append",
                schema,
                partition_by=[DATE],
                partition_filters=NO_ROWS if changes else None,
                commit_properties=CommitProperties(custom_metadata={"chronik": info}, app_transactions=applications),
            )
        except CommitFailedError as error:
            self.refresh()
            if not self._has(files):
                raise Conflict(str(error)) from None
        except (DeltaError, OSError) as error:
            kind = store_failure(error) if is_remote(self.uri) else PipelineError
            remedy = "fix that and start again: no record lands twice"
            raise kind(f"cannot commit to the table {self.uri}: {error}; {remedy}") from None
        self.refresh()
        if self._checked == before and self.version == before + 1:
            self._checked = self.version  # our own commit restores nothing

    def _has(self, files: Sequence[NewFile]) -> bool:
        """Return whether a commit that was refused took place: a store's client may have met its own first request."""
        return bool(files) and live_paths(self._table).issuperset(file.path for file in files)


@dataclass(frozen=True, slots=True)
class LandedBatch:
    rows: int
    dead_letters: int
    size_bytes: int = field(default=0, compare=False)


class BatchLander:
    """Lands one query's batches, one after another. Used by one thread."""

    def __init__(self, rows: Landable, dead_letters: Landable | None = None) -> None:
        self._rows = rows
        self._dead_letters = dead_letters
        self._landed = LandedOffsets()
        """Offsets that have landed: some of them, as earlier batches found them. Files are written without these."""

    def land(self, query: str, batch: int, write: Write) -> LandedBatch:
        """Land the batch unless it has already landed. Raises PipelineError if it cannot be landed."""
        reason = ""
        for _ in range(TRIES):
            # The dead letters first: a replay adds a record to the rows before it removes the dead letter.
            for table in reversed(self._tables):
                table.refresh()
                table.check_not_restored(query)
            if self._has_landed(query, batch):
                return LandedBatch(0, 0)
            files = self._write(write)
            try:
                return self._commit(query, batch, files)
            except Conflict as conflict:
                reason = str(conflict)
        fault = f"another job commits to the table {self._rows.uri} at the same time"
        raise PipelineError(f"{fault} ({reason}): stop one of them")

    def _has_landed(self, query: str, batch: int) -> bool:
        landed = self._rows.landed_batch(query)
        if landed is not None and landed >= batch:
            return True
        if batch > 0 and landed != batch - 1:
            raise PipelineError(
                f"the checkpoint is at batch {batch}, and the table {self._rows.uri} "
                f"{'has no batch of it' if landed is None else f'is at {landed}'}: "
                "the checkpoint belongs to another table, or the "
                "table was removed or restored; choose a new --checkpoint (no record lands twice)"
            )
        return False

    def _write(self, write: Write) -> Sequence[NewFile]:
        """Write the batch without any offset that has landed on the current snapshots."""
        files = write(self._landed)
        while (landed := self._landed_among(files)) is not None:
            self._landed = self._landed.merged_with([landed])
            self._remove(files)
            files = write(self._landed)
        return files

    def _landed_among(self, files: Sequence[NewFile]) -> LandedOffsets | None:
        """Return the landed offsets, if some lie within these files and the files were written without knowing them.

        An undisturbed run reads nothing for this, because its offsets are above all landed ones.
        """
        spans = widened({}, ((partition, *span) for file in files for partition, span in file.offsets.items()))
        firsts = {
            partition: first
            for partition, (first, _) in spans.items()
            if any(first < table.next_offset(partition) for table in self._tables)
        }
        if not firsts:
            return None
        first, *others = [table.landed_offsets(firsts) for table in self._tables]
        landed = first.merged_with(others)
        is_known = all(self._landed.covers(landed, partition, *spans[partition]) for partition in firsts)
        return None if is_known else landed

    def _remove(self, files: Sequence[NewFile]) -> None:
        """Remove files that were in no commit attempt. A failed attempt may still have added its files to the table."""
        dead = None if self._dead_letters is None else self._dead_letters.uri
        uris = {ROWS: self._rows.uri, STAGED: self._rows.uri, DEAD_LETTERS: dead}
        for name, uri in uris.items():
            paths = [file.path for file in files if file.table == name]
            if uri is not None and paths:
                remove_paths(uri, paths)

    def _commit(self, query: str, batch: int, files: Sequence[NewFile]) -> LandedBatch:
        rows, dead = ([file for file in files if file.table == table] for table in (ROWS, DEAD_LETTERS))
        if dead:
            assert self._dead_letters is not None
            self._dead_letters.commit(query, batch, dead)
        self._rows.commit(query, batch, rows)
        size_bytes = sum(file.size_bytes for file in files)
        return LandedBatch(sum(file.rows for file in rows), sum(file.rows for file in dead), size_bytes)

    @property
    def _tables(self) -> list[Landable]:
        return [self._rows] if self._dead_letters is None else [self._rows, self._dead_letters]


def _check(
    uri: str, table: DeltaTable, schema: Any, topic: str, topic_id: str, may_have_more: bool, mode: str | None
) -> None:
    settings: Mapping[str, str | None] = table.metadata().configuration
    if settings.get(TOPIC) != topic:
        holds = f"the topic {settings[TOPIC]}" if settings.get(TOPIC) else "something else"
        raise PipelineError(f"the table {uri} holds {holds}, not {topic}: choose another --to")
    if settings.get(MODE) != mode:
        created = settings.get(MODE) or "append"
        raise PipelineError(f"the table {uri} was created with --mode {created}: choose another --to and --checkpoint")
    if topic_id and settings.get(TOPIC_ID) and settings[TOPIC_ID] != topic_id:
        raise PipelineError(
            f"topic {topic} was deleted and recreated since the table {uri} was created: its offsets would be there "
            "twice; choose another --to and --checkpoint"
        )
    existing = {column.name: column.type for column in table.schema().fields}
    required = {column.name: column.type for column in Schema.from_arrow(schema).fields}
    differ = sorted(
        name
        for name in (required if may_have_more else existing | required)
        if existing.get(name) != required.get(name)
    )
    if differ:
        raise PipelineError(
            f"the table {uri} was created with another --schema (they differ in {', '.join(differ)}): "
            "choose another --to and --checkpoint"
        )
