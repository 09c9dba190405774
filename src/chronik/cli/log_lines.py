"""The node's log as whole lines, in a file whose disk may be full for a while."""

from __future__ import annotations

from collections.abc import Callable


class LogLines:
    """Passes lines to `write`, which may accept only part of a line. A truncated line is ended before the next one.

    A closed reader or a full disk must not stop a node, so lines that cannot be written are dropped.
    """

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self._is_torn = False

    def __call__(self, line: str) -> None:
        data = line.encode(errors="backslashreplace")
        if self._is_torn:
            data = b"\n" + data
        try:
            while data:
                data = data[self._write(data) :]
            self._is_torn = False
        except (OSError, ValueError):
            # How much was written is not always known; an extra empty line does no harm.
            self._is_torn = True
