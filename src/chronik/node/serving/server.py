"""The listeners of a node: accept connections, decode frames into requests, and run the handler of each one's API."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from struct import Struct
from typing import Any, Protocol

from chronik.client.endpoint import Endpoint
from chronik.node.config import ConfigError, ListenerConfig
from chronik.node.runtime import Runtime
from chronik.node.serving.access import Access, Decisions
from chronik.node.serving.api import Api, Handler, LargeValues, Values
from chronik.node.serving.authentication import Authentication
from chronik.node.serving.connection import SCRATCH_BYTES, Connection, Reply, Request
from chronik.node.serving.connection_quotas import ConnectionQuotas
from chronik.node.serving.quotas import ClientQuotas
from chronik.node.serving.rights import refusal
from chronik.node.serving.tls import NodeTls, TlsAcceptor, TlsContexts
from chronik.observe.logging import Logger
from chronik.observe.metrics import ApiMetrics
from chronik.wire.api import response_header_is_flexible
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest
from chronik.wire.frames import read_request_header
from chronik.wire.messages import read_request, write_response
from chronik.wire.schema import has_field, load

IDLE_SWEEP_S = 5.0
QUIET_CHECK_S = 0.01
STALLED_FRAME_S = 10.0
NO_FRAME = memoryview(b"")
RESPONSE_BYTES_MIN = 64 * 1024
LOOP_BODY_BYTES_MAX = 64 * 1024
"""Larger requests are decoded in a thread: a million elements take most of a second."""
REFUSALS_LOGGED_PER_SWEEP = 10
THROTTLE_TIME = "throttle_time"
_INT32 = Struct(">i")


class Listening(Protocol):
    """The server of an event loop: uvloop's has a list of sockets, asyncio's a tuple."""

    @property
    def sockets(self) -> Sequence[socket.socket]: ...

    async def start_serving(self) -> None: ...

    def close(self) -> None: ...


class ControllerRoute(Protocol):
    """Forwards requests to the controller if only it may answer them."""

    @property
    def is_controller(self) -> bool: ...

    async def send(self, request: Request, body: bytes) -> tuple[bytes, bool]:
        """Return the controller's response and whether it is an error. Raise KafkaError if none arrives."""


class Route:
    """What requests of one API need, looked up once instead of for each request."""

    __slots__ = ("api", "flexible_from", "handler", "highest", "hot", "lowest", "metrics")

    def __init__(self, handler: Handler, metrics: ApiMetrics) -> None:
        api = handler.api
        self.api = api
        self.handler = handler
        self.hot = handler.hot
        self.metrics = metrics
        self.lowest, self.highest = api.parsed_versions
        versions = range(self.lowest, self.highest + 1)
        flexible = (version for version in versions if response_header_is_flexible(api.key, version))
        self.flexible_from = next(flexible, self.highest + 1)


