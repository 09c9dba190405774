"""The Delta table that one topic lands in. Micro-batches land in it exactly once, however the last attempt ended.

The table itself records what has landed, in Delta's application transactions. They are in the same commit as the files,
and never expire:

    chronik:batch:QUERY       the last micro-batch of a query
    chronik:offset:PARTITION  the highest landed offset + 1
    commit info "chronik"     {"query", "batch", "offsets": {PARTITION: [first, last]}}, for people

The transactions are read and committed on one snapshot. deltalake rejects a commit only if another commit with the same
application id followed that snapshot. A handle reopened for the commit would therefore write a batch twice.

A record is either in the topic's table or in its dead letters. No commit spans both tables, so the dead letters are
committed first, and the commit to the topic's table completes the batch. If a run ends between the two, the batch is
read again, and the dead letters that have landed are skipped.

Landed records are skipped by their offsets. A lost checkpoint, a second query into the same table, or a schema change
between two attempts all deliver offsets that have already landed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, CommitProperties, Transaction

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.landed_offsets import LandedOffsets, widened
from chronik.pipeline.land.schema import DATE
from chronik.pipeline.land.task import DEAD_LETTERS, ROWS, NewFile, remove_files

TOPIC = "chronik.topic"
TOPIC_ID = "chronik.topic.id"
COMPACT_AT_FILES = 64
SMALL_BYTES = 32 * 1024 * 1024
COMPACTED_BYTES = 256 * 1024 * 1024
VACUUM_EVERY_COMPACTIONS = 100
TRIES = 8
COMPACT_EVERY_BATCHES = 16

Write = Callable[[LandedOffsets], Sequence[NewFile]]
"""Read the batch and write its files, except for the given offsets. It can be called repeatedly."""


class Conflict(Exception):
    """Another process has committed for this query or these partitions since the snapshot. Refresh and retry."""


class LandingTable:
    """One table at one snapshot, which `refresh` and our own commits advance. Used by one thread."""

    def __init__(self, uri: str, table: DeltaTable) -> None:
        self.uri = uri
        self._table = table
        self._compactions = 0

    @classmethod
    def open(cls, uri: str, schema: Any, topic: str, topic_id: str) -> LandingTable:
        """Open the table, or create it. Raises PipelineError if the existing table cannot hold this topic."""
        try:
            if not DeltaTable.is_deltatable(uri):
                marks = {TOPIC: topic, TOPIC_ID: topic_id}
                DeltaTable.create(
                    uri, schema, mode="ignore", partition_by=[DATE], configuration=marks, raise_if_key_not_exists=False
                )
            table = DeltaTable(uri)
        except (DeltaError, OSError) as error:
            raise PipelineError(f"cannot open or create the table {uri}: {error}") from None
        _check(uri, table, schema, topic, topic_id)
        return cls(uri, table)

    @property
    def version(self) -> int:
        return self._table.version()

    def refresh(self) -> None:
        self._table.update_incremental()

    def landed_batch(self, query: str) -> int | None:
        return self._table.transaction_version(f"chronik:batch:{query}")

    def next_offset(self, partition: int) -> int:
        """Return the highest landed offset + 1, or 0 if none has landed."""
        return self._table.transaction_version(f"chronik:offset:{partition}") or 0

    def landed_offsets(self) -> LandedOffsets:
        """Read the landed offsets from the rows themselves, the only source that shows every gap."""
        rows = self._table.to_pyarrow_dataset().scanner(columns=["partition", "offset"]).to_batches()
        return LandedOffsets.of(batch for batch in rows if batch.num_rows)

    def commit(self, query: str, batch: int, files: Sequence[NewFile]) -> None:
        """Commit all files and their transactions atomically. Raises Conflict."""
        spans = widened({}, ((partition, *span) for file in files for partition, span in file.offsets.items()))
        ends = {partition: max(last + 1, self.next_offset(partition)) for partition, (_, last) in spans.items()}
        applications = [
            Transaction(f"chronik:batch:{query}", batch),
            *(Transaction(f"chronik:offset:{partition}", end) for partition, end in sorted(ends.items())),
        ]
        info = {"query": query, "batch": batch, "offsets": {str(part): span for part, span in sorted(spans.items())}}
        try:
            self._table.create_write_transaction(
                [AddAction(file.path, file.size_bytes, {DATE: file.date}, 0, True, file.stats) for file in files],
                "append",
                self._table.schema(),
                partition_by=[DATE],
                commit_properties=CommitProperties(custom_metadata={"chronik": info}, app_transactions=applications),
            )
        except CommitFailedError as error:
            raise Conflict(str(error)) from None
        except (DeltaError, OSError) as error:
            remedy = "nothing of the batch is in it, so fix that and start again"
            raise PipelineError(f"cannot commit to the table {self.uri}: {error}; {remedy}") from None
        self.refresh()

    def compact(self) -> None:
        """Rewrite many small files into large ones. Readers of older versions keep their files."""
        sizes = pa.chunked_array(self._table.get_add_actions(flatten=True).column("size_bytes"))
        if sum(size < SMALL_BYTES for size in sizes.to_pylist()) < COMPACT_AT_FILES:
            return
        try:
            self._table.optimize.compact(target_size=COMPACTED_BYTES)
            self._compactions += 1
            if self._compactions % VACUUM_EVERY_COMPACTIONS == 1:
                self._table.vacuum(dry_run=False, full=True)  # files older than a week, Delta's default
        except CommitFailedError:
            pass  # another process rewrote the same files, so the work is done
        except (DeltaError, OSError) as error:
            raise PipelineError(f"cannot compact the table {self.uri}: {error}; the landed rows are intact") from None
        finally:
            self.refresh()


@dataclass(frozen=True, slots=True)
class LandedBatch:
    rows: int
    dead_letters: int


class BatchLander:
    """Lands one query's batches, one after another. Used by one thread."""

    def __init__(self, rows: LandingTable, dead_letters: LandingTable | None = None) -> None:
        self._rows = rows
        self._dead_letters = dead_letters
        self._landed = LandedOffsets()
        self._landed_at: tuple[int, ...] | None = None
        self._batches = 0

    def land(self, query: str, batch: int, write: Write) -> LandedBatch:
        """Land the batch unless it has already landed. Raises PipelineError if it cannot be landed."""
        reason = ""
        for _ in range(TRIES):
            for table in self._tables:
                table.refresh()
            if self._has_landed(query, batch):
                return LandedBatch(0, 0)
            files = write(self._landed)
            if self._may_overlap(files):
                self._read_landed()
                self._remove(files)
                files = write(self._landed)
            try:
                return self._commit(query, batch, files)
            except Conflict as conflict:
                reason = str(conflict)
        fault = f"another job commits to the table {self._rows.uri} at the same time"
        raise PipelineError(f"{fault} ({reason}): stop one of them")

    def compact(self) -> None:
        for table in self._tables:
            table.compact()

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

    def _may_overlap(self, files: Sequence[NewFile]) -> bool:
        """Return whether these offsets may have landed: never in an undisturbed run, always after a lost checkpoint."""
        if self._landed_at == self._versions:
            return False
        return any(
            first < table.next_offset(partition)
            for file in files
            for partition, (first, _) in file.offsets.items()
            for table in self._tables
        )

    def _read_landed(self) -> None:
        first, *others = [table.landed_offsets() for table in self._tables]
        self._landed = first.merged_with(others)
        self._landed_at = self._versions

    def _remove(self, files: Sequence[NewFile]) -> None:
        """Remove files that were in no commit attempt. A failed attempt may still have added its files to the table."""
        uris = {name: table.uri for name, table in zip((ROWS, DEAD_LETTERS), self._tables, strict=False)}
        for file in files:
            remove_files(uris[file.table], file.path.rpartition("/")[2])

    def _commit(self, query: str, batch: int, files: Sequence[NewFile]) -> LandedBatch:
        known = self._landed_at == self._versions
        rows, dead = ([file for file in files if file.table == table] for table in (ROWS, DEAD_LETTERS))
        if dead:
            assert self._dead_letters is not None
            self._dead_letters.commit(query, batch, dead)
        self._rows.commit(query, batch, rows)
        self._batches += 1
        if self._batches % COMPACT_EVERY_BATCHES == 0:
            self.compact()
        if known:
            # Only this lander has committed since `_read_landed`, and a query never reads an offset twice.
            self._landed_at = self._versions
        return LandedBatch(sum(file.rows for file in rows), sum(file.rows for file in dead))

    @property
    def _versions(self) -> tuple[int, ...]:
        return tuple(table.version for table in self._tables)

    @property
    def _tables(self) -> list[LandingTable]:
        return [self._rows] if self._dead_letters is None else [self._rows, self._dead_letters]


def _check(uri: str, table: DeltaTable, schema: Any, topic: str, topic_id: str) -> None:
    settings: Mapping[str, str | None] = table.metadata().configuration
    if settings.get(TOPIC) != topic:
        holds = f"the topic {settings[TOPIC]}" if settings.get(TOPIC) else "something else"
        raise PipelineError(f"the table {uri} holds {holds}, not {topic}: choose another --to")
    if topic_id and settings.get(TOPIC_ID) and settings[TOPIC_ID] != topic_id:
        raise PipelineError(
            f"topic {topic} was deleted and recreated since the table {uri} was created: its offsets would be there "
            "twice; choose another --to and --checkpoint"
        )
    existing = {column.name: column.type for column in table.schema().fields}
    required = {column.name: column.type for column in Schema.from_arrow(schema).fields}
    differ = sorted(name for name in existing | required if existing.get(name) != required.get(name))
    if differ:
        raise PipelineError(
            f"the table {uri} was created with another --schema (they differ in {', '.join(differ)}): "
            "choose another --to and --checkpoint"
        )
