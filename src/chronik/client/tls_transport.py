"""TLS between a socket and a protocol, for servers and clients: OpenSSL's memory buffers, driven directly.

    socket -> `received` (shared by all connections) -> incoming BIO -> decrypted into the protocol's own buffer
    protocol -> encrypted into the outgoing BIO -> one write to the socket's transport

asyncio's own TLS copies more, and keeps 256 KB for each connection (docs/design.md has the figures). The BIOs are
filled in small steps, because OpenSSL never shrinks them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

RECEIVE_BYTES = 256 * 1024
STEP_BYTES = 32 * 1024
"""How much is written to the incoming BIO at once. It bounds the memory that an idle connection keeps."""
ENCRYPT_BYTES = 64 * 1024
"""How much is encrypted at once, for the same reason."""
HANDSHAKE_RECEIVE_BYTES = 16 * 1024
FIRST_BYTES = (0x15, 0x16)
"""A TLS stream begins with an alert or with a handshake."""


class NotTls(ssl.SSLError):
    """The first byte is not that of a TLS handshake."""


class TlsBuffers:
    """The receive buffer that all connections of one loop share: the loop reads one socket at a time."""

    def __init__(self) -> None:
        self.received = memoryview(bytearray(RECEIVE_BYTES))


class TlsOwner(Protocol):
    """Decides about the handshakes of its connections, and reports their errors."""

    def progressed(self, transport: TlsTransport) -> None:
        """The peer has sent a part of its handshake."""

    def handshake_done(self, transport: TlsTransport) -> bool:
        """Return False to close the connection instead of connecting the protocol."""

    def handshake_failed(self, transport: TlsTransport, error: Exception) -> None: ...

    def stream_failed(self, transport: TlsTransport, error: ssl.SSLError) -> None:
        """The peer sent bytes that are not TLS, or an alert: it may refuse this side's certificate only now."""


