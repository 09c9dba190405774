"""Starts nodes as forks of `node_server`: processes with the signals, exit codes and command lines of their own."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.slow_node import SLOW_NODE
from tests.support.tested_build import tested_environment

from chronik.local.node_process import spawn_process
from chronik.testing.tied_node import TIED_NODE, TIED_TO

AnyProcess: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"
CAN_FORK = sys.platform == "linux"


def start_node(
    arguments: Sequence[str], environment: Mapping[str, str], log: int, folder: Path, *, runs_checkout: bool = False
) -> AnyProcess:
    """Run `chronik start` with these arguments in its own session; `log` receives its output.

    It is that of the tested build, or of the checkout in any case.
    """
    command = [*TIED_NODE, *arguments]
    with open(os.devnull, "rb") as nothing:
        if CAN_FORK:
            streams = nothing.fileno(), log, log
            server = _server(runs_checkout)
            return server.start(command[1:], environment, streams, folder=folder, new_session=True)
        build = {} if runs_checkout else tested_environment()
        tied = {**environment, **build, TIED_TO: str(os.getpid())}  # it may start after this process has died
        return subprocess.Popen(
            command, stdin=nothing, stdout=log, stderr=log, env=tied, cwd=folder, start_new_session=True
        )


def spawn_node(command: Sequence[str], environment: Mapping[str, str], log: int) -> int:
    """Start a node of a cluster and return its process id: forked, unless its command is not one of a plain node."""
    if not (CAN_FORK and any(tuple(command[: len(known)]) == known for known in (TIED_NODE, SLOW_NODE))):
        return spawn_process(command, {**environment, **tested_environment()}, log)
    with open(os.devnull, "r+b") as nothing:
        streams = nothing.fileno(), nothing.fileno(), log
        node = _server(False).start(command[1:], environment, streams, new_session=True)
    node.detach()
    return node.pid


@cache
def _server(runs_checkout: bool) -> ForkServer:
    """Return the server of this process, which ends with it, as do its nodes."""
    server = ForkServer("tests.support.node_server", {} if runs_checkout else tested_environment())
    atexit.register(server.close)
    return server
