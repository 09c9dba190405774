"""The bounds of connections that have not authenticated, errors inside a mechanism, and the key set's source."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from tests.support.tokens import key_set, public_jwk, token_now

from chronik.authentication.oauth import OAuthClient
from chronik.authentication.sasl import Authenticated, Challenge, Outcome
from chronik.node.config import ConfigError, NodeConfig, Sasl, Security
from chronik.node.environment import Environment
from chronik.node.runtime import Runtime
from chronik.node.serving import authentication, key_source
from chronik.node.serving.authentication import NO_ACCESS, Authentication
from chronik.node.serving.connection import Connection
from chronik.node.serving.key_source import KeyLoadError, KeySource, check_source, fetch_url
from chronik.observe.logging import make_logger
from chronik.observe.metrics import Metrics
from chronik.storage.disk import RealDisk
from chronik.wire.errors import ErrorCode, KafkaError

SECRET = b"a cluster secret"
NOW_MS = 1_800_000_000_000


class Client:
    """A connection, as far as its authentication uses it."""

    def __init__(self, host: str) -> None:
        self.client_host = host
        self.frame_bytes_max = 100_000_000
        self.access: Any = None
        self.gate: Any = None
        self.end: str | None = None

    def drop(self, reason: str) -> None:
        self.end = reason
        self.gate.closed()

    def close(self) -> None:
        self.end = "closed"
        self.gate.closed()


class Node:
    """The authentication of a node, its log, and clients."""

    def __init__(self, executor: ThreadPoolExecutor, wall_ms: Callable[[], int] = lambda: NOW_MS, **sasl: Any) -> None:
        self.lines: list[str] = []
        settings = Sasl(**{"mechanisms": ("PLAIN", "SCRAM-SHA-256"), "failure_delay_ms": 0, **sasl})
        config = NodeConfig(sasl=settings, security=Security(protocol="SASL_PLAINTEXT"))
        log = make_logger(self.lines.append, lambda: NOW_MS)
        env = Environment(RealDisk(), Random(1), executor, wall_ms)
        self.runtime = Runtime.make(config, env, Metrics(), log)
        self.shared = Authentication(self.runtime, SECRET, dict)

    def connect(self, host: str = "10.0.0.1") -> Client:
        client = Client(host)

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            self.runtime.loop.create_task(work)

        self.shared.guard(cast(Connection, client), spawn)
        return client


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


# -- connections -------------------------------------------------------------------------------------------------------


async def test_new_connection_has_no_rights_and_small_frames(executor: ThreadPoolExecutor) -> None:
    client = Node(executor).connect()
    assert client.access is NO_ACCESS
    assert not NO_ACCESS.is_open
    assert client.frame_bytes_max == authentication.UNAUTHENTICATED_FRAME_BYTES_MAX


async def test_connection_is_dropped_at_its_deadline(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "UNAUTHENTICATED_S_MAX", 0.05)
    node = Node(executor)
    late, settled = node.connect(), node.connect()
    node.shared.settle(cast(Connection, settled))
    async with asyncio.timeout(5):
        while late.end is None:
            await asyncio.sleep(0.01)
    assert late.end == "not authenticated within 0.05 s"
    assert settled.end is None


async def test_oldest_connection_of_the_busiest_address_makes_room(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "UNAUTHENTICATED_MAX", 4)
    node = Node(executor)
    honest = node.connect("10.0.0.9")
    flood = [node.connect("10.0.0.1") for _ in range(20)]
    assert honest.end is None
    assert [client.end is None for client in flood] == [False] * 17 + [True] * 3
    node.connect("10.0.0.9")
    assert honest.end is None
    assert [client.end is None for client in flood] == [False] * 18 + [True] * 2


# -- errors inside a mechanism -----------------------------------------------------------------------------------------


class Broken:
    def __init__(self, *, is_blocking: bool) -> None:
        self.is_blocking = is_blocking

    def respond(self, message: bytes) -> Outcome:
        raise ValueError(f"contains {message!r}")


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_error_inside_a_mechanism_is_a_refusal_and_shows_no_message(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, is_blocking: bool
) -> None:
    node = Node(executor)
    monkeypatch.setattr(node.shared, "new_exchange", lambda mechanism: Broken(is_blocking=is_blocking))
    client = node.connect()
    assert client.gate.handshake("PLAIN", with_frames=False) is ErrorCode.none
    with pytest.raises(KafkaError) as refused:
        await client.gate.authenticate(b"hunter2")
    assert refused.value.code is ErrorCode.sasl_authentication_failed
    assert client.access is NO_ACCESS
    text = "".join(node.lines)
    assert '"error": "ValueError"' in text
    assert "hunter2" not in text


async def test_refused_client_waits_for_its_delay_unless_the_node_stops(executor: ThreadPoolExecutor) -> None:
    node = Node(executor, failure_delay_ms=60_000)
    client = node.connect()
    client.gate.handshake("PLAIN", with_frames=False)
    answer = asyncio.ensure_future(client.gate.authenticate(b"\0alice\0wrong"))
    done, _ = await asyncio.wait([answer], timeout=0.3)
    assert not done
    node.shared.end_delays()
    with pytest.raises(KafkaError):
        async with asyncio.timeout(5):
            await answer


async def begun(node: Node, password: bytes) -> tuple[Client, asyncio.Future[object]]:
    """Return a client that has sent a password, and its answer."""
    client = node.connect()
    client.gate.handshake("PLAIN", with_frames=False)
    answer = asyncio.ensure_future(client.gate.authenticate(b"\0alice\0" + password))
    return client, answer


async def test_waiting_client_gets_no_verdict_from_a_node_that_stops(executor: ThreadPoolExecutor) -> None:
    node = Node(executor, failure_delay_ms=600_000)
    refused = [await begun(node, b"wrong") for _ in range(authentication.FAILURES_PENDING_MAX)]
    async with asyncio.timeout(20):
        while sum(node.runtime.metrics.authentication_failures.values()) < len(refused):
            await asyncio.sleep(0.01)
    waiting = [await begun(node, b"wonderland") for _ in range(3)]
    gone, answer = waiting.pop()
    await asyncio.sleep(0)
    gone.drop("the client disconnects")
    with pytest.raises(KafkaError):
        async with asyncio.timeout(5):
            await answer
    node.shared.end_delays()
    async with asyncio.timeout(5):
        await asyncio.gather(*(answer for _, answer in (*refused, *waiting)), return_exceptions=True)
    # Refused clients get their answer before the end. The others are closed first, so that no answer follows.
    assert [client.end for client, _ in refused] == [None] * len(refused)
    assert [client.end for client, _ in waiting] == ["closed"] * len(waiting)
    assert sum(node.runtime.metrics.authentication_failures.values()) == len(refused)


def users_file(folder: Path) -> str:
    path = folder / "users"
    path.touch(0o600)
    path.write_text("alice:wonderland\n")
    return str(path)


async def test_client_that_authenticates_again_does_not_wait_for_failures_of_its_address(
    executor: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "REAUTHENTICATION_INTERVAL_S_MIN", 0.0)
    node = Node(executor, users_file=users_file(tmp_path), failure_delay_ms=600_000)
    await node.shared.start()
    try:
        client, answer = await begun(node, b"wonderland")
        async with asyncio.timeout(20):
            await answer
            refused = [await begun(node, b"wrong") for _ in range(authentication.FAILURES_PENDING_MAX)]
            while sum(node.runtime.metrics.authentication_failures.values()) < len(refused):
                await asyncio.sleep(0.01)
            assert client.gate.handshake("PLAIN", with_frames=False) is ErrorCode.none
            await client.gate.authenticate(b"\0alice\0wonderland")
            node.shared.end_delays()
            await asyncio.gather(*(answer for _, answer in refused), return_exceptions=True)
    finally:
        await node.shared.stop()


async def test_password_is_checked_for_other_logins(executor: ThreadPoolExecutor, tmp_path: Path) -> None:
    node = Node(executor, users_file=users_file(tmp_path))
    await node.shared.start()
    try:
        assert await node.shared.check_password("alice", "wonderland")
        assert not await node.shared.check_password("alice", "wrong")
        assert not await node.shared.check_password("malice", "wonderland")
    finally:
        await node.shared.stop()


async def test_oauthbearer_without_keys_refuses_to_start(executor: ThreadPoolExecutor) -> None:
    with pytest.raises(ConfigError, match=r"OAUTHBEARER, which needs sasl\.jwks"):
        await Node(executor, mechanisms=("OAUTHBEARER",)).shared.start()


# -- the key set -------------------------------------------------------------------------------------------------------


class Issuer:
    """An HTTP server with a key set."""

    def __init__(self) -> None:
        self.body = key_set(public_jwk("rsa", "rsa"))
        self.status = 200
        self.requests = 0
        issuer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.requests += 1
                self.send_response(issuer.status)
                if issuer.status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(issuer.body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/keys?x=1"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    yield issuer
    issuer.close()


async def test_unknown_key_id_loads_the_keys_again_but_not_often(executor: ThreadPoolExecutor, issuer: Issuer) -> None:
    node = Node(executor, lambda: int(time.time() * 1000), mechanisms=("OAUTHBEARER",), jwks=issuer.url)
    await node.shared.start()
    try:

        async def outcome(key_id: str) -> Outcome | None:
            exchange = node.shared.new_exchange("OAUTHBEARER")
            message = OAuthClient(token_now(key_id=key_id)).first()
            return await node.shared.attempt(exchange, message, node.connect().gate)

        assert isinstance(await outcome("rsa"), Authenticated)
        assert issuer.requests == 1
        issuer.body = key_set(public_jwk("rsa", "next"))
        assert [type(each) for each in await asyncio.gather(*(outcome("next") for _ in range(10)))] == [
            Authenticated
        ] * 10
        assert issuer.requests == 2
        for number in range(20):
            assert isinstance(await outcome(f"made-up-{number}"), Challenge)
        assert issuer.requests == 2
    finally:
        await node.shared.stop()


async def test_url_that_does_not_answer_does_not_stop_the_node(executor: ThreadPoolExecutor, issuer: Issuer) -> None:
    issuer.status = 500
    node = Node(executor, mechanisms=("OAUTHBEARER",), jwks=issuer.url)
    await node.shared.start()
    try:
        assert any("jwks_not_loaded" in line and "answers 500" in line for line in node.lines)
        issuer.status = 200
        source = node.shared._keys
        assert source is not None
        async with asyncio.timeout(10):
            while not len(source.keys):
                await asyncio.sleep(0.05)
    finally:
        await node.shared.stop()


async def test_file_without_keys_stops_the_node(executor: ThreadPoolExecutor, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    for content, reason in ((None, "does not exist"), (b"{}", "no list of `keys`"), (b"x" * 2_000_000, "larger than")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            await Node(executor, mechanisms=("OAUTHBEARER",), jwks=str(path)).shared.start()


async def test_changed_file_of_keys_is_loaded_and_a_bad_one_is_not(
    executor: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_source, "FILE_POLL_S", 0.05)
    path = tmp_path / "keys.json"
    path.write_bytes(key_set(public_jwk("rsa", "first")))
    source = KeySource(Node(executor).runtime, str(path))
    await source.start()
    try:
        path.write_bytes(key_set(public_jwk("rsa", "second")))
        async with asyncio.timeout(10):
            while not source.keys.has("second"):
                await asyncio.sleep(0.02)
        path.write_bytes(json.dumps({"keys": []}).encode())
        await asyncio.sleep(0.3)
        assert source.keys.has("second")
    finally:
        source.stop()


def test_key_set_is_bounded_and_redirects_are_not_followed(issuer: Issuer) -> None:
    assert fetch_url(issuer.url, lambda: 0.0) == issuer.body
    for status, body, reason in ((302, b"", "answers 302"), (404, b"", "answers 404"), (200, b"x" * 2_000_000, "more")):
        issuer.status, issuer.body = status, body
        with pytest.raises(KeyLoadError, match=reason):
            fetch_url(issuer.url, lambda: 0.0)
    times = iter([0.0, 100.0, 100.0])
    issuer.status, issuer.body = 200, b"x"
    with pytest.raises(KeyLoadError, match="takes longer"):
        fetch_url(issuer.url, lambda: next(times))


@pytest.mark.parametrize("source", ["http://issuer.test/keys", "ftp://issuer.test/keys", "file:///etc/passwd"])
def test_keys_from_an_unprotected_source_are_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="https"):
        check_source(source)


@pytest.mark.parametrize("source", ["https://issuer.test/keys", "http://127.0.0.1:8080/keys", "keys.json", "/a/keys"])
def test_keys_from_a_protected_source_are_allowed(source: str) -> None:
    check_source(source)
