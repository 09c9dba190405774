"""Silent and slow HTTP connections hurt only themselves: health checks always succeed, other requests soon again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.web.known_answers import KnownAnswers
from chronik.web.server import WebServer, bind

SILENT = 300
SLOW = 40
CONNECTIONS_MAX = 400
REQUESTS_MAX = 200
ROUNDS = 40
ROUND_S = 0.2
"""All rounds together take longer than a connection may be silent."""
HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + b"X-Slow: " + b"x" * 1000


def status(node: Node, path: str) -> int:
    try:
        with urllib.request.urlopen(node.http + path, timeout=10) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def connect(node: Node) -> socket.socket:
    return socket.create_connection(("127.0.0.1", node.http_port), 10)


def is_open(connection: socket.socket) -> bool:
    """Return whether the node has not closed the connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1 << 16) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextlib.contextmanager
def held() -> Iterator[list[socket.socket]]:
    """A list of connections that are closed at the end."""
    connections: list[socket.socket] = []
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def sockets_of(node: Node) -> int:
    folder = f"/proc/{node.pid}/fd"
    count = 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"{folder}/{name}").startswith("socket:")
    return count


def test_health_checks_succeed_despite_silent_and_slow_connections(node: Node) -> None:
    with held() as silent, held() as slow:
        for number in range(ROUNDS):
            # Reopen at once every connection that the node closed.
            for connections, count in ((silent, SILENT), (slow, SLOW)):
                for ended in [each for each in connections if not is_open(each)]:
                    ended.close()
                    connections.remove(ended)
                connections += [connect(node) for _ in range(count - len(connections))]
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.send(HEAD[number : number + 1])
            answers = {path: status(node, path) for path in ("/healthz", "/readyz", "/metrics", "/api/cluster")}
            assert set(answers.values()) == {200}, f"round {number}: {answers}"
            time.sleep(ROUND_S)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /heal", b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nab"],
    ids=["nothing", "half a head", "one request", "half a body"],
)
def test_the_node_closes_a_connection_without_a_next_request(node: Node, sent: bytes) -> None:
    with held() as connections:
        connections.append(connect(node))
        connections[0].sendall(sent)

        def ended() -> bool:
            with contextlib.suppress(OSError):
                if sent and not sent.endswith(b"\r\n\r\n"):
                    connections[0].send(b"x")  # sending single bytes does not keep it open
            return not is_open(connections[0])

        eventually(ended, 20, "the node closes it")


def test_thousands_of_silent_connections_use_a_bounded_number_of_sockets(node: Node) -> None:
    before = sockets_of(node)
    with held() as connections:
        for number in range(3_000):
            connections.append(connect(node))
            if number % 300 == 0:
                assert (status(node, "/healthz"), status(node, "/readyz")) == (200, 200)
        eventually(lambda: sockets_of(node) <= before + CONNECTIONS_MAX, 10, "old ones made room")
        assert status(node, "/api/cluster") == 200


def test_health_checks_succeed_while_the_request_limit_is_reached() -> None:
    async def play(port: int, release: asyncio.Event) -> None:
        with held() as connections:
            for _ in range(REQUESTS_MAX):
                connections.append(await send_request(port, "/hold"))
            # One request more is rejected; retry, because it may arrive before the last request above.
            async with asyncio.timeout(10):
                while await first_line(port, "/hold?at-once") != b"HTTP/1.1 503 Service Unavailable":
                    await asyncio.sleep(0.01)
            assert await first_line(port, "/healthz") == b"HTTP/1.1 200 OK"
            assert await first_line(port, "/readyz") == b"HTTP/1.1 200 OK"
            release.set()
            async with asyncio.timeout(10):
                while await first_line(port, "/hold?at-once") != b"HTTP/1.1 200 OK":
                    await asyncio.sleep(0.01)

    asyncio.run(served(play))


def test_the_server_closes_a_connection_whose_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronik.web.http_bounds.STALL_S_MAX", 0.2)

    async def play(port: int, release: asyncio.Event) -> None:
        with held() as connections:
            gc.collect()  # what earlier tests left open is closed now, not while this one counts
            before = len(os.listdir("/proc/self/fd"))
            connections.append(await send_request(port, "/large"))
            # Both ends are in this process: the server's end appears, and disappears.
            for open_ends in (2, 1):
                async with asyncio.timeout(10):
                    while len(os.listdir("/proc/self/fd")) != before + open_ends:
                        await asyncio.sleep(0.01)

    asyncio.run(served(play))


async def send_request(port: int, path: str) -> socket.socket:
    """Send a request, and return the connection without reading from it."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return client


async def first_line(port: int, path: str) -> bytes:
    with await send_request(port, path) as client:
        received = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        return received.partition(b"\r\n")[0]


async def served(play: Callable[[int, asyncio.Event], Awaitable[None]]) -> None:
    """Run `play` with a server in this process, which holds its requests until they are released."""
    release = asyncio.Event()

    async def hold(request: Request) -> Response:
        if not request.url.query:
            await release.wait()
        return Response("done")

    async def large(request: Request) -> Response:
        return Response(bytes(64 << 20))

    async def alive(request: Request) -> Response:
        return Response("alive")

    async def close() -> None:
        return

    routes = {"/hold": hold, "/large": large, "/healthz": alive, "/readyz": alive}
    app = Starlette(routes=[Route(path, handler) for path, handler in routes.items()])
    app.state.close = close
    app.state.known = KnownAnswers(lambda: None)
    listener = bind("127.0.0.1", 0)
    server = WebServer(app, listener)
    await server.start()
    try:
        await play(listener.getsockname()[1], release)
    finally:
        release.set()
        await server.stop()
