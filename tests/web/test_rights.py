"""Who sees what: every path as an anonymous, an unauthorized and an authorized client, and what is filtered."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.web.support_login import (
    ALICE,
    SECRET,
    Acls,
    Answer,
    Browser,
    SecureNode,
    basic,
    bearer,
    secured,
    send,
    users_with,
)
from tests.web.test_app import Node, Replica, served

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.replicas.healing import Damage
from chronik.node.serving.access import Access
from chronik.node.serving.signed import Kind, sign, verify
from chronik.observe.traces import PartitionTrace
from chronik.web import schemas
from chronik.web.app import PUBLIC_FILES
from chronik.web.events import LISTENERS_OF_USER_MAX

PATHS: dict[str, tuple[int, int]] = {
    # path: the status for bob, who may only see the topic, and for alice, who may read it
    "/": (200, 200),
    "/page/app.js": (200, 200),
    "/page/nothing.js": (404, 404),
    "/api/openapi.json": (200, 200),
    "/api/cluster": (200, 200),
    "/api/topics": (200, 200),
    "/api/topics/orders": (200, 200),
    "/api/topics/payroll": (403, 403),
    "/api/topics/missing": (403, 403),
    "/api/topics/orders/messages?partition=9": (403, 404),
    "/api/topics/orders/batches?partition=9": (403, 404),
    "/api/topics/payroll/messages?partition=0": (403, 403),
    "/api/topics/payroll/batches?partition=0": (403, 403),
    "/api/topics/missing/messages?partition=0": (403, 403),
    "/api/groups/shop": (403, 503),  # no coordinator answers in this test
    "/api/groups/other": (403, 403),
    "/api/traces": (200, 200),
    "/api/traces?topic=orders": (403, 200),
    "/api/traces?topic=payroll": (403, 403),
    "/api/doctor/orders?seconds=0": (400, 400),
    "/api/doctor/orders?seconds=1&group=other": (403, 403),
    "/api/doctor/payroll?seconds=1": (403, 403),
    "/api/doctor/missing?seconds=1": (403, 403),
    "/api/groups": (200, 200),
    "/api/client-metrics": (403, 200),
    "/api/pipelines": (403, 403),
    "/api/transactions": (200, 200),
}
OPEN = ("/healthz", "/readyz", "/metrics", "/api/session", *(f"/page/{name}" for name in PUBLIC_FILES))


@secured
async def test_every_path_as_anonymous_unauthorized_and_authorized(node: SecureNode, port: int) -> None:
    described = (await send(port, "GET", "/api/openapi.json", basic("alice"))).json["paths"]
    tested = {path.partition("?")[0] for path in (*PATHS, *OPEN)}
    for path in described:
        if path not in ("/api/events", "/api/tokens"):
            assert any(_is_path(path, each) for each in tested), path
    for path in OPEN:
        assert (await send(port, "GET", path)).status == 200, path
    for path, (for_bob, for_alice) in PATHS.items():
        anonymous = await send(port, "GET", path)
        if path == "/":
            assert anonymous.status == 200 and b"/page/login.js" in anonymous.body
            assert b"app.js" not in anonymous.body and anonymous.header("vary") == "cookie"
        else:
            assert anonymous.status == 401, path
            assert "log in" in anonymous.json["error"]
        for user, expected in (("bob", for_bob), ("alice", for_alice)):
            answer = await send(port, "GET", path, basic(user))
            assert answer.status == expected, (user, path, answer.body)
            if answer.status == 403:
                assert "you may not" in answer.json["error"] and "ask for" in answer.json["error"]
    assert b"/page/app.js" in (await send(port, "GET", "/", basic("alice"))).body


def _is_path(template: str, path: str) -> bool:
    parts, given = template.split("/"), path.split("/")
    return len(parts) == len(given) and all(a == b or a.startswith("{") for a, b in zip(parts, given, strict=True))


@secured
async def test_a_refusal_names_the_missing_right_and_is_audited(node: SecureNode, port: int) -> None:
    answer = await send(port, "GET", "/api/topics/orders/messages?partition=0", basic("bob"))
    line = "you may not read messages of this topic: ask for READ on topic orders"
    assert (answer.status, answer.json) == (403, {"error": line})
    assert isinstance(node.decisions, Acls) and node.decisions.audited == ["orders"]
    node.decisions.audited.clear()
    for path in ("/api/topics", "/api/cluster", "/api/traces", "/api/topics/orders"):
        assert (await send(port, "GET", path, basic("bob"))).status == 200
    assert node.decisions.audited == []  # listings only filter


@secured
async def test_listings_show_what_the_user_may_see(node: SecureNode, port: int) -> None:
    node.broker.disk_error = "the disk does not answer"
    node.broker.damages = [
        Damage(topic, 0, 5, "scrub", "its file is missing", 1, "healed", "", (), 2) for topic in ("orders", "payroll")
    ]
    node.broker.replicas = {("orders", 0): Replica(), ("payroll", 0): Replica()}

    async def get(path: str, user: str) -> Any:
        return (await send(port, "GET", path, basic(user))).json

    for user in ("alice", "bob"):
        assert [line["name"] for line in (await get("/api/topics", user))["topics"]] == ["orders"]
        cluster = await get("/api/cluster", user)
        assert cluster["under_replicated_partitions"] == ["orders-0"]
        assert [damage["topic"] for damage in cluster["damages"]] == ["orders"]
        assert len(cluster["nodes"]) == 2
        assert b"payroll" not in json.dumps(cluster).encode()
    alice, bob = await get("/api/cluster", "alice"), await get("/api/cluster", "bob")
    assert (alice["topics"], alice["under_replicated"], alice["disk_error"]) == (2, 2, "the disk does not answer")
    assert (bob["topics"], bob["under_replicated"], bob["disk_error"]) == (1, 1, None)
    assert (await get("/api/topics/orders", "alice"))["configs"] == {"retention.ms": "1000"}
    assert (await get("/api/topics/orders", "bob"))["configs"] is None


@secured
async def test_traces_show_the_topics_that_the_user_may_read(node: SecureNode, port: int) -> None:
    node.traces.topics = frozenset({"orders", "payroll"})
    for number, topic in enumerate(("orders", "payroll", "payroll", "orders", "payroll")):
        PartitionTrace(node.traces, topic, number).no_data(number)
    for query in ("", "?last=2", "?after=0&limit=5"):
        alice = (await send(port, "GET", f"/api/traces{query}", basic("alice"))).json
        assert [event["topic"] for event in alice["events"]] == ["orders", "orders"]
        assert alice["traced_topics"] == ["orders"] and alice["next"] == 5
        bob = (await send(port, "GET", f"/api/traces{query}", basic("bob"))).json
        assert (bob["events"], bob["traced_topics"]) == ([], [])


async def _groups(*_: object) -> schemas.Groups:
    lines = [
        schemas.GroupSummary(name, "Stable", 1, 1, ["orders", "payroll"], 2, 7, 9, "classic")
        for name in ("shop", "other")
    ]
    return schemas.Groups(lines, 2, [])


async def _group(*_: object) -> schemas.Group:
    partitions = [schemas.GroupPartition(topic, 0, 5, 7, 2, "m", None) for topic in ("orders", "payroll")]
    held = [schemas.AssignedPartition(topic, 0) for topic in ("orders", "payroll")]
    member = schemas.Member("m", "c", "/h", None, held, 3, held)
    topics = ["orders", "payroll"]
    return schemas.Group("shop", "Stable", 1, 1, topics, 2, 4, 10, "consumer", 4, 4, "range", [member], partitions)


async def _transactions(*_: object) -> schemas.Transactions:
    names, partitions = ("pay", "other"), ["orders-0", "payroll-0"]
    lines = [schemas.Transaction(name, "Ongoing", 1, 1, 0, 0, 1, partitions) for name in names]
    return schemas.Transactions(lines, 2, [])


def test_groups_and_transactions_are_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronik.web.app.groups_view", _groups)
    monkeypatch.setattr("chronik.web.app.group_view", _group)
    monkeypatch.setattr("chronik.web.app.transactions_view", _transactions)

    async def work(node: SecureNode, port: int) -> None:
        async def get(path: str, user: str) -> Any:
            return (await send(port, "GET", path, basic(user))).json

        groups = await get("/api/groups", "alice")
        assert [(line["group"], line["topics"], line["lag"]) for line in groups["groups"]] == [
            ("shop", ["orders"], None)
        ]
        assert groups["total"] == 1
        assert (await get("/api/groups", "bob"))["groups"] == []
        group = await get("/api/groups/shop", "alice")
        assert (group["topics"], group["lag"], group["partition_count"]) == (["orders"], 2, 1)
        assert "payroll" not in json.dumps(group)
        (transaction,) = (await get("/api/transactions", "alice"))["transactions"]
        assert (transaction["transactional_id"], transaction["partitions"]) == ("pay", ["orders-0"])
        assert (await get("/api/transactions", "bob"))["transactions"] == []

    secured(work)()


class LedReplica(Replica):
    leads = True
    visible_end_offset = 0


class Events:
    """An open /api/events stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int, query: str, headers: dict[str, str]) -> Events:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": "localhost", **headers}.items())
        writer.write(f"GET /api/events?{query} HTTP/1.1\r\n{head}\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        return cls(reader, writer)

    async def next(self, event: str) -> Any:
        """Return the data of the next such event."""
        while True:
            line = (await self._reader.readuntil(b"\n")).decode().strip()
            if line == f"event: {event}":
                data = (await self._reader.readuntil(b"\n")).decode()
                return json.loads(data.removeprefix("data: "))

    async def until_closed(self) -> None:
        """Wait for the last chunk of the response."""
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            part = await self._reader.read(65_536)
            assert part
            data = data[-7:] + part

    def close(self) -> None:
        self.writer.close()


@secured
async def test_events_stream_what_each_listener_may_see(node: SecureNode, port: int) -> None:
    node.broker.replicas = {("orders", 0): LedReplica(), ("payroll", 0): LedReplica()}
    alice = await Events.open(port, "topics=1&topic=orders&group=other", basic("alice"))
    bob = await Events.open(port, "topics=1&topic=payroll&group=other", basic("bob"))
    assert [line["name"] for line in (await alice.next("topics"))["topics"]] == ["orders"]
    assert (await alice.next("topic"))["configs"] == {"retention.ms": "1000"}
    assert "ask for DESCRIBE on group other" in (await alice.next("group"))["error"]
    assert (await bob.next("cluster"))["topics"] == 1
    assert [line["name"] for line in (await bob.next("topics"))["topics"]] == ["orders"]
    assert (await bob.next("topic")) == {"error": "you may not see this topic: ask for DESCRIBE on topic payroll"}
    assert isinstance(node.decisions, Acls)
    node.decisions.granted.add(("User:bob", Operation.DESCRIBE, ResourceType.TOPIC, "payroll"))
    while "error" in (topic := await bob.next("topic")):
        pass
    assert (topic["name"], topic["configs"]) == ("payroll", None)
    node.decisions.granted.discard(("User:bob", Operation.DESCRIBE, ResourceType.TOPIC, "payroll"))
    while "error" not in await bob.next("topic"):
        pass
    for stream in (alice, bob):
        stream.close()


@secured
async def test_events_end_with_their_session(node: SecureNode, port: int) -> None:
    async def streamed(browser: Browser) -> Events:
        name, value = browser.session
        stream = await Events.open(port, "", {"Cookie": f"{name}={value}"})
        await stream.next("cluster")
        return stream

    first, second, third = Browser(port), Browser(port), Browser(port)
    for browser, user in ((first, "alice"), (second, "alice"), (third, "bob")):
        await browser.log_in(user)
    streams = [await streamed(browser) for browser in (first, second, third)]
    await first.send("DELETE", "/api/session", X_Chronik_CSRF=await first.csrf())
    await streams[0].until_closed()
    await streams[1].next("cluster")
    node.users = users_with({"bob": "builder"})
    await streams[1].until_closed()
    await streams[2].next("cluster")
    node.now_ms += 31 * 60_000
    await streams[2].until_closed()
    token = (await send(port, "POST", "/api/tokens?seconds=60", basic("bob"))).json["token"]
    stream = await Events.open(port, "", bearer(token))
    await stream.next("cluster")
    node.now_ms += 60_000
    await stream.until_closed()
    for each in (*streams, stream):
        each.close()


@secured
async def test_a_user_cannot_take_all_event_streams(node: SecureNode, port: int) -> None:
    tokens = {
        user: bearer((await send(port, "POST", "/api/tokens?seconds=60", basic(user))).json["token"])
        for user in ("alice", "bob")
    }
    streams = [await Events.open(port, "", tokens["bob"]) for _ in range(LISTENERS_OF_USER_MAX)]
    for stream in streams:
        await stream.next("cluster")
    refused = await send(port, "GET", "/api/events", tokens["bob"])
    assert (refused.status, "close a page" in refused.json["error"]) == (503, True)
    streams.append(await Events.open(port, "", tokens["alice"]))
    await streams[-1].next("cluster")
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("is_public", [True, False])
def test_metrics_and_health_have_their_own_rule(is_public: bool) -> None:
    async def work(node: SecureNode, port: int) -> None:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await send(port, "GET", path)).status == (200 if is_public else 401)
            assert (await send(port, "GET", path, basic("alice"))).status == 200
        assert (await send(port, "GET", "/healthz", basic("bob"))).status == 200
        assert (await send(port, "GET", "/metrics", basic("bob"))).status == (200 if is_public else 403)
        text = (await send(port, "GET", "/metrics", basic("alice"))).body
        assert b'chronik_http_logins_total{outcome="refused"} 0.0' in text

    secured(work, public_metrics=is_public)()


