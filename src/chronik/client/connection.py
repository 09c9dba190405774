"""One connection to one broker: pipelined requests, responses matched by correlation id.

frame   size int32, then a response header (correlation id int32, tagged fields if flexible) and a body
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from ssl import SSLContext, SSLError
from struct import Struct
from typing import Any, Protocol, cast

from chronik import __version__
from chronik.client.errors import (
    BadResponse,
    ConnectionLost,
    LostAtFirstRequest,
    Refused,
    RequestTimedOut,
    TlsFailed,
    Unreachable,
    UnsupportedByBroker,
    WrongListener,
)
from chronik.client.tls_transport import TlsTransport, WholeReads, connect_tls, tls_failure
from chronik.wire import frames, messages
from chronik.wire.api import ApiKey, known_versions, response_header_is_flexible
from chronik.wire.errors import ErrorCode, MalformedRequest
from chronik.wire.primitives import skip_tags

_INT16 = Struct(">h")
_INT32 = Struct(">i")
_SIZE_BYTES = 4
JOIN_BYTES_MAX = 64 * 1024
_TLS_RECORDS = (0x1503, 0x1603)
"""The first two bytes of a TLS alert and of a TLS handshake message: larger than any size of a response."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one connection, so that a slow or hostile broker cannot exhaust memory."""

    in_flight_requests_max: int = 100
    response_bytes_max: int = 256 * 1024 * 1024
    receive_buffer_bytes: int = 64 * 1024


