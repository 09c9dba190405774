"""/api/traces and the feed of all nodes' traces, on a real cluster."""

from __future__ import annotations

from tests.support.eventually import eventually
from tests.web.support_http import batch_of, get, put
from tests.web.test_events import events

from chronik.testing.cluster import TestCluster


def test_the_leader_and_the_feed_of_each_node_return_the_traces_of_a_topic(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=1, chronik_trace="true")
    leader = chronik_cluster.leader(topic)
    address = chronik_cluster.nodes[leader - 1].http
    eventually(lambda: topic in get(address, "/api/traces")[1]["traced_topics"], what="the topic is traced")
    put(chronik_cluster.bootstrap, topic, 0, *(batch_of([b"x"]) for _ in range(5)))

    status, page = get(address, f"/api/traces?topic={topic}&partition=0")
    assert (status, page["node"], page["dropped"]) == (200, leader, 0)
    appended = [event["base_offset"] for event in page["events"] if event["kind"] == "produce-appended"]
    assert appended == [0, 1, 2, 3, 4]
    numbers = [event["n"] for event in page["events"]]
    assert numbers == sorted(numbers)
    rest = get(address, f"/api/traces?after={numbers[1]}&limit=2&topic={topic}")[1]
    assert [event["n"] for event in rest["events"]] == numbers[2:4]
    newest = get(address, f"/api/traces?last=3&topic={topic}&partition=0")[1]
    assert [event["n"] for event in newest["events"]] == numbers[-3:]
    assert get(address, "/api/traces?topic=other")[1]["events"] == []

    for node in chronik_cluster.nodes:
        with events(str(node.http), f"?topic={topic}&traces=1") as stream:
            seen: set[int] = set()
            for state in stream.until("traces"):
                seen |= {event["base_offset"] for event in state["events"] if event["kind"] == "produce-appended"}
                if seen == {0, 1, 2, 3, 4}:
                    break
