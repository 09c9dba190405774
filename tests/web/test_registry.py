"""The registry's paths over HTTP: which rights they need, and what other sites and malformed requests get."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.web.support_login import Acls, Answer, SecureNode, basic, secured, send

from chronik.authorization.acls import Operation, ResourceType
from chronik.schemas.commands import Command, parsed_version, run
from chronik.schemas.state import State, Version


class Registry:
    """The registry of a node whose records are committed at once."""

    def __init__(self) -> None:
        self.state = State()
        self.lookups = 0
        self.is_behind = False
        self._offset = 0

    def view(self) -> tuple[State, int] | None:
        return None if self.is_behind else (self.state, self._offset)

    async def current(self) -> State:
        self.lookups += 1
        return self.state

    async def caught_up(self) -> State:
        return self.state

    async def decide(self, command: Command) -> Any:
        return run(self.state, command).answer

    async def formatted(self, version: Version, name: str, visible: frozenset[str] | None) -> str:
        return parsed_version(self.state, version, visible).formatted(name) or version.text

    async def submit(self, command: Command) -> Any:
        outcome = run(self.state, command)
        for key, value in outcome.records:
            self.state.apply(key, value)
            self._offset += 1
        return outcome.answer


STRING = json.dumps({"schema": '"string"'}).encode()
REGISTER = ("POST", "/subjects/orders-value/versions", STRING)


def with_registry(node: SecureNode) -> None:
    node.broker.schemas = Registry()


async def call(port: int, user: str, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    return await send(port, method, path, {**(basic(user) if user else {}), **headers}, body)


@secured
async def test_subjects_have_the_rights_of_their_topics(node: SecureNode, port: int) -> None:
    with_registry(node)
    anonymous = await call(port, "", *REGISTER)
    assert (anonymous.status, anonymous.header("www-authenticate")) == (401, 'Bearer realm="chronik"')
    refused = await call(port, "bob", *REGISTER)
    assert (refused.status, refused.json["error_code"]) == (403, 403)
    assert "WRITE on topic orders" in refused.json["message"]
    await node.broker.schemas.submit(Command("register", "orders-value", {"body": json.loads(STRING)}))
    await node.broker.schemas.submit(Command("register", "secret-value", {"body": {"schema": '"int"'}}))
    assert (await call(port, "bob", "GET", "/subjects")).json == ["orders-value"]
    assert (await call(port, "bob", "GET", "/schemas/ids/1")).json == {"schema": '"string"'}
    assert (await call(port, "bob", "GET", "/schemas/ids/2")).json["error_code"] == 40403
    assert (await call(port, "bob", "POST", "/subjects/orders-value", STRING)).json["id"] == 1
    for method, path in (
        ("GET", "/subjects/secret-value/versions"),
        ("DELETE", "/subjects/orders-value"),
        ("PUT", "/config/orders-value"),
        ("PUT", "/config"),
        ("PUT", "/mode"),
    ):
        assert (await call(port, "bob", method, path, b'{"compatibility":"NONE","mode":"IMPORT"}')).status == 403


def test_authorization_without_a_log_in_refuses_changes() -> None:
    async def work(node: SecureNode, port: int) -> None:
        with_registry(node)
        refused = await call(port, "", *REGISTER)
        assert refused.status == 403 and "http_login" in refused.json["message"]
        assert (await call(port, "", "GET", "/subjects")).json == []

    secured(work, http_login=False)()


def test_pages_of_other_sites_change_nothing() -> None:
    async def work(node: SecureNode, port: int) -> None:
        with_registry(node)
        assert (await call(port, "", *REGISTER, Origin="http://evil.example")).status == 403
        assert (await call(port, "", *REGISTER)).json == {"id": 1}

    secured(work, http_login=False, is_authorizing=False)()


def test_malformed_requests_get_errors_of_the_registry() -> None:
    async def work(node: SecureNode, port: int) -> None:
        with_registry(node)
        for method, path, body, status, code in (
            ("POST", "/subjects/a/versions", b"{", 400, 400),
            ("POST", "/subjects/a/versions", b"[]", 422, 422),
            ("POST", "/subjects/a/versions", b"{}", 422, 42201),
            ("POST", "/subjects/a/versions", b'{"schema":"{"}', 422, 42201),
            ("GET", "/subjects/a/versions/0", b"", 422, 42202),
            ("GET", "/subjects/a/versions/1", b"", 404, 40401),
            ("GET", "/schemas/ids/x", b"", 404, 404),
            ("GET", f"/schemas/ids/{'9' * 5_000}", b"", 404, 404),
            ("GET", f"/subjects/a/versions/{'9' * 5_000}", b"", 422, 42202),
            ("PUT", "/config", b'{"compatibility":"SOME"}', 422, 42203),
            ("PUT", "/mode", b'{"mode":"SOME"}', 422, 42204),
            ("GET", "/mode/a", b"", 404, 40409),
            ("GET", "/config/a", b"", 404, 40408),
            ("PATCH", "/config/a", b"", 405, 405),
        ):
            answer = await call(port, "", method, path, body)
            assert (answer.status, answer.json["error_code"]) == (status, code), (method, path)
        answers = await asyncio.gather(*(call(port, "", *REGISTER) for _ in range(5)))
        assert [each.json for each in answers] == [{"id": 1}] * 5

    secured(work, http_login=False, is_authorizing=False)()


class Lagging(Registry):
    """The registry of a node whose replica has no record yet."""

    def view(self) -> None:
        return None

    async def current(self) -> State:
        return State()


@secured
async def test_a_node_catches_up_with_the_leader_before_it_answers_404(node: SecureNode, port: int) -> None:
    node.broker.schemas = Lagging()
    await node.broker.schemas.submit(Command("register", "orders-value", {"body": json.loads(STRING)}))
    assert (await call(port, "bob", "GET", "/schemas/ids/1")).json == {"schema": '"string"'}
    assert (await call(port, "bob", "GET", "/subjects/orders-value/versions")).json == [1]
    assert (await call(port, "bob", "GET", "/schemas/ids/2")).json["error_code"] == 40403


@secured
async def test_lists_are_returned_in_pages(node: SecureNode, port: int) -> None:
    node.broker.schemas = Registry()
    for name in ("orders-key", "orders-value", "orders"):
        await node.broker.schemas.submit(Command("register", name, {"body": json.loads(STRING)}))
    assert (await call(port, "bob", "GET", "/subjects?offset=1&limit=1")).json == ["orders-key"]
    assert len((await call(port, "bob", "GET", "/schemas?latestOnly=true&limit=2")).json) == 2
    assert len((await call(port, "bob", "GET", "/subjects?limit=-1")).json) == 3
    assert (await call(port, "bob", "GET", "/subjects?offset=x")).status == 400
    assert (await call(port, "bob", "GET", "/subjects/%FF/versions")).status == 400


SECRET = {"type": "record", "name": "Secret", "fields": [{"name": "iban", "type": "string"}]}
HIDDEN = ("secret-value", ":.ctx:secret-value")


def grant(node: SecureNode, operation: Operation, topic: str) -> None:
    assert isinstance(node.decisions, Acls)
    node.decisions.granted.add(("User:bob", operation, ResourceType.TOPIC, topic))


async def register(node: SecureNode, subject: str, schema: object, *references: tuple[str, str]) -> None:
    """Register as a client that may do everything; a reference has a name and a subject."""
    named = [{"name": name, "subject": each, "version": 1} for name, each in references]
    body = {"schema": json.dumps(schema), "references": named}
    await node.broker.schemas.submit(Command("register", subject, {"body": body}))


async def node_with_hidden_schemas(node: SecureNode) -> None:
    """bob writes `orders`. `open-value` and an old version of `mixed-value` refer to what he may not see."""
    node.broker.schemas = Registry()
    for topic, operation in (("orders", Operation.WRITE), ("open", Operation.DESCRIBE), ("mixed", Operation.WRITE)):
        grant(node, operation, topic)
        grant(node, Operation.DESCRIBE, topic)
    for subject in HIDDEN:
        await register(node, subject, SECRET)
    await register(node, "open-value", {"type": "array", "items": "Secret"}, ("Secret", "secret-value"))
    await register(node, "mixed-value", {"type": "array", "items": "Secret"}, ("Secret", "secret-value"))


def referring(subject: str, version: int = 1) -> bytes:
    reference = {"name": "Secret", "subject": subject, "version": version}
    return json.dumps({"schema": '{"type":"array","items":"Secret"}', "references": [reference]}).encode()


@secured
async def test_a_reference_to_a_hidden_subject_is_answered_like_one_to_a_missing_subject(
    node: SecureNode, port: int
) -> None:
    await node_with_hidden_schemas(node)
    await register(node, "orders-value", "string")
    for path in (
        "/subjects/orders-value/versions",
        "/subjects/orders-value",
        "/subjects/:.ctx:orders-value/versions",
        "/compatibility/subjects/orders-value/versions",
        "/compatibility/subjects/orders-value/versions/latest?verbose=true",
    ):
        for version in (1, -1):
            missing = await call(port, "bob", "POST", path, referring("absent-value", version))
            is_verbose = path.endswith("verbose=true")
            assert missing.json.get("error_code") == (None if is_verbose else 42201)
            for subject in (":.:secret-value", *HIDDEN):
                hidden = await call(port, "bob", "POST", path, referring(subject, version))
                assert hidden.status == missing.status == (200 if is_verbose else 422), (path, subject)
                assert hidden.body == missing.body.replace(b"absent-value", subject.encode())
    through = await call(port, "bob", "POST", "/subjects/orders-value/versions", referring("open-value"))
    assert (through.status, through.json["error_code"]) == (422, 42201)
    grant(node, Operation.DESCRIBE, "secret")
    path = "/subjects/:.ctx:orders-value/versions"
    assert (await call(port, "bob", "POST", path, referring("secret-value"))).json == {"id": 2}
    # A node whose replica lags behind first finds no reference: it looks again.
    lagging, lagging.state = Lagging(), node.broker.schemas.state
    node.broker.schemas = lagging
    assert (await call(port, "bob", "POST", path, referring("secret-value"))).json == {"id": 2}


@secured
async def test_stored_references_to_hidden_subjects_are_not_resolved(node: SecureNode, port: int) -> None:
    await node_with_hidden_schemas(node)
    shown = (await call(port, "bob", "GET", "/subjects/open-value/versions/1")).json
    compatible = json.dumps({"schema": json.dumps({"type": "array", "items": SECRET})}).encode()
    requests = (
        ("GET", "/subjects/open-value/versions/1?format=resolved", b""),
        ("GET", "/subjects/open-value/versions/1/schema?format=resolved", b""),
        ("GET", "/subjects/open-value/metadata?format=resolved", b""),
        ("GET", f"/schemas/ids/{shown['id']}?format=resolved", b""),
        ("GET", f"/schemas/ids/{shown['id']}/schema?format=resolved", b""),
        ("POST", "/subjects/open-value?format=resolved", referring("secret-value")),
        ("POST", "/compatibility/subjects/open-value/versions", compatible),
        ("POST", "/subjects/mixed-value/versions", json.dumps({"schema": '"int"'}).encode()),
    )
    for method, path, body in requests:
        refused = await call(port, "bob", method, path, body)
        assert (refused.status, refused.json["error_code"]) == (422, 42201), path
        assert "secret-value" in refused.json["message"] and b"iban" not in refused.body
    grant(node, Operation.DESCRIBE, "secret")
    for method, path, body in requests[:-1]:
        allowed = await call(port, "bob", method, path, body)
        assert allowed.status == 200 and (b"iban" in allowed.body or allowed.json["is_compatible"]), path


@secured
async def test_listings_omit_what_only_hidden_subjects_have(node: SecureNode, port: int) -> None:
    await node_with_hidden_schemas(node)
    await register(node, "orders-value", "long")
    await register(node, ":.own:orders-value", "long")
    await register(node, "hidden-value", {"type": "array", "items": "long"}, ("x", "orders-value"))
    await register(node, "hidden-key", "long")
    orders = (await call(port, "bob", "GET", "/subjects/orders-value/versions/1")).json
    assert (await call(port, "bob", "GET", "/contexts")).json == [".", ".own"]
    assert (await call(port, "bob", "GET", "/subjects/orders-value/versions/1/referencedby")).json == []
    assert (await call(port, "bob", "GET", f"/schemas/ids/{orders['id']}/subjects")).json == ["orders-value"]
    found = (await call(port, "bob", "GET", f"/schemas/ids/{orders['id']}/versions")).json
    assert found == [{"subject": "orders-value", "version": 1}]
    everything = [each["subject"] for each in (await call(port, "bob", "GET", "/schemas?subjectPrefix=:*:")).json]
    assert sorted(everything) == [":.own:orders-value", "mixed-value", "open-value", "orders-value"]
    assert (await call(port, "bob", "GET", "/schemas?subjectPrefix=secret")).json == []


@secured
async def test_the_name_of_the_default_context_does_not_lead_to_another_topic(node: SecureNode, port: int) -> None:
    node.broker.schemas = Registry()
    for operation in (Operation.WRITE, Operation.ALTER_CONFIGS):
        for name in (":.:secret", ":.:"):
            grant(node, operation, name)
    for subject in (":.:secret-value", ":.::.:secret-value"):
        refused = await call(port, "bob", "POST", f"/subjects/{subject}/versions", STRING)
        assert refused.status == 403 and "WRITE on topic secret" in refused.json["message"]
    assert (await call(port, "bob", "PUT", "/config/:.:", b'{"compatibility":"NONE"}')).status == 403
    assert node.broker.schemas.state.configs == {}


def test_clients_find_the_cluster_metadata_and_serialized_schemas() -> None:
    async def work(node: SecureNode, port: int) -> None:
        with_registry(node)
        proto = {"schema": 'syntax = "proto3"; message A { int32 x = 1; }', "schemaType": "PROTOBUF"}
        for number, owner in enumerate(("a", "b"), 1):
            body = {
                "schema": f'{{"type":"fixed","name":"F","size":{number}}}',
                "metadata": {"properties": {"o": owner}},
            }
            await node.broker.schemas.submit(Command("set_config", "f", {"body": {"compatibility": "NONE"}}))
            await node.broker.schemas.submit(Command("register", "f", {"body": body}))
        await node.broker.schemas.submit(Command("register", "p", {"body": proto}))
        assert (await call(port, "", "GET", "/subjects/f/metadata?key=o&value=a")).json["version"] == 1
        assert (await call(port, "", "GET", "/subjects/f/metadata?key=o&value=c")).json["error_code"] == 40403
        assert (await call(port, "", "GET", "/subjects/g/metadata?key=o&value=c")).json["error_code"] == 40401
        assert (await call(port, "", "GET", "/v1/metadata/id")).json["scope"]["clusters"].keys() == {
            "kafka-cluster",
            "schema-registry-cluster",
        }
        assert (await call(port, "", "GET", "/v1/metadata/version")).json["version"]
        for path in ("/schemas/ids/3", "/subjects/p/versions/latest"):
            serialized = (await call(port, "", "GET", f"{path}?format=serialized")).json["schema"]
            assert (await call(port, "", "GET", f"{path}?format=other")).json["schema"].startswith("syntax")
            lookup = json.dumps({"schema": serialized, "schemaType": "PROTOBUF"}).encode()
            assert (await call(port, "", "POST", "/subjects/p?format=serialized", lookup)).json["schema"] == serialized
        check = json.dumps(proto).encode()
        for version, status, code in (("7", 404, 40402), ("latest", 200, None)):
            answer = await call(port, "", "POST", f"/compatibility/subjects/new/versions/{version}", check)
            assert (answer.status, answer.json.get("error_code")) == (status, code)
        plain = await call(port, "", "GET", "/subjects", Accept="application/json")
        own = await call(
            port, "", "GET", "/subjects", Accept="application/vnd.schemaregistry.v1+json, application/json"
        )
        assert [each.header("content-type") for each in (plain, own)] == [
            "application/json",
            "application/vnd.schemaregistry.v1+json",
        ]

    secured(work, http_login=False, is_authorizing=False)()
