"""Reading whole batches of a segment and checking their CRCs."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from chronik.storage.batches import is_intact, is_plausible
from chronik.storage.disk import Disk, File
from chronik.wire.batch import HEADER_BYTES, BatchHeader, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

__all__ = ["READ_BYTES", "ScannedBatch", "is_zero", "read_all_batches", "scan_batches", "used_bytes"]

READ_BYTES: Final = 1024 * 1024
_ZEROS: Final = bytes(READ_BYTES)


class ScannedBatch(NamedTuple):
    """A batch with all of its bytes, and whether its CRC is correct."""

    position: int
    header: BatchHeader
    batch: memoryview
    intact: bool


def scan_batches(file: File, at: int, end: int, *, once: bool = False) -> Iterator[ScannedBatch]:
    """Yield every whole batch from `at` on, up to the first invalid one; read READ_BYTES, or a larger batch, at a time.

    `once`: the data will not be read again soon (`File.pread_once`).
    """
    pread = file.pread_once if once else file.pread
    data = memoryview(b"")
    start = at
    while end - at >= HEADER_BYTES:
        if at + HEADER_BYTES > start + len(data):
            start, data = at, memoryview(pread(at, min(READ_BYTES, end - at)))
            if len(data) < HEADER_BYTES:
                return
        header = read_batch_header(data, at - start)
        if not is_plausible(header) or at + header.size_bytes > end:
            return
        if at + header.size_bytes > start + len(data):
            start, data = at, memoryview(pread(at, min(max(READ_BYTES, header.size_bytes), end - at)))
        batch = data[at - start : at - start + header.size_bytes]
        yield ScannedBatch(at, header, batch, is_intact(batch, header))
        at += header.size_bytes


def read_all_batches(disk: Disk, path: str) -> Iterator[ScannedBatch]:
    """Yield every batch of a closed segment. Raises CORRUPT_MESSAGE if the chain of batches is broken."""
    file = disk.open(path)
    try:
        end = file.size()
        position = 0
        for scanned in scan_batches(file, 0, end):
            yield scanned
            position = scanned.position + scanned.header.size_bytes
        if not is_zero(file, position, end):
            raise KafkaError(ErrorCode.corrupt_message, f"{path} is damaged at its byte {position}")
    finally:
        file.close()


def is_zero(file: File, at: int, end: int) -> bool:
    """Return whether the range holds only preallocated zeros."""
    while at < end:
        data = file.pread(at, min(READ_BYTES, end - at))
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
        data = file.pread(at, min(READ_BYTES, end - at))
        if not data:
            break
        stripped = data.rstrip(b"\0")
        if stripped:
            used = at + len(stripped) - start
        at += len(data)
    return used
