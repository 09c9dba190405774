"""One connection: reads frames, passes requests to its server, and sends responses in request order.

A frame is a 4-byte big-endian size and that many bytes. Small frames are parsed in place, in a scratch buffer that all
connections of a server share (the loop reads one socket at a time). A frame that does not fit gets its own buffer,
which grows with the bytes received, not with the size that its header claims.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from chronik.authorization.acls import ANONYMOUS
from chronik.node.config import ListenerConfig
from chronik.node.serving.access import OPEN_ACCESS, Access
from chronik.observe.metrics import ApiMetrics
from chronik.wire.compression import View
from chronik.wire.errors import MalformedRequest
from chronik.wire.frames import FRAME_SIZE, response_prefix

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")

SCRATCH_BYTES = 256 * 1024
LARGE_FRAME_BYTES = 2 * 1024 * 1024
LARGE_FRAME_STEP_BYTES = 16 * 1024
JOIN_BYTES_MAX = 64 * 1024
WRITE_HIGH_WATER_BYTES = 1024 * 1024
TLS_HANDSHAKE = 0x1603
"""The first two bytes of a TLS connection, where a frame has its size."""


class RequestLimits(Protocol):
    """The part of a client's quotas that answers a request; see `serving.quotas`."""

    def run(self, work: Callable[[], None]) -> None: ...

    def timed(self, work: Awaitable[T]) -> Awaitable[T]: ...

    def settle(self) -> int: ...

    @property
    def fetch_bytes_max(self) -> int | None: ...

    def is_over(self) -> bool: ...

    def fetched(self, size_bytes: int) -> tuple[int, bool]: ...


# Constructors by hand, here and of other objects of each request, because mypyc does not compile a dataclass's own one.
@dataclass(slots=True, eq=False, init=False)
class Request:
    """One request on one connection, kept until it is answered.

    `message` is kio's entity for cold APIs. For hot APIs `frame[body_at:]` holds the body; it is valid only during the
    handler's call, because the connection reuses its buffer.
    """

    connection: Connection
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    frame: View
    body_at: int
    started_s: float
    message: Any
    access: Access
    limits: RequestLimits | None
    """Set if a quota applies to the client."""
    throttle_ms: int
    """How long the controller throttles the client."""

    def __init__(
        self,
        connection: Connection,
        api_key: int,
        api_version: int,
        correlation_id: int,
        client_id: str | None,
        frame: View,
        body_at: int,
        started_s: float,
        message: Any = None,
        access: Access = OPEN_ACCESS,
    ) -> None:
        self.connection = connection
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.frame = frame
        self.body_at = body_at
        self.started_s = started_s
        self.message = message
        self.access = access
        self.limits = None
        self.throttle_ms = 0

    @property
    def client_host(self) -> str:
        return self.connection.client_host

    @property
    def listener(self) -> str:
        """The name of the client's listener: the client receives the addresses of that listener."""
        return self.connection.listener.name


@dataclass(slots=True, eq=False, init=False)
class Reply:
    """The slot of a request in its connection's response order, completed exactly once.

    Owned by the loop. `send` with buffers sends a response; `send_nothing` releases the slot without one (acks=0).
    """

    request: Request
    flexible_header: bool
    body: Sequence[Buffer] | None
    done: bool
    failed: bool
    _metrics: ApiMetrics
    _clock: Callable[[], float]

    def __init__(
        self, request: Request, flexible_header: bool, metrics: ApiMetrics, clock: Callable[[], float]
    ) -> None:
        self.request = request
        self.flexible_header = flexible_header
        self.body = None
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


class Gate(Protocol):
    """What a listener requires of a client before it serves its requests."""

    reads_tokens: bool
    """Whether frames are messages of a SASL mechanism, of any size, and not requests."""

    def admits(self, frame: memoryview) -> bool:
        """Whether this request runs now. Raise MalformedRequest if the connection has to be closed."""

    def closed(self) -> None: ...


class Listener(Protocol):
    """The part of the server that a connection uses."""

    loop: asyncio.AbstractEventLoop
    scratch: View
    frame_bytes_max: int
    pipelined_requests_max: int

    def connection_opened(self, connection: Connection) -> bool: ...

    def connection_closed(self, connection: Connection) -> None: ...

    def reads_slowly(self, connection: Connection) -> None: ...

    def reads_again(self, connection: Connection) -> None: ...

    def has_room(self, count: int) -> bool: ...

    def hold_bytes(self, count: int) -> None: ...

    def release_bytes(self, connection: Connection, count: int) -> None: ...

    def over_budget(self, connection: Connection) -> bool: ...

    def run_request(self, connection: Connection, frame: memoryview) -> None: ...

    def refused(self, connection: Connection, reason: str) -> None: ...


