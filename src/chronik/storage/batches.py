"""Iterating over the batches of a segment without decoding them."""

from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from chronik.storage.disk import Buffer, File
from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header

__all__ = ["BATCH_BYTES_MAX", "Cut", "cut_whole_batches", "header_at", "is_intact", "is_plausible", "walk_headers"]

BATCH_BYTES_MAX: Final = (1 << 31) - 1
READ_BYTES: Final = 64 * 1024
SPARSE_READ_BYTES: Final = 512
"""How much to read at once while iterating: READ_BYTES if batches are small, this if they are large."""

_OFFSET_AND_LENGTH: Final = Struct(">qi")
_LAST_OFFSET_DELTA: Final = Struct(">i")
_LAST_OFFSET_DELTA_AT: Final = 23
_LENGTH_END: Final = 12
_CRC_START: Final = 21


def is_plausible(header: BatchHeader) -> bool:
    """Return whether these bytes can be a batch header at all; preallocated zeros cannot."""
    return (
        header.magic == 2
        and header.size_bytes >= HEADER_BYTES
        and header.last_offset_delta >= 0
        and header.base_offset >= 0
        and 0 <= header.record_count <= header.last_offset_delta + 1
    )


def is_intact(batch: Buffer, header: BatchHeader) -> bool:
    """Return whether the batch is complete and its CRC is correct."""
    return len(batch) == header.size_bytes and crc32c(memoryview(batch)[_CRC_START:]) == header.crc


def header_at(file: File, at: int, end: int) -> BatchHeader | None:
    """Return the header of the batch at `at`; None if no whole batch can be there."""
    if end - at < HEADER_BYTES:
        return None
    data = file.pread(at, HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        return None
    header = read_batch_header(data)
    return header if is_plausible(header) and at + header.size_bytes <= end else None


def walk_headers(file: File, at: int, end: int) -> Iterator[tuple[int, BatchHeader]]:
    """Yield every batch from `at` on with its position, until `end` or the first invalid one."""
    data = b""
    start = at
    read_bytes = READ_BYTES
    while end - at >= HEADER_BYTES:
        if at + HEADER_BYTES > start + len(data):
            start = at
            data = file.pread(at, min(read_bytes, end - at))
            if len(data) < HEADER_BYTES:
                return
        header = read_batch_header(data, at - start)
        if not is_plausible(header) or at + header.size_bytes > end:
            return
        yield at, header
        at += header.size_bytes
        read_bytes = READ_BYTES if header.size_bytes < READ_BYTES // 4 else SPARSE_READ_BYTES


class Cut(NamedTuple):
    """Where to cut a read so that it holds only whole batches."""

    end: int
    next_offset: int
    size_wanted_bytes: int
    """0; or the size of the first batch, if not even that one is complete."""


def cut_whole_batches(data: Buffer, offset: int, upto_offset: int, start: int = 0) -> Cut:
    """Cut `data` after its whole batches from `start` on that are below `upto_offset`; they start at `offset`."""
    unpack = _OFFSET_AND_LENGTH.unpack_from
    at = start
    last_at = -1
    last_base = offset
    end = len(data)
    while end - at >= HEADER_BYTES:
        base_offset, length = unpack(data, at)
        size_bytes = length + _LENGTH_END
        if base_offset >= upto_offset or size_bytes < HEADER_BYTES:
            break
        if size_bytes > end - at:
            if last_at < 0:
                return Cut(start, offset, size_bytes)
            break
        last_at = at
        last_base = base_offset
        at += size_bytes
    if last_at < 0:
        return Cut(start, offset, 0)
    (delta,) = _LAST_OFFSET_DELTA.unpack_from(data, last_at + _LAST_OFFSET_DELTA_AT)
    if last_base + delta >= upto_offset:
        return Cut(last_at, last_base, 0)
    return Cut(at, last_base + delta + 1, 0)
