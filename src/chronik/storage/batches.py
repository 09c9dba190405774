"""Iterating over the batches of a segment without decoding them: by header, or whole with a check of their CRCs."""

from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from chronik.storage.disk import Buffer, File
from chronik.wire.batch import CRC_START, HEADER_BYTES, LENGTH_END, BatchHeader, read_batch_header
from chronik.wire.compression import View
from chronik.wire.errors import ErrorCode, KafkaError

HEADERS_READ_BYTES: Final = 64 * 1024
SPARSE_READ_BYTES: Final = 512
"""How much to read at once for headers: HEADERS_READ_BYTES if batches are small, this if they are large."""
SCAN_READ_BYTES: Final = 1024 * 1024
"""How much to read at once for whole batches."""

_ZEROS: Final = bytes(SCAN_READ_BYTES)
_OFFSET_AND_LENGTH: Final = Struct(">qi")
_LAST_OFFSET_DELTA: Final = Struct(">i")
_LAST_OFFSET_DELTA_AT: Final = 23


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
    return len(batch) == header.size_bytes and crc32c(memoryview(batch)[CRC_START:]) == header.crc


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
    read_bytes = HEADERS_READ_BYTES
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
        read_bytes = HEADERS_READ_BYTES if header.size_bytes < HEADERS_READ_BYTES // 4 else SPARSE_READ_BYTES


def end_of_whole_batches(data: Buffer, offset: int, upto_offset: int, start: int = 0) -> tuple[int, int]:
    """Return where the whole batches below `upto_offset` end in `data`, and the offset after them.

    Iteration begins at `start`; if there is no such batch, the result is `start` and `offset`.
    """
    unpack = _OFFSET_AND_LENGTH.unpack_from
    at = start
    last_at = -1
    last_base = offset
    end = len(data)
    while end - at >= HEADER_BYTES:
        base_offset, length = unpack(data, at)
        size_bytes = length + LENGTH_END
        if base_offset >= upto_offset or not HEADER_BYTES <= size_bytes <= end - at:
            break
        last_at = at
        last_base = base_offset
        at += size_bytes
    if last_at < 0:
        return start, offset
    (delta,) = _LAST_OFFSET_DELTA.unpack_from(data, last_at + _LAST_OFFSET_DELTA_AT)
    if last_base + delta >= upto_offset:
        return last_at, last_base
    return at, last_base + delta + 1


def end_of_intact_batches(data: memoryview, offset: int, batches_max: int | None = None) -> tuple[int, int]:
    """Return the position of the first batch with a wrong CRC or offset, and the offset after the batches before it.

    `data` holds whole batches; the first one contains `offset`, or follows it. At most `batches_max` are checked.
    """
    at, before = 0, (0, offset)
    checked = 0
    while at < len(data) and checked != batches_max:
        header = read_batch_header(data, at)
        end = at + header.size_bytes
        if at > 0 and header.base_offset < offset:
            # This batch's offset is wrong, or the one before; the CRC does not cover it.
            return before
        if header.last_offset < offset or not is_intact(data[at:end], header):
            break
        before = at, offset
        at, offset = end, header.next_offset
        checked += 1
    return at, offset


class ScannedBatch(NamedTuple):
    """A batch with all of its bytes, and whether its CRC is correct."""

    position: int
    header: BatchHeader
    batch: View
    intact: bool


def scan_batches(file: File, at: int, end: int, *, once: bool = False) -> Iterator[ScannedBatch]:
    """Yield every whole batch from `at` on, up to the first invalid one.

    `once`: the data will not be read again soon (`File.pread_once`).
    """
    pread = file.pread_once if once else file.pread
    data = memoryview(b"")
    start = at
    while end - at >= HEADER_BYTES:
        if at + HEADER_BYTES > start + len(data):
            start, data = at, memoryview(pread(at, min(SCAN_READ_BYTES, end - at)))
            if len(data) < HEADER_BYTES:
                return
        header = read_batch_header(data, at - start)
        if not is_plausible(header) or at + header.size_bytes > end:
            return
        if at + header.size_bytes > start + len(data):
            start, data = at, memoryview(pread(at, min(max(SCAN_READ_BYTES, header.size_bytes), end - at)))
        batch = data[at - start : at - start + header.size_bytes]
        yield ScannedBatch(at, header, batch, is_intact(batch, header))
        at += header.size_bytes


def scan_all_batches(file: File, path: str) -> Iterator[ScannedBatch]:
    """Yield every batch of a closed segment. Raises CORRUPT_MESSAGE if the chain of batches is broken."""
    end = file.size()
    position = 0
    for scanned in scan_batches(file, 0, end):
        yield scanned
        position = scanned.position + scanned.header.size_bytes
    if not is_zero(file, position, end):
        raise KafkaError(ErrorCode.corrupt_message, f"{path} is damaged at its byte {position}")


def is_zero(file: File, at: int, end: int) -> bool:
    """Return whether the range holds only preallocated zeros."""
    while at < end:
        data = file.pread(at, min(SCAN_READ_BYTES, end - at))
        if not data:
            return True
        if data != _ZEROS[: len(data)]:
            return False
        at += len(data)
    return True


def used_bytes(file: File, at: int, end: int) -> int:
    """Return how many bytes from `at` on are used, without the preallocated zeros at the end."""
    used = 0
    start = at
    while at < end:
        data = file.pread(at, min(SCAN_READ_BYTES, end - at))
        if not data:
            break
        stripped = data.rstrip(b"\0")
        if stripped:
            used = at + len(stripped) - start
        at += len(data)
    return used
