"""/api/topics/NAME/messages at every node of a real cluster."""

from __future__ import annotations

from base64 import b64decode

from tests.web.support_http import NOW_MS, batch_of, get, put

from chronik.testing.cluster import TestCluster

GZIP = 1


def test_every_node_returns_records_by_offset_and_by_time(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=1)
    put(
        chronik_cluster.bootstrap,
        topic,
        0,
        batch_of([b"one", b"<script>alert(1)</script>", b"\xff\xfe"], codec=GZIP),
        batch_of([None, b'{"four": 4}'], time_ms=NOW_MS + 1000),
    )
    leader = chronik_cluster.leader(topic)
    for node in chronik_cluster.nodes:
        path = f"/api/topics/{topic}/messages?partition=0"
        status, page = get(node.http, path)
        assert (status, page["node"], page["source"], page["high_watermark"]) == (200, leader, "leader", 5)
        assert [message["offset"] for message in page["messages"]] == [0, 1, 2, 3, 4]
        assert page["next"] is None
        first, script, binary, missing, last = page["messages"]
        assert first["key"] == {"encoding": "utf-8", "data": "key-0", "size_bytes": 5, "is_cut": False}
        assert first["headers"] == [
            {"name": "source", "value": {"encoding": "utf-8", "data": "test", "size_bytes": 4, "is_cut": False}}
        ]
        assert script["value"]["data"] == "<script>alert(1)</script>"
        assert (binary["value"]["encoding"], b64decode(binary["value"]["data"])) == ("base64", b"\xff\xfe")
        assert missing["value"] is None
        assert (last["timestamp_ms"], last["timestamp_type"]) == (NOW_MS + 1001, "CreateTime")

        def offsets(parameters: str, path: str = path, node: object = node.http) -> tuple[list[int], int | None]:
            status, page = get(node, path + parameters)
            assert status == 200
            return [message["offset"] for message in page["messages"]], page["next"]

        assert offsets("&offset=1&limit=2") == ([1, 2], 3)
        assert offsets("&offset=3&limit=2") == ([3, 4], None)
        assert offsets("&limit=2") == ([3, 4], None)
        assert offsets(f"&time={NOW_MS + 500}") == ([3, 4], None)
        assert offsets(f"&time={NOW_MS + 5000}") == ([], None)
        assert offsets("&offset=99") == ([], None)


def test_a_node_returns_its_own_records_if_the_leader_does_not_answer(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=1)
    put(chronik_cluster.bootstrap, topic, 0, batch_of([b"kept"]))
    leader = chronik_cluster.leader(topic)
    other = next(node for node in chronik_cluster.nodes if node.id != leader)
    put(chronik_cluster.bootstrap, topic, 0, batch_of([b"second"]))  # the followers learn that the first is committed
    chronik_cluster.pause(leader)
    status, page = get(other.http, f"/api/topics/{topic}/messages?partition=0&offset=0&limit=1")
    assert status == 200
    assert page["messages"][0]["value"]["data"] == "kept"
