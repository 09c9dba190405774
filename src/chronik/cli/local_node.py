"""A node of one's own in a child process, on free ports in a temporary folder, gone when done."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import TracebackType

from chronik.cli.errors import CliError

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
LOG_TAIL_BYTES = 2000


class LocalNode:
    """`chronik start` in a child process; use as a context."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="chronik-")
        self._log_path = os.path.join(self._folder, "node.log")
        self._process: subprocess.Popen[bytes] | None = None
        kafka, http, internal = _free_ports(3)
        self.bootstrap = f"127.0.0.1:{kafka}"
        self.http = f"127.0.0.1:{http}"
        self._internal = f"127.0.0.1:{internal}"

    def __enter__(self) -> LocalNode:
        # Settings of the caller's environment belong to another node.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CHRONIK_")}
        command = [sys.executable, "-m", "chronik.cli", "start", "--data-dir", os.path.join(self._folder, "node-1")]
        command += ["--listen", self.bootstrap, "--http", self.http, "--internal", self._internal]
        try:
            with open(self._log_path, "wb") as log:
                self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
            self._wait_until_ready(self._process)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        code = self._stop()
        tail = self._log_tail()
        self._remove()
        if kind is None and code != 0:
            raise CliError(f"the node did not stop cleanly (exit {code}); its log ends with: {tail}", 1)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(deadline_s - time.monotonic()) else b""
        if b"ready" not in line:
            raise CliError(f"the node did not start; its log ends with: {self._log_tail()}")

    def _stop(self) -> int | None:
        """Asks politely first; the exit code."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return process.returncode

    def _remove(self) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _log_tail(self) -> str:
        try:
            with open(self._log_path, "rb") as log:
                log.seek(max(0, os.path.getsize(self._log_path) - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip() or "(nothing)"
        except OSError:
            return "(no log)"


def _free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for made in sockets:
            made.bind(("127.0.0.1", 0))
        return [made.getsockname()[1] for made in sockets]
    finally:
        for made in sockets:
            made.close()
