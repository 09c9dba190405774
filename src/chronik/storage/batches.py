"""Walking over the batches of a segment without decoding them."""

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
"""Read at once while walking: much where batches are small, little where each is larger than that."""

_OFFSET_AND_LENGTH: Final = Struct(">qi")
_LAST_OFFSET_DELTA: Final = Struct(">i")
_LAST_OFFSET_DELTA_AT: Final = 23
_LENGTH_END: Final = 12
_CRC_START: Final = 21


def is_plausible(header: BatchHeader) -> bool:
    """Whether these bytes can be a batch's header at all; preallocated zeros are not."""
    return (
        header.magic == 2
        and header.size_bytes >= HEADER_BYTES
        and header.last_offset_delta >= 0
        and header.base_offset >= 0
        and 0 <= header.record_count <= header.last_offset_delta + 1
    )


def is_intact(batch: Buffer, header: BatchHeader) -> bool:
    """Whether the whole batch is there as it was sent."""
    return len(batch) == header.size_bytes and crc32c(memoryview(batch)[_CRC_START:]) == header.crc


def header_at(file: File, at: int, end: int) -> BatchHeader | None:
    """The header of the batch at `at`; None where no whole batch can be."""
    if end - at < HEADER_BYTES:
        return None
    data = file.pread(at, HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        return None
    header = read_batch_header(data)
    return header if is_plausible(header) and at + header.size_bytes <= end else None


def walk_headers(file: File, at: int, end: int) -> Iterator[tuple[int, BatchHeader]]:
    """Every batch from `at` on with its position, until `end` or the first that is none."""
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
    """Where a read is cut, so that it holds whole batches only."""

    end: int
    next_offset: int
    size_wanted_bytes: int
    """0; or, where not even the first batch is whole, that batch's size."""


def cut_whole_batches(data: Buffer, offset: int, upto_offset: int, start: int = 0) -> Cut:
    """The whole batches of `data` from `start` on that lie below `upto_offset`; `offset` is where they begin."""
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
