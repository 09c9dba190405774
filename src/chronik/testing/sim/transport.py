"""One end of a simulated connection: an `asyncio.Transport` over a window of bytes in flight.

Written data goes to the kernel while the window has room, and waits in the transport otherwise, as with asyncio and
uvloop. Like uvloop's transport, it keeps references to the caller's buffers: if the caller changes a buffer before it
is sent, that is a violation and ends the run.
"""

from __future__ import annotations

import asyncio
import errno
import os
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chronik.storage.disk import Buffer

if TYPE_CHECKING:
    from chronik.testing.sim.host import Process
    from chronik.testing.sim.network import Network

WINDOW_BYTES = 128 * 1024
SEGMENT_BYTES_MAX = 64 * 1024
HIGH_WATER_BYTES = 64 * 1024
SHORT_SHARE = 0.1
"""The share of segments and reads that are shorter than possible."""


class SimTransport(asyncio.Transport):
    """Invariant: `in_flight_bytes` is what the kernel has taken and the other end has not yet read."""

    def __init__(self, network: Network, process: Process, local: tuple[str, int], remote: tuple[str, int]) -> None:
        super().__init__({"sockname": local, "peername": remote})
        self.network = network
        self.process = process
        self.world = process.world
        self.serial = process.world.next_serial()
        self.peer: SimTransport | None = None
        self.in_flight_bytes = 0
        self.is_gone = False
        """The socket is closed: the kernel answers segments with a reset."""
        self.is_silenced = False
        self._loop = process.loop
        self._random = network.random
        self._protocol: asyncio.BufferedProtocol | None = None
        self._unsent: deque[tuple[memoryview, bytes]] = deque()
        self._unsent_bytes = 0
        self._unsent_at = 0
        self._high_bytes = HIGH_WATER_BYTES
        self._low_bytes = HIGH_WATER_BYTES // 4
        self._is_write_paused = False
        self._unread: deque[bytes] = deque()
        self._has_end = False
        self._end_seen = False
        self._reset: OSError | None = None
        self._is_reading = True
        self._is_read_scheduled = False
        self._is_closing = False
        self._is_lost = False
        self._last_arrival_s = 0.0
        network.opened(self)

    def attach(self, protocol: asyncio.BaseProtocol) -> None:
        """Connect the transport to its protocol; runs in an iteration of its loop."""
        assert isinstance(protocol, asyncio.BufferedProtocol), "no other kind is simulated"
        self._protocol = protocol
        protocol.connection_made(self)
        self._schedule_read()

    # -- asyncio interface: reading ------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._is_reading = True
            self._schedule_read()

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def _schedule_read(self) -> None:
        is_due = self._unread or (self._has_end and not self._end_seen) or self._reset is not None
        if is_due and self.is_reading() and self._protocol is not None and not self._is_read_scheduled:
            self._is_read_scheduled = True
            self._loop.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        self._is_read_scheduled = False
        protocol = self._protocol
        if protocol is None or not self.is_reading() or self._is_lost:
            return
        if self._unread:
            self._deliver(protocol)
            self._schedule_read()
        elif self._reset is not None:
            self._lose(self._reset)
        elif self._has_end and not self._end_seen:
            self._end_seen = True
            if not protocol.eof_received():
                self.close()

    def _deliver(self, protocol: asyncio.BufferedProtocol) -> None:
        """Do one read(2): deliver what is there, as far as the protocol has room, and sometimes less."""
        data = b"".join(self._unread)
        self._unread.clear()
        size = len(data)
        if size > 1 and self._random.random() < SHORT_SHARE:
            size = self._random.randint(1, size)
        buffer = memoryview(protocol.get_buffer(-1))
        size = min(size, len(buffer))
        buffer[:size] = data[:size]
        if size < len(data):
            self._unread.append(data[size:])
        self.world.trace("read", self.serial, zlib.crc32(data[:size]))
        if self.peer is not None:
            peer = self.peer
            self.network.carry(self.process.host, peer.process.host, lambda: peer.acknowledged(size))
        protocol.buffer_updated(size)

    # -- asyncio interface: writing ------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        if self._is_closing or self._is_lost or not len(data):
            return
        if self._reset is not None:
            self._loop.call_soon(self._lose, self._reset)
            return
        view = memoryview(data).cast("B")
        self._unsent.append((view, bytes(view)))
        self._unsent_bytes += len(view)
        self._send()
        if self._unsent_bytes > self._high_bytes and not self._is_write_paused:
            self._is_write_paused = True
            if self._protocol is not None:
                self._protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = high if high is not None else (4 * low if low is not None else HIGH_WATER_BYTES)
        self._low_bytes = low if low is not None else self._high_bytes // 4

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def _send(self) -> None:
        """Pass as much to the kernel as the window allows."""
        while self._unsent and self.in_flight_bytes < WINDOW_BYTES:
            view, written = self._unsent[0]
            left = len(written) - self._unsent_at
            size = min(left, SEGMENT_BYTES_MAX, WINDOW_BYTES - self.in_flight_bytes)
            if size > 1 and self._random.random() < SHORT_SHARE:
                size = self._random.randint(1, size)
            segment = written[self._unsent_at : self._unsent_at + size]
            if view[self._unsent_at : self._unsent_at + size] != segment:
                self.world.violated(f"{self.process.name} changed a buffer after it was written to a transport")
            self._unsent_at += size
            self._unsent_bytes -= size
            if self._unsent_at == len(written):
                self._unsent.popleft()
                self._unsent_at = 0
            self.in_flight_bytes += size
            self._carry(SimTransport.arrived, segment)

    def _writable(self) -> None:
        """Resume writing after the window has room again; runs in an iteration."""
        if self._is_lost:
            return
        self._send()
        if self._is_write_paused and self._unsent_bytes <= self._low_bytes:
            self._is_write_paused = False
            if self._protocol is not None:
                self._protocol.resume_writing()
        if not self._unsent and self._is_closing:
            self._loop.call_soon(self._lose, None)

    # -- asyncio interface: closing ------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if not self._unsent:
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = self._unsent_at = 0
        self._is_closing = True
        self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._unsent.clear()
        self._unsent_bytes = self._unsent_at = 0
        if self._protocol is not None:
            self._protocol.connection_lost(error)
        self.close_socket()

    # -- kernel --------------------------------------------------------------------------------------------------------

    def _carry(self, arrive: Callable[..., None], *args: Any) -> None:
        """Call `arrive` with the other end when the packet gets there; a silenced connection carries nothing."""
        peer = self.peer
        if peer is not None and not self.is_silenced:
            self._last_arrival_s = self.network.carry(
                self.process.host, peer.process.host, lambda: arrive(peer, *args), self._last_arrival_s
            )

    def arrived(self, segment: bytes) -> None:
        if not self.process.host.is_powered:
            return
        if self.is_gone:
            self._carry(SimTransport.arrived_reset)
            return
        self.world.trace("segment", self.serial, zlib.crc32(segment))
        self._unread.append(segment)
        self._schedule_read()
        self.process.reached_outside("segment.arrived")

    def arrived_end(self) -> None:
        if not self.is_gone:
            self._has_end = True
            self._schedule_read()

    def arrived_reset(self) -> None:
        if not self.is_gone and self._reset is None:
            self._reset = ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            if self._unsent:
                # A protocol that waits to send is notified, whether or not it reads.
                self._loop.call_soon_threadsafe(self._lose, self._reset)
            else:
                self._schedule_read()

    def acknowledged(self, size: int) -> None:
        """Free the window: the other end has read this much."""
        if self.is_gone:
            return
        self.in_flight_bytes -= size
        if self._unsent or self._is_write_paused:
            self._loop.call_soon_threadsafe(self._writable)

    def close_socket(self) -> None:
        """close(2): the peer reads to the end, or gets a reset if this end left data unread."""
        if self.is_gone:
            return
        self.is_gone = True
        self.network.closed(self)
        if self._unread:
            self._carry(SimTransport.arrived_reset)
        elif self._reset is None:
            self._carry(SimTransport.arrived_end)

    def vanish(self) -> None:
        """Close this end without notice to the peer: its machine lost power."""
        self.is_gone = True
        self.network.closed(self)
