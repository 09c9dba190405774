"""Links between nodes that can be cut: a TCP proxy for each direction in which one node connects to another.

A cut link forwards nothing and closes nothing, as when packets are dropped. Data in transit waits, new connections are
accepted and stay silent, and everything arrives late, after healing. If the other end closes, or nothing listens there,
the proxy resets the connection, as would happen without a proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

CHUNK_BYTES = 256 * 1024
CALL_TIMEOUT_S = 10.0
NO_LINGER = struct.pack("ii", 1, 0)


class Link:
    """The link from one node to another. Owned by the loop of `Links`."""

    def __init__(self, source: int, target: int, target_port: int) -> None:
        self.source = source
        self.target = target
        self.passes = asyncio.Event()
        self.passes.set()
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            _reset(writer)

    async def _serve(self, near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        self._writers.add(near)
        far: asyncio.StreamWriter | None = None
        try:
            await self.passes.wait()
            far_reader, far = await asyncio.open_connection("127.0.0.1", self._target_port, limit=CHUNK_BYTES)
            self._writers.add(far)
            for writer in (near, far):
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pumps = [
                asyncio.ensure_future(self._pump(near_reader, far)),
                asyncio.ensure_future(self._pump(far_reader, near)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            await self.passes.wait()
        except OSError:
            await self.passes.wait()
        except asyncio.CancelledError:
            pass  # the test is over; asyncio's server would log this as an error
        finally:
            for end in (near, far):
                if end is not None:
                    self._writers.discard(end)
                    _reset(end)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self.passes.wait()
                writer.write(data)
                await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()


class LoopThread:
    """An event loop in its own thread, for test clients and proxies that run beside the test."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = CALL_TIMEOUT_S) -> T:
        return self.submit(work).result(timeout_s)

    def close(self) -> None:
        """Cancel everything that runs on the loop, and end it."""

        async def cancel() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.run(cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        self._loop.close()


class Links:
    """All links of a cluster; most clusters have none."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._loop: LoopThread | None = None

    def add(self, source: int, target: int, target_port: int) -> str:
        """Return the address at which `source` reaches `target`."""

        async def make() -> int:
            self._links.append(Link(source, target, target_port))
            return await self._links[-1].listen()

        if self._loop is None:
            self._loop = LoopThread("links")
        return f"127.0.0.1:{self._loop.run(make())}"

    def cut(self, node_id: int) -> None:
        """Cut all links from and to this node."""
        self._pass_unless(lambda link: node_id in (link.source, link.target))

    def cut_pairs(self, pairs: Collection[tuple[int, int]]) -> None:
        """Cut the links between the two nodes of each pair; all other links work."""
        self._pass_unless(lambda link: (link.source, link.target) in pairs or (link.target, link.source) in pairs)

    def heal(self) -> None:
        self._pass_unless(lambda link: False)

    def _pass_unless(self, is_cut: Callable[[Link], bool]) -> None:
        async def put() -> None:
            for link in self._links:
                if is_cut(link):
                    link.passes.clear()
                else:
                    link.passes.set()

        assert self._loop is not None, "the nodes were started without links"
        self._loop.run(put())

    def close(self) -> None:
        async def close() -> None:
            for link in self._links:
                await link.close()

        if self._loop is not None:
            self._loop.run(close())
            self._loop.close()
            self._loop = None