def test_without_acls_each_user_sees_everything() -> None:
    async def work(node: SecureNode, port: int) -> None:
        assert (await send(port, "GET", "/api/topics")).status == 401
        topics = (await send(port, "GET", "/api/topics", basic("bob"))).json["topics"]
        assert [line["name"] for line in topics] == ["orders", "payroll"]
        assert (await send(port, "GET", "/api/topics/payroll/messages?partition=9", basic("bob"))).status == 404

    secured(work, is_authorizing=False)()


@secured
async def test_another_node_acts_for_a_user_or_for_itself(node: SecureNode, port: int) -> None:
    asker = SecureNode()

    async def get(path: str, caller_of: Access | None) -> Answer:
        return await send(port, "GET", path, {"Authorization": asker.caller(caller_of).authorization})

    bob = Access("User:bob", "10.0.0.9", Acls())
    assert (await get("/api/topics/payroll", bob)).status == 403
    assert (await get("/api/topics/orders/messages?partition=9", bob)).status == 403
    assert (await get("/api/topics/orders/messages?partition=9", Access(ALICE, "", Acls()))).status == 404
    assert len((await get("/api/topics", None)).json["topics"]) == 2
    token = asker.caller(bob).authorization
    claims = verify(SECRET.derived(Kind.NODE.purpose), Kind.NODE, token.removeprefix("Bearer "), node.now_ms)
    assert claims is not None and (claims.principal, claims.host) == ("User:bob", "10.0.0.9")
    assert (await send(port, "POST", "/api/tokens", {"Authorization": token})).status == 403
    forged = sign(b"x" * 32, Kind.NODE, claims)
    assert (await send(port, "GET", "/api/topics", bearer(forged))).status == 401
    node.now_ms += 30_000
    assert (await send(port, "GET", "/api/topics", {"Authorization": token})).status == 401
    assert token not in repr(asker.caller(bob)) and "Bearer" not in repr(asker.caller(bob))