class Server:
    """All client connections of one node, on all its listeners; a subclass handles the connections of peers.

    Invariant: `held_bytes` is the buffer memory of large frames that are not yet processed. Owned by the loop.
    """

    serves_clients = True
    """Whether these are listeners for clients, so that a SASL listener needs an `authentication`."""

    def __init__(self, runtime: Runtime, tls: NodeTls | None = None) -> None:
        """`tls` is needed by TLS listeners."""
        config = runtime.config
        self._runtime = runtime
        self.loop = runtime.loop
        self.decisions: Decisions | None = None
        """The authorizer for clients; None if every client may do everything."""
        self._tls = None if tls is None else TlsAcceptor(runtime, tls, self._tls_context, self.refused_client)
        self._clock = runtime.loop.time
        self._config = config
        self._metrics = runtime.metrics
        self.frame_bytes_max = config.frame_bytes_max
        self.idle_s_max = config.connection_idle_ms_max / 1000
        self.pipelined_requests_max = config.in_flight_requests_max
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.held_bytes = 0
        self.reading_bytes = 0
        """Bytes that reads in threads may still load into memory."""
        self._listeners: dict[str, tuple[ListenerConfig, Listening]] = {}
        """By name; the first one is that of `listen.kafka`."""
        # Insertion-ordered; never iterated when order would matter.
        self._connections: dict[Connection, None] = {}
        self._over_budget: dict[Connection, None] = {}
        self._slow_readers: dict[Connection, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._refusals_logged = 0
        self._sweep: asyncio.TimerHandle | None = None
        self._log = runtime.log.bind(component="node")
        self._routes: dict[int, Route] = {}
        self._controller: ControllerRoute | None = None
        self.authentication: Authentication | None = None
        """Set before `serve` if the listener uses SASL."""
        self.quotas: ClientQuotas | None = None
        """Set while a quota applies to any client of this server."""
        self.connection_quotas: ConnectionQuotas | None = None

    def _api_metrics(self, api: Api) -> ApiMetrics:
        return self._metrics.api(api.key)

    def _new_connection(self, listener: ListenerConfig) -> Connection:
        return Connection(self, listener)

    def _tls_context(self, contexts: TlsContexts) -> ssl.SSLContext:
        return contexts.clients

    def _accept(self, listener: ListenerConfig) -> asyncio.BufferedProtocol:
        connection = self._new_connection(listener)
        if not listener.uses_tls:
            return connection
        assert self._tls is not None
        return self._tls.accept(connection)

    def _count_connections(self) -> None:
        self._metrics.connections = len(self._connections)

    async def bind(self, *listeners: ListenerConfig) -> None:
        """Bind the ports without accepting connections yet. If one cannot be bound, `close` releases the others."""
        for listener in listeners:
            try:
                bound = await self.loop.create_server(
                    partial(self._accept, listener), *listener.endpoint, backlog=1024, start_serving=False
                )
            except OSError as error:
                if not self._listeners:
                    raise
                reason = error.strerror or str(error)
                raise ConfigError(
                    f"listener {listener.name} cannot listen on {listener.endpoint}: {reason}: change its address"
                ) from None
            self._listeners[listener.name] = (listener, bound)

    async def serve(self, handlers: Iterable[Handler], controller: ControllerRoute | None = None) -> None:
        """Start serving. Without `controller`, this node answers every API itself."""
        if self.authentication is None and any(listener.uses_sasl for listener, _ in self._listeners.values()):
            raise RuntimeError("a listener uses SASL, but the server has no authentication")
        self._routes = {handler.api.key: Route(handler, self._api_metrics(handler.api)) for handler in handlers}
        self._controller = controller
        for _, bound in self._listeners.values():
            await bound.start_serving()
        self._sweep = self.loop.call_later(IDLE_SWEEP_S, self._sweep_idle)

    @property
    def port(self) -> int:
        """The bound port of the first listener."""
        return next(iter(self.ports.values()))

    @property
    def ports(self) -> dict[str, int]:
        """The bound port of each listener."""
        return {name: int(bound.sockets[0].getsockname()[1]) for name, (_, bound) in self._listeners.items()}

    def advertised(self) -> dict[str, Endpoint]:
        """The address of each listener for clients, with the bound port if the system chose it."""
        ports = self.ports
        return {name: listener.advertised(ports[name]) for name, (listener, _) in self._listeners.items()}

    async def close(self, grace_s: float) -> None:
        """Stop listening, let running requests finish for up to `grace_s`, then close every connection."""
        if self._sweep is not None:
            self._sweep.cancel()
        for _, bound in self._listeners.values():
            bound.close()
        if self._tls is not None:
            self._tls.close()
        if self.authentication is not None:
            self.authentication.end_delays()
        await self._quiet(grace_s)
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._tasks):
            task.cancel()

    async def _quiet(self, grace_s: float) -> None:
        """Wait, for at most `grace_s`, until no connection has an unanswered request or unsent bytes."""
        deadline_s = self.loop.time() + grace_s
        busy = True
        while busy and self.loop.time() < deadline_s:
            await asyncio.sleep(QUIET_CHECK_S)
            busy = any(connection.has_unanswered or connection.unsent_bytes for connection in self._connections)

    # -- connections and their memory ----------------------------------------------------------------------------------

    def connection_opened(self, connection: Connection) -> bool:
        if len(self._connections) >= self._config.connections_max:
            self._metrics.connections_refused += 1
            self.refused(connection, f"{len(self._connections)} connections are open, which is the limit")
            return False
        quotas = self.connection_quotas
        reason = None if quotas is None else quotas.opened(connection)
        if reason is not None:
            self._metrics.connections_refused += 1
            self.refused(connection, reason)
            return False
        self._connections[connection] = None
        self._count_connections()
        listener = connection.listener
        if self.serves_clients and listener.uses_sasl:
            # The principal is known once the client has authenticated.
            assert self.authentication is not None
            self.authentication.guard(connection, self.spawn)
        elif self.decisions is not None or listener.uses_tls:
            connection.access = Access(connection.certificate_principal, connection.client_host, self.decisions)
        return True

    def connection_closed(self, connection: Connection) -> None:
        if connection.gate is not None:
            connection.gate.closed()
        self._connections.pop(connection, None)
        if self.connection_quotas is not None:
            self.connection_quotas.closed(connection)
        self._over_budget.pop(connection, None)
        self._wake_over_budget()
        self._slow_readers.pop(connection, None)
        self._count_connections()

    def refused(self, connection: Connection, reason: str) -> None:
        """Log each connection that is closed because of its input, at a limited rate."""
        if not connection.is_closing:
            # Otherwise an earlier refusal already closes this connection.
            self.refused_client(connection.client_host, reason)

    def refused_client(self, client_host: str, reason: str) -> None:
        self._metrics.malformed_requests += 1
        self._refusals_logged += 1
        if self._refusals_logged <= REFUSALS_LOGGED_PER_SWEEP:
            self._log.warning("connection_refused", client=client_host, reason=reason)

    def has_room(self, count: int) -> bool:
        return self.held_bytes + count <= self._config.in_flight_bytes_max

    def hold_bytes(self, count: int) -> None:
        self.held_bytes += count

    def release_bytes(self, connection: Connection, count: int) -> None:
        """Release the buffer of a large frame that was processed or dropped."""
        self.held_bytes -= count
        self._over_budget.pop(connection, None)
        self._wake_over_budget()

    def _wake_over_budget(self) -> None:
        while self._over_budget:
            connection = next(iter(self._over_budget))
            if self.held_bytes > self._config.in_flight_bytes_max:
                connection.pause_or_resume_reading()
                return
            del self._over_budget[connection]
            connection.pause_or_resume_reading()

    def over_budget(self, connection: Connection) -> bool:
        """Return whether this connection must stop reading its large frame until others have finished theirs."""
        if self.held_bytes <= self._config.in_flight_bytes_max:
            self._over_budget.pop(connection, None)
            return False
        # The connection that has waited longest may continue; otherwise none ever would.
        self._over_budget.setdefault(connection)
        return next(iter(self._over_budget)) is not connection

    def reads_slowly(self, connection: Connection) -> None:
        self._slow_readers[connection] = None

    def reads_again(self, connection: Connection) -> None:
        self._slow_readers.pop(connection, None)

    def response_bytes_allowed(self) -> int:
        """Return the size limit of one response: it shrinks while clients leave much data unread."""
        unsent_bytes = sum(connection.unsent_bytes for connection in self._slow_readers)
        left_bytes = self._config.in_flight_bytes_max - unsent_bytes - self.reading_bytes
        return max(RESPONSE_BYTES_MIN, min(self._config.fetch_bytes_max, left_bytes))

    def _sweep_idle(self) -> None:
        if self._refusals_logged > REFUSALS_LOGGED_PER_SWEEP:
            self._log.warning("connections_refused", count=self._refusals_logged)
        self._refusals_logged = 0
        now_s = self.loop.time()
        oldest_s = now_s - self.idle_s_max
        if self._over_budget:
            # Others wait for the memory that this frame holds; a peer that stopped halfway must not keep it.
            for connection in list(self._connections):
                if connection.has_unfinished_frame and connection.last_used_s < now_s - STALLED_FRAME_S:
                    self.refused(connection, "its frame stalled while other connections waited for memory")
                    connection.abort()
        for connection in list(self._connections):
            if connection.last_used_s >= oldest_s or connection.is_muted:
                continue
            if connection.unsent_bytes:
                # A normal close would wait for a peer that has not read for minutes.
                connection.abort()
            elif not connection.has_unanswered:
                connection.close()
        self._sweep = self.loop.call_later(IDLE_SWEEP_S, self._sweep_idle)

    # -- requests ------------------------------------------------------------------------------------------------------

    def run_request(self, connection: Connection, frame: memoryview) -> None:
        """Answer one request. Each request of each listener passes here, with the rights of its client."""
        if connection.gate is not None and not connection.gate.admits(frame):
            return
        api_key, version, correlation_id, client_id, body_at = read_request_header(frame)
        started_s = self._clock()
        request = Request(
            connection, api_key, version, correlation_id, client_id, frame, body_at, started_s, None, connection.access
        )
        self._metrics.bytes_in += len(frame)
        route = self._routes.get(api_key)
        if route is None:
            raise MalformedRequest(f"API {api_key} is not served by this node")
        if not route.lowest <= version <= route.highest:
            if route.api.unsupported_version_body is not None:
                reply = self._expect(request, route)
                reply.flexible_header = False
                reply.send((route.api.unsupported_version_body(),))
                return
            name = route.api.key.name
            raise MalformedRequest(f"{name} version {version} is not served, only {route.lowest} to {route.highest}")
        if not request.access.is_open:
            request.access = request.access.for_api(route.metrics.name)
        if route.hot is not None:
            # _expect, inlined: small requests spend their time here.
            reply = Reply(request, version >= route.flexible_from, route.metrics, self._clock)
            connection.expect_reply(reply)
            try:
                if self.quotas is None:
                    route.hot(request, reply)
                else:
                    self.quotas.run_hot(route.hot, request, reply)
            except MalformedRequest:
                raise
            except Exception:
                self._log.exception("request_failed", api=route.api.key.name, version=version, client=client_id)
                connection.abort()
            # A pending request must not keep the frame: its buffer is reused, or large.
            request.frame = NO_FRAME
            return
        body = bytes(frame[body_at:])
        request.frame = NO_FRAME
        is_large = len(body) > LOOP_BODY_BYTES_MAX
        if not is_large:
            request.message = read_request(api_key, version, body)
            if self.quotas is not None:
                request.limits = self.quotas.limit(request)
        reply = self._expect(request, route)
        if connection.is_ordered:
            connection.hold()
        run = self._run_large if is_large else self._run_cold
        self.spawn(run(route.handler, request, reply, body))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a request's work in a task that is cancelled at the latest when this server closes."""
        task = self.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._forget_task)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)

    def _expect(self, request: Request, route: Route) -> Reply:
        reply = Reply(request, request.api_version >= route.flexible_from, route.metrics, self._clock)
        request.connection.expect_reply(reply)
        return reply

    async def _run_large(self, handler: Handler, request: Request, reply: Reply, body: bytes) -> None:
        """Run a request whose decoding would block the loop."""
        try:
            request.message = await decode_request(self._runtime, request.api_key, request.api_version, body)
        except MalformedRequest as error:
            request.connection.drop(str(error))
            return
        if self.quotas is not None:
            request.limits = self.quotas.limit(request)
        await self._run_cold(handler, request, reply, body)

    async def _run_cold(self, handler: Handler, request: Request, reply: Reply, body: bytes) -> None:
        api, connection, controller = handler.api, request.connection, self._controller
        try:
            is_local = not api.on_controller or (api.is_local is not None and api.is_local(request.message))
            if not is_local and controller is not None and not controller.is_controller:
                try:
                    answer, reply.failed = await controller.send(request, body)
                    answer = _with_throttle(request, answer)
                except KafkaError as error:
                    answer, reply.failed = _error_body(api, request, error.code, error.message), True
            else:
                answer, reply.failed = await answer_cold(self._runtime, handler, request, self._log)
        except Exception:
            # The error response itself failed. Abort, so that the client does not wait forever.
            self._log.exception("error_response_failed", api=api.key.name, version=request.api_version)
            connection.abort()
            return
        self._metrics.bytes_out += len(answer)
        if request.throttle_ms:
            connection.mute(request.throttle_ms / 1000)
        reply.send((answer,))
        if connection.is_ordered:
            connection.release()


