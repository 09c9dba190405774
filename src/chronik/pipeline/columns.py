"""The columns of a topic in Spark, and the interface of what fills them.

Names and types are those of Spark's own Kafka source, so a query for one runs on the other.
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
    """Return exactly the schema that Spark writes in Arrow, because Spark rejects a batch with a different one."""
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
    """The requested offsets of one partition: from `start` up to but not including `stop`."""

    topic: str
    partition: int
    start: int
    stop: int


class Chunk(Protocol):
    """Rows for one Arrow batch. Filled from record batches, and cut whenever it is full."""

    @property
    def rows(self) -> int: ...

    def begin(self, header: BatchHeader, payload: Buffer) -> None:
        """Set the next record batch, decompressed."""

    def fill(self) -> bool:
        """Take rows of that batch. Return False if the chunk is full before its end. Raises CORRUPT_MESSAGE."""

    def cut(self) -> Any:
        """Return the rows so far as an Arrow batch, and empty the chunk."""


def readable_name(name: bytes) -> str:
    """Decode a header's name as UTF-8, as Kafka specifies. Replace invalid bytes, as the Java client does."""
    return name.decode("utf-8", "replace")
