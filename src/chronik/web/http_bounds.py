"""Limits that keep the HTTP port responsive: on connections, on idle time and on concurrent requests.

A connection *waits* while none of its requests is being answered: it was just opened, its last response is complete, or
its next request has not fully arrived. A connection that waits too long is closed. If there are too many connections,
the one that has waited longest is closed, so idle connections never keep a request out.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from chronik.web.known_answers import KnownAnswers, Recording

CONNECTIONS_MAX = 400
REQUESTS_MAX = 200
"""Concurrent requests, including open event streams. Health checks are neither counted nor rejected."""

WAIT_S_MAX = 5.0
"""How long a connection may wait for its first request, and for the next request after a response."""

STALL_S_MAX = 30.0
"""How long a peer may leave a response unread."""


class WaitingConnections(dict["HttpConnection", float]):
    """The waiting connections, each with the time when it began to wait. Owned by the event loop.

    Invariant: the connection that has waited longest comes first.
    """

    def drop_oldest(self) -> None:
        """Close the oldest connection whose response was sent completely, or the oldest of all if there is none."""
        silent = next((connection for connection in self if connection.is_sent), None)
        oldest = silent or next(iter(self), None)
        if oldest is not None:
            del self[oldest]
            oldest.transport.abort()

    def drop_late(self, now_s: float) -> None:
        """Close connections that have waited too long. Do not cut off a response that is still being read."""
        while self:
            connection, since_s = next(iter(self.items()))
            if now_s - since_s < WAIT_S_MAX:
                return
            del self[connection]
            if connection.is_sent or connection.is_given_up:
                connection.transport.abort()
            else:
                connection.give_up()
                self[connection] = now_s


class HttpConnection(H11Protocol):
    """uvicorn's connection. It also tracks whether it waits, and aborts if the peer does not read."""

    def __init__(self, waiting: WaitingConnections, known: KnownAnswers, **more: Any) -> None:
        super().__init__(**more)
        self.is_given_up = False
        self._waiting = waiting
        self._known = known
        self._recording: Recording | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._note()
        if len(self.connections) > CONNECTIONS_MAX:
            self._waiting.drop_oldest()

    def data_received(self, data: bytes) -> None:
        answer = self._known.find(self, data)
        if answer is not None:
            # `WaitingConnections` has the limit on idle time, without a timer for each answer.
            self._unset_keepalive_if_required()
            self.transport.write(answer)
            self._waiting.pop(self, None)
            self._note()
            return
        is_next = self.cycle is None or self.cycle.response_complete
        super().data_received(data)
        if is_next:
            self._recording = self._known.record(self, data)
        self._note()

    def on_response_complete(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            self._known.keep(recording, self)
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        self._read_again()
        super().connection_lost(exc)

    def _note(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._waiting.setdefault(self, self.loop.time())
        else:
            self._waiting.pop(self, None)

    # -- unread responses ----------------------------------------------------------------------------------------------

    @property
    def is_sent(self) -> bool:
        """Return whether the operating system has accepted everything that was written."""
        return not self.transport.get_write_buffer_size()

    def give_up(self) -> None:
        """Close the connection once the unsent data is written."""
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
    """The application, limited to REQUESTS_MAX concurrent requests. Health checks bypass the limit."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in ("/healthz", "/readyz"):
            await self._app(scope, receive, send)
            return
        if self._running >= REQUESTS_MAX:
            line = f"{self._running} requests are in progress, the limit: retry\n"
            await PlainTextResponse(line, 503, headers={"connection": "close"})(scope, receive, send)
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