def _size_refusal(size: int, bytes_max: int) -> str:
    if size >> 16 == TLS_HANDSHAKE:
        return "a client speaks TLS to a plaintext listener: its security.protocol must be that of the listener"
    return f"frame of {size} bytes; allowed are 8 to {bytes_max}"


class Connection(asyncio.BufferedProtocol):
    """Invariant: `_replies` holds every request that was read and not yet answered, oldest first.
    `_out` holds at most JOIN_BYTES_MAX and one response, and is empty between turns of the loop.

    Owned by the loop. Reading stops while a cold request runs (later requests on this connection must see its effect),
    while another caller holds it, while the peer does not read, and while too many requests are in flight.

    If `is_ordered` is False, cold requests overlap, and responses are sent as they become ready, for peers that match
    them by correlation id.
    """

    def __init__(
        self,
        server: Listener,
        listener: ListenerConfig,
        *,
        is_ordered: bool = True,
        requests_max: int | None = None,
    ) -> None:
        self._server = server
        self.listener = listener
        self.is_ordered = is_ordered
        self._requests_max = server.pipelined_requests_max if requests_max is None else requests_max
        self._transport: asyncio.Transport | None = None
        self._replies: deque[Reply] = deque()
        self._partial = b""
        self._large: memoryview | None = None
        """The buffer of a frame that does not fit into the scratch buffer."""
        self._large_size = 0
        self._large_have = 0
        self._out: list[Buffer] = []
        self._out_bytes = 0
        self._flush_scheduled = False
        self._parsing = False
        self._write_paused = False
        self._read_paused = False
        self._is_held_back = False
        self._holds = 0
        self._unmute: asyncio.TimerHandle | None = None
        self.is_closing = False
        self._end_of_input = False
        self._on_close: dict[object, Callable[[], None]] = {}
        self._on_end_of_input: list[Callable[[], None]] = []
        self.client_host = ""
        self.client_port = 0
        self.software = ("", "")
        """Name and version of the client's library, as it reports them in ApiVersions."""
        self.certificate_principal = ANONYMOUS
        """The principal of the client's certificate; of a client without one, ANONYMOUS."""
        self.access = OPEN_ACCESS
        """The client's rights. It changes when the client authenticates, again too."""
        self.gate: Gate | None = None
        """On a SASL listener: what has to happen before requests are served."""
        self.peer_id: int | None = None
        """The node at the other end, once it has proven the cluster secret on the internal listener."""
        self.frame_bytes_max = server.frame_bytes_max
        self.last_used_s = 0.0

    # -- asyncio callbacks ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Cast, not isinstance: uvloop's transports are of another class.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.client_host = str(peer[0]) if peer else ""
        self.client_port = int(peer[1]) if peer and len(peer) > 1 else 0
        self.last_used_s = self._server.loop.time()
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        if not self._server.connection_opened(self):
            self.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large[self._large_have :]
        scratch = self._server.scratch
        held = len(self._partial)
        if held:
            scratch[:held] = self._partial
        return scratch[held:]

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_closing:
            return
        self.last_used_s = self._server.loop.time()
        if self._large is not None:
            self._large_updated(nbytes)
            return
        scratch = self._server.scratch
        self._parse(scratch, len(self._partial) + nbytes)

    def eof_received(self) -> bool:
        # The peer sends no more; requests that it already sent are still answered (acks=0 producers close this way).
        self._input_ended()
        self._drop_unfinished_frame()
        return bool(self._replies or self._partial)

    def _input_ended(self) -> None:
        self._end_of_input = True
        callbacks, self._on_end_of_input = self._on_end_of_input, []
        for callback in callbacks:
            callback()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closing = True
        if self._unmute is not None:
            self._unmute.cancel()
        self._input_ended()
        callbacks = list(self._on_close.values())
        self._on_close.clear()
        self._replies.clear()
        self._out.clear()
        self._out_bytes = 0
        self._drop_large()
        self._partial = b""
        for callback in callbacks:
            callback()
        self._server.connection_closed(self)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._server.reads_slowly(self)

    def resume_writing(self) -> None:
        self._write_paused = False
        self._server.reads_again(self)
        self._continue()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _may_run(self) -> bool:
        return not (self._holds or self._write_paused or len(self._replies) >= self._requests_max)

    def _parse(self, data: memoryview, end: int) -> None:
        """Run the complete frames in data[:end]; keep the remaining bytes."""
        at = 0
        server = self._server
        replies = self._replies
        requests_max = self._requests_max
        self._parsing = True
        try:
            # _may_run, inlined: small requests spend their time here.
            while end - at >= 4 and not (
                self._holds or self._write_paused or self.is_closing or len(replies) >= requests_max
            ):
                (size,) = FRAME_SIZE.unpack_from(data, at)
                if (size < 8 and not self._reads_token_of(size)) or size > self.frame_bytes_max:
                    self._refuse(_size_refusal(size, self.frame_bytes_max))
                    return
                start = at + 4
                if end - start < size:
                    if size + 4 > SCRATCH_BYTES:
                        self._start_large(size, data[start:end])
                        at = end
                    break
                at = start + size
                server.run_request(self, data[start:at])
                if self._out_bytes >= JOIN_BYTES_MAX:
                    # Flush now: a peer that does not read must pause this loop before the next large response.
                    self._flush()
        except MalformedRequest as error:
            self._refuse(str(error))
        finally:
            self._parsing = False
        if self.is_closing:
            return
        if self._large is None:
            self._partial = bytes(data[at:end]) if at < end else b""
        if self._out:
            self._flush()
        if self._partial or self._large is not None or self._write_paused or self._read_paused or self._end_of_input:
            self.pause_or_resume_reading()

    def _reads_token_of(self, size: int) -> bool:
        return size >= 0 and self.gate is not None and self.gate.reads_tokens

    def _continue(self) -> None:
        """Run the kept requests if nothing holds them back any more."""
        if self.is_closing or self._parsing:
            return
        if self._large is None and len(self._partial) >= 4 and self._may_run():
            kept = self._partial
            self._partial = b""
            # A separate copy: a handler that runs here must not share the scratch buffer with a later read.
            self._parse(memoryview(bytearray(kept)), len(kept))
        elif self._large is not None and self._large_have == self._large_size and self._may_run():
            self._run_large()
        else:
            self.pause_or_resume_reading()

    def _start_large(self, size: int, have: memoryview) -> None:
        # Allocate a frame of ordinary size at once if it has really begun to arrive and the budget has room for it.
        begun = len(have) >= SCRATCH_BYTES // 4 and self._server.has_room(LARGE_FRAME_BYTES)
        first_bytes = min(size, LARGE_FRAME_BYTES if begun else 2 * len(have) + LARGE_FRAME_STEP_BYTES)
        self._large = memoryview(bytearray(first_bytes))
        self._large[: len(have)] = have
        self._large_size = size
        self._large_have = len(have)
        self._partial = b""
        self._server.hold_bytes(first_bytes)

    def _large_updated(self, nbytes: int) -> None:
        assert self._large is not None
        self._large_have += nbytes
        if self._large_have == self._large_size:
            if self._may_run():
                self._run_large()
            else:
                self.pause_or_resume_reading()
        elif self._large_have == len(self._large):
            bigger = min(self._large_size, 2 * len(self._large))
            grown = memoryview(bytearray(bigger))
            grown[: self._large_have] = self._large
            self._server.hold_bytes(bigger - len(self._large))
            self._large = grown
            self.pause_or_resume_reading()

    def _run_large(self) -> None:
        assert self._large is not None
        self._parsing = True
        try:
            self._server.run_request(self, self._large)
        except MalformedRequest as error:
            self._refuse(str(error))
        finally:
            self._parsing = False
        self._drop_large()
        if not self.is_closing:
            self._flush()
            self.pause_or_resume_reading()

    def _drop_large(self) -> None:
        if self._large is not None:
            held_bytes = len(self._large)
            self._large = None
            self._server.release_bytes(self, held_bytes)

    def pause_or_resume_reading(self) -> None:
        if self.is_closing or self._transport is None:
            return
        # While a request holds later ones back, reading continues into the scratch buffer until that has data: most
        # clients send one request at a time, and pausing costs two system calls.
        waiting = len(self._partial) >= 4 and not self._may_run()
        complete = self._large is not None and self._large_have == self._large_size
        self._is_held_back = self._large is not None and not complete and self._server.over_budget(self)
        stop = self._write_paused or waiting or complete or self._is_held_back
        if stop and not self._read_paused:
            self._read_paused = True
            self._transport.pause_reading()
        elif not stop and self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()
        if self._end_of_input:
            self._drop_unfinished_frame()
            if not self._replies and not self._partial:
                self.close()

    def _drop_unfinished_frame(self) -> None:
        """Drop an incomplete frame after the peer's end of input: it will never be complete."""
        if self._may_run():
            self._partial = b""
            self._drop_large()

    def _refuse(self, reason: str) -> None:
        self._server.refused(self, reason)
        self.close()

    # -- responses -----------------------------------------------------------------------------------------------------

    def expect_reply(self, reply: Reply) -> None:
        self._replies.append(reply)

    def hold(self) -> None:
        """Run no further request of this connection until each `hold` is matched by a `release`."""
        self._holds += 1

    def release(self) -> None:
        self._holds -= 1
        if not self._holds:
            self._continue()

    def mute(self, seconds: float) -> None:
        """Run no further request until `seconds` have passed (KIP-219). Responses are still sent.

        The socket is read until a further request arrives, so that a client which just closes is noticed at once.
        """
        if self.is_closing:
            return
        loop = self._server.loop
        unmute_s = loop.time() + seconds
        if self._unmute is None:
            self.hold()
        elif self._unmute.when() >= unmute_s:
            return
        else:
            self._unmute.cancel()
        self._unmute = loop.call_at(unmute_s, self._unmuted)

    def _unmuted(self) -> None:
        self._unmute = None
        self.last_used_s = self._server.loop.time()
        self.release()

    @property
    def is_muted(self) -> bool:
        return self._unmute is not None

    def reply_ready(self, reply: Reply) -> None:
        """Send the finished responses at the head of the queue. Called when `reply` is finished."""
        if self.is_closing:
            return
        replies = self._replies
        if replies and replies[0] is reply:
            while replies and replies[0].done:
                done = replies.popleft()
                if done.body is not None:
                    self._queue(done)
        elif self.is_ordered:
            return
        else:
            replies.remove(reply)
            if reply.body is not None:
                self._queue(reply)
        if not self._parsing:
            # Responses that become ready in the same turn of the loop leave in one write. The last one that is awaited
            # does not wait for the end of the turn: for a client with one request in flight, that is each one.
            if not replies or self._out_bytes >= JOIN_BYTES_MAX:
                self._flush()
            elif self._out and not self._flush_scheduled:
                self._flush_scheduled = True
                self._server.loop.call_soon(self._flush_at_end_of_turn)
            if self._read_paused or self._end_of_input:
                self._continue()

    def _queue(self, reply: Reply) -> None:
        body = reply.body
        assert body is not None
        length = len(body[0]) if len(body) == 1 else sum(map(len, body))
        self._out.append(response_prefix(reply.request.correlation_id, reply.flexible_header, length))
        self._out.extend(body)
        self._out_bytes += length

    def send_frame(self, data: bytes) -> None:
        """Send a frame without a response header, for a client whose messages have no request header."""
        if self.is_closing:
            return
        self._out.append(FRAME_SIZE.pack(len(data)) + data)
        self._out_bytes += len(data)
        if not self._parsing:
            self._flush()

    def _flush_at_end_of_turn(self) -> None:
        self._flush_scheduled = False
        if not self.is_closing:
            self._flush()

    def _flush(self) -> None:
        out = self._out
        if not out or self._transport is None:
            return
        write = self._transport.write
        out_bytes = self._out_bytes
        self._out = []
        self._out_bytes = 0
        if out_bytes < JOIN_BYTES_MAX:
            write(b"".join(out))
            return
        small: list[Buffer] = []
        for part in out:
            if len(part) < JOIN_BYTES_MAX:
                small.append(part)
                continue
            if small:
                write(b"".join(small))
                small = []
            write(part)
        if small:
            write(b"".join(small))

    # -- closing -------------------------------------------------------------------------------------------------------

    def when_closed(self, owner: object, callback: Callable[[], None]) -> None:
        """Call `callback` once when the connection ends, unless `forget` is called first."""
        if self.is_closing:
            self._server.loop.call_soon(callback)
        else:
            self._on_close[owner] = callback

    def when_input_ends(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the peer can send no more; responses to it may still be on their way."""
        if self.is_closing or self._end_of_input:
            self._server.loop.call_soon(callback)
        else:
            self._on_end_of_input.append(callback)

    def forget(self, owner: object) -> None:
        self._on_close.pop(owner, None)

    def close(self) -> None:
        """Close the connection after the written data has been sent."""
        if self.is_closing:
            return
        self._flush()
        self.is_closing = True
        if self._transport is not None:
            self._transport.close()

    def drop(self, reason: str) -> None:
        """Abort the connection, and log why."""
        self._server.refused(self, reason)
        self.abort()

    def abort(self) -> None:
        self.is_closing = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def has_unfinished_frame(self) -> bool:
        """Whether a large frame is incomplete, and the peer, not the memory budget, holds it up."""
        return self._large is not None and self._large_have < self._large_size and not self._is_held_back

    @property
    def has_unanswered(self) -> bool:
        return bool(self._replies)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._out_bytes + self._transport.get_write_buffer_size()
