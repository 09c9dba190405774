"""The TLS transport between a socket's transport and a protocol, without sockets: both are played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chronik.client.tls_transport import STEP_BYTES, NotTls, TlsBuffers, TlsTransport
from chronik.local.certificates import create_authority

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    folder = tmp_path_factory.mktemp("certificates")
    certificate, key = create_authority(folder).issue(folder, "node", ["localhost"])
    return _contexts(folder, certificate, key)


def _contexts(folder: Path, certificate: Path, key: Path) -> Contexts:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(certificate, key)
    client.load_verify_locations(folder / "ca.pem")
    return server, client


class Socket(asyncio.Transport):
    """The socket's transport. What is written waits in `sent`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_paused = self.is_closed = self.is_aborted = False

    def write(self, data: Any) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return len(self.sent)


class Recorder(asyncio.BufferedProtocol):
    """Keeps what it receives, in a buffer of `room` bytes. Calls `on_data` after each part."""

    def __init__(self, room: int = 64 * 1024) -> None:
        self.transport: Any = None
        self.received = bytearray()
        self.calls: list[str] = []
        self.on_data: Callable[[], None] = lambda: None
        self.keeps_open = False
        self._buffer = bytearray(room)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.calls.append("made")

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]
        self.on_data()

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return self.keeps_open

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append("lost")

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")


class Owner:
    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def progressed(self, transport: TlsTransport) -> None: ...

    def handshake_done(self, transport: TlsTransport) -> bool:
        return True

    def handshake_failed(self, transport: TlsTransport, error: Exception) -> None:
        self.errors.append(error)

    def stream_failed(self, transport: TlsTransport, error: ssl.SSLError) -> None:
        self.errors.append(error)


