"""The durable end of a log: the file `synced-end` in its folder, overwritten in place after each sync.

    offset int64, crc32c of these eight bytes uint32; big-endian

The file itself is not synced. After a kill it is exact; after a power loss it may be older, or missing. So a log that
ends below it has lost records that may have been acknowledged. Nothing else shows that: the recovery points are some
seconds old. Before a log is truncated on purpose, the file is lowered durably.
"""

import struct

from crc32c import crc32c

from chronik.storage.disk import Disk, read_file

__all__ = ["SYNCED_END_NAME", "lower_synced_end", "note_synced_end", "read_synced_end"]

SYNCED_END_NAME = "synced-end"
_OFFSET = struct.Struct(">q")
_CHECKSUM = struct.Struct(">I")


def read_synced_end(disk: Disk, folder: str) -> int:
    """Return the offset; 0 if the file is missing or damaged."""
    data = read_file(disk, f"{folder}/{SYNCED_END_NAME}") or b""
    if len(data) != _OFFSET.size + _CHECKSUM.size or _CHECKSUM.unpack_from(data, _OFFSET.size)[0] != crc32c(data[:8]):
        return 0
    return int(_OFFSET.unpack_from(data)[0])


def note_synced_end(disk: Disk, folder: str, offset: int) -> None:
    """Record that the log is durable up to `offset`."""
    _write(disk, folder, offset, durably=False)


def lower_synced_end(disk: Disk, folder: str, offset: int) -> None:
    """Lower the recorded end durably before the log is truncated to `offset`."""
    if read_synced_end(disk, folder) > offset:
        _write(disk, folder, offset, durably=True)


def _write(disk: Disk, folder: str, offset: int, *, durably: bool) -> None:
    data = _OFFSET.pack(offset)
    file = disk.open(f"{folder}/{SYNCED_END_NAME}", create=True)
    try:
        file.pwrite(data + _CHECKSUM.pack(crc32c(data)), 0)
        if durably:
            file.datasync()
    finally:
        file.close()
