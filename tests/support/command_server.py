"""The fork server for `chronik` commands."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

from tests.support.fork_server import ForkServer, serve

NO_BROKER = "127.0.0.1:1"


def run_command(
    arguments: Sequence[str], stdin: str, timeout_s: float, folder: Path | None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end; any thread may call this."""
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(stdin)
        given.seek(0)
        streams = given.fileno(), out.fileno(), err.fileno()
        command = _server().start(arguments, os.environ, streams, folder=folder)
        try:
            code = command.wait(timeout_s)
        except subprocess.TimeoutExpired:
            command.kill()
            raise subprocess.TimeoutExpired(list(arguments), timeout_s, _text(out), _text(err)) from None
        return subprocess.CompletedProcess(list(arguments), code, _text(out), _text(err))


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@cache
def _server() -> ForkServer:
    """Return the server of this process, which ends with it."""
    server = ForkServer(__name__)
    atexit.register(server.close)
    return server


def main() -> int:
    from chronik import cli

    with cli.unused_modules("hypothesis"):
        from chronik.cli import app
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        app.main(["no-such-command"])  # loads every command
        app.main(["topic", "list", "-b", NO_BROKER])  # loads what commands import only when they run
    serve()
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
