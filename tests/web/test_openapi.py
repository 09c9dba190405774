"""/api/openapi.json describes the routes and their parameters, and real answers match it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import jsonschema_rs
from kafka import KafkaConsumer
from starlette.routing import Route
from tests.support.eventually import eventually
from tests.web.support_http import batch_of, get, open_transaction, put
from tests.web.test_app import Node, get_json, served, three_nodes_one_of_them_fenced

from chronik.node.replicas.healing import Damage
from chronik.testing.cluster import TestCluster
from chronik.web.app import create_app

STREAM = "/api/events"


def check(description: dict[str, Any], path: str, status: int, answer: Any) -> None:
    """Fail if the answer to a GET of a described path does not match its schema."""
    response = description["paths"][path]["get"]["responses"][str(status)]
    if "$ref" in response:
        response = description["components"]["responses"][response["$ref"].rpartition("/")[2]]
    schema = response["content"]["application/json"]["schema"]
    jsonschema_rs.validator_for({**schema, "components": description["components"]}).validate(answer)


@served
async def test_the_description_has_exactly_the_routes_of_the_api(node: Node, port: int) -> None:
    _, description = await get_json(port, "/api/openapi.json")
    routes = [route for route in create_app(node).routes if isinstance(route, Route)]
    assert set(description["paths"]) == {route.path.replace(":path}", "}") for route in routes} - {
        "/",
        "/page/{name}",
    }
    changes = {("post", "/api/session"), ("delete", "/api/session"), ("post", "/api/tokens")}
    described = {(method, path) for path, methods in description["paths"].items() for method in methods}
    assert {each for each in described if each[0] not in ("get", "parameters")} == changes
    routed = {(method.lower(), route.path) for route in routes for method in route.methods or ()}
    assert {each for each in routed if each[0] not in ("get", "head")} == changes


@served
async def test_the_description_states_names_bounds_and_defaults_of_parameters(node: Node, port: int) -> None:
    _, description = await get_json(port, "/api/openapi.json")

    def parameters(path: str) -> dict[str, Any]:
        return {each["name"]: each for each in description["paths"][path]["get"].get("parameters", ())}

    batches = parameters("/api/topics/{name}/batches")
    assert list(batches) == ["partition", "from", "to", "limit", "own"]
    assert batches["partition"]["required"] is True
    assert batches["limit"]["schema"] == {"type": "integer", "minimum": 1, "maximum": 5000, "default": 1000}
    assert list(parameters("/api/topics/{name}/messages")) == ["partition", "offset", "time", "limit", "own"]
    assert list(parameters("/api/traces")) == ["after", "last", "topic", "partition", "limit"]
    assert list(parameters("/api/doctor/{name}")) == ["group", "seconds"]
    events = parameters(STREAM)
    assert list(events) == ["topics", "topic", "groups", "group", "transactions", "pipelines", "clients", "traces"]
    assert events["topic"]["schema"] == {"type": "string", "maxLength": 1000}
    assert events["topics"]["schema"] == {"type": "integer", "enum": [0, 1]}


@served
async def test_answers_of_a_cluster_with_problems_match_the_description(node: Node, port: int) -> None:
    _, description = await get_json(port, "/api/openapi.json")
    check(description, "/api/cluster", *await get_json(port, "/api/cluster"))
    node.broker.image, node.broker.is_ready = three_nodes_one_of_them_fenced(), True
    node.broker.damages = [Damage("orders", 1, 50, "scrub", "its file is missing", 1000, "healed", "", ("/d/x",), 2000)]
    for path in ("/api/cluster", "/api/topics"):
        check(description, path, *await get_json(port, path))
    _, topic = await get_json(port, "/api/topics/orders")
    assert UUID(topic["id"]) and topic["damages"]
    check(description, "/api/topics/{name}", 200, topic)


def test_every_answer_of_a_real_cluster_matches_the_description(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=1, chronik_trace="true")
    put(chronik_cluster.bootstrap, topic, 0, batch_of([b"text", b"\xff\x00", None]))
    address = chronik_cluster.nodes[chronik_cluster.leader(topic) - 1].http
    consumer = KafkaConsumer(
        topic, bootstrap_servers=chronik_cluster.bootstrap, group_id=topic, auto_offset_reset="earliest"
    )
    try:
        eventually(lambda: consumer.poll(timeout_ms=200), 20, "the consumer has its records")
        consumer.commit()
        # In another topic: the doctor would watch a group for long that has records left to read.
        producer = open_transaction(chronik_cluster.bootstrap, topic, chronik_cluster.topic(partitions=1))
        _, description = get(address, "/api/openapi.json")
        readable = [path for path, methods in description["paths"].items() if "get" in methods]
        queries = {path: "" for path in readable if path.startswith("/api/") and path != STREAM}
        queries["/api/topics/{name}/batches"] = queries["/api/topics/{name}/messages"] = "?partition=0"
        queries["/api/doctor/{name}"] = "?seconds=1"
        for path, query in queries.items():
            status, answer = get(address, path.replace("{name}", topic) + query)
            assert status == 200, (path, answer)
            check(description, path, status, answer)
            check(description, path, *get(address, f"{path.replace('{name}', topic)}?nothing=1"))
            if "{name}" in path:
                check(description, path, *get(address, path.replace("{name}", "missing") + query))
        assert get(address, "/api/traces")[1]["events"]
        assert get(address, f"/api/groups/{topic}")[1]["members"]
        assert get(address, "/api/transactions")[1]["transactions"]
        producer.abort_transaction(20)
    finally:
        consumer.close()
