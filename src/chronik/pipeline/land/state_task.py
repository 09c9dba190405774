"""The executors' part of `--mode upsert`: stage the changes of a micro-batch by bucket, and merge them into buckets.

`StageTask` reads records as an append does, and writes the last change of each key to a staged file. `MergeTask` reads
the changes of a bucket, finds the rows that they supersede, and rewrites only the files that have such rows. The rows
of small files join a rewrite if they are no larger than it. So a row that never changes is rewritten a number of times
that grows with the logarithm of its bucket's size, and a bucket has few files.

Staged files and the deleted keys are in a folder of the table that readers ignore, because its name begins with `_`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from chronik.pipeline.errors import task_errors
from chronik.pipeline.land.current_state import (
    BUCKET,
    DELETED,
    IDENTITY,
    NEVER,
    ORDERED_AT,
    PLACE,
    TIME,
    bucket_of,
    codes,
    compacted,
    micros,
    times,
    winners,
)
from chronik.pipeline.land.hidden_files import deleted_path, staged_path
from chronik.pipeline.land.landed_offsets import first_and_last, widened
from chronik.pipeline.land.schema import REASON, RECORD_SCHEMA, JsonColumns
from chronik.pipeline.land.task import FILE_BYTES_MAX, STAGED, FileSet, NewFile, OpenFile, WriteTask
from chronik.pipeline.storage import TableFiles
from chronik.pipeline.typed.debezium import DELETE, HIDDEN, OLD, OP, NoRow, identities, json_changes

ROWS_MAX = 256 * 1024
BYTES_MAX = 128 * 1024 * 1024
"""Changes that a task holds before it drops superseded ones, and after that before it writes them."""
STATE_COLUMNS = (*RECORD_SCHEMA.names, ORDERED_AT)
SMALL_BYTES = 32 * 1024
"""Files up to this size are always rewritten with new rows: a smaller file saves nothing."""
FORGET_ALL = 2**62
_REASON = pa.field(REASON, pa.string())
_IDENTITY, _DELETED = pa.field(IDENTITY, pa.binary()), pa.field(DELETED, pa.bool_())
NO_KEY = "the record has no key, so it is no row's state"


@dataclass(frozen=True)
class StageTask(WriteTask):
    """Stages changes instead of adding rows."""

    key: tuple[str, ...] = ()
    """The columns that identify a row. Empty: the record's key."""
    buckets: int = 1
    has_envelope: bool = False
    """Whether values are events of Debezium."""

    def _rows(self, schema: Any, name: str, dead_letters: FileSet) -> StagedChanges:
        return StagedChanges(self.rows_uri, name, self.key, self.buckets, dead_letters)

    def _parsed(self, parser: JsonColumns, batch: Any) -> tuple[list[Any], Any]:
        """Return states and deletions as batches with the same columns, and dead letters."""
        found: dict[bool, tuple[list[int], list[bytes | None]]] = {False: ([], []), True: ([], [])}
        bad: list[int] = []
        reasons: list[str] = []
        for index, value in enumerate(batch.column("value").to_pylist()):
            if value is None:
                if not (self.has_envelope and self.key):  # the event before a tombstone has deleted the row
                    found[True][0].append(index)
                    found[True][1].append(None)
                continue
            try:
                for change in json_changes(value, self.key) if self.has_envelope else ((False, value),):
                    found[change[0]][0].append(index)
                    found[change[0]][1].append(change[1])
            except NoRow as error:
                bad.append(index)
                reasons.append(str(error))
        dead = [batch.take(pa.array(bad, pa.int64())).append_column(_REASON, pa.array(reasons, pa.string()))]
        states, unreadable = parser.split(_taken(batch, found[False][0], False), found[False][1])
        dead.append(unreadable)
        deleted = _taken(batch, found[True][0], True)
        if self.key:
            deleted, unreadable = parser.only(self.key).split(deleted, found[True][1])
            dead.append(unreadable)
        dead = [each.select([*RECORD_SCHEMA.names, REASON]) for each in dead]
        return [states, _with_columns(deleted, states.schema)], pa.concat_batches(dead)

    def _changes(self, rows: Any) -> list[Any]:
        """Return decoded records as changes."""
        if not self.has_envelope:
            return [rows]
        is_tombstone = rows.column("value").is_null()
        if self.key:
            rows = rows.filter(pc.invert(is_tombstone))
            is_tombstone = rows.column("value").is_null()
        is_deleted = pc.or_(is_tombstone, pc.fill_null(pc.equal(rows.column(OP), DELETE), False))
        old = rows.column(OLD)
        rows = rows.drop_columns([hidden.name for hidden in HIDDEN])
        identity = key_of(rows, self.key)
        rows = rows.append_column(_IDENTITY, identity).append_column(_DELETED, is_deleted)
        is_moved = pc.fill_null(pc.and_(pc.not_equal(old, identity), pc.invert(is_deleted)), False)
        if not self.key or not pc.any(is_moved).as_py():
            return [rows]
        moved = rows.filter(is_moved)
        place = moved.schema.get_field_index(IDENTITY)
        moved = moved.set_column(place, _IDENTITY, old.filter(is_moved))
        marks = pa.array(np.ones(moved.num_rows, np.bool_))
        return [rows, moved.set_column(moved.schema.get_field_index(DELETED), _DELETED, marks)]


