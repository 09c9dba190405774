"""Processes forked from one that has already imported what they need.

A command or node that starts as a new interpreter imports for 0.3-0.4 s of CPU, and the tests start many.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
REQUEST_BYTES_MAX = 256 * 1024
REPORT_BYTES = 16
COMMAND_LINE_BYTES_MAX = 4096
SERVER_END_TIMEOUT_S = 10.0
ROOT = Path(__file__).parents[2]


class ForkedProcess:
    """A process of a ForkServer, with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], reports: int) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._reports: int | None = reports
        report = os.read(reports, REPORT_BYTES)
        if not report:
            raise ChildProcessError("the server that forks processes has ended")
        self.pid = int(report)

    def __del__(self) -> None:
        self.detach()

    def detach(self) -> None:
        """Expect no exit code."""
        if self._reports is not None:
            os.close(self._reports)
            self._reports = None

    def poll(self) -> int | None:
        return self._result(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._result(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _result(self, timeout_s: float | None) -> int | None:
        if self._reports is not None:
            ready = select.poll()  # `select.select` fails for numbers above 1,023
            ready.register(self._reports, select.POLLIN)
            if not ready.poll(None if timeout_s is None else timeout_s * 1000):
                return None
            report = os.read(self._reports, REPORT_BYTES)
            self.returncode = os.waitstatus_to_exitcode(int(report)) if report else -signal.SIGKILL
            self.detach()
        return self.returncode


class ForkServer:
    """The process of a module that calls `serve`, and the socket to it. Any thread may start processes."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
        # The last argument reserves memory for the command lines of the forked processes.
        command = [sys.executable, "-m", module, str(other.fileno()), "-" * COMMAND_LINE_BYTES_MAX]
        with other:
            self._process = subprocess.Popen(
                command,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                cwd=ROOT,
                start_new_session=True,
            )

    def close(self) -> None:
        """End the server, and with it all its processes."""
        self._socket.close()
        self._process.wait(SERVER_END_TIMEOUT_S)

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: tuple[int, int, int],
        *,
        folder: Path | str | None = None,
        new_session: bool = False,
    ) -> ForkedProcess:
        """Start a process with these arguments and standard streams."""
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
            "new_session": new_session,
            "files_max": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        reports, report_end = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [*streams, report_end])
        finally:
            os.close(report_end)
        return ForkedProcess(arguments, reports)


def serve() -> list[str]:
    """Fork a process for each request. Return only in those processes, with their arguments."""
    gc.freeze()  # a collection in a forked process would copy all pages
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            message, streams, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
            with contextlib.suppress(ChildProcessError):  # there is none
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not message:
                os._exit(0)
            server = os.getpid()
            if os.fork() == 0:
                end_with(server)
                break
            for stream in streams:
                os.close(stream)
    *standard, report = streams
    # This process waits for the requested one, because only a parent learns the exit code.
    waiter = os.getpid()
    started = os.fork()
    if started:
        for stream in standard:
            os.close(stream)
        _, status = os.waitpid(started, 0)
        with contextlib.suppress(BrokenPipeError):  # nothing reads it any more
            os.write(report, b"%-*d" % (REPORT_BYTES, status))
        os._exit(0)
    end_with(waiter)
    for number, stream in enumerate(standard):
        os.dup2(stream, number)
        os.close(stream)
    arguments = become(json.loads(message))
    os.write(report, b"%-*d" % (REPORT_BYTES, os.getpid()))
    os.close(report)
    return arguments


def become(request: dict[str, object]) -> list[str]:
    arguments, environment = request["arguments"], request["environment"]
    assert isinstance(arguments, list) and isinstance(environment, dict)
    if request["new_session"]:
        os.setsid()
    os.chdir(str(request["folder"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["files_max"]))  # type: ignore[arg-type]
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv[1:] = arguments
    _show([sys.executable, *arguments])
    return arguments


def end_with(parent: int) -> None:
    """End this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _show(command: Sequence[str]) -> None:
    """Overwrite the command line that other processes see; Linux reads it from this process's memory."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, size = int(fields[45]), int(fields[46]) - int(fields[45])
    line = b"\0".join(map(os.fsencode, command)) + b"\0"
    assert len(line) <= size, "the command line is too long"
    ctypes.memmove(start, line.ljust(size, b"\0"), size)
