"""/api/traces: the events of this node's trace ring, and the feed that collects those of all nodes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import msgspec

from chronik.client.node_http import HttpError, get_json
from chronik.observe.traces import Trace, TraceRing
from chronik.web.answers import Parameters, Refusal
from chronik.web.feeds import Feed
from chronik.web.listeners import Listener
from chronik.web.node_view import NodeView

PARAMETERS = ("after", "last", "topic", "partition", "limit")
LIMIT = 1_000
LIMIT_MAX = 5_000
FEED_EVENTS_MAX = 500
"""Of one node in one event of the feed. Further events follow in the next one."""
FEED_KEPT_MAX = 1_000
"""How many past events a new listener receives first."""
ANSWER_WAIT_S = 0.4


class TracesPage(msgspec.Struct, frozen=True):
    """`next` is the `after` of the next request. `dropped` counts the events that never reached the traces topic."""

    node: int
    next: int
    last: int
    dropped: int
    traced_topics: list[str]
    events: list[Trace]


async def traces_page(node: NodeView, parameters: Parameters) -> bytes:
    """Return one page of the ring, encoded: the oldest events after `after`, or the `last` newest ones."""
    if parameters.has("after") and parameters.has("last"):
        raise Refusal(400, "after and last were both given: pass one of them")
    limit = parameters.number("limit", LIMIT, 1, LIMIT_MAX)
    partition = parameters.number("partition", 0, 0, (1 << 31) - 1) if parameters.has("partition") else None
    ring = node.traces
    topic = parameters.text("topic")
    if parameters.has("last"):
        wanted = parameters.number("last", 0, 1, LIMIT_MAX)
        page = _page(node, ring, *latest(ring, wanted, topic, partition))
    else:
        page = _page(node, ring, *ring.read(parameters.number("after", 0), limit, topic, partition))
    # Do not use the node's own threads: a hanging disk may block all of them, and the traces must explain that.
    return await asyncio.get_running_loop().run_in_executor(None, msgspec.json.encode, page)


def latest(ring: TraceRing, count: int, topic: str | None, partition: int | None = None) -> tuple[list[Trace], int]:
    """Return the newest events, and the `after` value that continues after them."""
    events, following = ring.read(0, ring.last_n, topic, partition) if ring.last_n else ([], 0)
    return events[-count:], following


def _page(node: NodeView, ring: TraceRing, events: list[Trace], following: int) -> TracesPage:
    return TracesPage(node.node_id, following, ring.last_n, node.metrics.traces_dropped, sorted(ring.topics), events)


class TracesFeed(Feed):
    """The traces of one topic or of all topics, from every reachable node, in time order."""

    event = "traces"
    interval_s = 0.5

    def __init__(self, node: NodeView, topic: str | None) -> None:
        super().__init__(node)
        self._topic = topic
        self._after: dict[int, int] = {}
        self._kept: deque[Any] = deque(maxlen=FEED_KEPT_MAX)
        self._asking: dict[int, asyncio.Task[Any]] = {}
        self._silent: list[int] = []
        self._has_told = False

    def add(self, listener: Listener) -> None:
        self._listeners[listener] = None
        if self._has_told:
            listener.tell(self.event, self._encode(list(self._kept)), adds=True)

    async def tick(self) -> None:
        found = self._own()
        found += await self._others()
        found.sort(key=lambda event: (event["time_ms"], event["node"], event["n"]))
        self._kept.extend(found)
        if found or not self._has_told:
            self._has_told = True
            data = self._encode(found)
            for listener in self._listeners:
                listener.tell(self.event, data, adds=True)

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def _encode(self, events: list[Any]) -> bytes:
        traced = sorted(self._node.traces.topics)
        return msgspec.json.encode({"events": events, "traced_topics": traced, "silent_nodes": self._silent})

    def _own(self) -> list[Any]:
        node, ring = self._node, self._node.traces
        after = self._after.get(node.node_id)
        if after is None:
            events, following = latest(ring, FEED_EVENTS_MAX, self._topic)
        else:
            events, following = ring.read(after, FEED_EVENTS_MAX, self._topic)
        self._after[node.node_id] = following
        return [msgspec.to_builtins(event) for event in events]

    async def _others(self) -> list[Any]:
        """Return what the other nodes answer in time. A slow node is queried again once its pending request ends."""
        image = self._node.image
        brokers = {} if image is None else image.brokers
        for broker in brokers.values():
            is_other = broker.id != self._node.node_id and broker.http and not broker.is_fenced
            if is_other and broker.id not in self._asking:
                asking = get_json(broker.http, "/api/traces", **self._question(broker.id))
                self._asking[broker.id] = self._loop.create_task(asking)
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=ANSWER_WAIT_S)
        found: list[Any] = []
        silent: list[int] = []
        for node_id, task in list(self._asking.items()):
            if not task.done():
                silent.append(node_id)
                continue
            del self._asking[node_id]
            try:
                answer = task.result()
                self._after[node_id] = int(answer["next"])
                found += answer["events"]
            except (HttpError, KeyError, TypeError, ValueError):
                silent.append(node_id)
        self._silent = sorted(silent)
        return found

    def _question(self, node_id: int) -> dict[str, Any]:
        after = self._after.get(node_id)
        asked = {"last": FEED_EVENTS_MAX} if after is None else {"after": after, "limit": FEED_EVENTS_MAX}
        return {**asked, "topic": self._topic}
