"""The columns of a topic in Spark, and the interface of the decoders that fill them.

Names and types are those of Spark's own Kafka source, so a query for one runs on the other.
"""

from __future__ import annotations

from typing import Any, Protocol

import pyarrow as pa

from chronik.wire.batch import BatchHeader
from chronik.wire.compression import Buffer

HEADER_FIELDS = [pa.field("key", pa.string()), pa.field("value", pa.binary())]
HEADERS = pa.list_(pa.field("element", pa.struct(HEADER_FIELDS)))
TIMESTAMP_MS_MAX = (2**63 - 1) // 1000
"""The largest timestamp that fits in microseconds. Beyond it, the table's timestamp is null."""


CALENDAR_US_MIN, CALENDAR_US_MAX = -62_135_596_800_000_000, 253_402_300_799_999_999
"""Microseconds at the start of year 1 and at the end of year 9999, in UTC. Tables hold no other time."""


def arrow_schema(with_headers: bool) -> Any:
    """Return exactly the schema that Spark writes in Arrow, because Spark rejects a batch with a different one."""
    types = {
        "key": pa.binary(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "timestampType": pa.int32(),
    }
    return pa.schema(types | {"headers": HEADERS} if with_headers else types)


class Chunk(Protocol):
    """Rows for one Arrow batch. Filled from record batches, and cut whenever it is full."""

    @property
    def rows(self) -> int: ...

    def begin(self, header: BatchHeader, payload: Buffer) -> None:
        """Set the next record batch, decompressed."""

    def decode_batch(self) -> bool:
        """Decode rows of that batch. Return False if the chunk is full before its end. Raises CORRUPT_MESSAGE."""

    def cut(self) -> Any:
        """Return the rows so far as an Arrow batch, and empty the chunk."""


def decode_header_name(name: bytes) -> str:
    """Decode a header's name as UTF-8, as Kafka specifies. Replace invalid bytes, as the Java client does."""
    return name.decode("utf-8", "replace")
