"""`wire.checksum.record_checksum` over whole Arrow columns, without a Python object per record."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from chronik.wire.checksum import record_checksum

Array = Any


class _Bytes(NamedTuple):
    """A binary column: where each value starts and stops in `data`, and whether it is non-null."""

    ends: Array
    data: Array
    valid: Array


def checksums(keys: Any, values: Any, headers: Any | None = None) -> Array:
    """Return one int64 per record. `headers`: lists of (key, value) structs, null or empty if there are none."""
    key, value = _column(keys), _column(values)
    if headers is None:
        lists = np.zeros(len(keys) + 1, np.int64)
        name = content = _column(pa.array([], pa.binary()))
    else:
        headers = headers.combine_chunks() if isinstance(headers, pa.ChunkedArray) else headers
        # A null list may still span entries of its child.
        lengths = headers.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        lists = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        entries = headers.flatten()
        name, content = _column(entries.field(0)), _column(entries.field(1))
    try:
        from chronik.pipeline.audit.checksum_kernel import TABLE, checksum_rows
    except ImportError:
        return _checksum_rows(key, value, lists, name, content)
    sums = np.empty(len(keys), np.int64)
    checksum_rows(sums, TABLE, key, value, _fixed(lists), name, content)
    return sums


def _column(column: Any) -> _Bytes:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not pa.types.is_large_binary(column.type):
        column = column.cast(pa.large_binary())
    _, ends, data = column.buffers()
    ends = np.frombuffer(ends, np.int64) if ends is not None and ends.size else np.zeros(1, np.int64)
    return _Bytes(
        _fixed(ends[column.offset : column.offset + len(column) + 1]),
        _fixed(np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)),
        _fixed(column.is_valid().to_numpy(zero_copy_only=False)),
    )


def _fixed(array: Array) -> Array:
    """Mark the array read-only: numba would compile separate versions for writable and read-only arrays."""
    array.flags.writeable = False
    return array


def _checksum_rows(key: _Bytes, value: _Bytes, lists: Array, name: _Bytes, content: _Bytes) -> Array:
    """Compute in Python, for a Python version that numba does not support yet."""

    def one(column: _Bytes, at: int) -> bytes | None:
        return column.data[column.ends[at] : column.ends[at + 1]].tobytes() if column.valid[at] else None

    sums = np.empty(len(key.valid), np.int64)
    for row in range(len(sums)):
        headers = [
            ((one(name, at) or b"").decode("utf-8", "replace"), one(content, at))
            for at in range(lists[row], lists[row + 1])
        ]
        sums[row] = record_checksum(one(key, row), one(value, row), headers)
    return sums
