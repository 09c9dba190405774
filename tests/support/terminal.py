"""A command on its own terminal: what it shows there, and the keys that are pressed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Sequence
from threading import Thread
from types import TracebackType

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
CTRL_C = b"\x03"
EXIT_S_MAX = 60.0


class Terminal:
    """The command leads a session with this controlling terminal, so Ctrl-C reaches it as in a shell."""

    def __init__(self, command: Sequence[str], *, columns: int = 160, lines: int = 40) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color"},
        )
        os.close(theirs)
        self._shown = bytearray()
        self._reader = Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(EXIT_S_MAX)
        self._reader.join(EXIT_S_MAX)
        os.close(self._ours)

    @property
    def text(self) -> str:
        """Everything shown so far, without colours and cursor movements."""
        return _CONTROL.sub("", self._shown.decode(errors="replace"))

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed everywhere
            while found := os.read(self._ours, 65536):
                self._shown += found
