"""Serve the HTTP application on the node's event loop. The process that runs the node handles signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from chronik.node.serving.tls import TlsAcceptor
from chronik.web.http_bounds import BoundedApp, HttpConnection, WaitingConnections


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that a port in use is detected before anything starts."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, proto, _, address = found[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """uvicorn without signal handlers. It signals when it listens, and closes connections that wait too long."""

    def __init__(self, config: uvicorn.Config, waiting: WaitingConnections) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._waiting = waiting

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def on_tick(self, counter: int) -> bool:
        self._waiting.drop_late(asyncio.get_running_loop().time())
        return await super().on_tick(counter)


class WebServer:
    """One HTTP listener. Owned by the event loop that started it."""

    def __init__(self, app: Starlette, listener: socket.socket, tls: TlsAcceptor | None = None) -> None:
        """With `tls`, the listener speaks HTTPS only."""
        self._socket = listener
        self._close_app = app.state.close
        waiting = WaitingConnections()

        def make(**more: Any) -> asyncio.BaseProtocol:
            connection = HttpConnection(waiting, app.state.known, **more)
            return connection if tls is None else tls.accept_whole_reads(connection)

        self._server = _Server(
            uvicorn.Config(
                BoundedApp(app),
                http=cast(Any, make),
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # A client must not choose the address that its rights and its failed log-ins are checked for.
                proxy_headers=False,
                backlog=128,
                timeout_graceful_shutdown=2,
            ),
            waiting,
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait([self._serving, listening], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            listening.cancel()
            await self._serving
            raise RuntimeError("the HTTP server ended while it started")

    async def stop(self) -> None:
        if self._serving is None:
            self._socket.close()
            return
        # End the open event streams first; otherwise the server would wait for them.
        await self._close_app()
        self._server.should_exit = True
        await self._serving
