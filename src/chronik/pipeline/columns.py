"""The columns that a topic has in Spark, and what fills them.

They are those of Spark's own Kafka source, names and types: a query written for one runs on the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from chronik.wire.batch import BatchHeader
from chronik.wire.compression import Buffer

__all__ = ["HEADERS", "HEADER_FIELDS", "Chunk", "RecordRange", "arrow_schema", "readable_name"]

HEADER_FIELDS = [pa.field("key", pa.string()), pa.field("value", pa.binary())]
HEADERS = pa.list_(pa.field("element", pa.struct(HEADER_FIELDS)))


def arrow_schema(with_headers: bool) -> Any:
    """As Spark writes it in Arrow, to the letter: it refuses a batch whose schema differs."""
    fields = [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
    ]
    return pa.schema([*fields, pa.field("headers", HEADERS)] if with_headers else fields)


class RecordRange(NamedTuple):
    """The offsets of one partition that are wanted: from `start` up to but not `stop`."""

    topic: str
    partition: int
    start: int
    stop: int


class Chunk(Protocol):
    """Rows on their way into an Arrow batch. Filled batch by batch, cut off whenever it is full."""

    @property
    def rows(self) -> int: ...

    def begin(self, header: BatchHeader, payload: Buffer) -> None:
        """The next batch, decompressed."""

    def fill(self) -> bool:
        """Takes rows of that batch; False where the chunk is full before its end. CORRUPT_MESSAGE where it is bad."""

    def cut(self) -> Any:
        """The rows so far as an Arrow batch; the chunk is empty after it."""


def readable_name(name: bytes) -> str:
    """A header's name as UTF-8, as Kafka promises it to be; what is not is replaced, as Java's client does it."""
    return name.decode("utf-8", "replace")
