"""Offset ranges as rows, for jobs that read the records where they use them.

A record that passes from the source through Spark to a Python task crosses between Python and Java twice. A job that
does nothing with it in between reads with `rangesOnly`: only one row per task crosses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from chronik.pipeline.columns import RecordRange

__all__ = ["RANGES_DDL", "from_rows", "to_row"]

RANGES_DDL = "topic string, partition int, start bigint, stop bigint, topicId string"
_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("topicId", pa.string()),
    ]
)


def to_row(wanted: RecordRange, topic_id: str) -> Any:
    return pa.RecordBatch.from_arrays(
        [pa.array([value], column.type) for value, column in zip((*wanted, topic_id), _SCHEMA, strict=True)],
        schema=_SCHEMA,
    )


def from_rows(batch: Any) -> Iterator[tuple[RecordRange, str]]:
    for *wanted, topic_id in zip(*(batch.column(column.name).to_pylist() for column in _SCHEMA), strict=True):
        yield RecordRange(*wanted), topic_id
