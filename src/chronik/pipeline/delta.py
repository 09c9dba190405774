"""A Delta table that one topic lands in, and the rules of its commits.

The table itself records what has landed, in Delta's application transactions. They are in the same commit as the files,
and never expire:

    chronik:batch:QUERY       the last micro-batch of a query
    chronik:offset:PARTITION  the highest landed offset + 1
    commit info "chronik"     {"query", "batch", "offsets": {PARTITION: [first, last]}}, for people

The transactions are read and committed on one snapshot. deltalake rejects a commit only if another commit with the same
application id followed that snapshot. A handle reopened for the commit would therefore write a batch twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, CommitProperties, Transaction

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land_files import DATE, NewFile
from chronik.pipeline.land_ranges import LandedOffsets

__all__ = ["Conflict", "LandingTable"]

TOPIC = "chronik.topic"
TOPIC_ID = "chronik.topic.id"
COMPACT_AT_FILES = 64
SMALL_BYTES = 32 * 1024 * 1024
COMPACTED_BYTES = 256 * 1024 * 1024
VACUUM_EVERY_COMPACTIONS = 100


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
                DeltaTable.create(
                    uri,
                    schema,
                    mode="ignore",
                    partition_by=[DATE],
                    configuration={TOPIC: topic, TOPIC_ID: topic_id},
                    raise_if_key_not_exists=False,
                )
            table = DeltaTable(uri)
        except (DeltaError, OSError) as error:
            raise PipelineError(f"cannot open or make the table {uri}: {error}") from None
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
        spans = _spans(files)
        ends = {partition: max(last + 1, self.next_offset(partition)) for partition, (_, last) in spans.items()}
        applications = [
            Transaction(f"chronik:batch:{query}", batch),
            *(Transaction(f"chronik:offset:{partition}", end) for partition, end in sorted(ends.items())),
        ]
        told = {"query": query, "batch": batch, "offsets": {str(place): span for place, span in sorted(spans.items())}}
        try:
            self._table.create_write_transaction(
                [AddAction(file.path, file.size_bytes, {DATE: file.date}, 0, True, file.stats) for file in files],
                "append",
                self._table.schema(),
                partition_by=[DATE],
                commit_properties=CommitProperties(custom_metadata={"chronik": told}, app_transactions=applications),
            )
        except CommitFailedError as error:
            raise Conflict(str(error)) from None
        except (DeltaError, OSError) as error:
            raise PipelineError(
                f"cannot commit to the table {self.uri}: {error}; nothing of the batch is in it, so mend that and "
                "start again"
            ) from None
        self.refresh()

    def compact(self, *, small_files: int = COMPACT_AT_FILES) -> None:
        """Rewrite many small files into large ones. Readers of older versions keep their files."""
        sizes = pa.chunked_array(self._table.get_add_actions(flatten=True).column("size_bytes"))
        if sum(size < SMALL_BYTES for size in sizes.to_pylist()) < small_files:
            return
        try:
            self._table.optimize.compact(target_size=COMPACTED_BYTES)
            self._compactions += 1
            if self._compactions % VACUUM_EVERY_COMPACTIONS == 1:
                self._table.vacuum(dry_run=False, full=True)  # files older than a week, Delta's default
        except CommitFailedError:
            pass  # another process rewrote the same files, so the work is done
        except (DeltaError, OSError) as error:
            raise PipelineError(f"cannot compact the table {self.uri}: {error}; what has landed is whole") from None
        finally:
            self.refresh()


def _spans(files: Iterable[NewFile]) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for file in files:
        for partition, (first, last) in file.offsets.items():
            low, high = spans.get(partition, (first, last))
            spans[partition] = min(low, first), max(high, last)
    return spans


def _check(uri: str, table: DeltaTable, schema: Any, topic: str, topic_id: str) -> None:
    told: Mapping[str, str | None] = table.metadata().configuration
    if told.get(TOPIC) != topic:
        holds = f"the topic {told[TOPIC]}" if told.get(TOPIC) else "something else"
        raise PipelineError(f"the table {uri} holds {holds}, not {topic}: choose another --to")
    if topic_id and told.get(TOPIC_ID) and told[TOPIC_ID] != topic_id:
        raise PipelineError(
            f"topic {topic} was deleted and made again since the table {uri} was made: its offsets would be there "
            "twice; choose another --to and --checkpoint"
        )
    there = {column.name: column.type for column in pa.schema(table.schema().to_arrow())}
    wanted = {column.name: column.type for column in schema}
    differ = sorted(name for name in there.keys() | wanted.keys() if not _same(there.get(name), wanted.get(name)))
    if differ:
        raise PipelineError(
            f"the table {uri} was made with another --schema (they differ in {', '.join(differ)}): "
            "choose another --to and --checkpoint"
        )


def _same(one: Any, other: Any) -> bool:
    """Compare types but ignore the names of a list's inner field, which differ between Delta and Arrow."""
    if one is None or other is None:
        return one is other
    if pa.types.is_nested(one) and type(one) is type(other):
        if pa.types.is_struct(one):
            return [f.name for f in one] == [f.name for f in other] and all(
                _same(mine.type, yours.type) for mine, yours in zip(one, other, strict=True)
            )
        if pa.types.is_map(one):
            return _same(one.key_type, other.key_type) and _same(one.item_type, other.item_type)
        return _same(one.value_type, other.value_type)
    return bool(one == other)
