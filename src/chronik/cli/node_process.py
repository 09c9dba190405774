"""A node's process as any shell can find it: by its pid file, checked against what runs under that number.

A pid file outlives its process when the machine or the process dies, and the number may then belong to somebody else.
So it counts only while the process of that number has the node's configuration file among its arguments.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from chronik.cli.errors import CliError

ProcessState = Literal["running", "paused"]
_Condition = Callable[[], bool]

POLL_INTERVAL_S = 0.02
STOPPED_LETTERS = ("T", "t")
GONE_LETTERS = ("Z", "X", "x")
REASON_BYTES_MAX = 64 * 1024
SAID_BY_NODE = "chronik: "
CONFIG_FLAG = "--config"


class NodeProcess:
    """One node's process, running or not. Whoever started it, here or in another shell, it is found again."""

    def __init__(self, config_path: str, pid_path: str, log_path: str) -> None:
        self._config_path = config_path
        self._pid_path = pid_path
        self._log_path = log_path
        self._child_pid: int | None = None
        self._log_bytes_before = 0

    @property
    def pid(self) -> int | None:
        """The number of the process, or None where none runs."""
        return None if self.state is None else self._read_pid()

    @property
    def state(self) -> ProcessState | None:
        """None where no process of this node runs, whatever the pid file says."""
        self._reap()
        pid = self._read_pid()
        found = None if pid is None else inspect(pid)
        if found is None:
            return None
        letter, command = found
        # A child of ours needs no look at its command line, which is empty for a moment after its launch.
        is_ours = pid == self._child_pid or f"{CONFIG_FLAG} {self._config_path}" in command
        if letter in GONE_LETTERS or not is_ours:
            return None
        return "paused" if letter in STOPPED_LETTERS else "running"

    def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the process in a session of its own, so that it outlives this one and its terminal."""
        with _uninterrupted():
            self._launch(command, environment)

    def _launch(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.forget()
        with open(self._log_path, "ab") as log:
            self._log_bytes_before = log.tell()
            child = subprocess.Popen(
                [*command, CONFIG_FLAG, self._config_path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # it says there that it is ready; the log is for JSON lines
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )
        try:
            with open(self._pid_path, "w", encoding="ascii") as opened:
                opened.write(f"{child.pid}\n")
        except OSError as error:
            # A full disk, for one. Without the file nobody would find the process.
            child.kill()
            child.wait()
            self.forget()
            raise CliError(f"cannot write {self._pid_path}: {error.strerror}; make room, then try again") from None
        # It may outlive this process, and nobody has to wait for it: not what Popen expects of its children.
        child.returncode = 0
        self._child_pid = child.pid

    def send(self, number: signal.Signals) -> bool:
        """False where there is no process to send it to."""
        pid = self.pid
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            raise CliError(f"process {pid} belongs to another user: run this as the user who started it") from None
        return True

    def wait_until_gone(self, timeout_s: float) -> bool:
        return self._wait(lambda: self.state is None, timeout_s)

    def wait_until_paused(self, timeout_s: float) -> bool:
        return self._wait(lambda: self.state != "running", timeout_s)

    def forget(self) -> None:
        """Removes the pid file of a process that is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._pid_path)

    def reason(self) -> str:
        """Why the process ended, as it said itself since its launch: the line meant for people, else the last one."""
        try:
            with open(self._log_path, "rb") as log:
                size = os.fstat(log.fileno()).st_size
                log.seek(max(self._log_bytes_before, size - REASON_BYTES_MAX))
                lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        said = [line.removeprefix(SAID_BY_NODE) for line in lines if line.startswith(SAID_BY_NODE)]
        if said:
            return said[-1]
        return f"its log ends with: {lines[-1]}" if lines else f"nothing in {self._log_path} says why"

    def _reap(self) -> None:
        """A child that has ended would otherwise stay in the list of processes for as long as this one runs."""
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

    def _wait(self, condition: _Condition, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(POLL_INTERVAL_S)
        return True


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C counts when this has ended: a process without a pid file would be found by nobody."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts only the main thread
        return
    came = False

    def remember(number: int, frame: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def inspect(pid: int) -> tuple[str, str] | None:
    """The state letter and the command line of a process; None where there is none of that number."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as opened:
            letter = opened.read().rpartition(")")[2].split()[0]
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as opened:
            return letter, opened.read().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return None
    listed = subprocess.run(
        ["ps", "-ww", "-o", "state=,args=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    letters, _, command = listed.partition(" ")
    return (letters[:1], command) if listed else None
