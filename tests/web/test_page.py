"""The page in a real browser, with a real cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaConsumer
from tests.clients.drivers.confluent import ConfluentMember
from tests.clients.drivers.share import ConfluentShares, Delivered
from tests.cluster.support_cluster import Nodes
from tests.node.support_wire import WireClient
from tests.node.test_telemetry import alter, get, push
from tests.support.browser import Expect, OpenPage
from tests.support.eventually import eventually
from tests.web.support_http import batch_of, open_transaction, put, put_unacknowledged
from tests.web.support_http import get as get_json

from chronik.client.cluster import Cluster
from chronik.client.groups import Groups
from chronik.testing.cluster import TestCluster
from chronik.web.app import PAGE_CONTENT_TYPES, PAGE_FOLDER
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

SCRIPT = b"<script>window.ran = true</script><img src=x onerror='window.ran = true'>"


def test_the_page_shows_the_cluster_and_new_records_at_once(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    topic = chronik_cluster.topic(partitions=2)
    page = open_page(chronik_cluster.nodes[0].http)
    expect(page).to_have_title("Cluster · Chronik")
    expect(page.locator("#health")).to_contain_text("Healthy")
    expect(page.locator("tbody tr[data-key^=node-]")).to_have_count(3)
    expect(page.locator("#connection")).to_contain_text("live")
    page.get_by_role("link", name=topic).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(topic)
    expect(page.locator("tbody tr[data-key^=partition-]")).to_have_count(2)
    page.get_by_role("link", name="Messages").click()
    expect(page.get_by_text("There are no records from this position on.")).to_be_visible()
    put(chronik_cluster.bootstrap, topic, 1, batch_of([b'{"order": 12345678901234567890, "items": []}']))
    row = page.locator("ol.messages li")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("key-0")
    row.locator("summary").click()
    expect(row.locator("pre").nth(1)).to_have_text('{\n  "order": 12345678901234567890,\n  "items": []\n}')
    expect(row).to_contain_text("source")


@pytest.fixture
def nodes_in_racks(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path / "cluster") as nodes:
        for node, rack in zip(nodes, ("machine-b", "machine-a", "machine-b"), strict=True):
            node.change({"rack": rack})
        nodes.start_all()
        yield nodes


def test_the_page_groups_nodes_by_rack(nodes_in_racks: Nodes, open_page: OpenPage, expect: Expect) -> None:
    page = open_page(nodes_in_racks.nodes[0].http)
    rows = page.get_by_role("region", name="Nodes").locator("tbody tr")
    expect(rows).to_have_count(5)
    keys = [row.get_attribute("data-key") for row in rows.all()]
    assert keys == ["group-Rack machine-a", "node-2", "group-Rack machine-b", "node-1", "node-3"]
    expect(rows.nth(0)).to_have_text("Rack machine-a")


def test_the_page_shows_a_script_as_text_and_bytes_as_hex(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    topic = chronik_cluster.topic(partitions=1)
    put(chronik_cluster.bootstrap, topic, 0, batch_of([SCRIPT, b"\x00\x01\xfe", None]))
    page = open_page(chronik_cluster.nodes[0].http, f"/#/topics/{topic}/messages")
    rows = page.locator("ol.messages li")
    expect(rows).to_have_count(3)
    script = page.locator("ol.messages li[data-key='0-0']")
    script.locator("summary").click()
    expect(script.locator("pre").nth(1)).to_have_text(SCRIPT.decode())
    binary = page.locator("ol.messages li[data-key='0-1']")
    binary.locator("summary").click()
    expect(binary.locator("pre").nth(1)).to_contain_text("000000  00 01 fe")
    expect(page.locator("ol.messages li[data-key='0-2'] summary")).to_contain_text("null")
    assert page.evaluate("window.ran") is None
    page.get_by_label("From", exact=True).select_option("offset")
    page.get_by_label("Offset", exact=True).fill("2")
    page.get_by_role("button", name="Read").click()
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="Older").click()
    expect(rows).to_have_count(3)


def test_the_page_explains_a_stuck_watermark_until_it_advances_again(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    topic = chronik_cluster.topic(partitions=1, min_insync_replicas="3")
    leader = chronik_cluster.leader(topic)
    follower = next(node.id for node in chronik_cluster.nodes if node.id not in (leader, chronik_cluster.controller))
    watcher = next(node for node in chronik_cluster.nodes if node.id not in (leader, follower))
    cluster, page = (open_page(watcher.http, path) for path in ("/", f"/#/topics/{topic}"))
    partition = page.locator("tbody tr[data-key=partition-0]")
    expect(partition).to_contain_text("ok")
    expect(cluster.locator("#health")).to_contain_text("Healthy")
    chronik_cluster.pause(follower)
    put_unacknowledged(watcher.bootstrap, topic, 0, batch_of([b"waits"] * 7))
    expect(partition).to_contain_text("stalled")
    expect(partition.locator("td[data-label=Lag]")).to_contain_text("7")
    expect(cluster.locator("#health")).to_contain_text(f"Watermark stuck on {topic}")
    stalls = page.get_by_role("region", name="Stall windows")
    expect(stalls).to_contain_text("watermark stuck at 0, log end at 7")
    page.route("**/api/doctor/*", lambda route: route.continue_(url=f"{route.request.url}?seconds=3"))
    page.get_by_role("button", name="Diagnose").click()
    verdict = page.get_by_role("status", name="Diagnosis")
    expect(verdict.get_by_role("heading")).to_have_text("watermark-not-advancing")
    expect(verdict).to_contain_text(f"node {follower}")
    chronik_cluster.resume(follower)
    expect(partition.locator("td[data-label=Watermark]")).to_have_text("7")
    expect(partition).not_to_contain_text("stalled")
    expect(stalls).not_to_contain_text("still")


def test_the_page_shows_an_open_transaction_until_it_ends(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    topic, name = chronik_cluster.topic(partitions=1), "payments-with-a-name-that-no-line-of-a-phone-holds"
    producer = open_transaction(chronik_cluster.bootstrap, name, topic)
    put(chronik_cluster.bootstrap, topic, 0, batch_of([b"later"]))
    page = open_page(chronik_cluster.nodes[0].http, width=390)
    line = page.locator(f"tr[data-key='transaction-{name}']")
    expect(line.locator("td[data-label=Partitions]")).to_have_text(f"{topic}-0")
    page.evaluate(f"location.hash = '#/topics/{topic}'")
    stable = page.locator("tr[data-key=partition-0] td[data-label='Last stable']")
    expect(stable).to_have_text("0")
    expect(line).to_contain_text("Ongoing")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    producer.commit_transaction(30)
    expect(stable).to_have_text("3")
    expect(line).to_have_count(0)


def test_the_page_shows_clients_that_push_their_metrics(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    node = chronik_cluster.nodes[0]
    with WireClient(int(node.bootstrap.rpartition(":")[2]), client_id="orders <1>") as client:
        client.call(ApiKey.API_VERSIONS, 3, {"client_software_name": "wire", "client_software_version": "1"})
        assert alter(client, "all", metrics="*", match="client_id=orders.*") == ErrorCode.none
        page = open_page(node.http)
        expect(page.get_by_text("Metrics of clients")).to_have_count(0)
        got = get(client)
        assert push(client, got) == ErrorCode.none
    line = page.locator(f"tr[data-key='client-{got.client_instance_id}']")
    expect(line).to_contain_text("orders <1>")
    expect(line.locator("td[data-label=Library]")).to_have_text("wire 1")
    expect(line.locator("td[data-label=Metrics]")).to_have_text("3")


def test_the_page_shows_that_a_node_stops_and_restarts_without_a_reload(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    topic = chronik_cluster.topic(partitions=3)
    down, *others = chronik_cluster.nodes
    page = open_page(others[0].http)
    gone = open_page(down.http, f"/#/topics/{topic}", may_fail=True)
    for one in (page, gone):
        one.evaluate("window.opened = true")
    expect(page.locator("#health")).to_contain_text("Healthy")
    expect(gone.locator("tbody tr[data-key=partition-2]")).to_contain_text("ok")
    chronik_cluster.kill(down.id)
    expect(gone.locator("#notice")).to_contain_text(f"Not connected to node {down.id}")
    expect(gone.locator("#connection")).to_contain_text("not connected")
    row = page.locator(f"tr[data-key=node-{down.id}]")
    expect(row).to_contain_text("down")
    expect(page.locator("#health")).to_contain_text(f"Node {down.id} is down")
    expect(page.locator(f"tr[data-key='topic-{topic}']")).to_contain_text("under-replicated")
    chronik_cluster.kill(others[1].id)
    expect(page.locator("#health")).to_contain_text(f"Node {others[0].id} is disconnected")
    expect(page.locator("#notice")).to_contain_text("is not serving")
    chronik_cluster.start(others[1].id)
    chronik_cluster.start(down.id)
    expect(row).to_contain_text("alive")
    expect(page.locator("#health")).to_contain_text("Healthy")
    expect(gone.locator("#connection")).to_contain_text("live")
    expect(gone.locator("#notice")).to_be_empty()
    expect(gone.locator("tbody tr[data-key=partition-2]")).to_contain_text("ok")
    for one in (page, gone):
        assert one.evaluate("window.opened") is True


def test_the_page_fits_a_phone_and_shows_the_lag_of_groups(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    topic = chronik_cluster.topic(partitions=2, chronik_trace="true")
    put(chronik_cluster.bootstrap, topic, 0, batch_of([b"long " * 2000, SCRIPT, bytes(range(256)) * 8]))
    group = "readers-with-a-name-that-is-far-too-long-to-fit-into-one-line-of-any-phone-that-there-is"
    consumer = KafkaConsumer(
        topic, bootstrap_servers=chronik_cluster.bootstrap, group_id=group, auto_offset_reset="earliest"
    )
    try:
        eventually(lambda: consumer.poll(timeout_ms=200), 20, "the consumer has its records")
        consumer.commit()
        put(chronik_cluster.bootstrap, topic, 0, batch_of([b"more"] * 4))
        page = open_page(chronik_cluster.nodes[0].http, width=390, color_scheme="dark")
        for path, shows in (
            ("", group),
            (f"topics/{topic}", "node "),
            (f"topics/{topic}/messages", "long"),
            (f"topics/{topic}/traces", "produce appended"),
            (f"topics/{topic}/settings", "chronik.trace"),
            ("groups", group),
            (f"groups/{group}", f"{topic}-0"),
        ):
            page.evaluate(f"location.hash = '#/{path}'")
            expect(page.locator("main")).to_contain_text(shows)
            for summary in page.locator("ol.messages summary").all()[:6]:
                summary.click()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        line = page.locator(f"tr[data-key='{topic}-0']")
        expect(line.locator("td[data-label=Lag]")).to_contain_text("4")
        expect(line.locator("td[data-label=Committed]")).to_have_text("3")
    finally:
        consumer.close()


def test_the_page_shows_epochs_and_targets_of_a_consumer_group(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    topic = chronik_cluster.topic(partitions=2)
    node = chronik_cluster.nodes[0]
    member = ConfluentMember(chronik_cluster.bootstrap, topic, "page-epochs", "server-uniform")
    member.start()
    try:
        eventually(lambda: len(member.partitions) == 2, 30, "the member has both partitions")
        described = get_json(node.http, "/api/groups/page-epochs")[1]
        (shown,) = described["members"]
        assert described["epoch"] == described["assignment_epoch"] == shown["epoch"]
        page = open_page(node.http, "/#/groups/page-epochs")
        line = page.locator(f"tr[data-key='{shown['member']}']")
        expect(line.locator("td[data-label=Epoch]")).to_have_text(str(shown["epoch"]))
        expect(line.locator("td[data-label=Assigned]")).to_have_text(f"{topic}-0, {topic}-1")
        expect(line.locator("td[data-label=Target]")).to_have_text("reached")
        expect(page.locator("dl.figures")).to_contain_text(f"Epoch{described['epoch']}")
        # A second member has a target, but owns nothing until the first one has revoked it.
        owed = {**shown, "member": "second", "partitions": [], "target": shown["partitions"][:1], "epoch": 1}
        state = {**described, "epoch": 9, "assignment_epoch": 8, "members": [owed]}
        html = page.evaluate(
            """async (state) => {
                const view = (await import('/page/groups.js')).group(state.group);
                const root = document.createElement("div");
                root.append(...view.draw({ group: state }).flat(9).filter(Boolean));
                return root.innerText;
            }""",
            state,
        )
        assert "9, target of 8" in html
        assert f"{topic}-{shown['partitions'][0]['partition']}" in html and "reached" not in html
    finally:
        member.leave()


async def start_at_the_beginning(cluster: TestCluster, group: str) -> None:
    host, _, port = cluster.bootstrap.partition(",")[0].rpartition(":")
    async with Cluster([(host, int(port))]) as client:
        await Groups(client).alter_configs(group, {"share.auto.offset.reset": "earliest"})


def test_the_page_shows_what_the_leaders_of_a_share_group_report(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    topic = group = chronik_cluster.topic(partitions=1)
    asyncio.run(start_at_the_beginning(chronik_cluster, group))
    put(chronik_cluster.bootstrap, topic, 0, batch_of([b"x"] * 5))
    member = ConfluentShares().join(chronik_cluster.bootstrap, group, topic, explicit=True)
    taken: list[Delivered] = []
    try:

        def has_all() -> bool:
            taken.extend(member.poll())
            return len(taken) == 5

        eventually(has_all, 60, "the member has all records")
        for record, kind in zip(taken, ("accept", "accept", "accept", "reject"), strict=False):
            member.acknowledge(record, kind)
        member.commit()
        for node in chronik_cluster.nodes:  # The partition's leader is one of them.
            status, described = get_json(node.http, f"/api/groups/{group}")
            assert status == 200
            share = described["partitions"][0]["share"]
            assert (share["in_flight"], share["delivered"], share["accepted"], share["rejected"]) == (1, 5, 3, 1)
            assert described["epoch"] == described["assignment_epoch"]
        page = open_page(chronik_cluster.nodes[0].http, f"/#/groups/{group}")
        line = page.locator(f"tr[data-key='{topic}-0']")
        for label, shows in (("In flight", "1"), ("Delivered", "5"), ("Accepted", "3"), ("Rejected", "1")):
            expect(line.locator(f"td[data-label='{label}']")).to_have_text(shows)
        expect(line.locator("td[data-label='Oldest lock']")).to_contain_text("s")
    finally:
        member.close()


def test_the_page_reports_unknown_topics_and_groups(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    page = open_page(chronik_cluster.nodes[0].http, "/#/topics/nothing")
    expect(page.get_by_text("topic nothing does not exist")).to_be_visible()
    page.evaluate("location.hash = '#/groups/nobody'")
    expect(page.get_by_text(re.compile("group nobody does not exist"))).to_be_visible()


def test_the_page_derives_stall_windows_from_traces(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    def event(kind: str, time_ms: int, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "time_ms": time_ms, "node": 1, "partition": 0, **more}

    events = [
        event("produce-appended", 1_000, last_offset=4),
        event("watermark-updated", 1_010, old=0, new=5, why="replica-fetch"),
        event("produce-appended", 2_000, last_offset=9),
        event("produce-appended", 4_000, last_offset=11),
        event("watermark-updated", 5_500, old=5, new=10, why="isr-change"),
        event("watermark-updated", 5_510, old=5, new=10, why="leader"),
        event("watermark-updated", 5_520, old=10, new=12, why="replica-fetch"),
        event("fetch-started", 6_000, fetch=7, max_wait_ms=500),
        event("fetch-served", 6_500, fetch=7, elapsed_ms=500, client_id="patient", offset=12),
        event("fetch-started", 7_000, fetch=8, max_wait_ms=500),
        event("fetch-served", 9_000, fetch=8, elapsed_ms=2_000, client_id="stuck", offset=12),
    ]
    page = open_page(chronik_cluster.nodes[0].http)
    windows = page.evaluate("async (events) => (await import('/page/stalls.js')).tracedWindows(events)", events)
    assert [(window["from"], window["to"]) for window in windows] == [(2_000, 5_500), (4_000, 5_520), (7_000, 9_000)]
    assert "stuck at 5, then rose to 10 (isr-change)" in windows[0]["what"]
    assert "fetch of stuck at 12 took 2000 ms on node 1" in windows[2]["what"]


def test_the_page_requests_nothing_from_other_hosts_and_is_in_the_wheel() -> None:
    for path in PAGE_FOLDER.iterdir():
        assert path.suffix in PAGE_CONTENT_TYPES, path
        text = path.read_text()
        addresses = set(re.findall(r"https?://[^\s\"'`$)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, path
        assert "innerHTML" not in text, path
    assert Path(PAGE_FOLDER, "index.html").is_file()