_NO_PROTOCOL = asyncio.BufferedProtocol()


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """To the socket's transport this is the protocol; to `protocol` it is the transport, once the handshake is done.

    Invariant: the outgoing BIO is empty between calls: what is encrypted is in the socket's transport, which counts it
    for back-pressure. `_kept` holds received bytes that the protocol has not taken because it paused reading; they are
    at most one receive buffer. Owned by the loop.

    The socket's end of input counts as the end of the TLS stream, because Kafka's frames and HTTP's messages have
    lengths: a truncated one is never taken for a whole one.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        protocol: asyncio.BufferedProtocol,
        buffers: TlsBuffers,
        owner: TlsOwner,
        *,
        is_server: bool,
        host: str | None = None,
    ) -> None:
        super().__init__()
        self.protocol = protocol
        self._has_begun = False
        self._context = context
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server, server_hostname=host)
        self._is_server = is_server
        self._received = buffers.received
        self._owner = owner
        self._socket: asyncio.Transport | None = None
        self._is_established = False
        self._has_failed = False
        self._failure: ssl.SSLError | None = None
        self._is_closing = False
        self._is_reading_paused = False
        self._is_decrypting = False
        self._is_continuing = False
        self._has_ended = False
        """Whether the peer can send no more, and the protocol knows it."""
        self._kept: bytes | None = None
        self._kept_end = False
        """Whether the input ended after the kept bytes."""

    # -- callbacks of the socket's transport ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Cast, not isinstance: uvloop's transports are of another class.
        self._socket = cast(asyncio.Transport, transport)
        if not self._is_server:
            self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received if self._is_established else self._received[:HANDSHAKE_RECEIVE_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_closing:
            return
        data = self._received[:nbytes]
        if self._is_established:
            self._take(data)
            return
        self._owner.progressed(self)
        if not self._has_begun:
            self._has_begun = True
            if data[0] not in FIRST_BYTES:
                self._handshake_failed(NotTls("the first byte is not that of TLS"))
                return
        self._incoming.write(data)
        self._shake_hands()

    def eof_received(self) -> bool:
        if not self._is_established:
            self._handshake_failed(ConnectionResetError("the peer closed the connection during the handshake"))
            return False
        if self._kept is not None or self._is_reading_paused:
            # The protocol receives what came before the end first.
            self._kept_end = True
            return True
        return self._end_input()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._kept = None
        if self._is_established:
            self.protocol.connection_lost(exc or self._failure)
        else:
            self._handshake_failed(exc or ConnectionResetError("the connection was closed during the handshake"))
        # A closed connection must not wait for the garbage collector, which runs rarely.
        self.protocol, self._socket = _NO_PROTOCOL, None

    def pause_writing(self) -> None:
        if self._is_established:
            self.protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._is_established:
            self.protocol.resume_writing()

    # -- handshake -----------------------------------------------------------------------------------------------------

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return
        except (ssl.SSLError, ssl.CertificateError) as error:
            self._handshake_failed(error)
            return
        self._send()
        if not self._owner.handshake_done(self):
            self.close()
            return
        self._is_established = True
        self.protocol.connection_made(self)
        # The peer may have sent data together with the end of its handshake.
        self._take(memoryview(b""))

    def _handshake_failed(self, error: Exception) -> None:
        if self._has_failed:
            return
        self._has_failed = self._is_closing = True
        self._owner.handshake_failed(self, error)
        if self._socket is not None:
            self._send()  # the alert, which names the reason to the peer
            self._socket.close()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _take(self, data: memoryview) -> None:
        """Decrypt into the protocol's buffer until all is taken, or the protocol pauses reading."""
        incoming, tls, protocol = self._incoming, self._tls, self.protocol
        read, size = tls.read, len(data)
        at = 0
        has_ended = False
        self._is_decrypting = True
        try:
            while not (self._is_reading_paused or self._is_closing or has_ended):
                buffer = cast(memoryview, protocol.get_buffer(-1))
                room, filled = len(buffer), 0
                is_drained = False
                while filled < room:
                    if not incoming.pending and not tls.pending():
                        if at >= size:
                            is_drained = True
                            break
                        incoming.write(data[at : at + STEP_BYTES])
                        at += STEP_BYTES
                    try:
                        count = read(room - filled, cast(Any, buffer[filled:] if filled else buffer))
                    except ssl.SSLWantReadError:
                        # Part of a record: OpenSSL has taken it from the BIO.
                        continue
                    if not count:
                        has_ended = True
                        break
                    filled += cast(int, count)
                if filled:
                    protocol.buffer_updated(filled)
                if is_drained:
                    break
        except ssl.SSLError as error:
            self._failed(error)
            return
        finally:
            self._is_decrypting = False
        if self._outgoing.pending:
            self._send()  # answers of TLS itself, such as a key update
        if self._is_closing:
            return
        if has_ended:
            if not self._end_input():
                self.close()
        elif at < size or incoming.pending or tls.pending():
            self._kept = bytes(data[at:])

    def _failed(self, error: ssl.SSLError) -> None:
        if not self._is_closing:
            self._send()
            self._owner.stream_failed(self, error)
            self._failure = error
            self.abort()

    def _end_input(self) -> bool:
        """Report the end of input once. Return whether the protocol still has to write."""
        if self._has_ended:
            return True
        self._has_ended = True
        return bool(self.protocol.eof_received())

    def pause_reading(self) -> None:
        if not self._is_reading_paused:
            self._is_reading_paused = True
            if self._socket is not None and not self._is_closing:
                self._socket.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading_paused or self._socket is None or self._is_closing:
            return
        self._is_reading_paused = False
        if not self._is_decrypting and (self._kept is not None or self._kept_end):
            self._continue_soon()
        else:
            self._socket.resume_reading()

    def _continue_soon(self) -> None:
        if not self._is_continuing:
            self._is_continuing = True
            asyncio.get_running_loop().call_soon(self._continue)

    def _continue(self) -> None:
        self._is_continuing = False
        if self._is_closing or self._is_reading_paused:
            return
        kept, self._kept = self._kept, None
        if kept is not None:
            self._take(memoryview(kept))
        if self._is_closing or self._is_reading_paused or self._socket is None:
            return
        if self._kept_end:
            self._kept_end = False
            if not self._end_input():
                self.close()
        elif not self._has_ended:
            self._socket.resume_reading()

    def is_reading(self) -> bool:
        return not self._is_reading_paused and not self._is_closing

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or not data:
            return
        assert self._socket is not None
        size = len(data)
        try:
            if size <= ENCRYPT_BYTES:
                self._tls.write(data)
                self._socket.write(self._outgoing.read())
                return
            view = memoryview(data)
            for at in range(0, size, ENCRYPT_BYTES):
                self._tls.write(view[at : at + ENCRYPT_BYTES])
                self._socket.write(self._outgoing.read())
        except ssl.SSLError as error:
            self._failed(error)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def _send(self) -> None:
        if self._socket is not None and self._outgoing.pending:
            self._socket.write(self._outgoing.read())

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._socket is not None:
            self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return 0 if self._socket is None else self._socket.get_write_buffer_size()

    # -- closing -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what was written and close_notify, then close. The peer's close_notify is not awaited."""
        if self._is_closing:
            return
        self._is_closing = True
        self._kept = None
        if self._socket is None:
            return
        # The error is normal: the peer's close_notify is not here yet.
        with suppress(ssl.SSLError, ValueError):
            self._tls.unwrap()
        self._send()
        self._socket.close()

    def abort(self) -> None:
        self._is_closing = True
        self._kept = None
        if self._socket is not None:
            self._socket.abort()

    def is_closing(self) -> bool:
        return self._is_closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._tls
        if name == "sslcontext":
            return self._context
        return default if self._socket is None else self._socket.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = cast(asyncio.BufferedProtocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol


class WholeReads(asyncio.BufferedProtocol):
    """Passes decrypted bytes to a protocol that takes them by `data_received`."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol
        self._buffer = memoryview(bytearray(0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.protocol.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._buffer = memoryview(bytearray(HANDSHAKE_RECEIVE_BYTES))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        buffer, self._buffer = self._buffer, memoryview(b"")
        self.protocol.data_received(bytes(buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        return self.protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        self.protocol.resume_writing()


_BUFFERS: WeakKeyDictionary[asyncio.AbstractEventLoop, TlsBuffers] = WeakKeyDictionary()
"""The receive buffer of all connections that a loop opened."""


async def connect_tls(
    loop: asyncio.AbstractEventLoop, protocol: asyncio.BufferedProtocol, context: ssl.SSLContext, host: str, port: int
) -> None:
    """Connect `protocol` to a server by TLS. Raise the error of the connection or of the handshake."""
    dialing = _Dialing(loop)
    buffers = _BUFFERS.get(loop)
    if buffers is None:
        buffers = _BUFFERS[loop] = TlsBuffers()
    transport = TlsTransport(context, protocol, buffers, dialing, is_server=False, host=host)
    await loop.create_connection(lambda: transport, host, port)
    try:
        await dialing.done
    except BaseException:
        transport.abort()
        raise


class _Dialing:
    """The handshake of one connection to a server."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()

    def progressed(self, transport: TlsTransport) -> None: ...

    def handshake_done(self, transport: TlsTransport) -> bool:
        if self.done.done():  # the caller has given up
            return False
        self.done.set_result(None)
        return True

    def handshake_failed(self, transport: TlsTransport, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def stream_failed(self, transport: TlsTransport, error: ssl.SSLError) -> None:
        """Do nothing: the protocol learns it from `connection_lost`."""


def tls_failure(error: ssl.SSLError) -> str:
    """Explain in one line why a connection to a server failed."""
    if isinstance(error, NotTls):
        return "it answers in plaintext: set security.protocol to PLAINTEXT or SASL_PLAINTEXT, or use its TLS port"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {error.verify_message.rstrip('.')}"
    return _ALERTS.get(error.reason or "", f"the handshake failed ({error.reason or 'protocol error'})")


_ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a client certificate",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it refused the handshake: it may require a client certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know the authority of the client certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it refused the client certificate: it has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refused the client certificate",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it refuses the versions of TLS that this side offers",
}
