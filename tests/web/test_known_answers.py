"""Answers of lookups that are sent again without the application: the same bytes, as long as they are true."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from tests.web.support_login import SecureNode, basic, secured
from tests.web.test_registry import Registry, grant

from chronik.authorization.acls import Operation
from chronik.schemas.commands import Command
from chronik.web import known_answers
from chronik.web.app import create_app
from chronik.web.known_answers import KnownAnswers, Recording
from chronik.web.server import WebServer, bind

TIMEOUT_S = 20.0
DATE = re.compile(rb"\r\ndate: [^\r]*")
LENGTH = re.compile(rb"\r\ncontent-length: ([0-9]+)")
PATHS = (
    "/schemas/ids/1",
    "/schemas/ids/1/schema",
    "/schemas/ids/1/versions",
    "/schemas/ids/1/subjects?deleted=true",
    "/schemas/ids/1?fetchMaxId=true&unknown=1",
    "/schemas/ids/1?format=resolved",
    "/schemas/ids/1?subject=:.ctx:a",
    "/schemas/ids/9",
    "/schemas/ids/x",
    "/schemas/types",
    "/schemas?latestOnly=true",
    "/subjects",
    "/subjects?deleted=true",
    "/subjects/a/versions",
    "/subjects/a/versions/1",
    "/subjects/a/versions/latest/schema",
    "/subjects/a/versions/0",
    "/subjects/b%2Fc/versions/1",
    "/subjects/gone/versions/1",
    "/subjects/gone/versions/1?deleted=true",
    "/subjects/%FF/versions/1",
    "/contexts",
    "/config",
    "/config/a",
    "/mode",
    "/mode/a",
    "/v1/metadata/id",
    "/v1/metadata/version",
    "/healthz",
    "/api/unknown",
)


class Client:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()
            # The node reads a part of its own, if it gets the turn.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def answer(self, *, has_body: bool = True) -> bytes:
        """Return an answer without its date."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = LENGTH.search(head)
        assert length is not None and len(DATE.findall(head)) == 1
        body = await self._reader.readexactly(int(length[1])) if has_body else b""
        return DATE.sub(b"", head) + body

    async def get(self, path: str, **headers: str) -> bytes:
        await self.send(request(path, **headers))
        return await self.answer()

    async def exchange(self, *parts: bytes) -> bytes:
        """Send requests, and return all answers until the node closes the connection."""
        received = b""
        # After a malformed request, a node closes a connection on which more may have arrived.
        with suppress(ConnectionError):
            await self.send(*parts)
        with suppress(ConnectionError):
            while part := await self._reader.read(65_536):
                received += part
        return DATE.sub(b"", received)

    def close(self) -> None:
        self._writer.close()


