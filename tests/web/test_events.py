"""/api/events and /api/groups of a real cluster, and streams that end with the node."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kafka import KafkaConsumer
from tests.conftest import StartNode
from tests.support.eventually import eventually
from tests.web.support_http import batch_of, get, open_transaction, put, put_unacknowledged

from chronik.testing.cluster import TestCluster
from chronik.web.events import LISTENERS_MAX


class Events:
    """A stream, read event by event."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def next(self) -> tuple[str, Any] | None:
        """Return the next event, or None at the end of the stream."""
        name = ""
        while line := self._response.readline():
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                return name, json.loads(line[6:])
        return None

    def until(self, name: str, *, events_max: int = 100) -> Iterator[Any]:
        for _ in range(events_max):
            event = self.next()
            assert event is not None, "the stream ended"
            if event[0] == name:
                yield event[1]
        raise AssertionError(f"no such {name} among {events_max} events")


@contextmanager
def events(address: str, query: str = "") -> Iterator[Events]:
    connection = http.client.HTTPConnection(address, timeout=15)
    try:
        connection.request("GET", f"/api/events{query}")
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield Events(response)
    finally:
        connection.close()


def test_every_node_streams_all_partitions_of_a_growing_topic(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=3)
    put(chronik_cluster.bootstrap, topic, 1, batch_of([b"x"] * 7))
    for node in chronik_cluster.nodes:
        with events(str(node.http), f"?topic={topic}&topics=1") as stream:
            partitions = next(
                state["partitions"]
                for state in stream.until("topic")
                if [line["high_watermark"] for line in state["partitions"]] == [0, 7, 0]
            )
            assert [line["lag"] for line in partitions] == [0, 0, 0]
            assert all(sorted(line["isr"]) == [1, 2, 3] for line in partitions)
            next(
                line
                for state in stream.until("topics")
                for line in state["topics"]
                if (line["name"], line["records"], line["lag"]) == (topic, 7, 0)
            )


def test_the_stream_reports_how_long_a_watermark_is_stuck(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=1, min_insync_replicas="3")
    leader = chronik_cluster.leader(topic)
    follower = next(node.id for node in chronik_cluster.nodes if node.id not in (leader, chronik_cluster.controller))
    watcher = next(node for node in chronik_cluster.nodes if node.id not in (leader, follower))
    with events(str(watcher.http), f"?topic={topic}") as stream:
        next(stream.until("topic"))
        chronik_cluster.pause(follower)
        put_unacknowledged(watcher.bootstrap, topic, 0, batch_of([b"waits"] * 4))
        stalled = next(state for state in stream.until("topic") if state["partitions"][0]["stuck_ms"] > 600)
        assert stalled["partitions"][0]["lag"] == 4
        chronik_cluster.resume(follower)
        next(state for state in stream.until("topic") if state["partitions"][0]["high_watermark"] == 4)


def test_the_stream_reports_groups_with_their_lag(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=2)
    put(chronik_cluster.bootstrap, topic, 0, batch_of([b"x"] * 5))
    consumer = KafkaConsumer(
        topic, bootstrap_servers=chronik_cluster.bootstrap, group_id="readers", auto_offset_reset="earliest"
    )
    try:
        eventually(lambda: consumer.poll(timeout_ms=200), 20, "the consumer has its records")
        consumer.commit()
        put(chronik_cluster.bootstrap, topic, 0, batch_of([b"y"] * 3))
        for node in chronik_cluster.nodes:
            status, listed = get(node.http, "/api/groups")
            assert status == 200
            assert [(line["group"], line["state"], line["lag"], line["member_count"]) for line in listed["groups"]] == [
                ("readers", "Stable", 3, 1)
            ]
            status, group = get(node.http, "/api/groups/readers")
            assert status == 200
            (member,) = group["members"]
            assert {held["partition"] for held in member["partitions"]} == {0, 1}
            first = group["partitions"][0]
            assert (first["topic"], first["committed"], first["end"], first["lag"]) == (topic, 5, 8, 3)
            assert first["member"] == member["member"]
        with events(str(chronik_cluster.nodes[1].http), "?groups=1&group=readers") as stream:
            assert next(stream.until("group"))["lag"] == 3
            assert next(stream.until("groups"))["groups"][0]["group"] == "readers"
    finally:
        consumer.close()


