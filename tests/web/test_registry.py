"""The registry's paths over HTTP: which rights they need, and what other sites and malformed requests get."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.web.support_login import Answer, SecureNode, basic, secured, send

from chronik.schemas.commands import Command, parsed_version, run
from chronik.schemas.state import State, Version


class Registry:
    """The registry of a node whose records are committed at once."""

    def __init__(self) -> None:
        self.state = State()

    async def current(self) -> State:
        return self.state

    caught_up = current

    async def decide(self, command: Command) -> Any:
        return run(self.state, command).answer

    async def formatted(self, version: Version, name: str) -> str:
        return parsed_version(self.state, version).formatted(name) or version.text

    async def submit(self, command: Command) -> Any:
        outcome = run(self.state, command)
        for key, value in outcome.records:
            self.state.apply(key, value)
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
