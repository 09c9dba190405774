"""A disk whose reads can be made slow while the node runs: to see what a failing disk does to consumers.

For tests and rehearsals only (`debug_slow_reads` in node.toml). The setting names a file; while it exists, no read of a
segment is taken for cached, and each takes as many milliseconds as the file says. The loop's own reads stay fast: they
are of what was just written, which no disk holds up.
"""

from __future__ import annotations

import os
import threading

from chronik.storage.disk import RealDisk, RealFile

SEGMENT_SUFFIX = ".log"


class SlowReads(RealDisk):
    def __init__(self, switch: str) -> None:
        super().__init__()
        self.switch = switch

    def open(self, path: str, create: bool = False) -> RealFile:
        opened = super().open(path, create)
        return SlowFile(self, opened) if path.endswith(SEGMENT_SUFFIX) else opened

    def delay_s(self) -> float:
        """0 while the switch is not there, or says nothing."""
        try:
            with open(self.switch) as switch:
                return float(switch.read() or 0) / 1000
        except (OSError, ValueError):
            return 0.0


class SlowFile(RealFile):
    __slots__ = ("_slow",)

    def __init__(self, disk: SlowReads, opened: RealFile) -> None:
        super().__init__(disk, opened.detach())
        self._slow = disk

    def pread(self, at: int, size: int) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            delay_s = self._slow.delay_s()
            if delay_s > 0:
                threading.Event().wait(delay_s)
        return super().pread(at, size)

    def pread_cached(self, at: int, size: int) -> bytes | bytearray | None:
        if os.path.exists(self._slow.switch):
            return None
        return super().pread_cached(at, size)
