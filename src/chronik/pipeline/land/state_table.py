"""A Delta table with one row per key, and its commits: `--mode upsert`.

The table is divided by the hash of the key into a fixed number of buckets. A commit removes the files that were
rewritten and adds new ones, together with the application transactions of `delta` and these:

    chronik:offset:PARTITION   everything below has landed: rows of superseded records are gone, so only this shows it
    chronik:time:PARTITION     the newest timestamp of the partition, in microseconds
    chronik:deleted:BUCKET     the number of the file with the bucket's deleted keys

`deltalake` cannot replace chosen files. So the entry of the log is written here (`delta_log`), for exactly the version
after the snapshot that the batch was merged on. If any other commit has taken that version, the batch starts again.

Each partition lands in order and without gaps. A record below the partition's landed end has landed, and is
skipped in every batch. A batch that begins after that end would skip records, so it is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.current_state import BUCKET, ORDERED_AT, TIME
from chronik.pipeline.land.delta import MODE, BatchLander, Conflict, Landable, LandedBatch, LandingTable
from chronik.pipeline.land.delta_log import is_plain, put_entry, remove_unused, uses_lock
from chronik.pipeline.land.hidden_files import deleted_path, deleted_transaction
from chronik.pipeline.land.landed_offsets import LandedOffsets, widened
from chronik.pipeline.land.schema import RECORD_SCHEMA, table_schema
from chronik.pipeline.land.state_task import (
    BucketFile,
    BucketJob,
    MergedBucket,
    MergeTask,
    StagedIndex,
    forget_before,
)
from chronik.pipeline.land.task import DEAD_LETTERS, RANGE, STAGED, NewFile

UPSERT = "upsert"
KEY = "chronik.key"
BUCKETS = "chronik.buckets"
BUCKETS_DEFAULT = 32
SLACK_US = 24 * 3600 * 1_000_000
"""How much later than a newer record of its partition a record may be produced, by its timestamp."""

Merge = Callable[[MergeTask], Sequence[MergedBucket]]
"""Run the merge of all jobs, on the executors."""


class StateTable(LandingTable):
    """One table at one snapshot. Used by one thread."""

    DIVIDED_BY = BUCKET
    OWN = frozenset({*RECORD_SCHEMA.names, ORDERED_AT, BUCKET})
    MODE = UPSERT
    AFTER_RESTORE = "land the topic in another --to, because this table cannot show which records are missing"
    topic_partitions = 1
    """The number of partitions that the topic had when the table was opened."""

    @classmethod
    def open_state(
        cls,
        uri: str,
        fields: Any,
        topic: str,
        topic_id: str,
        key: tuple[str, ...],
        buckets: int | None = None,
        *,
        may_have_more: bool = False,
    ) -> StateTable:
        """Open the table, or create it. Raises PipelineError if the existing table has another key."""
        names = ",".join(key)
        properties = {MODE: UPSERT, KEY: names, BUCKETS: str(buckets or BUCKETS_DEFAULT)}
        schema = state_schema(fields)
        table = cls.open(uri, schema, topic, topic_id, may_have_more=may_have_more, properties=properties)
        created = table._properties.get(KEY) or ""
        if created != names:
            raise PipelineError(
                f"the table {uri} was created with the key {created or 'of the record'}: choose another --to"
            )
        if uses_lock() or not is_plain(table._table):
            raise PipelineError(
                f"--mode upsert needs conditional writes and a table without further features, and {uri} has a lock or "
                "features: choose another --to"
            )
        return table

    @property
    def buckets(self) -> int:
        return int(self._properties.get(BUCKETS) or BUCKETS_DEFAULT)

    @property
    def _properties(self) -> Mapping[str, str | None]:
        return self._table.metadata().configuration

    def landed_offsets(self, firsts: Mapping[int, int]) -> LandedOffsets:
        return LandedOffsets.below({partition: self.next_offset(partition) for partition in firsts})

    def check_not_restored(self, query: str) -> None:
        """Raise PipelineError if the table was restored, also for a new query.

        A restored table keeps the end of each partition, and a new query skips everything below it.
        """
        self._check_not_restored(None)

    def has_landed_from(self, partition: int) -> bool:
        return self._table.transaction_version(f"chronik:offset:{partition}") is not None

    def newest_us(self, staged: Mapping[int, int]) -> dict[int, int]:
        """Return the newest time of each partition that has landed or is staged."""
        newest: dict[int, int] = {}
        for partition in range(self.partitions(staged)):
            at = self._table.transaction_version(f"chronik:time:{partition}")
            times = [each for each in (at, staged.get(partition)) if each is not None]
            if times:
                newest[partition] = max(times)
        return newest

    def partitions(self, seen: Iterable[int] = ()) -> int:
        """Return the number of partitions that the topic has, as far as it is known."""
        known = self._table.transaction_version("chronik:partitions") or 0
        return max([known, self.topic_partitions, *(partition + 1 for partition in seen)])

    def plan(self, staged: Sequence[NewFile]) -> list[BucketJob]:
        """Return what there is to merge, by bucket."""
        groups: dict[int, list[tuple[str, int]]] = {}
        for file in staged:
            for group, bucket in enumerate(_index(file).buckets):
                groups.setdefault(bucket, []).append((file.path, group))
        existing: dict[int, list[BucketFile]] = {}
        for action in pa.table(self._table.get_add_actions(flatten=True)).to_pylist():
            bucket = int(action[f"partition.{BUCKET}"])
            existing.setdefault(bucket, []).append(BucketFile(action["path"], action["size_bytes"]))
        return [
            BucketJob(bucket, staged_groups, existing.get(bucket, []), self._deleted_path(bucket))
            for bucket, staged_groups in sorted(groups.items())
        ]

    def _deleted_path(self, bucket: int) -> str | None:
        number = self._table.transaction_version(deleted_transaction(bucket))
        return None if number is None else deleted_path(bucket, number)

    def file_schema(self) -> Any:
        """Return the columns of the files that the next commit adds."""
        typed = self._columns or self.more_columns()
        return pa.schema([*RECORD_SCHEMA, *(pa.field(each.name, each.type) for each in typed), (ORDERED_AT, TIME)])

    def commit_merge(
        self,
        query: str,
        batch: int,
        ranges: Mapping[int, tuple[int, int]],
        newest_us: Mapping[int, int],
        staged_bytes: int,
        jobs: Sequence[BucketJob],
        merged: Sequence[MergedBucket],
        number: int,
        attempt: str,
        now_ms: int,
    ) -> None:
        """Commit as the version after the snapshot. Raises Conflict if another commit has taken it."""
        sizes = {file.path: file.size_bytes for job in jobs for file in job.files}
        transactions = {f"chronik:batch:{query}": batch, "chronik:partitions": self.partitions(ranges)}
        for partition, (_, last) in ranges.items():
            transactions[f"chronik:offset:{partition}"] = max(last + 1, self.next_offset(partition))
        transactions |= {f"chronik:time:{partition}": at for partition, at in newest_us.items()}
        transactions |= {deleted_transaction(each.bucket): number for each in merged if each.deleted}
        added = [(each.bucket, file) for each in merged for file in each.added]
        removed = [(each.bucket, path) for each in merged for path in each.removed]
        own: dict[str, Any] = {"query": query, "batch": batch, "snapshot": self.version}
        own["offsets"] = {str(partition): span for partition, span in sorted(ranges.items())}
        # What has landed are the changes. The files of the buckets have them once more, with rows that are older.
        own["bytes"], own["rewritten"] = staged_bytes, sum(file.size_bytes for _, file in added)
        counts = {
            "inserted": sum(each.rows_inserted for each in merged),
            "updated": sum(each.rows_updated for each in merged),
            "deleted": sum(each.rows_deleted for each in merged),
        }
        info = {"timestamp": now_ms, "operation": "MERGE", "operationParameters": {}, "chronik": {**own, **counts}}
        changed = self._changed_schema()
        actions: list[dict[str, Any]] = []
        if changed is not None:
            actions.append({"metaData": self._metadata(changed.to_json())})
        actions += [
            {"txn": {"appId": name, "version": version, "lastUpdated": now_ms}}
            for name, version in transactions.items()
        ]
        actions += [
            {
                "remove": {
                    "path": path,
                    "size": sizes[path],
                    "deletionTimestamp": now_ms,
                    "extendedFileMetadata": True,
                    **_shared(bucket),
                }
            }
            for bucket, path in removed
        ]
        actions += [
            {
                "add": {
                    "path": file.path,
                    "size": file.size_bytes,
                    "modificationTime": now_ms,
                    "stats": file.stats,
                    **_shared(bucket),
                }
            }
            for bucket, file in added
        ]
        if put_entry(self._table, self.version + 1, info, actions, attempt) is not None:
            remove_unused(self._table, [file.path for _, file in added])
            raise Conflict("another commit was faster")
        self.refresh()

    def _metadata(self, schema: str) -> dict[str, Any]:
        metadata = self._table.metadata()
        return {
            "id": str(metadata.id),
            "format": {"provider": "parquet", "options": {}},
            "schemaString": schema,
            "partitionColumns": [BUCKET],
            "configuration": dict(metadata.configuration),
            "createdTime": metadata.created_time,
        }


class StateLander(BatchLander):
    """Lands one query's batches in a table with one row per key. Used by one thread."""

    def __init__(
        self,
        rows: StateTable,
        dead_letters: Landable,
        merge: Merge,
        parallel: int,
        token: str,
        wall_ms: Callable[[], int],
    ) -> None:
        super().__init__(rows, dead_letters)
        self._state = rows
        self._merge = merge
        self._parallel = parallel
        self._token = token
        self._wall_ms = wall_ms
        self._attempts = 0

    def _commit(self, query: str, batch: int, files: Sequence[NewFile]) -> LandedBatch:
        by_table = {name: [file for file in files if file.table == name] for name in (STAGED, DEAD_LETTERS, RANGE)}
        staged, dead = by_table[STAGED], by_table[DEAD_LETTERS]
        ranges = widened({}, ((number, *span) for file in by_table[RANGE] for number, span in file.offsets.items()))
        self._check_gaps(ranges)
        if dead and self._dead_letters is not None:
            self._dead_letters.commit(query, batch, dead)
        self._attempts += 1
        name = f"{self._token}-{batch}-{self._attempts}"
        number = (self._state.version << 32) + zlib.crc32(name.encode())
        newest: dict[int, int] = {}
        for index in map(_index, staged):
            for partition, at in index.newest_us.items():
                newest[partition] = max(at, newest.get(partition, at))
        newest = self._state.newest_us(newest)
        jobs = self._state.plan(staged)
        staged_bytes = sum(file.size_bytes for file in staged)
        columns, key = self._state.file_schema(), self._key()
        tasks = _divided(jobs, self._parallel)
        task = MergeTask(
            self._state.uri,
            columns,
            key,
            name,
            number,
            forget_before(newest, self._state.partitions(ranges), SLACK_US),
            tasks,
        )
        try:
            merged = self._merge(task) if jobs else []
            self._state.commit_merge(
                query, batch, ranges, newest, staged_bytes, jobs, merged, number, name, self._wall_ms()
            )
        finally:
            self._remove(staged)
        rows = sum(each.rows_inserted + each.rows_updated + each.rows_deleted for each in merged)
        size_bytes = staged_bytes + sum(file.size_bytes for file in dead)
        return LandedBatch(rows, sum(file.rows for file in dead), size_bytes)

    def _key(self) -> tuple[str, ...]:
        return tuple(name for name in (self._state._properties.get(KEY) or "").split(",") if name)

    def _check_gaps(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        for partition, (first, _) in ranges.items():
            end = self._state.next_offset(partition)
            if self._state.has_landed_from(partition) and first > end:
                raise PipelineError(
                    f"{self._state.uri} has the state up to offset {end} of partition {partition}, and this landing "
                    f"begins at {first}: records between them would be missing; use --starting earliest with a new "
                    "--checkpoint (landed records are skipped), or another --to if they are no longer in the log"
                )


def state_schema(fields: Any) -> Any:
    """Return the columns of a table with one row per key."""
    columns = list(table_schema(fields))[:-1]
    return pa.schema([*columns, pa.field(ORDERED_AT, TIME), pa.field(BUCKET, pa.int32())])


def range_of(partition: int, start: int, stop: int) -> NewFile:
    """Return the entry that reports what a task has read."""
    return NewFile(RANGE, "", 0, None, 0, "", {partition: (start, stop - 1)})


def _divided(jobs: Sequence[BucketJob], tasks: int) -> tuple[tuple[BucketJob, ...], ...]:
    """Divide buckets among tasks of about equal size."""
    parts: list[list[BucketJob]] = [[] for _ in range(min(tasks, len(jobs)))]
    sizes = [0] * len(parts)
    for job in sorted(jobs, key=lambda job: -sum(file.size_bytes for file in job.files)):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(job)
        sizes[smallest] += 1 + sum(file.size_bytes for file in job.files)
    return tuple(tuple(part) for part in parts)


def _index(file: NewFile) -> StagedIndex:
    return msgspec.json.decode(file.stats, type=StagedIndex)


def _shared(bucket: int) -> dict[str, Any]:
    return {"partitionValues": {BUCKET: str(bucket)}, "dataChange": True}
