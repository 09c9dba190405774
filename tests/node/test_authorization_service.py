"""The audit log of denials, and envelopes of clients."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from tests.node.support_authorization import DeniesEverything

from chronik.authorization.acls import ANONYMOUS, Operation, ResourceType
from chronik.node.membership.authorization import AUDIT_INTERVAL_S, AUDITED_MAX, LOGGED_CHARS_MAX, DenialAudit
from chronik.node.membership.envelopes import Envelopes
from chronik.node.membership.internal_api import Envelope, decode_envelope, encode
from chronik.node.serving.access import OPEN_ACCESS, Access
from chronik.node.serving.api import Api, Handler
from chronik.observe.logging import make_logger
from chronik.observe.metrics import Metrics
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode
from chronik.wire.messages import read_response, write_request

TOPIC = ResourceType.TOPIC


class Timers:
    """The loop's timers, run by hand."""

    def __init__(self) -> None:
        self.pending: list[tuple[float, Any]] = []

    def call_later(self, delay_s: float, callback: Any) -> Any:
        entry = (delay_s, callback)
        self.pending.append(entry)
        return SimpleNamespace(cancel=lambda: self.pending.remove(entry))

    def expire(self) -> None:
        ((delay_s, callback),) = self.pending
        assert delay_s == AUDIT_INTERVAL_S
        self.pending.clear()
        callback()


class Scene:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.timers, self.metrics = Timers(), Metrics()
        log = make_logger(lambda line: self.lines.append(json.loads(line)), lambda: 0)
        self.audit = DenialAudit(cast(Any, SimpleNamespace(loop=self.timers, metrics=self.metrics, log=log)))

    def denied(self, principal: str, name: str, operation: Operation = Operation.READ) -> None:
        self.audit.denied(principal, "10.0.0.1", "Fetch", operation, TOPIC, name)

    def events(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


def test_a_principal_and_resource_is_logged_once_in_an_interval() -> None:
    scene = Scene()
    for name in ("a", "a", "b", "a"):
        scene.denied("User:eve", name)
    scene.denied("User:eve", "a", Operation.WRITE)
    scene.denied("User:bob", "a")
    assert [(line["principal"], line["resource"]) for line in scene.events("denied")] == [
        ("User:eve", "TOPIC:a"),
        ("User:eve", "TOPIC:b"),
        ("User:bob", "TOPIC:a"),
    ]
    assert scene.metrics.authorization_denials["READ"] == 5
    scene.timers.expire()
    assert [line["count"] for line in scene.events("denials_suppressed")] == [3]
    scene.denied("User:eve", "a")
    assert len(scene.events("denied")) == 4
    scene.timers.expire()
    assert len(scene.events("denials_suppressed")) == 1, "nothing was suppressed this time"


def test_a_flood_of_denials_logs_a_bounded_number_of_short_lines() -> None:
    scene = Scene()
    for number in range(3 * AUDITED_MAX):
        scene.denied("User:eve" + "x" * 5_000, f"{number}-" + "y" * 30_000)
    assert len(scene.events("denied")) == AUDITED_MAX
    assert max(len(json.dumps(line)) for line in scene.lines) < 3 * LOGGED_CHARS_MAX
    scene.audit.close()
    assert [line["count"] for line in scene.events("denials_suppressed")] == [2 * AUDITED_MAX]
    assert not scene.timers.pending


def test_an_envelope_of_an_older_node_is_that_of_an_unauthenticated_client() -> None:
    older = msgspec.msgpack.encode({"api_key": 19, "api_version": 7, "client_id": "c", "body": b""})
    assert decode_envelope(older) == Envelope(19, 7, "c", b"", ANONYMOUS, "")
    newer = Envelope(19, 7, "c", b"", "User:alice", "10.0.0.1")
    assert decode_envelope(encode(newer)) == newer


def test_a_controller_without_an_authorizer_refuses_requests_of_nodes_that_have_one() -> None:
    lines: list[dict[str, Any]] = []
    log = make_logger(lambda line: lines.append(json.loads(line)), lambda: 0)
    carried_out: list[str] = []

    async def unregister(request: Any) -> dict[str, Any]:
        carried_out.append(request.access.principal)
        return {"error_code": ErrorCode.none}

    async def answers() -> list[ErrorCode]:
        runtime = SimpleNamespace(loop=asyncio.get_running_loop(), node_id=1, log=log)
        metadata = SimpleNamespace(is_controller=True, version=7)
        controller: Envelopes = cast(Any, Envelopes)(runtime, metadata, None, None)
        api = Api(ApiKey.UNREGISTER_BROKER, (0, 0), on_controller=True)
        controller.serve([Handler(api, cold=unregister)])
        body = write_request(api.key, 0, {"broker_id": 2})
        carrier = cast(Any, SimpleNamespace(connection=None, correlation_id=1))
        codes = []
        for principal, has_authorizer in (("User:eve", True), ("User:admin", True), ("User:bob", False)):
            envelope = Envelope(api.key, 0, "c", body, principal, "10.0.0.1", has_authorizer)
            reply = await controller.open(decode_envelope(encode(envelope)), carrier)
            codes.append(read_response(api.key, 0, reply.body).error_code)
        return codes

    refused = ErrorCode.cluster_authorization_failed
    assert asyncio.run(answers()) == [refused, refused, ErrorCode.none]
    assert carried_out == ["User:bob"]
    assert [line["event"] for line in lines] == ["authorizer_missing"]


def test_an_access_names_the_client_and_its_api_and_audits_only_requests() -> None:
    decisions = DeniesEverything()
    access = Access("User:alice", "10.0.0.1", decisions).for_api("Fetch")
    assert not access.allows(Operation.READ, TOPIC, "a")
    assert not access.sees(TOPIC, "a")
    assert access.authorized_operations(ResourceType.GROUP, "g") == 0
    assert not access.allows_any(Operation.WRITE, TOPIC)
    client = ("User:alice", "10.0.0.1")
    assert decisions.requested[:2] == [
        (*client, Operation.READ, TOPIC, "a"),
        (*client, Operation.DESCRIBE, TOPIC, "a"),
    ]
    assert decisions.denials == [
        (*client, "Fetch", Operation.READ, TOPIC, "a"),
        (*client, "Fetch", Operation.WRITE, TOPIC, ""),
    ]


def test_an_open_access_allows_everything() -> None:
    assert OPEN_ACCESS.is_open
    assert OPEN_ACCESS.for_api("Fetch").is_open
    assert OPEN_ACCESS.allows(Operation.ALTER, ResourceType.CLUSTER)
    assert OPEN_ACCESS.allows_any(Operation.WRITE, TOPIC)
