"""A disk that can be made slow while the node runs: to see what a failing disk does to producers and consumers.

For tests and rehearsals only (`debug_slow_reads` and `debug_slow_syncs` in node.toml). Each setting names a file; while
that exists, no read of a segment is taken for cached and each takes as many milliseconds as the file says, or so does
each sync of a segment. The loop's own reads stay fast: they are of what was just written, which no disk holds up. Its
syncs do not: a log that rolls faster than its disk syncs waits for it.
"""

from __future__ import annotations

import os
import threading

from chronik.storage.disk import RealDisk, RealFile

SEGMENT_SUFFIX = ".log"


class Switch:
    """A file that says how many milliseconds something takes; "" is no file."""

    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def is_on(self) -> bool:
        return os.path.exists(self._path)

    def wait(self) -> None:
        """Not at all while the file is not there, or says nothing."""
        try:
            with open(self._path) as told:
                delay_s = float(told.read() or 0) / 1000
        except (OSError, ValueError):
            return
        if delay_s > 0:
            threading.Event().wait(delay_s)


class SlowDisk(RealDisk):
    """The machine's own file system, with a switch for reads and one for syncs."""

    def __init__(self, reads: str = "", syncs: str = "") -> None:
        super().__init__()
        self.reads = Switch(reads)
        self.syncs = Switch(syncs)

    def open(self, path: str, create: bool = False) -> RealFile:
        opened = super().open(path, create)
        return SlowFile(self, opened) if path.endswith(SEGMENT_SUFFIX) else opened


class SlowFile(RealFile):
    __slots__ = ("_slow",)

    def __init__(self, disk: SlowDisk, opened: RealFile) -> None:
        super().__init__(disk, opened.detach())
        self._slow = disk

    def pread(self, at: int, size: int) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            self._slow.reads.wait()
        return super().pread(at, size)

    def pread_cached(self, at: int, size: int) -> bytes | bytearray | None:
        return None if self._slow.reads.is_on else super().pread_cached(at, size)

    def datasync(self) -> None:
        self._slow.syncs.wait()
        super().datasync()