async def decode_request(runtime: Runtime, api_key: int, version: int, body: bytes) -> Any:
    """Decode a request; a large one in a thread."""
    if len(body) <= LOOP_BODY_BYTES_MAX:
        return read_request(api_key, version, body)
    return await runtime.run_blocking(partial(read_request, api_key, version, body))


async def answer_cold(runtime: Runtime, handler: Handler, request: Request, log: Logger) -> tuple[bytes, bool]:
    """Return the response body and whether it is an error."""
    assert handler.cold is not None
    refused = refusal(request.access, request.api_key)
    if refused is not None:
        return _error_body(handler.api, request, refused, "the client is not authorized"), True
    try:
        work = handler.cold(request)
        values = await (work if request.limits is None else request.limits.timed(work))
        if isinstance(values, LargeValues):
            make, throttle_ms = values.make, _throttle_ms(request)
            return await runtime.run_blocking(lambda: _encode(request, make(), throttle_ms)), False
        return _write(request, values), False
    except KafkaError as error:
        return _error_body(handler.api, request, error.code, error.message), True
    except Exception:
        api = handler.api
        log.exception("request_failed", api=api.key.name, version=request.api_version, client=request.client_id)
        message = "unexpected error; see the node's log"
        return _error_body(api, request, ErrorCode.unknown_server_error, message), True


