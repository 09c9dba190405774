"""The state of pipelines at /api/pipelines, in events and on the page."""

from __future__ import annotations

import time
from functools import partial

import msgspec
from tests.support import topics
from tests.support.browser import Expect, OpenPage
from tests.support.eventually import eventually
from tests.web.support_http import get
from tests.web.test_events import events

from chronik.client.pipelines import (
    PIPELINES_TOPIC,
    AuditState,
    PipelineJob,
    PipelineState,
    create_topic,
    write_state,
)
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.testing.cluster import TestCluster


def write(bootstrap: str, state: PipelineState) -> None:
    with BlockingCluster(bootstrap) as cluster:
        cluster.run(create_topic(cluster.cluster))
        cluster.run(write_state(cluster.cluster, state))


def _knows_some(node: str) -> bool:
    return bool(get(node, "/api/pipelines")[1].get("pipelines"))


def test_every_node_and_the_page_show_what_pipelines_report(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    nodes = [str(node.http) for node in chronik_cluster.nodes]
    assert get(nodes[0], "/api/pipelines") == (200, {"pipelines": []})
    now_ms = time.time_ns() // 1_000_000
    audit = AuditState("incomplete", now_ms, {"0": 7}, gaps=3, reason="partitions 0: see the audit")
    job = PipelineJob("orders", "landing", "orders", "t/orders", "failed", now_ms, "no topic", audit=audit)
    state = PipelineState("shop", "i", "host", 7, "v", "running", now_ms, now_ms, [job])
    write(chronik_cluster.bootstrap, state)
    try:
        for node in nodes:
            eventually(partial(_knows_some, node), 20, "the node knows it")
            assert get(node, "/api/pipelines")[1]["pipelines"] == [msgspec.to_builtins(state)]
        with events(nodes[1], "?pipelines=1") as stream:
            assert next(stream.until("pipelines"))["pipelines"][0]["name"] == "shop"
            old = msgspec.structs.replace(state, heartbeat_ms=now_ms - 60_000, jobs=[])
            write(chronik_cluster.bootstrap, old)
            next(each for each in stream.until("pipelines") if each["pipelines"][0]["state"] == "lost")
        write(chronik_cluster.bootstrap, state)
        page = open_page(chronik_cluster.nodes[2].http)
        expect(page.locator("tr[data-key=pipeline-shop-orders]")).to_contain_text("incomplete")
        expect(page.get_by_text("orders: no topic")).to_be_visible()
    finally:
        topics.delete(chronik_cluster.bootstrap, PIPELINES_TOPIC)
        eventually(lambda: get(nodes[0], "/api/pipelines")[1] == {"pipelines": []}, 20, "it is forgotten")
