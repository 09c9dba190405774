"""One connection without a network: the protocol that a listener creates, its input bytes, and what it writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from chronik.node.serving.connection import Connection
from chronik.storage.disk import Buffer

CLIENT = ("10.0.9.9", 40_000)


class FuzzTransport(asyncio.Transport):
    """The transport of one connection. Delivers its data in pieces, as fast as the protocol accepts them.

    `is_lost` is set once the protocol was notified of the loss, `was_closed` once the node has closed the connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], asyncio.BaseProtocol],
        data: bytes,
        *,
        piece_bytes: int = 0,
        ends_at_once: bool = False,
    ) -> None:
        super().__init__({"peername": CLIENT, "sockname": CLIENT})
        self.written = bytearray()
        self.is_lost = False
        self.was_closed = False
        """Whether the node closed the connection, including in response to the end of input."""
        self._loop = loop
        self._factory = factory
        self._data = data
        self._at = 0
        self._piece_bytes = piece_bytes or len(data)
        self._ends_at_once = ends_at_once
        self.end_was_seen = False
        self._is_reading = True
        self._is_due = False
        self.protocol: Connection
        loop.call_soon_threadsafe(self._open)

    @property
    def is_settled(self) -> bool:
        """Whether nothing more happens by itself: all input was read and answered, or the connection has ended."""
        if self.is_lost:
            return True
        all_read = self._at >= len(self._data) and (self.end_was_seen or not self._ends_at_once)
        return hasattr(self, "protocol") and all_read and self._is_reading and not self.protocol.has_unanswered

    def send(self, data: bytes) -> None:
        """Send more data on the same connection."""
        self._data = data
        self._at = 0
        self._piece_bytes = len(data)
        self._loop.call_soon_threadsafe(self._schedule)

    def lose(self) -> None:
        """Disconnect the client abruptly."""
        self._loop.call_soon_threadsafe(self._lose, ConnectionResetError("the client went away"))

    def _open(self) -> None:
        protocol = self._factory()
        assert isinstance(protocol, Connection)
        self.protocol = protocol
        protocol.connection_made(self)
        self._read()

    def _schedule(self) -> None:
        is_more = self._at < len(self._data) or (self._ends_at_once and not self.end_was_seen)
        if is_more and self._is_reading and not self._is_due and not self.is_lost and not self.was_closed:
            self._is_due = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._is_due = False
        if not self._is_reading or self.is_lost or self.was_closed:
            return
        if self._at < len(self._data):
            buffer = self.protocol.get_buffer(-1)
            size = min(self._piece_bytes, len(self._data) - self._at, len(buffer))
            buffer[:size] = self._data[self._at : self._at + size]
            self._at += size
            self.protocol.buffer_updated(size)
            self._schedule()
        elif self._ends_at_once and not self.end_was_seen:
            self.end_was_seen = True
            if not self.protocol.eof_received():
                self.close()

    def _lose(self, error: Exception | None) -> None:
        if not self.is_lost:
            self.is_lost = True
            self.protocol.connection_lost(error)

    # -- asyncio.Transport ---------------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        if not self.is_lost and not self.was_closed:
            self.written += data

    def close(self) -> None:
        if not self.was_closed:
            self.was_closed = True
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self.was_closed

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._schedule()

    def is_reading(self) -> bool:
        return self._is_reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignore the limits: every write is accepted at once."""

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return CLIENT if name in ("peername", "sockname") else default
