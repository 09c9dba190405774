"""`chronik start --processes N`: N nodes of one machine, each in a process, because a node uses about one core.

The supervisor starts the nodes, restarts one that ends, and stops all of them cleanly at the first SIGTERM or SIGINT; a
second one kills them. The nodes share its standard output and error: one stream of log lines, each with its node's id.
If the supervisor dies, the kernel sends the nodes SIGTERM (Linux).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from chronik.cli.errors import CANNOT, say

if TYPE_CHECKING:
    from chronik.node.config import NodeConfig

PROCESS_FLAG = "--process"
BACKOFF_S_MIN, BACKOFF_S_MAX = 1.0, 30.0
STEADY_S = 60.0
"""After a node that ran this long, the delay begins again at its minimum."""
CORES_PER_PROCESS_MIN = 2
"""With fewer, nodes are not bound to cores: a sync in a thread would wait for the event loop on the only core."""
PR_SET_PDEATHSIG = 1


def supervise(config: NodeConfig, arguments: Sequence[str]) -> int:
    """Run the nodes until a signal comes. `arguments` are those of `chronik start`."""
    _prepare_secret(config)
    return asyncio.run(Supervisor(config, arguments).run())


def _prepare_secret(config: NodeConfig) -> None:
    """Create the secret of the nodes, if there is none and no other machine has to have the same."""
    from chronik.node.membership.cluster_secret import SECRET_VARIABLE, make_secret
    from chronik.node.process_config import machine_folder, machine_secret_file
    from chronik.storage.disk import RealDisk

    path = machine_secret_file(config)
    if config.peers or config.cluster_secret_file or os.environ.get(SECRET_VARIABLE) or os.path.exists(path):
        return
    os.makedirs(machine_folder(config), exist_ok=True)
    make_secret(RealDisk(), path, random.SystemRandom())


class Supervisor:
    """Owns the processes of one machine's nodes."""

    def __init__(self, config: NodeConfig, arguments: Sequence[str]) -> None:
        self._config = config
        self._command = [sys.executable, "-m", "chronik.cli", "start", *arguments]
        self._stopping = asyncio.Event()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._exit_code = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        await asyncio.gather(*(self._keep(number) for number in range(self._config.processes)))
        return self._exit_code

    def _on_signal(self) -> None:
        self._send(signal.SIGKILL if self._stopping.is_set() else signal.SIGTERM)
        self._stopping.set()

    def _send(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, number: int) -> None:
        """Run one node, and start it again whenever it ends."""
        loop, node_id, backoff_s, is_first = asyncio.get_running_loop(), self._config.node_id + number, 0.0, True
        while not self._stopping.is_set():
            started_s = loop.time()
            try:
                code = await self._run_node(number)
                reason = f"ended (exit code {code})"
            except OSError as error:  # No memory, or too many processes: that may pass.
                code, reason = 0, f"cannot be started ({error.strerror})"
            if self._stopping.is_set():
                if code not in (0, -signal.SIGKILL):
                    self._exit_code = 1
                return
            if is_first and code == CANNOT:
                # A wrong setting or a port that is taken: the node has printed the reason.
                say(f"node {node_id} cannot start: the other nodes of this machine are stopped")
                self._exit_code = CANNOT
                self._on_signal()
                return
            is_first = False
            backoff_s = 0.0 if loop.time() - started_s > STEADY_S else backoff_s
            backoff_s = min(BACKOFF_S_MAX, max(BACKOFF_S_MIN, 2 * backoff_s))
            say(f"node {node_id} {reason}: it starts again in {backoff_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)

    async def _run_node(self, number: int) -> int:
        """Run a node until it ends; return its exit code. Raises OSError if there can be no further process."""
        # In a group of its own: otherwise Ctrl-C on a terminal reaches it too, and it gets two signals.
        process = await asyncio.create_subprocess_exec(
            *self._command, PROCESS_FLAG, str(number), process_group=0, stdin=asyncio.subprocess.DEVNULL
        )
        self._running[number] = process
        if self._stopping.is_set():
            process.terminate()
        try:
            return await process.wait()
        finally:
            del self._running[number]


def become_process(config: NodeConfig, number: int) -> None:
    """Prepare this process to be one of a machine's nodes: it stops if its supervisor dies, and has its own cores."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        share = cores_of(sorted(os.sched_getaffinity(0)), config.processes, number)
        if share:
            os.sched_setaffinity(0, share)


def cores_of(cores: Sequence[int], processes: int, number: int) -> Sequence[int]:
    """Return a process's share of the cores; none if there are too few to divide them."""
    if len(cores) < CORES_PER_PROCESS_MIN * processes:
        return ()
    return cores[number * len(cores) // processes : (number + 1) * len(cores) // processes]
