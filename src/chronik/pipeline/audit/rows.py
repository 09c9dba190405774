"""The rows of an audit's sides as Spark shuffles them, each assigned to a block."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from chronik.pipeline.audit.blocks import DELETED, EXACT_TIME, NO_CHECKSUM, NO_TIME, Rows
from chronik.pipeline.audit.checksum import checksums
from chronik.pipeline.deleted import DeletedKeys
from chronik.pipeline.source.columns import CALENDAR_US_MAX, CALENDAR_US_MIN

_NUMBERS = dict.fromkeys(("start", "stop", "seq", "time_ms", "checksum", "bare"), pa.int64())
ROW_SCHEMA = pa.schema(
    {"partition": pa.int32(), "block": pa.int64(), "side": pa.int8(), **_NUMBERS, "flags": pa.int8()}
)
KEYED_SCHEMA = ROW_SCHEMA.append(pa.field("key", pa.binary()))
PACKED_SCHEMA = pa.schema({"partition": pa.int32(), "block": pa.int64(), "rows": pa.binary()})
"""All rows of a batch that are in one block as one row: Spark would shuffle and sort millions of small ones."""

Array = Any


def rows_table(
    side: Array | int,
    partition: Array | int,
    start: Array,
    stop: Array,
    time_ms: Array | None = None,
    *,
    seq: Array | None = None,
    checksum: Array | None = None,
    bare: Array | None = None,
    flags: Array | int = 0,
    block_bits: int,
) -> Any:
    """Return a batch of ROW_SCHEMA, with ranges cut at block boundaries. Omitted columns are unknown."""
    count = len(start)
    columns = {
        "partition": np.full(count, partition, np.int32) if isinstance(partition, int) else partition.astype(np.int32),
        "side": np.full(count, side, np.int8) if isinstance(side, int) else side.astype(np.int8),
        "seq": np.zeros(count, np.int64) if seq is None else seq,
        "time_ms": np.full(count, NO_TIME, np.int64) if time_ms is None else time_ms,
        "checksum": np.full(count, NO_CHECKSUM, np.int64) if checksum is None else checksum,
        "bare": np.full(count, NO_CHECKSUM, np.int64) if bare is None else bare,
        "flags": np.full(count, flags, np.int8) if isinstance(flags, int) else flags.astype(np.int8),
    }
    starts, stops, which = split_at_blocks(start, stop, block_bits)
    columns = {name: column[which] for name, column in columns.items()}
    columns |= {"start": starts, "stop": stops, "block": starts >> block_bits}
    return pa.RecordBatch.from_arrays([pa.array(columns[name]) for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)


def record_rows(side: int, batch: Any, block_bits: int, deleted: DeletedKeys | None = None) -> Any:
    """Convert an Arrow batch of records. Without the records' bytes there are no checksums."""
    offsets = batch.column("offset").to_numpy()
    times = batch.column("timestamp").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    known = times.is_valid().to_numpy(zero_copy_only=False)
    numbers = times.fill_null(0).to_numpy()
    known &= (numbers >= CALENDAR_US_MIN) & (numbers <= CALENDAR_US_MAX)
    sums, bare = _contents(batch) if "value" in batch.schema.names else (None, None)
    return rows_table(
        side,
        batch.column("partition").to_numpy(),
        offsets,
        offsets + 1,
        np.where(known, numbers // 1000, NO_TIME),
        checksum=sums,
        bare=bare,
        flags=EXACT_TIME if not deleted else np.where(deleted.mask(batch), EXACT_TIME | DELETED, EXACT_TIME),
        block_bits=block_bits,
    )


def _contents(batch: Any) -> tuple[Array, Array | None]:
    """Return the checksums of records, and those without headers of records that have headers."""
    key, value, headers = (batch.column(name) for name in ("key", "value", "headers"))
    sums = checksums(key, value, headers)
    has_headers = headers.value_lengths().fill_null(0).to_numpy(zero_copy_only=False) > 0
    return sums, np.where(has_headers, checksums(key, value), NO_CHECKSUM) if has_headers.any() else None


def split_at_blocks(start: Array, stop: Array, bits: int) -> tuple[Array, Array, Array]:
    """Cut ranges at multiples of 2**bits. The third array has the index of each part's original range."""
    first, last = start >> bits, (stop - 1) >> bits
    parts = last - first + 1
    which = np.repeat(np.arange(len(start)), parts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    block = first[which] + number
    return (
        np.maximum(start[which], block << bits).astype(np.int64),
        np.minimum(stop[which], (block + 1) << bits).astype(np.int64),
        which,
    )


def packed(batch: Any) -> Any:
    """Convert a batch of ROW_SCHEMA to PACKED_SCHEMA."""
    if not batch.num_rows:
        return pa.RecordBatch.from_pylist([], PACKED_SCHEMA)
    partition, block = (batch.column(name).to_numpy() for name in ("partition", "block"))
    rows = np.stack([batch.column(name).to_numpy().astype(np.int64) for name in Rows._fields])
    order = np.lexsort((block, partition))
    partition, block, rows = partition[order], block[order], rows[:, order]
    begins = [0, *(np.flatnonzero((np.diff(partition) != 0) | (np.diff(block) != 0)) + 1).tolist()]
    parts = [rows[:, begin:end].tobytes() for begin, end in pairwise([*begins, len(order)])]
    columns = [pa.array(partition[begins]), pa.array(block[begins]), pa.array(parts, pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=PACKED_SCHEMA)


def rows_of(table: Any) -> Rows:
    """Return the rows of one block, of ROW_SCHEMA or PACKED_SCHEMA."""
    if "rows" not in table.column_names:
        return Rows(*(table.column(name).to_numpy() for name in Rows._fields))
    parts = [np.frombuffer(part.as_buffer(), np.int64).reshape(len(Rows._fields), -1) for part in table.column("rows")]
    return Rows(*np.concatenate(parts, axis=1))
