"""Which record is a key's current state: the pure part of `--mode upsert`.

Within a partition, the highest offset wins. A key is in several partitions if the topic's partition count was raised.
Kafka has no order between partitions, so timestamps decide there: the partition with the highest timestamp of the key
wins, and the higher partition on a tie. A partition's timestamp of a key is the highest of all its records of that key,
because producers may send timestamps that fall. This is a total order that does not depend on when a partition was
read: the winner of all records is the winner of the winners of any two parts of them. A tombstone takes part in the
order like any record, so deleted keys are remembered (`ordered_at` with no row) as long as another partition may still
have an older record.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Numbers = npt.NDArray[np.int64]

IDENTITY = "chronik_identity"
DELETED = "chronik_deleted"
ORDERED_AT = "ordered_at"
"""The highest timestamp that the key had in the row's partition."""
BUCKET = "bucket"
NEVER = -(2**62)
"""The time of a record without a timestamp."""
TIME = pa.timestamp("us", tz="UTC")
PLACE = {"partition": pa.int32(), "offset": pa.int64(), ORDERED_AT: TIME}


def bucket_of(identity: bytes, buckets: int) -> int:
    return zlib.crc32(identity) % buckets


def micros(times: Any) -> Numbers:
    """Return an Arrow column of timestamps as numbers, with NEVER for null."""
    numbers = pc.fill_null(times.cast(pa.int64()), NEVER)
    return np.asarray(numbers.to_numpy(zero_copy_only=False), np.int64)


def times(numbers: Numbers) -> Any:
    return pa.array(numbers, pa.int64(), mask=numbers == NEVER).cast(TIME)


def codes(identity: Any) -> Numbers:
    """Number the different identities."""
    encoded = pa.chunked_array([identity]).combine_chunks() if not isinstance(identity, pa.ChunkedArray) else identity
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    return np.asarray(encoded.dictionary_encode().indices.to_numpy(zero_copy_only=False), np.int64)


def last_of_partitions(code: Numbers, partition: Numbers, offset: Numbers, ordered: Numbers) -> tuple[Numbers, Numbers]:
    """Return the last row of each key in each partition, and its time there."""
    if not len(code):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.lexsort((offset, partition, code))
    is_new = (np.diff(code[order]) != 0) | (np.diff(partition[order]) != 0)
    begins = np.concatenate(([0], np.flatnonzero(is_new) + 1))
    ends = np.concatenate((begins[1:], [len(order)])) - 1
    return order[ends], np.maximum.reduceat(ordered[order], begins)


def winners(code: Numbers, partition: Numbers, offset: Numbers, ordered: Numbers) -> tuple[Numbers, Numbers]:
    """Return the row that is the current state of each key, and its time."""
    rows, at = last_of_partitions(code, partition, offset, ordered)
    order = np.lexsort((partition[rows], at, code[rows]))
    is_last = np.concatenate((np.diff(code[rows][order]) != 0, [True])) if len(order) else np.empty(0, np.bool_)
    chosen = order[is_last]
    return rows[chosen], at[chosen]


def compacted(changes: Any) -> Any:
    """Return a table of changes with only the last change of each key in each partition."""
    rows, at = last_of_partitions(
        codes(changes.column(IDENTITY)),
        changes.column("partition").to_numpy().astype(np.int64),
        changes.column("offset").to_numpy(),
        micros(changes.column(ORDERED_AT)),
    )
    place = changes.schema.get_field_index(ORDERED_AT)
    return changes.take(pa.array(rows)).set_column(place, ORDERED_AT, times(at))
