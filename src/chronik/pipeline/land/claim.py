"""Allow only one landing at a time on a checkpoint directory.

Spark's JVM outlives a killed driver by some seconds, and may still write to the checkpoint. Two JVMs that plan the same
micro-batch with different end offsets would leave a gap. So a new run waits until the previous JVM has exited.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from chronik.pipeline.errors import PipelineError

FILE = ".claim"
WAIT_S_MAX = 60.0
POLL_S = 0.1


@contextmanager
def claim(folder: str) -> Iterator[Callable[[int], None]]:
    """Claim the directory until this process exits, in any way. Yield a function that records the JVM's process id.

    The id is for the next run, in case this process dies before it stops the JVM. Raises PipelineError if another
    landing holds the directory. A no-op on object stores, which have no locks.
    """
    if "://" in folder:
        yield lambda _: None
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(Path(folder, FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise PipelineError(f"cannot use {folder} for checkpoints: {error.strerror}; choose --checkpoint") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PipelineError(
                f"another chronik pipeline land or run uses the checkpoint {folder}: stop it, or choose --checkpoint"
            ) from None
        _wait_for(os.pread(descriptor, 32, 0), folder)

        def record_jvm(pid: int) -> None:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(pid).encode(), 0)

        yield record_jvm
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _wait_for(written: bytes, folder: str) -> None:
    if not written.strip().isdigit():
        return
    pid, pause = int(written), Event()
    for _ in range(int(WAIT_S_MAX / POLL_S)):
        if not _is_java(pid):
            return
        pause.wait(POLL_S)
    raise PipelineError(
        f"Spark's process {pid} of an earlier landing still uses the checkpoint {folder}: end it (kill {pid})"
    )


def _is_java(pid: int) -> bool:
    """Return whether the process is alive and a JVM, because pids are reused. Without /proc, being alive suffices."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False  # another user's process means that the pid was reused
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return not Path("/proc/self").exists()
    return b"java" in command
