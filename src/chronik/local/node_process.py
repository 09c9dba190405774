"""A node's process, found from any shell by its pid file and checked against the process with that id.

A pid file outlives its process after a crash of the process or the machine, and the id may then belong to another
process. So the file is valid only while that process has the node's configuration file among its arguments.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from chronik.local.errors import LocalClusterError

ProcessState = Literal["running", "paused"]
Spawn: TypeAlias = Callable[[Sequence[str], Mapping[str, str], int], int]
"""Starts a process with this command, environment and file for errors; returns its id."""

REASON_BYTES_MAX = 64 * 1024
MESSAGE_PREFIX = "chronik: "
CONFIG_FLAG = "--config"


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C until the end of the block: no command could find a process without a pid file."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts only the main thread
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


class NodeProcess:
    """One node's process, running or not, whether this shell or another one started it."""

    def __init__(self, config_path: str, pid_path: str, log_path: str) -> None:
        self._config_path = config_path
        self._pid_path = pid_path
        self._log_path = log_path
        self._child_pid: int | None = None
        self._log_bytes_before = 0

    @property
    def pid(self) -> int | None:
        """The process id, or None if the node is not running."""
        return None if self.state is None else self._read_pid()

    @property
    def state(self) -> ProcessState | None:
        """None if the node is not running, whatever the pid file contains."""
        self._reap()
        pid = self._read_pid()
        inspected = None if pid is None else inspect(pid)
        if inspected is None:
            return None
        letter, threads, command = inspected
        if letter in "ZXx":
            # The first thread of a killed process ends at once; one inside fsync still holds the data folder's lock.
            return "running" if threads > 1 else None
        # Do not check the command line of our own child: it is empty for a moment after launch.
        if pid != self._child_pid and f"{CONFIG_FLAG} {self._config_path}" not in command:
            return None
        return "paused" if letter in "Tt" else "running"

    @_uninterrupted()
    def launch(self, command: Sequence[str], environment: Mapping[str, str], spawn: Spawn | None = None) -> None:
        """Start the process; `spawn` is `spawn_process` by default."""
        self.forget()
        with open(self._log_path, "ab") as log:
            self._log_bytes_before = log.tell()
            pid = (spawn or spawn_process)([*command, CONFIG_FLAG, self._config_path], environment, log.fileno())
        self._child_pid = pid
        try:
            with open(self._pid_path, "w", encoding="ascii") as opened:
                opened.write(f"{pid}\n")
        except OSError as error:
            # For example because the disk is full. Without the pid file no command could find the process.
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # `spawn` may have started it elsewhere
                os.waitpid(pid, 0)
            self.forget()
            raise LocalClusterError(
                f"cannot write {self._pid_path}: {error.strerror}; free some space, then try again"
            ) from None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process runs."""
        pid = self.pid
        try:
            if pid is not None:
                os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise LocalClusterError(
                f"process {pid} belongs to another user: run this command as the user who started it"
            ) from None

    def kill(self) -> None:
        """Send SIGKILL, and remove the pid file when the process has ended."""
        self.send(signal.SIGKILL)
        self.wait_until_gone(45.0)
        self.forget()

    def wait_until_gone(self, timeout_s: float) -> bool:
        return wait_until(lambda: self.state is None, timeout_s)

    def forget(self) -> None:
        """Remove the pid file of a process that has ended."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._pid_path)

    def reason(self) -> str:
        """Return why the process ended: its last message for people since launch, else the last line of its log."""
        try:
            with open(self._log_path, "rb") as log:
                size = os.fstat(log.fileno()).st_size
                log.seek(max(self._log_bytes_before, size - REASON_BYTES_MAX))
                lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        messages = [line.removeprefix(MESSAGE_PREFIX) for line in lines if line.startswith(MESSAGE_PREFIX)]
        if messages:
            return messages[-1]
        return f"its log ends with: {lines[-1]}" if lines else f"{self._log_path} gives no reason"

    def _reap(self) -> None:
        """Reap a child that has ended, which would otherwise stay a zombie as long as this process runs."""
        if self._child_pid is not None:
            try:
                ended, _ = os.waitpid(self._child_pid, os.WNOHANG)
            except ChildProcessError:
                ended = self._child_pid
            if ended:
                self._child_pid = None

    def _read_pid(self) -> int | None:
        try:
            with open(self._pid_path, encoding="ascii") as opened:
                return int(opened.read())
        except (OSError, ValueError):
            return None


def spawn_process(command: Sequence[str], environment: Mapping[str, str], log: int) -> int:
    """Start a process in its own session, so that it outlives this process and its terminal."""
    child = subprocess.Popen(  # noqa: S603 - the user's own command, without a shell
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # it prints that it is ready; the log is for JSON lines
        stderr=log,
        env=dict(environment),
        start_new_session=True,
    )
    # Popen expects its caller to wait for the child; this child may outlive us, so mark it as already waited for.
    child.returncode = 0
    return child.pid


def wait_until(condition: Callable[[], bool], timeout_s: float, interval_s: float = 0.02) -> bool:
    """Poll until the condition holds; return False if the time is up."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(interval_s)
    return True


def inspect(pid: int) -> tuple[str, int, str] | None:
    """Return a process's state letter, number of threads and command line, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as opened:
            fields = opened.read().rpartition(")")[2].split()
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as opened:
            return fields[0], int(fields[17]), opened.read().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return None
    listed = subprocess.run(  # noqa: S603 - the pid is a number
        ["ps", "-ww", "-o", "state=,args=", "-p", str(pid)],  # noqa: S607 - its folder differs between systems
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    letters, _, command = listed.partition(" ")
    return (letters[:1], 1, command) if listed else None