def test_every_node_reports_open_transactions_and_the_last_stable_offset(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=2)
    put(chronik_cluster.bootstrap, topic, 1, batch_of([b"x"] * 3))
    producer = open_transaction(chronik_cluster.bootstrap, "payments", topic, 1)
    put(chronik_cluster.bootstrap, topic, 1, batch_of([b"y"] * 2))
    for node in chronik_cluster.nodes:
        status, found = get(node.http, "/api/transactions")
        (transaction,) = found["transactions"]
        assert (status, found["total"], found["silent_nodes"]) == (200, 1, [])
        assert (transaction["transactional_id"], transaction["state"]) == ("payments", "Ongoing")
        assert transaction["partitions"] == [f"{topic}-1"]
        assert transaction["times_out_ms"] - transaction["start_ms"] == 60_000
        with events(str(node.http), f"?topic={topic}&transactions=1") as stream:
            held = (state["partitions"][1] for state in stream.until("topic"))
            next(line for line in held if (line["last_stable_offset"], line["high_watermark"]) == (3, 6))
            assert next(stream.until("transactions"))["transactions"] == [transaction]
    leader = chronik_cluster.nodes[chronik_cluster.leader(topic, 1) - 1]
    assert get(leader.http, f"/api/topics/{topic}")[1]["partitions"][1]["last_stable_offset"] == 3
    producer.commit_transaction(30)
    with events(str(leader.http), f"?topic={topic}&transactions=1") as stream:
        next(state for state in stream.until("topic") if state["partitions"][1]["last_stable_offset"] == 7)
        next(state for state in stream.until("transactions") if state["transactions"] == [])


def test_an_unknown_group_topic_or_parameter_is_an_error_message(chronik_cluster: TestCluster) -> None:
    address = chronik_cluster.nodes[0].http
    assert get(address, "/api/groups/nobody") == (404, {"error": "group nobody does not exist: see /api/groups"})
    status, body = get(address, "/api/events?topics=yes")
    assert (status, body["error"]) == (400, "topics=yes is invalid: pass 0 or 1")
    assert get(address, "/api/events?everything=1")[0] == 400
    with events(str(address), "?topic=nothing&group=nobody") as stream:
        assert next(stream.until("topic")) == {"error": "topic nothing does not exist"}
        assert "does not exist" in next(stream.until("group"))["error"]


def test_streams_end_when_the_node_stops_and_are_limited_in_number(start_node: StartNode) -> None:
    node = start_node()
    address = f"127.0.0.1:{node.http_port}"
    with events(address) as stream:
        assert next(stream.until("cluster"))["is_ready"] is True
        connections = [http.client.HTTPConnection(address, timeout=10) for _ in range(LISTENERS_MAX - 1)]
        for connection in connections:
            connection.request("GET", "/api/events")
            assert connection.getresponse().status == 200
        status, body = get(address, "/api/events")
        assert status == 503
        assert "close a page" in body["error"]
        connections.pop().close()
        eventually(lambda: _status(address) == 200, what="a place is free again")
        node.terminate()
        while stream.next() is not None:
            pass
        assert "Traceback" not in node.log_text()
        for connection in connections:
            connection.close()


def _status(address: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", "/api/events")
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/page/nothing.js", "/api/nothing"])
def test_every_response_denies_access_to_other_sites(chronik_cluster: TestCluster, path: str) -> None:
    connection = http.client.HTTPConnection(str(chronik_cluster.nodes[0].http), timeout=10)
    connection.request("GET", path, headers={"Origin": "http://elsewhere.example"})
    response = connection.getresponse()
    body = response.read()
    assert response.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in response.headers
    if path == "/":
        etag = response.headers["etag"]
        connection.request("GET", path, headers={"If-None-Match": etag})
        again = connection.getresponse()
        assert (again.status, again.read()) == (304, b"")
    else:
        assert response.status == 404
        assert "see /" in json.loads(body)["error"]
    connection.close()


def test_a_request_with_a_foreign_host_name_is_rejected(chronik_cluster: TestCluster) -> None:
    address = chronik_cluster.nodes[0].http

    def status(host: str, path: str = "/api/topics") -> int:
        connection = http.client.HTTPConnection(str(address), timeout=10)
        connection.request("GET", path, headers={"Host": host})
        answered = connection.getresponse().status
        connection.close()
        return answered

    for host in (str(address), f"localhost:{address.port}", "LOCALHOST", "[::1]:80", "page.localhost", "10.0.0.7:6092"):
        assert status(host) == 200, host
    for host in ("evil.example", f"evil.example:{address.port}", "127.0.0.1.evil.example", "localhost.evil.example"):
        assert status(host) == 403, host
        assert status(host, "/") == 403
        assert status(host, "/healthz") == 200
