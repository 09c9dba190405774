"""Responses that become ready together leave in one write of their connection."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from chronik.node.serving.connection import JOIN_BYTES_MAX, Connection, Reply, Request
from chronik.wire.frames import response_prefix

NO_FRAME = memoryview(b"")


class Transport:
    """Records each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None: ...


class Metrics:
    def __init__(self) -> None:
        self.seconds = SimpleNamespace(observe=lambda _: None)
        self.errors = 0


def opened() -> tuple[Connection, Transport]:
    ignore: Any = lambda *_: True  # noqa: E731
    server: Any = SimpleNamespace(
        loop=asyncio.get_running_loop(),
        frame_bytes_max=1000,
        pipelined_requests_max=10,
        connection_opened=ignore,
        connection_closed=ignore,
    )
    listener: Any = None
    connection, transport = Connection(server, listener), Transport()
    any_transport: Any = transport
    connection.connection_made(any_transport)
    return connection, transport


def expect(connection: Connection, count: int) -> list[Reply]:
    metrics: Any = Metrics()
    replies = [
        Reply(Request(connection, 0, 9, i, None, NO_FRAME, 0, 0.0), False, metrics, lambda: 0.0) for i in range(count)
    ]
    for reply in replies:
        connection.expect_reply(reply)
    return replies


def frame(correlation_id: int, body: bytes) -> bytes:
    return response_prefix(correlation_id, False, len(body)) + body


async def test_responses_of_one_turn_leave_in_one_write_in_request_order() -> None:
    connection, transport = opened()
    replies = expect(connection, 4)
    for index in (1, 0, 2):
        replies[index].send((b"body",))
    assert transport.writes == []
    assert connection.unsent_bytes > 0
    await asyncio.sleep(0)
    assert transport.writes == [b"".join(frame(i, b"body") for i in range(3))]
    assert connection.unsent_bytes == 0


async def test_the_last_awaited_response_is_written_at_once() -> None:
    connection, transport = opened()
    for reply in expect(connection, 2):
        reply.send((b"body",))
    assert transport.writes == [frame(0, b"body") + frame(1, b"body")]
    await asyncio.sleep(0)
    assert len(transport.writes) == 1


async def test_responses_above_the_limit_do_not_wait_for_the_end_of_the_turn() -> None:
    connection, transport = opened()
    body = bytes(JOIN_BYTES_MAX)
    expect(connection, 2)[0].send((body,))
    assert b"".join(transport.writes) == frame(0, body)


async def test_a_close_writes_the_responses_that_wait_for_the_end_of_the_turn() -> None:
    connection, transport = opened()
    expect(connection, 2)[0].send((b"body",))
    connection.close()
    assert transport.writes == [frame(0, b"body")]


async def test_responses_of_a_lost_connection_are_dropped() -> None:
    connection, transport = opened()
    expect(connection, 2)[0].send((b"body",))
    connection.connection_lost(None)
    await asyncio.sleep(0)
    assert transport.writes == []
    assert connection.unsent_bytes == 0
