"""Helpers for tables with one row per key: the executors' work in this process, and what must be in the table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql.types import StructType

from chronik.pipeline.land.delta import LandingTable, Write
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.schema import dead_letter_schema
from chronik.pipeline.land.state_table import StateLander, StateTable, range_of
from chronik.pipeline.land.state_task import MergedBucket, MergeTask, StageTask
from chronik.pipeline.land.task import NewFile
from chronik.pipeline.land.topic_landing import dead_letters_name
from chronik.pipeline.source.columns import HEADERS

_names = count()


class Record(NamedTuple):
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    time_ms: int | None = 0


def arrow(records: Sequence[Record]) -> Any:
    times = [None if each.time_ms is None else each.time_ms * 1000 for each in records]
    return pa.record_batch(
        {
            "key": pa.array([each.key for each in records], pa.binary()),
            "value": pa.array([each.value for each in records], pa.binary()),
            "partition": pa.array([each.partition for each in records], pa.int32()),
            "offset": pa.array([each.offset for each in records], pa.int64()),
            "timestamp": pa.array(times, pa.timestamp("us", tz="UTC")),
            "headers": pa.array([[]] * len(records), HEADERS),
        }
    )


def merge(task: MergeTask) -> list[MergedBucket]:
    return [task.merge(job) for jobs in task.jobs for job in jobs]


def lander(
    folder: Path | str,
    fields: StructType | None = None,
    key: tuple[str, ...] = (),
    buckets: int = 4,
    do_merge: Any = merge,
) -> StateLander:
    rows = StateTable.open_state(f"{folder}/t", fields, "t", "id-1", key, buckets)
    dead = LandingTable.open(f"{folder}/{dead_letters_name('t')}", dead_letter_schema(), "t", "id-1")
    return StateLander(rows, dead, do_merge, 2, f"x{next(_names)}", lambda: 1_800_000_000_000)


def writer(
    folder: Path | str,
    *tasks: Sequence[Record],
    fields: StructType | None = None,
    key: tuple[str, ...] = (),
    buckets: int = 4,
    has_envelope: bool = False,
) -> Write:
    """Return what stages the records: each sequence is a task."""

    def write(landed: LandedOffsets) -> list[NewFile]:
        found: list[NewFile] = []
        for records in tasks:
            uris = f"{folder}/t", f"{folder}/{dead_letters_name('t')}"
            task = StageTask(*uris, "x", fields, landed, key=key, buckets=buckets, has_envelope=has_envelope)
            found += task.write(iter([arrow(records)]), f"part-{next(_names)}")
            for partition in {each.partition for each in records}:
                offsets = [each.offset for each in records if each.partition == partition]
                found.append(range_of(partition, min(offsets), max(offsets) + 1))
        return found

    return write


def state(folder: Path | str) -> dict[bytes | None, bytes | None]:
    """Return the table's rows, and fail if a key has several."""
    table = DeltaTable(f"{folder}/t").to_pyarrow_table(columns=["key", "value"])
    keys = table.column("key").to_pylist()
    assert len(set(keys)) == len(keys), "a key has several rows"
    return dict(zip(keys, table.column("value").to_pylist(), strict=True))


def expected(records: Sequence[Record]) -> dict[bytes | None, bytes | None]:
    """Return the current state of all records, by the documented rule, one record after another."""
    found: dict[bytes | None, bytes | None] = {}
    for key in {each.key for each in records}:
        of_key = [each for each in records if each.key == key]
        lasts = []
        for partition in {each.partition for each in of_key}:
            of_partition = [each for each in of_key if each.partition == partition]
            newest = max(-1 if each.time_ms is None else each.time_ms for each in of_partition)
            lasts.append((newest, partition, max(of_partition, key=lambda each: each.offset)))
        winner = max(lasts, key=lambda last: last[:2])[2]
        if winner.value is not None:
            found[key] = winner.value
    return found
