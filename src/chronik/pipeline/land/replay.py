"""Decode a table's dead letters again, after their schema was corrected. Without Spark.

The files of the dead letters are taken in groups, and two commits move what can be decoded now. The first one adds the
rows to the topic's table by the rules of every landing: no offset that the table has is added again, and another
commit to the same partitions is a conflict. The second one replaces the files of the group by files with what still
fails (`dead_letters`).

If a run ends between the two commits, the records are in both tables. The next run finds them in the topic's table and
only removes the dead letters. No record is lost or lands twice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql.types import StructType

from chronik.pipeline.catalog import NAMESPACE, find_table, open_catalog
from chronik.pipeline.deleted import DeletedKeys
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.dead_letters import (
    DeadFile,
    DeadLetters,
    DeltaDeadLetters,
    IcebergDeadLetters,
    Taken,
    missing,
)
from chronik.pipeline.land.delta import TOPIC, TOPIC_ID, Conflict, Landable, LandingTable
from chronik.pipeline.land.landed_offsets import LandedOffsets, first_and_last, widened
from chronik.pipeline.land.options import TableOptions
from chronik.pipeline.land.schema import REASON, RECORD_COLUMNS, RECORD_SCHEMA, dead_letter_schema, table_schema
from chronik.pipeline.land.task import DEAD_LETTERS, ROWS, NewFile, WriteTask, remove_paths
from chronik.pipeline.storage import TableFiles
from chronik.pipeline.typed.decoding import MissingSchemas
from chronik.pipeline.typed.topic_schemas import TopicSchemas

DEAD_LETTERS_SUFFIX = "_dead_letters"
GROUP_BYTES = 64 * 1024 * 1024
"""Compressed bytes of dead letters that are decoded at a time."""
GROUP_FILES = 256
TRIES = 8
PLACES_MAX = 5


@dataclass(slots=True)
class Replayed:
    """What a replay did. `reasons`: why dead letters still fail, with the number and the first places."""

    replayed: int = 0
    landed_before: int = 0
    """Dead letters that were in the table already, because an earlier replay was interrupted."""
    deleted: int = 0
    failing: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, other: Replayed) -> None:
        self.replayed += other.replayed
        self.landed_before += other.landed_before
        self.deleted += other.deleted
        self.failing += other.failing
        self.reasons += other.reasons
        for reason, places in other.places.items():
            self.places[reason] = [*self.places.get(reason, []), *places][:PLACES_MAX]

    def to_json(self) -> dict[str, Any]:
        failing = [
            {"reason": reason, "count": number, "places": self.places[reason]}
            for reason, number in self.reasons.most_common()
        ]
        counts = {"replayed": self.replayed, "landed_before": self.landed_before, "deleted": self.deleted}
        return {**counts, "failing": self.failing, "reasons": failing}


@dataclass(frozen=True, slots=True)
class ReplayedTable:
    """A topic's table and its dead letters, of either format."""

    topic: str
    rows: Landable
    dead: DeadLetters
    can_promote: Callable[[Any, Any], bool] | None = None
    """Whether the table's format can change a column's type so. None: every change that widens it."""

    @classmethod
    def open(cls, uri: str, options: TableOptions, fields: StructType | None = None) -> ReplayedTable:
        """Open the tables. `fields`: the columns of JSON values. Raises PipelineError."""
        uri = uri.rstrip("/")
        topic, topic_id = topic_of(uri, options)
        dead_uri, columns, is_typed = uri + DEAD_LETTERS_SUFFIX, table_schema(fields), bool(options.registry_formats)
        if not options.is_iceberg:
            rows = LandingTable.open(uri, columns, topic, topic_id, may_have_more=is_typed)
            return cls(topic, rows, DeltaDeadLetters(dead_uri, topic, topic_id))
        from chronik.pipeline.land.iceberg import IcebergTable, can_promote

        dead = find_table(dead_uri, options.catalog)
        if dead is None:
            raise missing(dead_uri)
        namespace = options.catalog.get("namespace", NAMESPACE)
        catalog = open_catalog(os.path.dirname(uri), options.catalog)
        IcebergTable.open(catalog, dead_uri, dead_letter_schema(), topic, topic_id, namespace=namespace)
        found = IcebergTable.open(catalog, uri, columns, topic, topic_id, namespace=namespace, may_have_more=is_typed)
        return cls(topic, found, IcebergDeadLetters(dead, dead_uri), can_promote)