def key_of(rows: Any, key: tuple[str, ...]) -> Any:
    """Return what identifies each row. Null if no schema has had a field of the key yet."""
    if not set(key) <= set(rows.schema.names):
        return pa.nulls(rows.num_rows, pa.binary())
    return identities([rows.column(name) for name in key or ("key",)])


def _taken(batch: Any, rows: list[int], is_deleted: bool) -> Any:
    marks = pa.array(np.full(len(rows), is_deleted))
    return batch.take(pa.array(rows, pa.int64())).append_column(_DELETED, marks)


def _with_columns(batch: Any, schema: Any) -> Any:
    """Return the batch with null for the columns that it does not have."""
    columns = [
        batch.column(column.name) if column.name in batch.schema.names else pa.nulls(batch.num_rows, column.type)
        for column in schema
    ]
    return pa.record_batch(columns, schema=schema)


class StagedChanges:
    """One task's changes. Memory is bounded; keys that do not fit go to one more file."""

    def __init__(self, uri: str, name: str, key: tuple[str, ...], buckets: int, dead_letters: FileSet) -> None:
        self._files = TableFiles(uri)
        self._name = name
        self._key = key
        self._buckets = buckets
        self._dead_letters = dead_letters
        self._changes: list[Any] = []
        self._rows = self._bytes = 0
        self._done: list[NewFile] = []

    def add(self, rows: Any) -> None:
        """Add records with their typed columns, and DELETED if that does not follow from the value."""
        identity = rows.column(IDENTITY) if IDENTITY in rows.schema.names else None
        if identity is None:
            identity = key_of(rows, self._key)
            rows = rows.append_column(pa.field(IDENTITY, pa.binary()), identity)
        if identity.null_count:
            bad = rows.filter(identity.is_null()).select(RECORD_SCHEMA.names)
            reasons = pa.array([self._no_key()] * bad.num_rows, pa.string())
            self._dead_letters.add(bad.append_column(pa.field(REASON, pa.string()), reasons))
            rows = rows.filter(identity.is_valid())
        if DELETED not in rows.schema.names:
            rows = rows.append_column(pa.field(DELETED, pa.bool_()), rows.column("value").is_null())
        rows = rows.append_column(pa.field(ORDERED_AT, TIME), rows.column("timestamp"))
        if rows.num_rows:
            self._changes.append(rows)
            self._rows += rows.num_rows
            self._bytes += rows.nbytes
            if self._rows >= ROWS_MAX or self._bytes >= BYTES_MAX:
                self._compact()
                if self._rows >= ROWS_MAX // 2 or self._bytes >= BYTES_MAX // 2:
                    self._write()

    def _no_key(self) -> str:
        return f"{', '.join(self._key)} is null: {NO_KEY}" if self._key else NO_KEY

    def finish(self) -> list[NewFile]:
        self._compact()
        self._write()
        return self._done

    def _compact(self) -> None:
        if self._changes:
            changes = compacted(pa.Table.from_batches(self._changes).combine_chunks())
            self._changes = changes.to_batches()
            self._rows, self._bytes = changes.num_rows, changes.nbytes

    def _write(self) -> None:
        """Write one file with one row group per bucket."""
        if not self._changes:
            return
        changes = pa.Table.from_batches(self._changes).combine_chunks()
        self._changes, self._rows, self._bytes = [], 0, 0
        buckets = np.array([bucket_of(each, self._buckets) for each in changes.column(IDENTITY).to_pylist()], np.int64)
        changes = changes.take(pa.array(np.argsort(buckets, kind="stable")))
        buckets.sort()
        different, begins, counts = np.unique(buckets, return_index=True, return_counts=True)
        path = staged_path(f"{self._name}-{len(self._done)}")
        full = self._files.full(path)
        self._files.store.create_dir(full.rpartition("/")[0], recursive=True)
        with pq.ParquetWriter(full, changes.schema, filesystem=self._files.store, compression="zstd") as writer:
            for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
                writer.write_table(changes.slice(begin, count), row_group_size=count)
        size_bytes = self._files.store.get_file_info(full).size
        offsets: dict[int, tuple[int, int]] = widened(
            {}, (each for batch in changes.to_batches() for each in first_and_last(batch))
        )
        partitions, moments = changes.column("partition").to_numpy(), micros(changes.column(ORDERED_AT))
        newest = {int(each): int(moments[partitions == each].max()) for each in np.unique(partitions)}
        index = msgspec.json.encode(StagedIndex(different.tolist(), newest)).decode()
        self._done.append(NewFile(STAGED, path, size_bytes, None, changes.num_rows, index, offsets))


