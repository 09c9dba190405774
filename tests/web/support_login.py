"""A node that requires a log-in, with users and ACLs, and clients that send it requests."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from tests.web.test_app import Node, broker

from chronik.authentication.credentials import Credentials
from chronik.authentication.plain import check_password
from chronik.authentication.sasl import SCRAM_SHA_512
from chronik.authentication.scram import new_credential
from chronik.authorization.acls import CLUSTER_NAME, Operation, ResourceType
from chronik.metadata.image import ClusterImage, PartitionImage, TopicImage
from chronik.node.config import Authorization, NodeConfig, Security
from chronik.node.membership.cluster_secret import ClusterSecret
from chronik.web.app import create_app
from chronik.web.server import WebServer, bind
from chronik.web.users import SaslUsers

SECRET = ClusterSecret("the-secret-of-a-cluster-in-a-test-0123456789", "the test")
KEY = b"k" * 32
PASSWORDS = {"alice": "wonderland", "bob": "builder"}
IMPLIED = {Operation.READ: Operation.DESCRIBE}


class Acls:
    """Decisions: what is not granted is denied. `audited` are the denials that would be in the audit log."""

    def __init__(self, *granted: tuple[str, Operation, ResourceType, str]) -> None:
        self.granted = {*granted, *((p, IMPLIED[o], t, n) for p, o, t, n in granted if o in IMPLIED)}
        self.audited: list[str] = []

    def allows(self, principal: str, host: str, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        return (principal, operation, resource_type, name) in self.granted

    def known(self, *_: object) -> dict[tuple[int, str], bool]:
        return {}

    def allows_any(self, *_: object) -> bool:
        return False

    def denied(self, principal: str, host: str, api: str, *denied: Any) -> None:
        self.audited.append(denied[-1])


ALICE = "User:alice"
GRANTS = (
    (ALICE, Operation.READ, ResourceType.TOPIC, "orders"),
    (ALICE, Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, "orders"),
    (ALICE, Operation.DESCRIBE, ResourceType.GROUP, "shop"),
    (ALICE, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME),
    (ALICE, Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, "pay"),
    ("User:bob", Operation.DESCRIBE, ResourceType.TOPIC, "orders"),
)


class SecureNode(Node):
    """A node with the users alice, who may read `orders`, and bob, who may only see it."""

    def __init__(self, *, is_authorizing: bool = True, **security: Any) -> None:
        super().__init__(
            NodeConfig(
                node_id=2,
                security=Security(**{"http_login": True, "http_hosts": ("balancer.example",), **security}),
                authorization=Authorization(enabled=is_authorizing),
            )
        )
        self.broker.secret = SECRET
        self.broker.image = two_topics()
        self.broker.is_ready = True
        self.users = users_with(PASSWORDS)
        self.decisions = Acls(*GRANTS) if is_authorizing else None


def users_with(passwords: dict[str, str]) -> SaslUsers:
    # One iteration: the tests check many passwords.
    stored = {
        name: {SCRAM_SHA_512: new_credential(SCRAM_SHA_512, text, name.encode(), 1)} for name, text in passwords.items()
    }
    credentials = Credentials(KEY, stored, {})

    async def check(name: str, password: str) -> bool:
        return check_password(credentials, name, password)

    return SaslUsers(lambda: credentials, check)


def two_topics() -> ClusterImage:
    topics = {
        name: TopicImage(name, UUID(int=at), (PartitionImage(0, 2, 1, (2, 1), (2,)),), {"retention.ms": "1000"})
        for at, name in enumerate(("orders", "payroll"), 1)
    }
    return ClusterImage(cluster_id="c", version=9, topics=topics, brokers={1: broker(1), 2: broker(2)})


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for each, value in self.headers if each == name), None)

    @property
    def cookies(self) -> dict[str, str]:
        pairs = (value.partition(";")[0] for name, value in self.headers if name == "set-cookie")
        return {name: value.strip('"') for name, _, value in (pair.partition("=") for pair in pairs)}

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def send(port: int, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = {"Host": f"127.0.0.1:{port}", "Connection": "close", **(headers or {})}
    if body:
        lines["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    text = await reader.read()
    writer.close()
    await writer.wait_closed()
    top, _, rest = text.partition(b"\r\n\r\n")
    status, *fields = top.decode("latin-1").split("\r\n")
    parsed = [(name.lower(), value.strip()) for name, _, value in (field.partition(":") for field in fields)]
    return Answer(int(status.split()[1]), parsed, rest)


class Browser:
    """A browser's tab: it keeps cookies, and sends the headers that browsers send."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.cookies: dict[str, str] = {}

    async def send(self, method: str, path: str, body: object = None, **more: str) -> Answer:
        headers = {"Origin": f"http://127.0.0.1:{self.port}", "Sec-Fetch-Site": "same-origin"}
        if method == "GET":
            del headers["Origin"]
        if self.cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        if body is not None:
            headers["Content-Type"] = "application/json"
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        headers = {name: value for name, value in headers.items() if value}
        answer = await send(self.port, method, path, headers, b"" if body is None else msgspec.json.encode(body))
        for name, value in answer.cookies.items():
            self.cookies[name] = value
            if not value:
                del self.cookies[name]
        return answer

    async def get(self, path: str) -> Answer:
        return await self.send("GET", path)

    async def csrf(self) -> str:
        return str((await self.get("/api/session")).json["csrf"])

    async def log_in(self, user: str, password: str | None = None) -> Answer:
        csrf = await self.csrf()
        given = {"user": user, "password": PASSWORDS.get(user, "") if password is None else password}
        return await self.send("POST", "/api/session", given, X_Chronik_CSRF=csrf)

    @property
    def session(self) -> tuple[str, str]:
        return next((name, value) for name, value in self.cookies.items() if "session" in name)


def basic(user: str, password: str | None = None) -> dict[str, str]:
    text = f"{user}:{PASSWORDS[user] if password is None else password}"
    return {"Authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


TIMEOUT_S = 120.0


def secured(work: Callable[[SecureNode, int], Awaitable[None]], **settings: Any) -> Callable[[], None]:
    """Return a test that runs `work` with a node that requires a log-in and the port of its HTTP server."""

    async def run() -> None:
        node = SecureNode(**settings)
        listener = bind("127.0.0.1", 0)
        server = WebServer(create_app(node), listener)
        await server.start()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await work(node, listener.getsockname()[1])
        finally:
            await server.stop()

    return lambda: asyncio.run(run())