class Replay:
    """One replay of one table. Used by one thread."""

    def __init__(
        self,
        table: ReplayedTable,
        token: str,
        now_ms: int,
        fields: StructType | None = None,
        schemas: TopicSchemas | None = None,
        deleted: DeletedKeys | None = None,
    ) -> None:
        """`token`: a name that no earlier run had. `fields` or `schemas` decode, as in a landing."""
        self._rows = table.rows
        self._dead = table.dead
        self._uri = table.rows.uri
        self._dead_uri = table.dead.uri
        self._token = token
        self._now_ms = now_ms
        self._fields = fields
        self._schemas = schemas
        self._deleted = deleted
        self._names = count()

    def run(self) -> Replayed:
        """Replay all dead letters that there are now. Raises PipelineError; what was replayed stays so."""
        done = Replayed()
        for group in list(self._groups()):
            left = group
            for _ in range(TRIES):
                try:
                    done.add(self._replay(left))
                    break
                except (Conflict, Taken):
                    # A landing, a merge or another replay. Files that are merged by now come with the next run.
                    self._rows.refresh()
                    self._dead.refresh()
                    current = {file.path for file in self._dead.files()}
                    left = [file for file in left if file.path in current]
            else:
                raise PipelineError(f"other jobs commit to {self._uri} at the same time: start the replay again")
        return done

    def _groups(self) -> Iterator[list[DeadFile]]:
        group: list[DeadFile] = []
        for file in sorted(self._dead.files(), key=lambda file: file.path):
            if group and (
                sum(f.size_bytes for f in group) + file.size_bytes > GROUP_BYTES or len(group) >= GROUP_FILES
            ):
                yield group
                group = []
            group.append(file)
        if group:
            yield group

    def _replay(self, group: Sequence[DeadFile]) -> Replayed:
        if not group:
            return Replayed()
        firsts = self._firsts(group)
        landed = self._rows.landed_offsets(firsts) if firsts else LandedOffsets()
        counts = Counter[str]()
        name = f"replay-{self._token}-{next(self._names)}"
        files = self._write(group, landed, name, counts)
        rows, dead = ([file for file in files if file.table == table] for table in (ROWS, DEAD_LETTERS))
        replayed, failing = sum(file.rows for file in rows), sum(file.rows for file in dead)
        done = Replayed(replayed, counts["landed"], counts["deleted"], failing)
        self._explain(dead, done)
        if failing == counts["all"]:
            remove_paths(self._dead_uri, [file.path for file in dead])
            return done
        try:
            if rows:
                self._rows.commit(name, 0, rows)
        except Conflict:
            # The rows' files were in an attempt to commit, so a vacuum removes them.
            remove_paths(self._dead_uri, [file.path for file in dead])
            raise
        self._dead.replace(group, dead, name, self._now_ms)
        return done

    def _firsts(self, group: Sequence[DeadFile]) -> dict[int, int]:
        spans: dict[int, tuple[int, int]] = {}
        for batch in self._batches(group, ["partition", "offset"]):
            spans = widened(spans, first_and_last(batch))
        return {partition: first for partition, (first, _) in spans.items()}

    def _batches(self, group: Sequence[DeadFile], columns: Sequence[str]) -> Iterator[Any]:
        files = TableFiles(self._dead_uri)
        for each in group:
            with files.store.open_input_file(files.full(each.path)) as file:
                for batch in pq.ParquetFile(file).iter_batches(columns=list(columns)):
                    if batch.num_rows:
                        yield batch.select(list(columns))

    def _write(
        self, group: Sequence[DeadFile], landed: LandedOffsets, name: str, counts: Counter[str]
    ) -> list[NewFile]:
        """Decode the group, and write both tables' files. `counts`: how many records there were, and are skipped."""

        def records() -> Iterator[Any]:
            counts.clear()
            for batch in self._batches(group, RECORD_SCHEMA.names):
                fresh = landed.without(batch) if landed else batch
                left = self._deleted.without(fresh) if self._deleted else fresh
                counts["all"] += batch.num_rows
                counts["landed"] += batch.num_rows - fresh.num_rows
                counts["deleted"] += fresh.num_rows - left.num_rows
                yield left

        while True:
            decoding = None
            if self._schemas is not None:
                decoding = self._schemas.plan(self._rows.more_columns(), RECORD_COLUMNS)
                self._rows.require(decoding.columns)
            task = WriteTask(self._uri, self._dead_uri, name, self._fields, LandedOffsets(), None, decoding)
            try:
                return task.write(records(), f"{name}-{next(self._names)}")
            except MissingSchemas as found:
                assert self._schemas is not None
                self._schemas.learn(found.missing)

    def _explain(self, dead: Sequence[NewFile], done: Replayed) -> None:
        group = [DeadFile(file.path, file.size_bytes, file.date) for file in dead]
        for batch in self._batches(group, [REASON, "partition", "offset"]):
            for row in batch.to_pylist():
                reason = row[REASON] or ""
                done.reasons[reason] += 1
                places = done.places.setdefault(reason, [])
                if len(places) < PLACES_MAX:
                    places.append(f"partition {row['partition']}, offset {row['offset']}")


def topic_of(uri: str, options: TableOptions) -> tuple[str, str]:
    """Return the topic of a table and the topic's id. Raises PipelineError if no landing made the table."""
    if options.is_iceberg:
        table = find_table(uri, options.catalog)
        settings: Mapping[str, str | None] = {} if table is None else table.properties
    else:
        settings = _delta_settings(uri)
    if not settings.get(TOPIC):
        raise PipelineError(f"{uri} is not a table of chronik pipeline land: name the table of a topic, DIR/TOPIC")
    if settings.get("chronik.mode") == "upsert":
        raise PipelineError(f"the table {uri} has one row per key: land its topic again to a new table instead")
    return settings[TOPIC] or "", settings.get(TOPIC_ID) or ""


def _delta_settings(uri: str) -> Mapping[str, str | None]:
    try:
        return DeltaTable(uri).metadata().configuration if DeltaTable.is_deltatable(uri) else {}
    except (DeltaError, OSError) as error:
        raise PipelineError(f"cannot read the table {uri}: {error}") from None
