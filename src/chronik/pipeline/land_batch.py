"""One micro-batch into its tables, exactly once: whatever ended the attempt before, and wherever.

A record is either in the topic's table or in its dead letters. There is no commit over both, so the dead letters go
first and the topic's table says that the batch is done: where a run ends between the two, the batch comes again, finds
its dead letters landed and leaves them out.

What has landed is left out by offsets, not by trust: a lost checkpoint, another query into the same table and a schema
that changed between two attempts all bring offsets that are there already.
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
"""Reads the batch and writes its files, without the offsets that are named; called again, it does so again."""


@dataclass(frozen=True, slots=True)
class LandedBatch:
    rows: int
    dead_letters: int


class BatchLander:
    """Lands one query's batches, one after the other. Used by one thread."""

    def __init__(self, rows: LandingTable, dead_letters: LandingTable | None = None) -> None:
        self._rows = rows
        self._dead_letters = dead_letters
        self._landed = LandedOffsets()
        self._landed_at: tuple[int, ...] | None = None
        self._batches = 0

    def land(self, query: str, batch: int, write: Write) -> LandedBatch:
        """Nothing lands where the batch has landed. Raises PipelineError where it cannot be landed."""
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
        """Whether offsets of these files may have landed: never in a run that just goes on, always after a loss."""
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
        """Only what no commit was tried with: one that failed may be in the table all the same."""
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
            # Nobody but us has committed since we looked, and a query never reads an offset twice.
            self._landed_at = self._versions
        return LandedBatch(sum(file.rows for file in rows), sum(file.rows for file in dead))

    @property
    def _versions(self) -> tuple[int, ...]:
        return tuple(table.version for table in self._tables)

    @property
    def _tables(self) -> list[LandingTable]:
        return [self._rows] if self._dead_letters is None else [self._rows, self._dead_letters]
