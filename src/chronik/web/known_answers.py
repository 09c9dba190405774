"""Answers of the schema registry's lookups that a connection sends again without the application.

An answer is known by all bytes of its request, and holds while the node's registry has the state from which the
application gave it. A node that requires a log-in knows none: there, answers depend on rights and on the time. Only
answers with status 200 are known: before other ones, the registry asks its leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from chronik.schemas.state import State
from chronik.web.node_view import NodeView

REQUEST_BYTES_MAX = 2 * 1024
ANSWER_BYTES_MAX = 64 * 1024
BYTES_MAX = 8 * 1024 * 1024
"""Requests and answers. Beyond this, the answer that was added first is dropped."""
OVERHEAD_BYTES = 400
"""What an answer takes beside its bytes."""
VIEW = "schemas_view"
"""In the state of a request's scope: from what the registry has answered it."""
DATE = b"\r\ndate: "

View = tuple[State, int]
Key = tuple[object, bytes]


def view_of(node: NodeView) -> View | None:
    """Return what lookups are answered from, or None if the application has to find out."""
    if node.security.http_login or not node.is_ready:
        return None
    registry = node.schemas
    return None if registry is None else registry.view()


class KnownAnswers:
    """Owned by the event loop. Invariant: all answers are from `_view`, and take at most BYTES_MAX."""

    def __init__(self, current: Callable[[], View | None]) -> None:
        self._current = current
        self._view: View | None = None
        self._answers: dict[Key, tuple[bytes, bytes]] = {}
        """What comes before and after the date. The check of the Host header depends on the node's address, too."""
        self._size_bytes = 0

    def find(self, connection: H11Protocol, request: bytes) -> bytes | None:
        """Return the answer to what a connection has received, or None."""
        answer = self._answers.get((connection.server, request))
        if answer is None or not _is_between_requests(connection):
            return None
        view, date = self._current(), _date(connection.server_state.default_headers)
        return None if view is None or view != self._view else date.join(answer)

    def record(self, connection: H11Protocol, request: bytes) -> Recording | None:
        """Record the answer, if the connection has just received a whole request that can come again."""
        is_whole = request.startswith(b"GET /") and request.find(b"\r\n\r\n") == len(request) - 4
        if not is_whole or len(request) > REQUEST_BYTES_MAX or connection.conn.their_state is not h11.DONE:
            return None
        if not _date(connection.cycle.default_headers):
            return None
        return Recording(connection, request)

    def keep(self, recording: Recording, connection: H11Protocol) -> None:
        """Keep a complete answer, if the registry gave it and the connection stays open."""
        view, before, after = recording.view, *recording.around_date()
        if view is None or not after or connection.conn.our_state is not h11.DONE:
            return
        if view != self._view:
            self._answers.clear()
            self._view, self._size_bytes = view, 0
        size_bytes = _size_bytes(recording.key, (before, after))
        if size_bytes > ANSWER_BYTES_MAX or recording.key in self._answers:
            return
        self._answers[recording.key] = before, after
        self._size_bytes += size_bytes
        while self._size_bytes > BYTES_MAX:
            oldest = next(iter(self._answers))
            self._size_bytes -= _size_bytes(oldest, self._answers.pop(oldest))


class Recording:
    """The transport of one answer, which keeps what passes through it, up to a bound: event streams never end."""

    def __init__(self, connection: H11Protocol, request: bytes) -> None:
        self.key: Key = connection.server, request
        self._scope: dict[str, Any] = connection.scope  # type: ignore[assignment]
        self._date = _date(connection.cycle.default_headers)
        self._transport: asyncio.Transport = connection.transport
        self._parts: list[bytes] = []
        self._left_bytes = ANSWER_BYTES_MAX
        connection.cycle.transport = self  # type: ignore[assignment]

    @property
    def view(self) -> View | None:
        view: View | None = self._scope["state"].get(VIEW)
        return view

    def around_date(self) -> tuple[bytes, bytes]:
        """Return what was written before and after the date; nothing after it if there is none."""
        before, line, after = b"".join(self._parts).partition(DATE + self._date)
        return before + DATE, after if line else b""

    def write(self, data: bytes) -> None:
        self._left_bytes -= len(data)
        if self._left_bytes >= 0:
            self._parts.append(data)
        else:
            self._parts.clear()
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()


def _is_between_requests(connection: H11Protocol) -> bool:
    """Return whether the connection is idle: nothing of a request is buffered, and the peer reads what it gets."""
    conn = connection.conn
    is_idle = conn.our_state is h11.IDLE and conn.their_state is h11.IDLE and not conn.trailing_data[0]
    return is_idle and not connection.flow.write_paused


def _date(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the date that uvicorn sends, empty before it has one."""
    return next((value for name, value in headers if name == b"date"), b"")


def _size_bytes(key: Key, answer: tuple[bytes, bytes]) -> int:
    return len(key[1]) + len(answer[0]) + len(answer[1]) + OVERHEAD_BYTES
