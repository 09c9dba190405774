"""/api/topics/NAME/batches at every node of a real cluster."""

from __future__ import annotations

from typing import Any

from tests.web.support_http import NOW_MS, batch_of, get, put

from chronik.testing.cluster import TestCluster

GZIP = 1


def all_pages(address: object, topic: str, limit: int) -> list[dict[str, Any]]:
    batches: list[dict[str, Any]] = []
    offset: int | None = 0
    while offset is not None:
        status, page = get(address, f"/api/topics/{topic}/batches?partition=0&from={offset}&limit={limit}")
        assert status == 200
        assert len(page["batches"]) <= limit
        batches += page["batches"]
        offset = page["next"]
    return batches


def test_every_node_lists_the_batches_of_the_leader(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=1)
    sent = [batch_of([b"x"] * size, codec=GZIP if size == 3 else 0) for size in (1, 3, 2, 5)]
    put(chronik_cluster.bootstrap, topic, 0, *sent)
    leader = chronik_cluster.leader(topic)
    for node in chronik_cluster.nodes:
        status, page = get(node.http, f"/api/topics/{topic}/batches?partition=0")
        assert status == 200
        assert (page["topic"], page["partition"], page["leader"], page["next"]) == (topic, 0, leader, None)
        assert (page["log_start_offset"], page["high_watermark"]) == (0, 11)
        assert [(batch["base_offset"], batch["last_offset"], batch["count"]) for batch in page["batches"]] == [
            (0, 0, 1),
            (1, 3, 3),
            (4, 5, 2),
            (6, 10, 5),
        ]
        assert [batch["codec"] for batch in page["batches"]] == ["none", "gzip", "none", "none"]
        assert [batch["size_bytes"] for batch in page["batches"]] == [len(encoded) for encoded in sent]
        assert {batch["base_timestamp_ms"] for batch in page["batches"]} == {NOW_MS}
        assert page["batches"][3]["max_timestamp_ms"] == NOW_MS + 4
        assert all_pages(node.http, topic, 1) == page["batches"]
        ranged = get(node.http, f"/api/topics/{topic}/batches?partition=0&from=2&to=5")[1]
        assert [batch["base_offset"] for batch in ranged["batches"]] == [1, 4]
        assert get(node.http, f"/api/topics/{topic}/batches?partition=0&from=11")[1]["batches"] == []
