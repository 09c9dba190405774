"""A disk that a test can slow down or make to hang while the node runs.

Each switch is a file that holds a number of milliseconds. While the reads file exists, no segment read is served as
cached, and each takes that long; while the syncs file exists, each sync of a segment or of the commit log takes that
long. Reads on the event loop stay fast: they are of data just written, which is in memory. Syncs on the loop do not: a
log that rolls faster than its disk syncs waits for it.

Instead of a number, the syncs file may contain

hang      no write or sync of any file by a thread completes until this file is removed; appends on the event loop go
          to the page cache, which has room
freeze    writes on the event loop do not complete either: the page cache is full
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from uuid import UUID

from chronik.node.membership.raft_store import SqliteRaftStore
from chronik.raft.store import Persist
from chronik.storage.commit_log import FOLDER_NAME
from chronik.storage.disk import Buffer, RealDisk, RealFile

SEGMENT_SUFFIX = ".log"
COMMIT_LOG = f"/{FOLDER_NAME}/"
HANG, FREEZE = "hang", "freeze"
LOOK_INTERVAL_S = 0.02


class Switch:
    """A file that holds a delay in milliseconds, or makes operations hang; "" means no file."""

    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def is_on(self) -> bool:
        return os.path.exists(self._path)

    def wait(self) -> None:
        """Wait for the configured delay; return at once if the file is missing or empty."""
        try:
            delay_s = float(self._text() or 0) / 1000
        except ValueError:
            return
        if delay_s > 0:
            threading.Event().wait(delay_s)

    def hold(self) -> None:
        """Wait until the file no longer makes this thread hang."""
        while self._text() in ((FREEZE,) if _is_loop() else (HANG, FREEZE)):
            threading.Event().wait(LOOK_INTERVAL_S)

    def _text(self) -> str:
        try:
            with open(self._path) as opened:
                return opened.read().strip()
        except OSError:
            return ""


class SlowDisk(RealDisk):
    """The machine's own file system, with one switch for reads and one for syncs."""

    def __init__(self, reads: str = "", syncs: str = "") -> None:
        super().__init__()
        self.reads = Switch(reads)
        self.syncs = Switch(syncs)

    def open(self, path: str, create: bool = False) -> RealFile:
        if create:
            self.syncs.hold()
        opened = super().open(path, create)
        is_slow = path.endswith(SEGMENT_SUFFIX) or COMMIT_LOG in path
        return SlowSegment(self, opened) if is_slow else SlowFile(self, opened)

    def mkdir(self, path: str) -> None:
        self.syncs.hold()
        super().mkdir(path)

    def remove(self, path: str) -> None:
        self.syncs.hold()
        super().remove(path)

    def rename(self, old: str, new: str) -> None:
        self.syncs.hold()
        super().rename(old, new)

    def sync_dir(self, path: str) -> None:
        self.syncs.hold()
        super().sync_dir(path)

    def rmtree(self, path: str) -> None:
        self.syncs.hold()
        super().rmtree(path)


class SlowFile(RealFile):
    """Any file: its writes hang with the disk."""

    __slots__ = ("_slow",)

    def __init__(self, disk: SlowDisk, opened: RealFile) -> None:
        super().__init__(disk, opened.detach())
        self._slow = disk

    def pwrite(self, data: Buffer, at: int) -> None:
        self._slow.syncs.hold()
        super().pwrite(data, at)

    def pwrite_durably(self, parts: Sequence[Buffer], at: int) -> None:
        self.pwrite(b"".join(parts), at)
        self.datasync()

    def datasync(self) -> None:
        self._slow.syncs.hold()
        super().datasync()

    def truncate(self, size: int) -> None:
        self._slow.syncs.hold()
        super().truncate(size)

    def allocate(self, size: int) -> None:
        self._slow.syncs.hold()
        super().allocate(size)


class SlowSegment(SlowFile):
    """A segment, or a file of the commit log: the switches delay its reads and syncs."""

    __slots__ = ()

    def pread(self, at: int, size: int) -> bytes:
        if not _is_loop():
            self._slow.reads.wait()
        return super().pread(at, size)

    def pread_cached(self, at: int, size: int) -> bytes | bytearray | None:
        return None if self._slow.reads.is_on else super().pread_cached(at, size)

    def datasync(self) -> None:
        self._slow.syncs.wait()
        super().datasync()


class SlowRaftStore(SqliteRaftStore):
    """SQLite does not write through `SlowDisk`, so each write first waits for the disk's switch."""

    def __init__(self, disk: SlowDisk, path: str, new_store_id: Callable[[], UUID]) -> None:
        super().__init__(path, new_store_id)
        self._slow = disk

    def persist(self, persist: Persist) -> None:
        self._slow.syncs.hold()
        super().persist(persist)


def _is_loop() -> bool:
    return threading.current_thread() is threading.main_thread()
