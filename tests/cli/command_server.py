"""Runs `chronik` commands in processes of their own, forked from one that has imported all commands.

A command that starts as a new interpreter imports for 0.3 s of CPU, and the tests run hundreds.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from select import select
from typing import IO

REQUEST_BYTES_MAX = 256 * 1024
NO_BROKER = "127.0.0.1:1"
SERVER_END_TIMEOUT_S = 10.0


class CommandServer:
    """The process that forks, and the socket to it. Any thread may run commands."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())], pass_fds=[other.fileno()], stdin=subprocess.DEVNULL
            )

    def close(self) -> None:
        self._socket.close()
        self._process.wait(SERVER_END_TIMEOUT_S)

    def run(
        self, arguments: Sequence[str], stdin: str, timeout_s: float, cwd: Path | None
    ) -> subprocess.CompletedProcess[str]:
        request = json.dumps([list(arguments), str(cwd or Path.cwd()), dict(os.environ)]).encode()
        report, report_end = os.pipe()
        with (
            tempfile.TemporaryFile("w+") as given,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
            os.fdopen(report, "rb", buffering=0) as reports,
        ):
            given.write(stdin)
            given.seek(0)
            try:
                streams = [given.fileno(), out.fileno(), err.fileno(), report_end]
                socket.send_fds(self._socket, [request], streams)
            finally:
                os.close(report_end)
            pid = int(reports.read(16))
            if not select([reports], [], [], timeout_s)[0]:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(arguments), timeout_s, _text(out), _text(err))
            code = os.waitstatus_to_exitcode(int(reports.read(16)))
            return subprocess.CompletedProcess(list(arguments), code, _text(out), _text(err))


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@cache
def command_server() -> CommandServer:
    """Return the server of this process, which ends with it."""
    server = CommandServer()
    atexit.register(server.close)
    return server


def _serve(requests: socket.socket) -> None:
    """Fork a process for each request; return in those, with their arguments and streams in place."""
    while True:
        request, streams, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
        with contextlib.suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not request:
            os._exit(0)
        if os.fork():
            for stream in streams:
                os.close(stream)
            continue
        requests.close()
        *standard, report = streams
        command = os.fork()
        if command:
            os.write(report, b"%-16d" % command)
            _, status = os.waitpid(command, 0)
            with contextlib.suppress(BrokenPipeError):  # the command was killed because it took too long
                os.write(report, b"%-16d" % status)
            os._exit(0)
        os.close(report)
        for number, stream in enumerate(standard):
            os.dup2(stream, number)
            os.close(stream)
        arguments, folder, environment = json.loads(request)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv[1:] = arguments
        return


if __name__ == "__main__":
    from chronik import cli

    with cli.unused_modules("hypothesis"):
        from chronik.cli import app
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        app.main(["no-such-command"])  # loads every command
        app.main(["topic", "list", "-b", NO_BROKER])  # loads what commands import only when they run
    gc.freeze()  # a collection in a forked process would copy all pages
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
    sys.exit(cli.main())