class Pair:
    """A server's transport, and OpenSSL as its client. Bytes pass when the test says so, `step` at once."""

    def __init__(self, contexts: Contexts, step: int = 1 << 30, room: int = 64 * 1024) -> None:
        server, client = contexts
        self.protocol, self.owner, self.socket = Recorder(room), Owner(), Socket()
        self.transport = TlsTransport(server, self.protocol, TlsBuffers(), self.owner, is_server=True)
        self._to_client, self.from_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(self._to_client, self.from_client, server_hostname="localhost")
        self._step = step
        self.transport.connection_made(self.socket)

    def shake_hands(self) -> Pair:
        for _ in range(4):
            with contextlib.suppress(ssl.SSLWantReadError):
                self.client.do_handshake()
            self.pass_to_server()
            self.pass_to_client()
        assert self.protocol.calls == ["made"]
        return self

    def pass_to_server(self) -> None:
        self.feed(self.from_client.read())

    def feed(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            buffer = self.transport.get_buffer(-1)
            count = min(len(buffer), self._step, len(data) - at)
            buffer[:count] = data[at : at + count]
            at += count
            self.transport.buffer_updated(count)

    def pass_to_client(self) -> None:
        self._to_client.write(bytes(self.socket.sent))
        self.socket.sent.clear()

    def send(self, data: bytes) -> None:
        self.client.write(data)
        self.pass_to_server()

    def read(self) -> bytes:
        self.pass_to_client()
        parts = []
        try:
            while part := self.client.read(1 << 16):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        return b"".join(parts)


@pytest.mark.parametrize("step", [1, 7, 16 * 1024, 1 << 20])
def test_data_arrives_whole_in_fragments_of_any_size(contexts: Contexts, step: int) -> None:
    pair = Pair(contexts, step).shake_hands()
    data = bytes(range(256)) * 300
    pair.send(data)
    assert pair.protocol.received == data
    pair.transport.write(data)
    assert pair.read() == data


@pytest.mark.parametrize("room", [1, 100, 1 << 20])
def test_data_arrives_whole_in_a_protocol_buffer_of_any_size(contexts: Contexts, room: int) -> None:
    pair = Pair(contexts, room=room).shake_hands()
    data = bytes(range(256)) * 200
    pair.send(data)
    assert pair.protocol.received == data


def test_large_writes_arrive_whole_and_leave_nothing_in_the_bio(contexts: Contexts) -> None:
    pair = Pair(contexts).shake_hands()
    data = bytes(3_000_000)
    pair.transport.write(memoryview(data))
    assert not pair.transport._outgoing.pending
    assert pair.transport.get_write_buffer_size() > len(data)
    assert pair.read() == data


async def test_paused_protocol_receives_nothing_until_it_resumes(contexts: Contexts) -> None:
    pair = Pair(contexts, room=1000).shake_hands()
    pair.protocol.on_data = pair.transport.pause_reading
    data = bytes(range(256)) * 1000
    pair.client.write(data)
    encrypted = pair.from_client.read()
    pair.feed(encrypted)
    assert len(pair.protocol.received) == 1000
    assert pair.socket.is_paused
    # The received bytes are kept; the BIO holds at most one step of them.
    assert pair.transport._incoming.pending <= STEP_BYTES
    received = 1000
    while received < len(data):
        pair.transport.resume_reading()
        await asyncio.sleep(0)
        assert received < len(pair.protocol.received) <= received + 1000
        received = len(pair.protocol.received)
    pair.transport.resume_reading()
    await asyncio.sleep(0)
    assert pair.protocol.received == data
    assert not pair.socket.is_paused


async def test_end_of_input_follows_the_data_that_was_kept(contexts: Contexts) -> None:
    pair = Pair(contexts, room=1000).shake_hands()
    pair.protocol.on_data = pair.transport.pause_reading
    pair.send(bytes(1500))
    assert pair.transport.eof_received()
    assert "eof" not in pair.protocol.calls
    pair.protocol.on_data = lambda: None
    pair.transport.resume_reading()
    await asyncio.sleep(0)
    assert len(pair.protocol.received) == 1500
    assert pair.protocol.calls[-1] == "eof"
    assert pair.socket.is_closed


@pytest.mark.parametrize("keeps_open", [False, True])
def test_close_notify_ends_the_input_and_answers_can_still_be_sent(contexts: Contexts, keeps_open: bool) -> None:
    pair = Pair(contexts).shake_hands()
    pair.protocol.keeps_open = keeps_open
    pair.client.write(b"last request")
    with pytest.raises(ssl.SSLWantReadError):
        pair.client.unwrap()
    pair.pass_to_server()
    assert pair.protocol.received == b"last request"
    assert pair.protocol.calls == ["made", "eof"]
    assert pair.socket.is_closed is not keeps_open
    if keeps_open:
        pair.transport.write(b"answer")
        assert not pair.socket.is_closed


def test_close_sends_close_notify_after_the_data(contexts: Contexts) -> None:
    pair = Pair(contexts).shake_hands()
    pair.transport.write(b"answer")
    pair.transport.close()
    assert pair.socket.is_closed and not pair.socket.is_aborted
    pair.pass_to_client()
    assert pair.client.read(100) == b"answer"
    assert pair.client.read(100) == b""  # a clean end, not a truncation
    pair.transport.write(b"too late")
    assert not pair.socket.sent


def test_backpressure_of_the_socket_reaches_the_protocol(contexts: Contexts) -> None:
    pair = Pair(contexts)
    pair.transport.pause_writing()  # during the handshake there is no protocol to pause
    pair.shake_hands()
    pair.transport.pause_writing()
    pair.transport.resume_writing()
    assert pair.protocol.calls == ["made", "pause", "resume"]


def test_plaintext_fails_the_handshake_at_the_first_byte(contexts: Contexts) -> None:
    pair = Pair(contexts)
    pair.feed(b"\x00\x00\x00\x20")
    assert isinstance(pair.owner.errors[0], NotTls)
    assert pair.socket.is_closed
    pair.transport.connection_lost(None)
    assert len(pair.owner.errors) == 1
    assert pair.protocol.calls == []


def test_changed_bytes_end_the_connection(contexts: Contexts) -> None:
    pair = Pair(contexts).shake_hands()
    pair.client.write(b"request")
    encrypted = bytearray(pair.from_client.read())
    encrypted[-1] ^= 1
    pair.feed(bytes(encrypted))
    assert pair.protocol.received == b""
    assert pair.socket.is_aborted
    (error,) = pair.owner.errors
    assert isinstance(error, ssl.SSLError)


def test_closed_connection_is_freed_without_the_garbage_collector(contexts: Contexts) -> None:
    pair = Pair(contexts).shake_hands()
    transport, protocol = weakref.ref(pair.transport), weakref.ref(pair.protocol)
    gc.disable()
    try:
        pair.transport.connection_lost(None)
        del pair
        assert transport() is None
        assert protocol() is None
    finally:
        gc.enable()


def test_protocol_that_aborts_while_it_reads_receives_no_more(contexts: Contexts) -> None:
    pair = Pair(contexts, room=100).shake_hands()
    pair.protocol.on_data = pair.transport.abort
    pair.send(bytes(1000))
    assert len(pair.protocol.received) == 100
