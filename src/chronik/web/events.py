"""/api/events: a node's view of its cluster as server-sent events.

    cluster        always: on every change, and every few seconds
    topics         ?topics=1: one line per topic, every second
    topic          ?topic=NAME: its partitions with offsets, lag and rate, every 500 ms
    groups         ?groups=1: one line per consumer group, every 2 s
    group          ?group=NAME: its members and its lag per partition, every second
    transactions   ?transactions=1: open transactions, every 2 s
    pipelines      ?pipelines=1: what running pipelines report, every 2 s
    clients        ?clients=1: the clients that push their metrics to this node, every 2 s
    traces         ?traces=1: new trace events of all nodes, only those of the topic if one is named

Each feed is computed once for all its listeners, and not at all without listeners. The number of listeners is bounded.
A listener receives what it may see; if that is nothing of a feed, an error that names the missing right. Its stream
ends with its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chronik.web.answers import Flag, Parameters, Refusal, Text, Visitor
from chronik.web.feeds import (
    ClientsFeed,
    ClusterFeed,
    Feed,
    GroupFeed,
    GroupsFeed,
    Listener,
    TopicFeed,
    TopicsFeed,
    TransactionsFeed,
)
from chronik.web.guard import Guard
from chronik.web.node_view import NodeView
from chronik.web.pipelines import Pipelines, PipelinesFeed
from chronik.web.traces import TracesFeed

TOPICS, GROUPS, TRANSACTIONS, TRACES = Flag("topics"), Flag("groups"), Flag("transactions"), Flag("traces")
CLIENTS, PIPELINES = Flag("clients"), Flag("pipelines")
TOPIC, GROUP = (Text(name, characters_max=1000) for name in ("topic", "group"))
PARAMETERS = (TOPICS, TOPIC, GROUPS, GROUP, TRANSACTIONS, PIPELINES, CLIENTS, TRACES)
LISTENERS_MAX = 64
LISTENERS_OF_USER_MAX = 16
"""One user must not keep the other ones out."""
EVENT_STREAM = "text/event-stream"
SEND_TIMEOUT_S = 60.0
SESSION_CHECK_S = 1.0

FeedKey = tuple[str, str]
"""The kind of event, and the topic or group; empty if there is none."""
FeedMakers = dict[FeedKey, Callable[[], Feed]]


class EventHub:
    """The feeds that have listeners. Owned by the event loop."""

    def __init__(self, node: NodeView, guard: Guard) -> None:
        self._node = node
        self._guard = guard
        self.pipelines = Pipelines(node)
        self._feeds: dict[FeedKey, Feed] = {}
        self._listeners: dict[Listener, list[FeedKey]] = {}

    async def open(self, parameters: Parameters) -> EventStream:
        """Return a stream for one request. Raises Refusal if there are too many listeners."""
        feeds = self._requested(parameters)
        if len(self._listeners) >= LISTENERS_MAX:
            raise Refusal(503, f"{LISTENERS_MAX} listeners are connected, the limit: close a page, or use another node")
        visitor = parameters.visitor
        if visitor.how not in ("open", "node") and self._count(visitor.access.principal) >= LISTENERS_OF_USER_MAX:
            raise Refusal(503, f"you have {LISTENERS_OF_USER_MAX} listeners, the limit: close a page")
        return EventStream(self, feeds, visitor)

    def _count(self, principal: str) -> int:
        return sum(listener.access.principal == principal for listener in self._listeners)

    def listen(self, feeds: FeedMakers, visitor: Visitor) -> Listener:
        listener = Listener(visitor.access)
        self._listeners[listener] = list(feeds)
        for key, make in feeds.items():
            if key not in self._feeds:
                self._feeds[key] = make()
            self._feeds[key].add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        for key in self._listeners.pop(listener, ()):
            if self._feeds[key].remove(listener):
                del self._feeds[key]

    def has_ended(self, visitor: Visitor) -> bool:
        return self._guard.has_ended(visitor)

    async def close(self) -> None:
        """End every stream, because the node is stopping."""
        feeds = list(self._feeds.values())
        for listener in list(self._listeners):
            listener.close()
            self.leave(listener)
        await asyncio.gather(*(feed.stopped() for feed in feeds))

    def _requested(self, parameters: Parameters) -> FeedMakers:
        node = self._node
        topic, group = parameters.text(TOPIC), parameters.text(GROUP)
        feeds: FeedMakers = {("cluster", ""): lambda: ClusterFeed(node)}
        if parameters.flag(TOPICS):
            feeds["topics", ""] = lambda: TopicsFeed(node)
        if topic is not None:
            feeds["topic", topic] = lambda: TopicFeed(node, topic)
        if parameters.flag(GROUPS):
            feeds["groups", ""] = lambda: GroupsFeed(node)
        if group is not None:
            feeds["group", group] = lambda: GroupFeed(node, group)
        if parameters.flag(TRANSACTIONS):
            feeds["transactions", ""] = lambda: TransactionsFeed(node)
        if parameters.flag(PIPELINES):
            feeds["pipelines", ""] = lambda: PipelinesFeed(node, self.pipelines)
        if parameters.flag(CLIENTS):
            feeds["clients", ""] = lambda: ClientsFeed(node)
        if parameters.flag(TRACES):
            feeds["traces", topic or ""] = lambda: TracesFeed(node, topic)
        return feeds


class EventStream(Response):
    """The response. It runs until the reader disconnects, its session ends, or the node stops."""

    def __init__(self, hub: EventHub, feeds: FeedMakers, visitor: Visitor) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"}, media_type=EVENT_STREAM)
        self._hub = hub
        self._feeds = feeds
        self._visitor = visitor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(_body(b"retry: 1000\n\n"))
        listener = self._hub.listen(self._feeds, self._visitor)
        disconnected = asyncio.ensure_future(_close_on_disconnect(receive, listener))
        ended = asyncio.ensure_future(self._close_on_end(listener)) if self._visitor.claims is not None else None
        try:
            while (lines := await listener.take()) is not None:
                # A reader that disappeared without closing its connection keeps its slot at most this long.
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(_body(lines))
            if not disconnected.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            return
        finally:
            disconnected.cancel()
            if ended is not None:
                ended.cancel()
            self._hub.leave(listener)

    async def _close_on_end(self, listener: Listener) -> None:
        """Close the listener once the visitor's session or token has ended. It ends with time too, so it is polled."""
        try:
            while True:
                await asyncio.sleep(SESSION_CHECK_S)
                if self._hub.has_ended(self._visitor):
                    return
        finally:
            # Also if the check fails: a stream must not outlive a session that nobody can check.
            listener.close()


async def _close_on_disconnect(receive: Receive, listener: Listener) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    finally:
        listener.close()


def _body(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}
