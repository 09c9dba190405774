"""A direct writer on a faulty disk: a write takes place when its result is requested, or at a later crash point."""

from __future__ import annotations

import os

from tests.storage.faulty_disk import FaultyDisk, FaultyFile

from chronik.storage.direct_writes import DirectWriter


class FakeDirect(DirectWriter):
    """`has_event` is False for tests without a loop."""

    def __init__(self, disk: FaultyDisk, buffer_bytes: int, *, has_event: bool = False) -> None:
        self.buffer = memoryview(bytearray(buffer_bytes))
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK) if has_event else -1
        self.writes = 0
        self._disk = disk
        self._files: list[FaultyFile] = []
        self._write: tuple[FaultyFile, bytes, int] | None = None

    def open_file(self, path: str) -> int:  # type: ignore[override]
        self._files.append(self._disk.open(path))
        return len(self._files) - 1

    def close_file(self, fd: int) -> None:  # type: ignore[override]
        self._files[fd].close()

    def submit(self, fd: int, size: int, at: int) -> None:
        assert self._write is None, "two writes at a time"
        self._write = self._files[fd], bytes(self.buffer[:size]), at
        self.writes += 1
        if self.event_fd >= 0:
            os.eventfd_write(self.event_fd, 1)

    def result(self, *, wait: bool) -> int | None:
        if self._write is None:
            return None
        file, data, at = self._write
        self._write = None
        try:
            file.pwrite(data, at)
            file.datasync()
        except OSError as error:
            return -(error.errno or 1)
        return len(data)

    def close(self) -> None:
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1
