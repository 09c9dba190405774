"""Land one micro-batch in its tables exactly once, wherever and however the previous attempt ended.

A record is either in the topic's table or in its dead letters. No commit spans both tables, so the dead letters are
committed first, and the commit to the topic's table completes the batch. If a run ends between the two, the batch is
read again, and the dead letters that have landed are skipped.

Landed records are skipped by their offsets. A lost checkpoint, a second query into the same table, or a schema change
between two attempts all deliver offsets that have already landed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chronik.pipeline.delta import Conflict, LandingTable
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land_files import NewFile, remove_files
from chronik.pipeline.land_ranges import LandedOffsets

__all__ = ["DEAD_LETTERS", "ROWS", "BatchLander", "LandedBatch"]

ROWS = "rows"
DEAD_LETTERS = "dead letters"
TRIES = 8
COMPACT_EVERY_BATCHES = 16

Write = Callable[[LandedOffsets], Sequence[NewFile]]
"""Read the batch and write its files, except for the given offsets. It can be called repeatedly."""


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
            if self._is_done(query, batch):
                return LandedBatch(0, 0)
            files = write(self._landed)
            if self._may_overlap(files):
                self._look()
                self._remove(files)
                files = write(self._landed)
            try:
                return self._commit(query, batch, files)
            except Conflict as conflict:
                reason = str(conflict)
        raise PipelineError(
            f"another job commits to the table {self._rows.uri} at the same time ({reason}): stop one of them"
        )

    def _is_done(self, query: str, batch: int) -> bool:
        landed = self._rows.landed_batch(query)
        if landed is not None and landed >= batch:
            return True
        if batch > 0 and landed != batch - 1:
            raise PipelineError(
                f"the checkpoint is at batch {batch}, and the table {self._rows.uri} "
                f"{'has none of it' if landed is None else f'is at {landed}'}: it belongs to another table, or the "
                "table was removed or set back; choose a new --checkpoint (what is in the table is not landed twice)"
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

    def _look(self) -> None:
        first, *others = [table.landed_offsets() for table in self._tables]
        self._landed = first.merged_with(others)
        self._landed_at = self._versions

    def _remove(self, files: Sequence[NewFile]) -> None:
        """Remove files that were in no commit attempt. A failed attempt may still have added its files to the table."""
        for file in files:
            table = self._rows if file.table == ROWS else self._dead_letters
            assert table is not None
            remove_files(table.uri, file.path.rpartition("/")[2])

    def _commit(self, query: str, batch: int, files: Sequence[NewFile]) -> LandedBatch:
        known = self._landed_at == self._versions
        rows = [file for file in files if file.table == ROWS]
        dead = [file for file in files if file.table == DEAD_LETTERS]
        if dead:
            assert self._dead_letters is not None
            self._dead_letters.commit(query, batch, dead)
        self._rows.commit(query, batch, rows)
        self._batches += 1
        if self._batches % COMPACT_EVERY_BATCHES == 0:
            for table in self._tables:
                table.compact()
        if known:
            # Only this lander has committed since `_look`, and a query never reads an offset twice.
            self._landed_at = self._versions
        return LandedBatch(sum(file.rows for file in rows), sum(file.rows for file in dead))

    @property
    def _versions(self) -> tuple[int, ...]:
        return tuple(table.version for table in self._tables)

    @property
    def _tables(self) -> list[LandingTable]:
        return [self._rows] if self._dead_letters is None else [self._rows, self._dead_letters]
