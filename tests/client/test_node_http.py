"""Bounded GET requests: valid and invalid answers of a node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from chronik.client.node_http import HttpError, get, get_json
from chronik.doctor.chronik_nodes import TracePages

T = TypeVar("T")
DATE = "Date: Thu, 01 Jan 1970 00:01:00 GMT\r\n"


def request_once(answer: bytes | None, ask: Callable[[str], Awaitable[T]]) -> tuple[T | HttpError, list[str]]:
    """Run `ask` against a server that sends one answer (None: no answer); return the result and its requests."""
    requests: list[str] = []
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async def run() -> T | HttpError:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await ask(f"127.0.0.1:{port}")
        except HttpError as error:
            return error
        finally:
            server.close()
            await asyncio.gather(*filter(None, serving), return_exceptions=True)

    return asyncio.run(run()), requests


def test_a_response_includes_the_nodes_clock() -> None:
    body = b'{"a": 1}'
    answer, requests = request_once(
        f"HTTP/1.1 200 OK\r\n{DATE}\r\n".encode() + body, lambda a: get(a, "/api/x y", after=3, topic=None, limit=5)
    )
    assert not isinstance(answer, HttpError)
    assert answer == (200, body, 60_000.0)
    assert requests[0].startswith("GET /api/x%20y?after=3&limit=5 HTTP/1.0\r\n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 503 no\r\n\r\nsorry", "answered 503"),
        (b'HTTP/1.1 404 no\r\n\r\n{"error": "no such topic"}', "answered 404: no such topic"),
        (b"nonsense\r\n\r\n", "did not answer with HTTP"),
        (b"HTTP/1.1 200 OK\r\n", "bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n[1]", "did not answer with an object"),
        (b"HTTP/1.1 200 OK\r\n\r\n{", "did not answer with an object"),
        (None, "did not answer within 0.2 s"),
    ],
)
def test_an_invalid_response_is_a_one_line_error(answer: bytes | None, reason: str) -> None:
    outcome, _ = request_once(answer, lambda address: get_json(address, "/", 0.2))
    assert isinstance(outcome, HttpError)
    assert reason in str(outcome)
    assert "\n" not in str(outcome)


def test_an_unreachable_or_invalid_address_is_an_error() -> None:
    for address in ("127.0.0.1:1", "nowhere", ""):
        with pytest.raises(HttpError):
            asyncio.run(get(address, "/"))


def test_trace_pages_resume_after_the_last_event_and_report_node_availability() -> None:
    event = '{"kind":"no-data","n":7,"time_ms":1.0,"node":1,"topic":"t","partition":0,"fetch":2}'
    page = f'HTTP/1.1 200 OK\r\n{DATE}\r\n{{"node":1,"next":7,"dropped":0,"events":[{event}]}}'.encode()

    async def story(address: str) -> None:
        pages = TracePages("127.0.0.1:1", "t", 0)
        assert await pages.latest(5) == ()
        assert (pages.answers, pages.has_changed) == (False, True)
        assert await pages.next() == ()
        assert not pages.has_changed, "it is reported once"
        pages.address = address
        assert [event.n for event in await pages.next()] == [7]
        assert (pages.answers, pages.has_changed, pages.clock_ms) == (True, True, 60_000.0)
        await pages.next()
        assert not pages.has_changed

    outcome, requests = request_once(page, story)
    assert outcome is None
    assert "after=0" in requests[0]
    assert "after=7" in requests[1]
    assert "topic=t&partition=0" in requests[1]
