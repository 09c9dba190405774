"""The direct writer of a simulated process: a write takes the time of a thread's job, or its owner waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from errno import EIO
from typing import TYPE_CHECKING

from chronik.storage.direct_writes import DirectWriter

if TYPE_CHECKING:
    from chronik.testing.sim.disk import ProcessDisk, SimFile


class SimDirect(DirectWriter):
    def __init__(self, disk: ProcessDisk, buffer_bytes: int) -> None:
        self.buffer = memoryview(bytearray(buffer_bytes))
        self._disk = disk
        self._files: list[SimFile] = []
        self._write: tuple[SimFile, bytes, int] | None = None
        self._ended: int | None = None
        self._on_ended: Callable[[], None] = lambda: None

    def open_file(self, path: str) -> int:  # type: ignore[override]
        self._files.append(self._disk.open(path))
        return len(self._files) - 1

    def close_file(self, fd: int) -> None:  # type: ignore[override]
        self._files[fd].close()

    def watch(self, loop: asyncio.AbstractEventLoop, on_ended: Callable[[], None]) -> None:
        self._on_ended = on_ended

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._on_ended = lambda: None

    def submit(self, fd: int, size: int, at: int) -> None:
        self._write, self._ended = (self._files[fd], bytes(self.buffer[:size]), at), None
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._disk.process.executor, self._run)
        job.add_done_callback(lambda _: self._on_ended())

    def _run(self) -> None:
        if self._write is None:
            return
        (file, data, at), self._write = self._write, None
        try:
            file.pwrite(data, at)
            file.datasync()
            self._ended = len(data)
        except OSError as error:
            self._ended = -(error.errno or EIO)

    def result(self, *, wait: bool) -> int | None:
        if wait:
            self._run()
        ended, self._ended = self._ended, None
        return ended

    def close(self) -> None:
        return