def request(path: str, method: str = "GET", **headers: str) -> bytes:
    lines = {"Host": "127.0.0.1", **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield client
    finally:
        client.close()


async def registered(node: SecureNode) -> Registry:
    registry = Registry()
    node.broker.schemas = registry
    for subject in ("a", "b/c", "gone", ":.ctx:a"):
        await registry.submit(Command("register", subject, {"body": {"schema": '"string"'}}))
    await registry.submit(Command("delete_subject", "gone", {}))
    return registry


def without_log_in(work: Callable[[SecureNode, int], Awaitable[None]]) -> Callable[[], None]:
    return secured(work, http_login=False, is_authorizing=False)


@without_log_in
async def test_an_answer_that_is_sent_again_has_the_same_bytes(node: SecureNode, port: int) -> None:
    registry = await registered(node)
    async with connected(port) as client:
        for path in PATHS:
            for headers in ({}, {"Accept": "application/json"}, {"Connection": "keep-alive", "User_Agent": "x"}):
                first = await client.get(path, **headers)
                seen = registry.lookups
                async with connected(port) as other:
                    assert [await client.get(path, **headers), await other.get(path, **headers)] == [first] * 2, path
                is_known = first.startswith(b"HTTP/1.1 200") and not path.startswith(("/healthz", "/v1/metadata/id"))
                is_looked_up = registry.lookups > seen
                assert not (is_known and is_looked_up), path


@without_log_in
async def test_a_repeated_lookup_does_not_reach_the_registry(node: SecureNode, port: int) -> None:
    registry = await registered(node)
    async with connected(port) as client:
        first = await client.get("/schemas/ids/1")
        seen = registry.lookups
        assert [await client.get("/schemas/ids/1") for _ in range(50)] == [first] * 50
    assert first.endswith(b'{"schema":"\\"string\\""}') and seen == registry.lookups == 1


@without_log_in
async def test_a_change_of_the_registry_ends_every_known_answer(node: SecureNode, port: int) -> None:
    registry = await registered(node)
    async with connected(port) as client:

        async def status(path: str) -> bytes:
            return (await client.get(path))[9:12]

        for path in ("/subjects/a/versions", "/subjects/a/versions/1", "/schemas/ids/1/subjects"):
            assert [await status(path) for _ in range(2)] == [b"200"] * 2
        await registry.submit(Command("register", "a", {"body": {"schema": '"bytes"'}}))
        assert (await client.get("/subjects/a/versions")).endswith(b"[1,2]")
        await registry.submit(Command("delete_version", "a", {"version": 1}))
        assert await status("/subjects/a/versions/1") == b"404"
        assert (await client.get("/schemas/ids/1/subjects")).endswith(b'["b/c"]')


@without_log_in
async def test_a_node_that_is_not_ready_or_must_read_first_answers_nothing_known(node: SecureNode, port: int) -> None:
    registry = await registered(node)
    async with connected(port) as client:
        for _ in range(2):
            assert (await client.get("/schemas/ids/1")).startswith(b"HTTP/1.1 200")
        node.broker.is_ready = False
        assert (await client.get("/schemas/ids/1")).startswith(b"HTTP/1.1 503")
        node.broker.is_ready = True
        assert (await client.get("/schemas/ids/1")).startswith(b"HTTP/1.1 200")
        assert registry.lookups == 1
        registry.is_behind = True
        assert (await client.get("/schemas/ids/1")).startswith(b"HTTP/1.1 200")
        assert registry.lookups == 2
        node.broker.schemas = None
        assert (await client.get("/schemas/ids/1")).startswith(b"HTTP/1.1 503")


@secured
async def test_a_node_with_a_log_in_checks_rights_for_each_request(node: SecureNode, port: int) -> None:
    registry = Registry()
    node.broker.schemas = registry
    await registry.submit(Command("register", "payroll-value", {"body": {"schema": '"string"'}}))
    bob = basic("bob")
    async with connected(port) as client:
        assert (await client.get("/schemas/ids/1", **bob)).startswith(b"HTTP/1.1 404")
        grant(node, Operation.DESCRIBE, "payroll")
        for _ in range(3):
            assert (await client.get("/schemas/ids/1", **bob)).startswith(b"HTTP/1.1 200")
        assert node.decisions is not None
        node.decisions.granted.clear()  # type: ignore[attr-defined]
        for path in ("/schemas/ids/1", "/schemas/ids/1/schema"):
            hidden = await client.get(path, **bob)
            assert hidden.startswith(b"HTTP/1.1 404") and b"string" not in hidden
        assert (await client.get("/schemas/ids/1")).startswith(b"HTTP/1.1 401")


@without_log_in
async def test_another_host_name_is_refused_for_a_known_path(node: SecureNode, port: int) -> None:
    await registered(node)
    async with connected(port) as client:
        for _ in range(2):
            assert (await client.get("/schemas/ids/1")).startswith(b"HTTP/1.1 200")
            assert (await client.get("/schemas/ids/1", Host="evil.example")).startswith(b"HTTP/1.1 403")


@without_log_in
async def test_bytes_that_belong_to_an_earlier_request_are_not_a_known_one(node: SecureNode, port: int) -> None:
    await registered(node)
    lookup, other = request("/schemas/ids/1"), request("/subjects")
    async with connected(port) as client:
        known, listed = await client.get("/schemas/ids/1"), await client.get("/subjects")
        # The same bytes as a body, and after the beginning of a header.
        posted = request("/subjects/a", "POST", Content_Length=str(len(lookup)))
        await client.send(posted, lookup, other)
        assert (await client.answer()).startswith(b"HTTP/1.1 400") and await client.answer() == listed
        await client.send(b"GET /subjects HTTP/1.1\r\nX-Part: ", lookup, lookup)
        assert [await client.answer() for _ in range(2)] == [listed, known]
        # Requests that arrive together are answered in their order.
        await client.send(lookup + other + lookup, lookup)
        assert [await client.answer() for _ in range(4)] == [known, listed, known, known]
        assert (await client.exchange(request("/schemas/ids/1", Connection="close"))).startswith(b"HTTP/1.1 200")


@without_log_in
async def test_random_streams_get_the_answers_of_a_server_that_knows_none(node: SecureNode, port: int) -> None:
    await registered(node)
    app = create_app(node)
    app.state.known = Nothing(lambda: None)
    listener = bind("127.0.0.1", 0)
    plain = WebServer(app, listener)
    await plain.start()
    random_ = random.Random(1)
    try:
        for _ in range(150):
            stream, answers, is_damaged = b"", [], False
            for _ in range(random_.randrange(1, 8)):
                method = random_.choice(("GET",) * 6 + ("HEAD", "POST", "OPTIONS"))
                path = random_.choice(PATHS[: random_.choice((3, len(PATHS)))])
                more = random_.choice(({}, {}, {"Content_Length": "4"}, {"Expect": "100-continue"}, {"Upgrade": "x"}))
                one = request(path, method, **more) + (b"GET " if "Content_Length" in more else b"")
                if random_.random() < 0.05:
                    at = random_.randrange(len(one))
                    one = one[:at] + bytes([random_.randrange(256)]) + one[at + 1 :]
                    is_damaged = True
                stream += one
            stream += request("/schemas/ids/1", Connection="close")
            cuts = sorted(random_.randrange(len(stream)) for _ in range(random_.randrange(6)))
            parts = [stream[low:high] for low, high in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
            for each in (port, listener.getsockname()[1]):
                async with connected(each) as client, asyncio.timeout(TIMEOUT_S):
                    answers.append(await client.exchange(*parts))
            shortest = min(map(len, answers)) if is_damaged else None
            assert answers[0][:shortest] == answers[1][:shortest], stream
    finally:
        await plain.stop()


class Nothing(KnownAnswers):
    def find(self, *_: Any) -> None:
        return None


def test_known_answers_take_a_bounded_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_answers, "BYTES_MAX", 20_000)
    monkeypatch.setattr(known_answers, "ANSWER_BYTES_MAX", 5_000)
    kept: list[KnownAnswers] = []
    create = KnownAnswers.__init__

    def note(known: KnownAnswers, current: Any) -> None:
        create(known, current)
        kept.append(known)

    monkeypatch.setattr(KnownAnswers, "__init__", note)

    async def work(node: SecureNode, port: int) -> None:
        registry = await registered(node)
        text = json.dumps({"type": "enum", "name": "E", "symbols": ["S" * 6_000]})
        await registry.submit(Command("register", "large", {"body": {"schema": text}}))
        async with connected(port) as client:
            for number in range(100):
                await client.get(f"/schemas/ids/1?x={number}")
            seen = registry.lookups
            await client.get("/schemas/ids/1?x=99")
            assert registry.lookups == seen
            await client.get("/schemas/ids/1?x=0")
            assert registry.lookups == seen + 1
            for _ in range(2):
                await client.get("/subjects/large/versions/1")
            assert registry.lookups == seen + 3
            for _ in range(2):
                await client.get(f"/schemas/ids/1?x={'9' * 3_000}")
            assert registry.lookups == seen + 5
        answers = kept[0]._answers
        assert 10 < len(answers) < 50
        assert sum(len(key[1]) + sum(map(len, parts)) for key, parts in answers.items()) <= 20_000
        assert kept[0]._size_bytes <= 20_000

    without_log_in(work)()


def test_a_stream_of_events_is_not_kept_in_memory() -> None:
    written: list[bytes] = []
    cycle = SimpleNamespace(default_headers=[(b"date", b"today")])
    transport = SimpleNamespace(write=written.append)
    connection: Any = SimpleNamespace(server=("", 1), scope={"state": {}}, cycle=cycle, transport=transport)
    recording = Recording(connection, b"GET /api/events HTTP/1.1\r\n\r\n")
    cycle.transport.write(b"HTTP/1.1 200\r\ndate: today\r\n")
    for _ in range(100):
        cycle.transport.write(b"x" * 1_000)
        assert sum(map(len, recording._parts)) <= known_answers.ANSWER_BYTES_MAX
    assert sum(map(len, written)) > 100_000
    assert not recording.around_date()[1]
