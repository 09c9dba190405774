"""Offset ranges: the tasks of one Spark job.

With the option `rangesOnly`, the source returns its ranges as rows, for jobs that read the records where they use them.
A record that passes from the source through Spark to a Python task crosses between Python and Java twice. A range is
only one row per task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa

Partition = tuple[str, int]

_RANGE = {"topic": pa.string(), "partition": pa.int32(), "start": pa.int64(), "stop": pa.int64()}
RANGES_SCHEMA = pa.schema(_RANGE | {"topicId": pa.string()})


class RecordRange(NamedTuple):
    """The requested offsets of one partition: from `start` up to but not including `stop`."""

    topic: str
    partition: int
    start: int
    stop: int

    @property
    def partition_name(self) -> str:
        return f"{self.topic}-{self.partition}"


def split(ranges: Sequence[RecordRange], parts_min: int = 0, rows_max: int = 0) -> list[RecordRange]:
    """Return non-empty ranges, cut to get about `parts_min` ranges, and none above `rows_max` (0: unlimited)."""
    filled = [whole for whole in ranges if whole.stop > whole.start]
    total = sum(whole.stop - whole.start for whole in filled)
    parts: list[RecordRange] = []
    for whole in filled:
        size = whole.stop - whole.start
        count = 1 if parts_min <= len(filled) else max(1, round(size / total * parts_min))
        if rows_max:
            count = max(count, -(-size // rows_max))
        count = min(count, size)
        edges = [whole.start + size * part // count for part in range(count + 1)]
        parts += [whole._replace(start=start, stop=stop) for start, stop in pairwise(edges)]
    return parts


def to_row(records: RecordRange, topic_id: str) -> Any:
    row = dict(zip(RANGES_SCHEMA.names, (*records, topic_id), strict=True))
    return pa.RecordBatch.from_pylist([row], schema=RANGES_SCHEMA)


def from_rows(batch: Any) -> Iterator[tuple[RecordRange, str]]:
    for *records, topic_id in zip(*(batch.column(name).to_pylist() for name in RANGES_SCHEMA.names), strict=True):
        yield RecordRange(*records), topic_id