@pytest.mark.parametrize(
    "path",
    [
        "/api/topics/x%0d%0aSet-Cookie:%20stolen=1",
        "/api/topics/orders/messages?partition=0%0d%0aSet-Cookie:%20stolen=1",
        "/api/traces?topic=x%0aSet-Cookie:%20stolen=1",
        "/page/x%0d%0a%0d%0a<script>",
        "/api/tokens?seconds=1%0d%0aSet-Cookie:%20stolen=1",
    ],
)
def test_no_value_of_a_request_becomes_a_header_of_the_response(path: str) -> None:
    async def work(node: SecureNode, port: int) -> None:
        for method in ("GET", "POST"):
            answer = await send(port, method, path, basic("alice"))
            assert answer.status in (400, 403, 404, 405), path
            assert answer.cookies == {} and answer.header("set-cookie") is None
            assert answer.header("content-type") == "application/json"

    secured(work)()


@pytest.mark.parametrize(
    "path",
    [
        "/page/../users.py",
        "/page/..%2fusers.py",
        "/page/%2e%2e/users.py",
        "/page/....//users.py",
        "/page/%2fetc%2fpasswd",
        "/page/login.js%00.css",
        "/page/..%5cusers.py",
        "//page/../../etc/passwd",
        "/api/topics/..%2f..%2fcluster",
        "/api/groups/../../etc/passwd",
    ],
)
def test_paths_do_not_leave_their_folder(path: str) -> None:
    async def work(node: SecureNode, port: int) -> None:
        assert (await send(port, "GET", path)).status in (400, 401, 404)
        answer = await send(port, "GET", path, basic("alice"))
        assert answer.status in (400, 403, 404), path
        assert b"root:" not in answer.body and b"pbkdf2" not in answer.body

    secured(work)()


@secured
async def test_names_cannot_add_headers_or_lines(node: SecureNode, port: int) -> None:
    for path in ("/api/topics/a%0d%0aSet-Cookie:%20x=1", "/page/a%0d%0aX-Evil:%201", "/api/%0d%0aX-Evil:%201"):
        answer = await send(port, "GET", path, basic("alice"))
        assert answer.status in (400, 403, 404)
        assert answer.header("x-evil") is None and answer.header("set-cookie") is None
        assert "\n" not in answer.json["error"]


@served
async def test_without_a_login_setting_nothing_is_required(node: Node, port: int) -> None:
    session = await send(port, "GET", "/api/session")
    assert (session.status, session.json, session.cookies) == (200, {"login": False}, {})
    for method, path in (("POST", "/api/session"), ("DELETE", "/api/session"), ("POST", "/api/tokens")):
        assert (await send(port, method, path)).status == 409
    assert (await send(port, "GET", "/page/app.js")).status == 200
    assert b"app.js" in (await send(port, "GET", "/")).body
    assert (await send(port, "GET", "/api/openapi.json")).json["security"] == []