class Connection(asyncio.BufferedProtocol):
    """A connected socket with negotiated API versions. Owned by the loop it was opened on.

    The first request of a turn of the loop is written at once, and later ones of the turn together at its end: a node
    forwards many batches in a turn, and each write is a system call here and a read there.

    Invariant: each id in `_waiting` was sent and not yet answered; when the connection ends, all of them fail.
    `_joined` holds less than JOIN_BYTES_MAX, and is empty between turns of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, client_id: str, limits: ConnectionLimits) -> None:
        self.name = name
        self.features: dict[str, int] = {}
        """The levels of the features that the cluster has finalized (KIP-584)."""
        self._loop = loop
        self._client_id = client_id
        self._limits = limits
        self._versions: dict[int, tuple[int, int]] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._closed: Exception | None = None
        self._ended = asyncio.Event()
        self._correlation_id = 0
        self._answered = 0
        self._waiting: dict[int, tuple[asyncio.Future[memoryview], int, int]] = {}
        self._request_slots = asyncio.Semaphore(limits.in_flight_requests_max)
        self._writable = asyncio.Event()
        self._writable.set()
        self._released = asyncio.Event()
        self._released.set()
        self._scratch = bytearray(limits.receive_buffer_bytes)
        self._scratch_filled = 0
        self._frame: bytearray | None = None
        self._frame_filled = 0
        self._joined: list[bytes] = []
        self._joined_bytes = 0
        self._has_written = False
        """Whether a request was written in this turn of the loop."""

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        client_id: str = "chronik",
        timeout_s: float = 10.0,
        limits: ConnectionLimits | None = None,
        ssl: SSLContext | None = None,
        authenticate: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> Connection:
        """Connect and request the broker's API versions. Raises Unreachable, or ConnectionLost during the handshake.

        With `ssl` the connection is encrypted, and the broker's certificate verified for `host` as the context says; a
        failed TLS handshake raises TlsFailed.
        `authenticate` runs first: it may send what the broker requires before it answers other requests.
        """
        loop = asyncio.get_running_loop()
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        connection = cls(loop, name, client_id, limits or ConnectionLimits())
        try:
            async with asyncio.timeout(timeout_s):
                if ssl is None:
                    await loop.create_connection(lambda: connection, host, port)
                else:
                    await connect_tls(loop, connection, ssl, host, port)
        except SSLError as error:
            raise TlsFailed(f"cannot connect to {name} by TLS: {tls_failure(error)}") from error
        except TimeoutError:
            raise Unreachable(f"no connection to {name} within {timeout_s:g} s") from None
        except ConnectionRefusedError as error:
            raise Refused(f"cannot connect to {name}: {_reason(error)}") from None
        except OSError as error:
            # The cause is for callers that know the settings which explain a failed TLS handshake.
            raise Unreachable(f"cannot connect to {name}: {_reason(error)}") from error
        try:
            if authenticate is not None:
                await authenticate(connection)
            await connection._negotiate(timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    @property
    def is_writable(self) -> bool:
        """Whether the socket accepts more bytes now."""
        return self._closed is None and self._writable.is_set()

    async def wait_closed(self) -> Exception:
        """Wait until the connection has ended and return the reason."""
        await self._ended.wait()
        assert self._closed is not None
        return self._closed

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def version(self, key: ApiKey, at_most: int | None = None) -> int:
        """Return the newest version of an API that both sides support. Raises UnsupportedByBroker."""
        ours = known_versions(key)
        theirs = self._versions.get(key)
        if theirs is not None and ours:
            newest = min(ours[-1], theirs[1], ours[-1] if at_most is None else at_most)
            if newest >= max(ours[0], theirs[0]):
                return newest
        raise UnsupportedByBroker(f"{self.name} does not support {key.name}: it needs another broker version")

    def supports(self, key: ApiKey, version: int = 0) -> bool:
        low, high = self._versions.get(key, (0, -1))
        return low <= version <= high

    async def call(
        self, key: ApiKey, values: Mapping[str, Any], *, timeout_s: float = 30.0, at_most: int | None = None
    ) -> Any:
        """Send one request, given by field names, and return its response as kio's entity."""
        version = self.version(key, at_most)
        body = messages.write_request(key, version, values)
        response = bytes(await self.request(key, version, body, timeout_s=timeout_s))
        try:
            return messages.read_response(key, version, response)
        except MalformedRequest as error:
            raise BadResponse(f"{self.name} sent a response that does not parse: {error}") from None

    async def request(
        self, key: int, version: int, body: bytes | Sequence[bytes | memoryview], *, timeout_s: float = 30.0
    ) -> memoryview:
        """Send an encoded body and wait for the response body, which has its own buffer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._request_slots.acquire()
                try:
                    await self._released.wait()
                    await self._writable.wait()
                    return await self.send(key, version, body)
                finally:
                    self._request_slots.release()
        except TimeoutError:
            error = RequestTimedOut(f"{self.name} did not answer within {timeout_s:g} s")
            self._end(error)
            raise error from None

    def send(self, key: int, version: int, body: bytes | Sequence[bytes | memoryview]) -> asyncio.Future[memoryview]:
        """Send at once, without the in-flight limit or a deadline: for callers that bound their own pipeline."""
        future: asyncio.Future[memoryview] = self._loop.create_future()
        if self._closed is not None or self._transport is None:
            future.set_exception(self._closed or ConnectionLost(f"{self.name} is not connected"))
            return future
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        self._waiting[self._correlation_id] = (future, key, version)
        self._write(key, version, body)
        return future

    def send_unanswered(self, key: int, version: int, body: bytes | Sequence[bytes | memoryview]) -> None:
        """Send a request without a response: produce with acks=0."""
        if self._closed is not None or self._transport is None:
            raise self._closed or ConnectionLost(f"{self.name} is not connected")
        self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        self._write(key, version, body)

    def hold(self) -> None:
        """Delay requests until `release`: a broker accepts only SASL requests during an authentication.

        `send` is not delayed.
        """
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    async def drained(self) -> None:
        """Wait until the socket accepts more bytes."""
        await self._writable.wait()
        if self._closed is not None:
            raise self._closed

    def hand_over(self, protocol: asyncio.Protocol) -> None:
        """Connect another protocol to the socket, for a tool that frames its requests itself. Nothing may be in flight.

        This connection counts as closed from then on.
        """
        transport = cast(asyncio.Transport, self._transport)
        if self._waiting:
            raise RuntimeError("a connection with requests in flight cannot be handed over")
        self._write_joined()
        self._transport = None
        self._end(ConnectionLost(f"the connection to {self.name} was handed over"))
        # TLS decrypts into the protocol's buffer.
        transport.set_protocol(WholeReads(protocol) if isinstance(transport, TlsTransport) else protocol)
        protocol.connection_made(transport)

    def end(self, error: Exception) -> None:
        """Close the connection for a reason: requests that wait fail with it."""
        self._end(error)

    def close(self) -> None:
        self._end(ConnectionLost(f"the connection to {self.name} was closed here"))

    # Event loop callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast instead of isinstance: uvloop's transports are of another class.
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._joined = []
        reason = tls_failure(exc) if isinstance(exc, SSLError) else exc
        lost = f"{self.name} closed the connection{f': {reason}' if reason else ''}"
        if self._answered == 1 and self._versions:
            # It answers ApiVersions and nothing else: that is how a broker treats a client that does not authenticate.
            self._end(
                LostAtFirstRequest(
                    f"{lost} at the first request after ApiVersions; if its listener requires SASL, set "
                    "security.protocol and sasl.mechanism"
                )
            )
        self._end(ConnectionLost(lost))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is not None:
            return memoryview(self._frame)[self._frame_filled :]
        return memoryview(self._scratch)[self._scratch_filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._frame is not None:
            self._frame_filled += nbytes
            if self._frame_filled == len(self._frame):
                frame, self._frame = self._frame, None
                self._complete(memoryview(frame))
            return
        self._scratch_filled += nbytes
        self._take_frames()

    def _take_frames(self) -> None:
        """Extract whole frames from the scratch buffer; a frame larger than the buffer gets its own buffer."""
        at, filled = 0, self._scratch_filled
        while filled - at >= _SIZE_BYTES and self._closed is None:
            (size,) = _INT32.unpack_from(self._scratch, at)
            if size >> 16 in _TLS_RECORDS:
                self._end(
                    WrongListener(
                        f"{self.name} speaks TLS, and this client does not: set security.protocol to SSL or SASL_SSL"
                    )
                )
                return
            if not _SIZE_BYTES <= size <= self._limits.response_bytes_max:
                self._end(ConnectionLost(f"{self.name} does not speak Kafka here (a response of {size} bytes)"))
                return
            begin, end = at + _SIZE_BYTES, at + _SIZE_BYTES + size
            if end <= filled:
                at = end
                self._complete(memoryview(bytes(memoryview(self._scratch)[begin:end])))
                continue
            if end - at > len(self._scratch):
                self._frame = bytearray(size)
                self._frame_filled = filled - begin
                self._frame[: self._frame_filled] = memoryview(self._scratch)[begin:filled]
                at = filled
            break
        rest = filled - at
        if rest and at:
            self._scratch[:rest] = self._scratch[at:filled]
        self._scratch_filled = rest

    def _complete(self, frame: memoryview) -> None:
        (correlation_id,) = _INT32.unpack_from(frame)
        waiting = self._waiting.pop(correlation_id, None)
        if waiting is None:
            self._end(ConnectionLost(f"{self.name} answered a request that was not sent"))
            return
        self._answered += 1
        future, key, version = waiting
        try:
            body_at = skip_tags(frame, 4) if response_header_is_flexible(key, version) else 4
        except MalformedRequest as error:
            self._end(ConnectionLost(f"{self.name} sent a response header that does not parse: {error}"))
            return
        if not future.done():
            future.set_result(frame[body_at:])

    def _write(self, key: int, version: int, body: bytes | Sequence[bytes | memoryview]) -> None:
        assert self._transport is not None
        whole = body if isinstance(body, bytes) else b"".join(body)
        frame = frames.write_request(key, version, self._correlation_id, self._client_id, whole)
        if not self._has_written:
            self._has_written = True
            self._loop.call_soon(self._turn_ended)
            self._transport.write(frame)
            return
        self._joined.append(frame)
        self._joined_bytes += len(frame)
        if self._joined_bytes >= JOIN_BYTES_MAX:
            self._write_joined()

    def _turn_ended(self) -> None:
        self._has_written = False
        self._write_joined()

    def _write_joined(self) -> None:
        joined, self._joined = self._joined, []
        self._joined_bytes = 0
        if joined and self._closed is None and self._transport is not None:
            self._transport.write(b"".join(joined))

    def _end(self, error: Exception) -> None:
        """Close the connection and fail all waiting requests, once."""
        if self._closed is not None:
            return
        self._write_joined()
        self._closed = error
        self._writable.set()
        self._released.set()
        self._ended.set()
        waiting, self._waiting = self._waiting, {}
        for future, _, _ in waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: an abandoned future must not log a warning
        if self._transport is not None:
            self._transport.abort()

    async def _negotiate(self, timeout_s: float) -> None:
        """Send ApiVersions 3, or version 0 if the broker refuses that: its refusal has version 0's layout."""
        software = {"client_software_name": "chronik", "client_software_version": __version__}
        for version in (3, 0):
            request = messages.write_request(ApiKey.API_VERSIONS, version, software)
            body = bytes(await self.request(ApiKey.API_VERSIONS, version, request, timeout_s=timeout_s))
            if _INT16.unpack_from(body)[0] == ErrorCode.unsupported_version and version:
                continue
            try:
                response = messages.read_response(ApiKey.API_VERSIONS, version, body)
            except MalformedRequest as error:
                raise BadResponse(f"{self.name} does not speak Kafka: {error}") from None
            self._versions = {api.api_key: (api.min_version, api.max_version) for api in response.api_keys}
            finalized = getattr(response, "finalized_features", ())
            self.features = {feature.name: feature.max_version_level for feature in finalized}
            return


class Connect(Protocol):
    """How a connection to a broker is opened: `Connection.open`, or by another way to the same broker."""

    def __call__(
        self, host: str, port: int, /, *, client_id: str, timeout_s: float
    ) -> Coroutine[Any, Any, Connection]: ...


def _reason(error: OSError) -> str:
    """Return the operating system's message: asyncio's own text repeats the address."""
    if error.errno is not None and error.errno > 0 and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__
