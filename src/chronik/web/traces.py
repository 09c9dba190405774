"""/api/traces: the events of this node's trace ring, and the feed that collects those of all nodes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import msgspec

from chronik.client.node_http import HttpError, get_json
from chronik.node.serving.access import Access
from chronik.observe.traces import Trace, TraceRing
from chronik.web import schemas
from chronik.web.answers import INT32_MAX, Number, Parameters, Text
from chronik.web.feeds import Feed, Listener, Rights
from chronik.web.node_view import NodeView
from chronik.web.rights import reads_topic, require_readable

EVENTS_MAX = 5_000
AFTER = Number("after", description="Not together with last.")
LAST = Number("last", 1, EVENTS_MAX, description="Not together with after.")
TOPIC = Text("topic")
PARTITION = Number("partition", high=INT32_MAX)
LIMIT = Number("limit", 1, EVENTS_MAX, default=1_000)
PARAMETERS = (AFTER, LAST, TOPIC, PARTITION, LIMIT)
FEED_EVENTS_MAX = 500
"""Of one node in one event of the feed. Further events follow in the next one."""
FEED_KEPT_MAX = 1_000
"""How many past events a new listener receives first."""
ANSWER_WAIT_S = 0.4


async def traces_page(node: NodeView, parameters: Parameters) -> bytes:
    """Return one page of the ring, encoded: the oldest events after `after`, or the `last` newest ones."""
    parameters.reject_both(AFTER, LAST)
    limit, last = parameters.number(LIMIT), parameters.optional(LAST)
    partition, topic = parameters.optional(PARTITION), parameters.text(TOPIC)
    ring, access = node.traces, parameters.access
    if topic is not None:
        require_readable(access, topic, "traces")
    if last is not None:
        events, following = latest(ring, ring.last_n or 1, topic, partition)
    else:
        events, following = ring.read(parameters.optional(AFTER) or 0, limit, topic, partition)
    readable = ReadableTopics(access)
    if not access.is_open:
        events = [event for event in events if event.topic in readable]
    events = events if last is None else events[-last:]
    traced = sorted(name for name in ring.topics if name in readable)
    page = schemas.Traces(node.node_id, following, ring.last_n, node.metrics.traces_dropped, traced, [*events])
    # Do not use the node's own threads: a hanging disk may block all of them, and the traces must explain that.
    return await asyncio.to_thread(msgspec.json.encode, page)


class ReadableTopics:
    """The topics that a visitor may read, each checked once."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._known: dict[str, bool] = {}

    def __contains__(self, topic: str) -> bool:
        if topic not in self._known:
            self._known[topic] = reads_topic(self._access, topic)
        return self._known[topic]


def latest(ring: TraceRing, count: int, topic: str | None, partition: int | None = None) -> tuple[list[Trace], int]:
    """Return the newest events, and the `after` value that continues after them."""
    events, following = ring.read(0, ring.last_n, topic, partition) if ring.last_n else ([], 0)
    return events[-count:], following


class TracesFeed(Feed):
    """The traces of one topic or of all topics, from every reachable node, in time order."""

    event = "traces"
    interval_s = 0.5

    def __init__(self, node: NodeView, topic: str | None) -> None:
        super().__init__(node)
        self._topic = topic
        self._after: dict[int, int] = {}
        self._kept: deque[Any] = deque(maxlen=FEED_KEPT_MAX)
        self._pending: dict[int, asyncio.Task[Any]] = {}
        self._silent: list[int] = []
        self._has_sent = False

    def add(self, listener: Listener) -> None:
        self._listeners[listener] = None
        if self._has_sent:
            listener.send(self.event, self._encode_events(list(self._kept), listener.access), adds=True)

    async def tick(self) -> None:
        events = self._own_events() + await self._other_events()
        events.sort(key=lambda event: (event["time_ms"], event["node"], event["n"]))
        self._kept.extend(events)
        if events or not self._has_sent:
            self._has_sent = True
            encoded: dict[Rights, bytes] = {}
            for listener in self._listeners:
                data = encoded.get(listener.rights)
                if data is None:
                    data = encoded[listener.rights] = self._encode_events(events, listener.access)
                listener.send(self.event, data, adds=True)

    def visible(self, state: Any, access: Access) -> object:
        return state  # an error: `_encode_events` filters the events

    async def close(self) -> None:
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)

    def _encode_events(self, events: list[Any], access: Access) -> bytes:
        """Encode what a visitor may read of the events."""
        readable = ReadableTopics(access)
        traced = sorted(topic for topic in self._node.traces.topics if topic in readable)
        if not access.is_open:
            events = [event for event in events if event["topic"] in readable]
        return msgspec.json.encode({"events": events, "traced_topics": traced, "silent_nodes": self._silent})

    def _own_events(self) -> list[Any]:
        node, ring = self._node, self._node.traces
        after = self._after.get(node.node_id)
        if after is None:
            events, following = latest(ring, FEED_EVENTS_MAX, self._topic)
        else:
            events, following = ring.read(after, FEED_EVENTS_MAX, self._topic)
        self._after[node.node_id] = following
        return [msgspec.to_builtins(event) for event in events]

    async def _other_events(self) -> list[Any]:
        """Return what the other nodes answer in time. A slow node is queried again once its pending request ends."""
        image = self._node.image
        brokers = {} if image is None else image.brokers
        for broker in brokers.values():
            is_other = broker.id != self._node.node_id and broker.http and not broker.is_fenced
            if is_other and broker.id not in self._pending:
                after = self._after.get(broker.id)
                page = {"last": FEED_EVENTS_MAX} if after is None else {"after": after, "limit": FEED_EVENTS_MAX}
                # As this node itself: the events are filtered for each listener.
                caller = self._node.caller()
                request = get_json(broker.http, "/api/traces", caller=caller, **page, topic=self._topic)
                self._pending[broker.id] = self._loop.create_task(request)
        if self._pending:
            await asyncio.wait(self._pending.values(), timeout=ANSWER_WAIT_S)
        events: list[Any] = []
        silent: list[int] = []
        for node_id, task in list(self._pending.items()):
            if not task.done():
                silent.append(node_id)
                continue
            del self._pending[node_id]
            try:
                answer = task.result()
                self._after[node_id] = int(answer["next"])
                events += answer["events"]
            except (HttpError, KeyError, TypeError, ValueError):
                silent.append(node_id)
        self._silent = sorted(silent)
        return events
