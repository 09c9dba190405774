"""What keeps the HTTP port answerable: bounds on connections, on how long one may be silent, and on requests at a time.

A connection *waits* while it has no request that is being answered: it was just opened, its last answer is out, or its
request has not arrived whole. A connection that waits too long is closed. When there are too many connections, the one
that has waited longest makes room, so silent connections never keep a request out.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX = 400
REQUESTS_MAX = 200
"""Requests that are answered at a time, open event streams included. Health checks do not count and are not refused."""

WAIT_S_MAX = 5.0
"""How long a connection may wait: for its first request, and for the next one after an answer."""

STALL_S_MAX = 30.0
"""How long a peer may leave an answer unread."""

HEALTH_CHECKS = ("/healthz", "/readyz")


class WaitingConnections:
    """The connections that wait, each with the time since when. Owned by the loop.

    Invariant: the one that has waited longest comes first.
    """

    def __init__(self) -> None:
        self._since_s: dict[HttpConnection, float] = {}

    def add(self, connection: HttpConnection, now_s: float) -> None:
        self._since_s.setdefault(connection, now_s)

    def remove(self, connection: HttpConnection) -> None:
        self._since_s.pop(connection, None)

    def drop_oldest(self) -> None:
        """Make room for a new connection; an answer that is still being read is cut short only if there is no other."""
        silent = next((connection for connection in self._since_s if connection.is_read), None)
        oldest = silent or next(iter(self._since_s), None)
        if oldest is not None:
            self._end(oldest)

    def drop_late(self, now_s: float) -> None:
        """End the connections that have waited too long. An answer that is still being read is not cut short."""
        while self._since_s:
            connection, since_s = next(iter(self._since_s.items()))
            if now_s - since_s < WAIT_S_MAX:
                return
            if connection.is_read or connection.is_given_up:
                self._end(connection)
            else:
                connection.give_up()
                self.remove(connection)
                self.add(connection, now_s)

    def _end(self, connection: HttpConnection) -> None:
        self.remove(connection)
        connection.transport.abort()


class HttpConnection(H11Protocol):
    """uvicorn's connection, which says whether it waits and gives up a peer that does not read."""

    def __init__(self, waiting: WaitingConnections, **more: Any) -> None:
        super().__init__(**more)
        self.is_given_up = False
        self._waiting = waiting
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._note()
        if len(self.connections) > CONNECTIONS_MAX:
            self._waiting.drop_oldest()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.remove(self)
        self._read_again()
        super().connection_lost(exc)

    def _note(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._waiting.add(self, self.loop.time())
        else:
            self._waiting.remove(self)

    # -- unread answers ------------------------------------------------------------------------------------------------

    @property
    def is_read(self) -> bool:
        """Whether the peer's system has taken all that was sent."""
        return not self.transport.get_write_buffer_size()

    def give_up(self) -> None:
        """Close after what is unsent."""
        self.is_given_up = not self.flow.write_paused
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(STALL_S_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        self._read_again()
        super().resume_writing()

    def _read_again(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class BoundedApp:
    """The application, with REQUESTS_MAX requests at a time; health checks have room of their own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH_CHECKS:
            await self._app(scope, receive, send)
            return
        if self._running >= REQUESTS_MAX:
            line = f"{self._running} requests are being answered, which is the limit: try again\n"
            await PlainTextResponse(line, 503, headers={"connection": "close"})(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
