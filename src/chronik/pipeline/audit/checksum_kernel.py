"""The compiled loop of `checksum`: CRC-32C over columns, eight bytes at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

POLYNOMIAL = 0x82F63B78
SLICES = 8

_njit: Callable[[Any], Any] = numba.njit(cache=True, nogil=True)


def _table() -> Any:
    """Return the slicing-by-8 table: row n is the effect of a byte that is followed by n more bytes."""
    table = np.zeros((SLICES, 256), np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
        table[0, byte] = crc
    for row in range(1, SLICES):
        table[row] = (table[row - 1] >> 8) ^ table[0][table[row - 1] & 0xFF]
    return table


TABLE = _table()
TABLE.flags.writeable = False


@_njit
def _bytes(crc, table, data, start, stop):  # type: ignore[no-untyped-def]
    at = start
    while stop - at >= 8:
        low = crc ^ (
            np.uint32(data[at])
            | np.uint32(data[at + 1]) << np.uint32(8)
            | np.uint32(data[at + 2]) << np.uint32(16)
            | np.uint32(data[at + 3]) << np.uint32(24)
        )
        crc = np.uint32(
            table[7, low & 0xFF]
            ^ table[6, (low >> 8) & 0xFF]
            ^ table[5, (low >> 16) & 0xFF]
            ^ table[4, (low >> 24) & 0xFF]
            ^ table[3, data[at + 4]]
            ^ table[2, data[at + 5]]
            ^ table[1, data[at + 6]]
            ^ table[0, data[at + 7]]
        )
        at += 8
    while at < stop:
        crc = np.uint32((crc >> np.uint32(8)) ^ table[0, (crc ^ data[at]) & 0xFF])
        at += 1
    return crc


@_njit
def _number(crc, table, number):  # type: ignore[no-untyped-def]
    """Add an int32, big-endian."""
    for shift in (24, 16, 8, 0):
        byte = (number >> shift) & 0xFF
        crc = np.uint32((crc >> np.uint32(8)) ^ table[0, (crc ^ np.uint32(byte)) & 0xFF])
    return crc


@_njit
def _field(crc, table, column, row):  # type: ignore[no-untyped-def]
    if not column.valid[row]:
        return _number(crc, table, -1)
    start, stop = column.ends[row], column.ends[row + 1]
    return _bytes(_number(crc, table, stop - start), table, column.data, start, stop)


@_njit
def checksum_rows(sums, table, key, value, lists, name, content):  # type: ignore[no-untyped-def]
    for row in range(len(sums)):
        crc = np.uint32(0xFFFFFFFF)
        crc = _field(crc, table, key, row)
        crc = _field(crc, table, value, row)
        crc = _number(crc, table, lists[row + 1] - lists[row])
        for at in range(lists[row], lists[row + 1]):
            crc = _field(crc, table, name, at)
            crc = _field(crc, table, content, at)
        sums[row] = np.int64(np.uint32(crc ^ np.uint32(0xFFFFFFFF)))
