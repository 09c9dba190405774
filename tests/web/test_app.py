"""Health, readiness and metrics over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from chronik.observe.metrics import Metrics
from chronik.web.app import create_app
from chronik.web.server import WebServer, bind


class Node:
    """What the application sees of a node."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.is_ready = False


async def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), body


def served(work: Callable[[Node, int], Awaitable[None]]) -> None:
    async def run() -> None:
        node = Node()
        listener = bind("127.0.0.1", 0)
        server = WebServer(create_app(node), listener)
        await server.start()
        try:
            async with asyncio.timeout(20):
                await work(node, listener.getsockname()[1])
        finally:
            await server.stop()

    asyncio.run(run())


def test_a_node_is_alive_before_it_is_ready() -> None:
    async def work(node: Node, port: int) -> None:
        assert (await get(port, "/healthz"))[0] == 200
        assert (await get(port, "/readyz"))[0] == 503
        node.is_ready = True
        assert await get(port, "/readyz") == (200, "ready\n")

    served(work)


def test_metrics_are_those_of_this_node_now() -> None:
    async def work(node: Node, port: int) -> None:
        node.metrics.watermark_updates = 41
        assert "chronik_watermark_updates_total 41.0" in (await get(port, "/metrics"))[1]
        node.metrics.watermark_updates += 1
        assert "chronik_watermark_updates_total 42.0" in (await get(port, "/metrics"))[1]

    served(work)


def test_what_is_not_there_is_404_and_nothing_can_be_changed() -> None:
    async def work(node: Node, port: int) -> None:
        assert (await get(port, "/nothing"))[0] == 404
        assert (await get(port, "/healthz", method="POST"))[0] == 405

    served(work)


def test_many_requests_at_once_are_all_answered() -> None:
    async def work(node: Node, port: int) -> None:
        answers = await asyncio.gather(*(get(port, "/healthz") for _ in range(50)))
        assert {status for status, _ in answers} == {200}

    served(work)


def test_a_taken_port_is_found_at_bind() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", other.getsockname()[1])


def test_a_server_that_never_started_frees_its_port() -> None:
    async def run() -> int:
        listener = bind("127.0.0.1", 0)
        port: int = listener.getsockname()[1]
        await WebServer(create_app(Node()), listener).stop()
        return port

    bind("127.0.0.1", asyncio.run(run())).close()