class StagedIndex(msgspec.Struct, frozen=True):
    """What a staged file has: the bucket of each row group, and the newest time of each partition."""

    buckets: list[int]
    newest_us: dict[int, int]


class BucketFile(msgspec.Struct, frozen=True):
    """A file of the table's current version."""

    path: str
    size_bytes: int


class BucketJob(msgspec.Struct, frozen=True):
    """What there is to merge into one bucket."""

    bucket: int
    staged: list[tuple[str, int]]
    """Staged files, each with the number of the row group."""
    files: list[BucketFile]
    deleted: str | None
    """The file with the deleted keys of this bucket."""


class MergedBucket(msgspec.Struct, frozen=True):
    """What the driver commits for one bucket."""

    bucket: int
    removed: list[str]
    added: list[NewFile]
    deleted: bool
    """Whether the attempt has written a new file of deleted keys."""
    rows_deleted: int
    rows_updated: int
    rows_inserted: int


@dataclass(frozen=True)
class MergeTask:
    """Merges changes: `spark.range(tasks).mapInArrow(task, REPORT_SCHEMA)` yields lines of MergedBucket."""

    uri: str
    schema: Any
    """The columns of the table's files, in Arrow."""
    key: tuple[str, ...]
    name: str
    number: int
    """Names the files of deleted keys of this attempt."""
    forget_before_us: int
    """Deleted keys of this time or older are not remembered: no partition has older records any more."""
    jobs: tuple[tuple[BucketJob, ...], ...]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for task in batch.column("id").to_pylist():
                for job in self.jobs[task]:
                    line = msgspec.json.encode(self.merge(job)).decode()
                    yield pa.RecordBatch.from_arrays([pa.array([line], pa.string())], ["report"])

    def merge(self, job: BucketJob) -> MergedBucket:
        with task_errors(f"merging bucket {job.bucket} of {self.uri}"):
            return self._merge(job)

    def _merge(self, job: BucketJob) -> MergedBucket:
        files = TableFiles(self.uri)
        changes = self._changes(files, job)
        wanted = changes.column(IDENTITY).combine_chunks()
        parts: list[Any] = []  # the places of all rows that take part, in the order: files, deleted keys, changes
        origins: list[tuple[int, Any]] = []
        for number, file in enumerate(job.files):
            rows, places = self._matching(files, file, wanted)
            parts.append(places)
            origins.append((number, rows))
        known = self._deleted(files, job)
        is_wanted = pc.is_in(known.column(IDENTITY), wanted)
        parts.append(known.filter(is_wanted))
        parts.append(changes.select([IDENTITY, *PLACE]))
        every = pa.concat_tables(parts).combine_chunks()
        rows, at = winners(
            codes(every.column(IDENTITY)),
            every.column("partition").to_numpy().astype(np.int64),
            every.column("offset").to_numpy(),
            micros(every.column(ORDERED_AT)),
        )
        is_winner = np.zeros(every.num_rows, np.bool_)
        is_winner[rows] = True
        begin, superseded = 0, {}
        for number, matched in origins:
            lost = matched[~is_winner[begin : begin + len(matched)]]
            begin += len(matched)
            if len(lost):
                superseded[number] = lost
        begin_of_changes = every.num_rows - changes.num_rows
        remembered = known.filter(pc.invert(is_wanted))
        old = rows[(rows >= begin) & (rows < begin_of_changes)]
        chosen = rows >= begin_of_changes
        taken = changes.take(pa.array(rows[chosen] - begin_of_changes))
        place = taken.schema.get_field_index(ORDERED_AT)
        taken = taken.set_column(place, ORDERED_AT, times(at[chosen]))
        is_deleted = taken.column(DELETED)
        gone = taken.filter(is_deleted).select([IDENTITY, *PLACE])
        remembered = pa.concat_tables([remembered, every.take(pa.array(old)), gone])
        moments = micros(remembered.column(ORDERED_AT))
        is_untimed = (moments == NEVER) & (self.forget_before_us < FORGET_ALL)
        remembered = remembered.filter(pa.array((moments > self.forget_before_us) | is_untimed))
        is_changed = not remembered.equals(known)
        if is_changed:
            self._write_deleted(files, job.bucket, remembered)
        new = taken.filter(pc.invert(is_deleted))
        added, removed = self._write(files, job, superseded, new)
        updated = sum(len(lost) for lost in superseded.values())
        deleted = max(0, updated - self._replaced(every, begin, rows, new))
        return MergedBucket(
            job.bucket, removed, added, is_changed, deleted, updated - deleted, new.num_rows - (updated - deleted)
        )

    def _replaced(self, every: Any, existing: int, rows: Any, new: Any) -> int:
        """Return how many new rows have the key of an existing one."""
        return int(pc.sum(pc.is_in(new.column(IDENTITY), every.column(IDENTITY).slice(0, existing))).as_py() or 0)

    def _changes(self, files: TableFiles, job: BucketJob) -> Any:
        parts = []
        for path, group in job.staged:
            with files.store.open_input_file(files.full(path)) as opened:
                parts.append(pq.ParquetFile(opened).read_row_group(group))
        return compacted(pa.concat_tables(parts, promote_options="permissive").combine_chunks())

    def _scan(self, files: TableFiles, file: BucketFile, columns: Sequence[str]) -> Iterator[Any]:
        rows = pads.dataset([files.full(file.path)], schema=self.schema, format="parquet", filesystem=files.store)
        yield from rows.scanner(columns=list(columns), use_threads=False).to_batches()

    def _matching(self, files: TableFiles, file: BucketFile, wanted: Any) -> tuple[Any, Any]:
        """Return which rows of a file have keys that are wanted, and their places."""
        key = self.key or ("key",)
        begin, rows, found = 0, [], []
        for batch in self._scan(files, file, [*key, *PLACE]):
            identity = identities([batch.column(name) for name in key])
            matched = np.flatnonzero(pc.is_in(identity, wanted).to_numpy(zero_copy_only=False))
            if len(matched):
                places = batch.select(list(PLACE)).take(pa.array(matched))
                found.append(pa.record_batch([identity.take(pa.array(matched)), *places.columns], _PLACES))
                rows.append(matched + begin)
            begin += batch.num_rows
        return (np.concatenate(rows) if rows else np.empty(0, np.int64)), pa.Table.from_batches(found, _PLACES)

    def _write(
        self, files: TableFiles, job: BucketJob, superseded: dict[int, Any], new: Any
    ) -> tuple[list[NewFile], list[str]]:
        if not superseded and not new.num_rows:
            return [], []
        chosen = set(superseded)
        size_bytes = max(new.nbytes // 2, SMALL_BYTES) + sum(job.files[number].size_bytes for number in chosen)
        others = sorted(set(range(len(job.files))) - chosen, key=lambda number: job.files[number].size_bytes)
        for number in others:
            if job.files[number].size_bytes > min(size_bytes, FILE_BYTES_MAX // 4):
                break
            chosen.add(number)
            size_bytes += job.files[number].size_bytes
        written = BucketFiles(files, job.bucket, self.name, self.schema)
        for number in sorted(chosen):
            lost, begin = superseded.get(number), 0
            for batch in self._scan(files, job.files[number], self.schema.names):
                keep = np.ones(batch.num_rows, np.bool_)
                if lost is not None:
                    keep[lost[(lost >= begin) & (lost < begin + batch.num_rows)] - begin] = False
                begin += batch.num_rows
                written.add(batch.filter(pa.array(keep)))
        for batch in new.to_batches():
            written.add(_with_columns(batch, self.schema))
        return written.finish(), [job.files[number].path for number in sorted(chosen)]

    def _deleted(self, files: TableFiles, job: BucketJob) -> Any:
        if job.deleted is None:
            return _PLACES.empty_table()
        with files.store.open_input_file(files.full(job.deleted)) as opened:
            return pq.read_table(opened).cast(_PLACES)

    def _write_deleted(self, files: TableFiles, bucket: int, remembered: Any) -> None:
        full = files.full(deleted_path(bucket, self.number))
        files.store.create_dir(full.rpartition("/")[0], recursive=True)
        pq.write_table(remembered, full, filesystem=files.store, compression="zstd")


_PLACES = pa.schema({IDENTITY: pa.binary(), **PLACE})


class BucketFiles:
    """The files that one merge writes."""

    def __init__(self, files: TableFiles, bucket: int, name: str, schema: Any) -> None:
        self._files = files
        self._bucket = bucket
        self._name = name
        self._schema = schema
        self._file: OpenFile | None = None
        self._done: list[NewFile] = []

    def add(self, rows: Any) -> None:
        if not rows.num_rows:
            return
        if self._file is None:
            path = f"{BUCKET}={self._bucket}/{self._name}-{self._bucket}-{len(self._done)}.parquet"
            self._file = OpenFile("rows", self._files, path, None, self._schema)
        self._file.add(rows)
        if self._file.size_bytes >= FILE_BYTES_MAX:
            self._close()

    def finish(self) -> list[NewFile]:
        if self._file is not None:
            self._close()
        return self._done

    def _close(self) -> None:
        assert self._file is not None
        self._done.append(self._file.close())
        self._file = None


def forget_before(newest_us: Mapping[int, int], partitions: int, slack_us: int) -> int:
    """Return the time up to which deleted keys can be forgotten, from each partition's newest record.

    No other partition has older records if there is only one. A partition that has not landed may have any.
    """
    if partitions == 1:
        return FORGET_ALL
    return min(newest_us.values()) - slack_us if len(newest_us) == partitions else NEVER
