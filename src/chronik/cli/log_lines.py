"""The node's log as whole lines, in a file that may be on a full disk for a while."""

from __future__ import annotations

from collections.abc import Callable


class LogLines:
    """Hands lines to `write`, which takes as many bytes as it can. One that was cut short is ended before the next.

    A reader that went away, or a disk without room, must not stop a node: what cannot be written is left out.
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
            # How much of it was taken is not always known; an empty line does no harm.
            self._is_torn = True
