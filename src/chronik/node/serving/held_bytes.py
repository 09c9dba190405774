"""A bound for the bytes of requests that wait outside their connection's buffer."""

from __future__ import annotations

import asyncio

from chronik.node.serving.connection import Connection


class HeldBytes:
    """Above `bytes_max`, each connection that adds bytes is held back until requests of any connection finish.

    Invariant: `bytes` is the sum of what was added and not removed. Owned by the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, bytes_max: int) -> None:
        self.bytes = 0
        self._loop = loop
        self._bytes_max = bytes_max
        self._held: dict[Connection, None] = {}

    def add(self, connection: Connection, size_bytes: int) -> None:
        self.bytes += size_bytes
        if self.bytes > self._bytes_max and connection not in self._held:
            self._held[connection] = None
            connection.hold()

    def remove(self, size_bytes: int) -> None:
        self.bytes -= size_bytes
        while self._held and self.bytes <= self._bytes_max:
            connection = next(iter(self._held))
            del self._held[connection]
            self._loop.call_soon(connection.release)

    def forget(self, connection: Connection) -> None:
        """The connection was closed."""
        self._held.pop(connection, None)
