"""`python bench/tls_transports.py`: CPU of a server's side of TLS: asyncio's own, uvloop's, and ours.

Each server is a process that receives and answers requests of one client over a socket. What is printed is its CPU
time for a request, that of the kernel included: the lowest of several windows, in three runs by turns.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import ssl
import struct
import tempfile
import time
from multiprocessing.connection import Connection
from unittest.mock import Mock

from chronik.client.tls_transport import TlsBuffers, TlsTransport
from chronik.local.certificates import create_authority

HEADER = struct.Struct(">QQ")
SMALL, LARGE = 100, 1_000_000
REQUESTS = {"small request": (SMALL, SMALL, 2_000), "1 MB in": (LARGE, SMALL, 60), "1 MB out": (SMALL, LARGE, 60)}
"""The bytes of the request and of the response, and how many requests a window has."""
KINDS, WINDOWS, RUNS = ("asyncio", "uvloop", "chronik"), 12, 3


class Answering(asyncio.BufferedProtocol):
    """Answers one request at a time. A request has its size and that of its answer; size 0 asks for the CPU time."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(1 << 18))
        self._left = self._answer_bytes = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if not self._left:
            size_bytes, self._answer_bytes = HEADER.unpack_from(self._buffer)
            if not size_bytes:
                self._transport.write(HEADER.pack(time.process_time_ns(), 0))
                return
            self._left = size_bytes
        self._left -= nbytes
        if not self._left:
            self._transport.write(bytes(self._answer_bytes))


def serve(kind: str, folder: str, pipe: Connection) -> None:
    """Run one server until its process is ended."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{folder}/node.pem", f"{folder}/node.key")

    async def run() -> None:
        loop, buffers = asyncio.get_running_loop(), TlsBuffers()
        if kind == "chronik":
            # The mock accepts every handshake.
            server = await loop.create_server(
                lambda: TlsTransport(context, Answering(), buffers, Mock(), is_server=True), "127.0.0.1", 0
            )
        else:
            server = await loop.create_server(Answering, "127.0.0.1", 0, ssl=context)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    if kind == "uvloop":
        import uvloop

        uvloop.run(run())
    else:
        asyncio.run(run())


def call(tls: ssl.SSLSocket, size_bytes: int, answer_bytes: int) -> int:
    tls.sendall(HEADER.pack(size_bytes, answer_bytes) + bytes(max(0, size_bytes - HEADER.size)))
    received, left = b"", answer_bytes or HEADER.size
    while left:
        received = tls.recv(min(left, 1 << 16))
        left -= len(received)
    return 0 if size_bytes else int(HEADER.unpack(received)[0])


def measure(kind: str, folder: str) -> dict[str, float]:
    """Return the CPU time of each kind of request in microseconds."""
    spawn = multiprocessing.get_context("spawn")
    pipe, other = spawn.Pipe()
    server = spawn.Process(target=serve, args=(kind, folder, other), daemon=True)
    server.start()
    raw = socket.create_connection(("127.0.0.1", pipe.recv()))
    tls = ssl.create_default_context(cafile=f"{folder}/ca.pem").wrap_socket(raw, server_hostname="127.0.0.1")
    assert tls.cipher() == ("TLS_AES_256_GCM_SHA384", "TLSv1.3", 256)
    figures = {}
    for name, (size_bytes, answer_bytes, count) in REQUESTS.items():
        lowest_ns = float("inf")
        for _ in range(WINDOWS):
            before_ns = call(tls, 0, 0)
            for _ in range(count):
                call(tls, size_bytes, answer_bytes)
            lowest_ns = min(lowest_ns, (call(tls, 0, 0) - before_ns) / count)
        figures[name] = lowest_ns / 1000
    tls.close()
    server.terminate()
    server.join()
    return figures


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        create_authority(made).issue(made, "node", ["127.0.0.1"])
        for number in range(RUNS):
            for each in KINDS:
                shown = ", ".join(f"{name} {cpu_us:.1f} µs" for name, cpu_us in measure(each, made).items())
                print(f"run {number + 1}, {each}: {shown}", flush=True)
