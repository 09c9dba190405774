"""What an API module is made of: its key, the versions it answers, and its handler.

A *cold* handler is a coroutine: it gets the request as an entity of kio's and returns the response's fields as a dict.
A *hot* handler (Produce, Fetch) is a plain function that reads the frame itself and answers at once, or later through
the request's `Reply`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from chronik.node.membership.internal_api import InternalKey
from chronik.observe.metrics import ApiMetrics
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

if TYPE_CHECKING:
    from chronik.node.broker import Broker
    from chronik.node.serving.connection import Connection

Buffer: TypeAlias = bytes | bytearray | memoryview
Values: TypeAlias = dict[str, Any]


class Request:
    """One request of one connection, alive until it is answered.

    `message` is kio's entity for cold APIs; `frame[body_at:]` holds the body for hot ones and is valid only during the
    handler's call, since the connection reuses its buffer.
    """

    __slots__ = (
        "api_key",
        "api_version",
        "body_at",
        "client_id",
        "connection",
        "correlation_id",
        "frame",
        "message",
        "size_bytes",
        "started_s",
    )

    def __init__(
        self,
        connection: Connection,
        api_key: int,
        api_version: int,
        correlation_id: int,
        client_id: str | None,
        frame: memoryview,
        body_at: int,
        started_s: float,
    ) -> None:
        self.connection = connection
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.frame = frame
        self.body_at = body_at
        self.size_bytes = len(frame)
        self.started_s = started_s
        self.message: Any = None

    @property
    def client_host(self) -> str:
        return self.connection.client_host


ColdHandler: TypeAlias = Callable[["Broker", Request], Awaitable[Values]]
HotHandler: TypeAlias = Callable[["Broker", Request, "Reply"], None]
ErrorValues: TypeAlias = Callable[[Request, ErrorCode], Values]


class Reply:
    """A request's place in its connection's order of responses, filled exactly once.

    Owned by the loop. `send` with buffers answers; `send_nothing` frees the place without a byte (acks=0).
    """

    __slots__ = ("_clock", "_metrics", "body", "done", "failed", "flexible_header", "request")

    def __init__(
        self, request: Request, flexible_header: bool, metrics: ApiMetrics, clock: Callable[[], float]
    ) -> None:
        self.request = request
        self.flexible_header = flexible_header
        self.body: Sequence[Buffer] | None = None
        self.done = False
        self.failed = False
        self._metrics = metrics
        self._clock = clock

    def send(self, body: Sequence[Buffer] | None) -> None:
        if self.done:
            raise RuntimeError("a request was answered twice")
        self.done = True
        self.body = body
        request = self.request
        metrics = self._metrics
        metrics.seconds.observe(self._clock() - request.started_s)
        if self.failed:
            metrics.errors += 1
        request.connection.reply_ready(self)

    def send_nothing(self) -> None:
        self.send(None)


@dataclass(frozen=True, slots=True)
class Api:
    """One API as this node answers it.

    `versions` is what ApiVersions advertises. `readable_from` is the lowest version that is really parsed, where the
    advertised minimum is lower only to please a client's feature check. `on_controller` has the server pass the whole
    request to the controller where another node is it, and wait for the outcome to reach this node's image; the handler
    then runs on the controller only.
    """

    key: ApiKey | InternalKey
    versions: tuple[int, int]
    handle: ColdHandler | None = None
    hot: HotHandler | None = None
    on_error: ErrorValues | None = None
    readable_from: int | None = None
    on_controller: bool = False

    @property
    def parsed_versions(self) -> tuple[int, int]:
        lowest = self.versions[0] if self.readable_from is None else self.readable_from
        return lowest, self.versions[1]
