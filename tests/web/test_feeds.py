"""Feeds run only while there are listeners; a slow listener does not affect the other ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID

from tests.web.test_app import Node, three_nodes_one_of_them_fenced

from chronik.metadata.image import ClusterImage
from chronik.node.admin.telemetry import ClientInstance
from chronik.web.events import EventHub, FeedMakers
from chronik.web.feeds import CHUNKS_WAITING_MAX, ClientsFeed, ClusterFeed, Listener, TopicsFeed
from chronik.web.guard import EVERYONE, Guard
from chronik.wire.otlp import Point


class CountingNode(Node):
    """Counts how often the metadata is read."""

    def __init__(self) -> None:
        super().__init__()
        self.broker.image = three_nodes_one_of_them_fenced()
        self.reads = 0

    @property
    def image(self) -> ClusterImage | None:
        self.reads += 1
        return super().image


def events_in(lines: bytes | None) -> list[tuple[str, Any]]:
    events = []
    for block in (lines or b"").decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


async def test_feeds_do_not_run_without_listeners() -> None:
    node = CountingNode()
    hub = EventHub(node, Guard(node))
    makers: FeedMakers = {("cluster", ""): lambda: ClusterFeed(node), ("topics", ""): lambda: TopicsFeed(node)}
    assert asyncio.all_tasks() == {asyncio.current_task()}  # no feed runs
    assert node.reads == 0
    first, second = hub.listen(makers, EVERYONE), hub.listen(makers, EVERYONE)
    async with asyncio.timeout(10):
        seen: set[str] = set()
        while seen != {"cluster", "topics"}:
            seen |= {event for event, _ in events_in(await first.take())}
    feeds = list(hub._feeds.values())
    assert len(feeds) == 2  # both listeners share them
    hub.leave(first)
    assert hub._feeds
    hub.leave(second)
    assert hub._feeds == {}
    for feed in feeds:
        await feed.stopped()
    reads = node.reads
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await hub.close()
    assert node.reads == reads


async def test_a_later_listener_receives_the_current_state_at_once() -> None:
    node = CountingNode()
    hub = EventHub(node, Guard(node))
    makers: FeedMakers = {("cluster", ""): lambda: ClusterFeed(node)}
    async with asyncio.timeout(10):
        first = hub.listen(makers, EVERYONE)
        ((event, cluster),) = events_in(await first.take())
        assert (event, cluster["cluster_id"], cluster["is_ready"]) == ("cluster", "c", False)
        assert events_in(await hub.listen(makers, EVERYONE).take()) == [(event, cluster)]
        await hub.close()
        assert await first.take() is None


async def test_clients_that_push_metrics_are_sent_without_the_values() -> None:
    node = CountingNode()
    names = ("client_id", "client_software_name", "client_software_version", "client_source_address")
    instance = ClientInstance(UUID(int=7), "User:a", dict.fromkeys(names, "x"), metrics=("a.",))
    instance.series = {("a.rate", ()): Point("a.rate", (), 1.0)}
    node.broker.pushing_clients = [instance]
    hub = EventHub(node, Guard(node))
    async with asyncio.timeout(10):
        listener = hub.listen({("clients", ""): lambda: ClientsFeed(node)}, EVERYONE)
        ((event, state),) = events_in(await listener.take())
        await hub.close()
    (client,) = state["clients"]
    assert (event, client["series"], client["metrics"], client["subscribed"]) == ("clients", 1, [], ["a."])


async def test_the_queue_of_a_slow_listener_is_bounded() -> None:
    listener = Listener()
    for number in range(1000):
        listener.send("topic", json.dumps({"n": number}).encode())
        listener.send("traces", json.dumps({"n": number}).encode(), adds=True)
    events = events_in(await listener.take())
    assert events[0] == ("topic", {"n": 999})
    assert events[1:] == [("traces", {"n": number}) for number in range(1000 - CHUNKS_WAITING_MAX, 1000)]