def _error_body(api: Api, request: Request, code: ErrorCode, message: str) -> bytes:
    if api.on_error is not None:
        return _write(request, api.on_error(request, code))
    values: Values = {"error_code": code, "error_message": message}
    try:
        return _write(request, values)
    except KeyError:
        values.pop("error_message")
        return _write(request, values)


def _write(request: Request, values: Values) -> bytes:
    """Encode a response, with the time for which the client is throttled."""
    return _encode(request, values, _throttle_ms(request))


def _throttle_ms(request: Request) -> int:
    return request.throttle_ms if request.limits is None else max(request.throttle_ms, request.limits.settle())


def _encode(request: Request, values: Values, throttle_ms: int) -> bytes:
    if throttle_ms and has_field(request.api_key, "response", (), THROTTLE_TIME):
        values = {**values, THROTTLE_TIME: throttle_ms}
    return write_response(request.api_key, request.api_version, values)


def _with_throttle(request: Request, answer: bytes) -> bytes:
    """Return the controller's response with the longer throttle time: the controller's or this node's.

    In the responses of all APIs that are forwarded, the throttle time comes first.
    """
    if load(request.api_key, request.api_version, "response").fields[0].name != THROTTLE_TIME:
        return answer
    (request.throttle_ms,) = _INT32.unpack_from(answer)
    own_ms = 0 if request.limits is None else request.limits.settle()
    return answer if own_ms <= request.throttle_ms else _INT32.pack(own_ms) + answer[_INT32.size :]
