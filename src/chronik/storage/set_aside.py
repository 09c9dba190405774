"""Files that are no longer used but may still be needed: moved to a folder of their own instead of deleted.

    DATA/set-aside/NAME-TTTTTTTTTTTTT/      T: when it was set aside, in milliseconds since 1970, 13 digits

Retention counts from the time in the name. A folder with any other name is never removed.
"""

import re
from collections.abc import Sequence
from typing import Final

from chronik.storage.disk import Disk

__all__ = ["SET_ASIDE_NAME", "expired", "set_aside"]

SET_ASIDE_NAME: Final = "set-aside"

_TIME: Final = re.compile(r".+-(\d{13})")


def set_aside(disk: Disk, data_path: str, source_paths: Sequence[str], name: str, now_ms: int) -> str:
    """Move files or folders of the node, in this order, into a new folder, and return its path. Blocks.

    Durable when it returns. A source that does not exist is skipped. After an OSError, sources that were not yet moved
    are still in place: no file is ever lost.
    """
    around = f"{data_path}/{SET_ASIDE_NAME}"
    while disk.exists(folder := f"{around}/{name}-{now_ms:013d}"):
        now_ms += 1
    disk.mkdir(folder)
    # Sync the folder's name first: a crash must not lose it together with the files moved there.
    disk.sync_dir(around)
    disk.sync_dir(data_path)
    holders: dict[str, None] = {}
    for path in source_paths:
        if disk.exists(path):
            holder, _, last = path.rpartition("/")
            disk.rename(path, f"{folder}/{last}")
            holders[holder] = None
    disk.sync_dir(folder)
    for holder in holders:
        disk.sync_dir(holder)
    return folder


def expired(disk: Disk, data_path: str, now_ms: int, retention_ms: int) -> list[str]:
    """Return the folders set aside at least `retention_ms` ago; none if that is negative. Blocks."""
    around = f"{data_path}/{SET_ASIDE_NAME}"
    if retention_ms < 0 or not disk.exists(around):
        return []
    return [
        f"{around}/{name}"
        for name in disk.listdir(around)
        if (found := _TIME.fullmatch(name)) is not None and int(found[1]) <= now_ms - retention_ms
    ]
