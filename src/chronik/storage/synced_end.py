"""The durable end of a log: the file `synced-end` in its folder holds its offset and is written after each sync.

The file itself is not synced. After a kill it is exact; after a power loss it may be older, or missing. So a log that
ends below it has lost records that may have been acknowledged. Nothing else shows that: the recovery points are some
seconds old. Before a log is truncated on purpose, the file is lowered durably.
"""

from chronik.storage.disk import Disk
from chronik.storage.small_files import read_numbers, write_numbers

__all__ = ["SYNCED_END_NAME", "lower_synced_end", "note_synced_end", "read_synced_end"]

SYNCED_END_NAME = "synced-end"


def read_synced_end(disk: Disk, folder: str) -> int:
    """Return the offset; 0 if the file is missing or damaged."""
    (offset,) = read_numbers(disk, f"{folder}/{SYNCED_END_NAME}", 1) or (0,)
    return offset


def note_synced_end(disk: Disk, folder: str, offset: int) -> None:
    """Record that the log is durable up to `offset`."""
    write_numbers(disk, f"{folder}/{SYNCED_END_NAME}", offset, durably=False)


def lower_synced_end(disk: Disk, folder: str, offset: int) -> None:
    """Lower the recorded end durably before the log is truncated to `offset`."""
    if read_synced_end(disk, folder) > offset:
        write_numbers(disk, f"{folder}/{SYNCED_END_NAME}", offset, durably=True)
