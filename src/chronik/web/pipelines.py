"""/api/pipelines: what `chronik pipeline run` reports, read from the topic `__chronik_pipelines`.

Nodes never write to it. The topic's records are read once, and then only what is new. As its messages, they need READ
on the topic.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from uuid import UUID

from chronik.client.pipelines import PARTITION, PIPELINES_TOPIC, PipelineStates
from chronik.node.serving.access import Access
from chronik.web import schemas
from chronik.web.feeds import Feed
from chronik.web.log_reader import LocalLog, LogReader, leader_log
from chronik.web.node_view import NodeView, led_here, require_image, require_other_leader
from chronik.web.rights import require_readable

READS_MAX = 64
"""Reads for one answer, of up to 1 MiB each. A longer topic is read over several answers."""


class Pipelines:
    """The states that one node has read. Owned by the event loop."""

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._topic_id: UUID | None = None
        self._states = PipelineStates()
        self._reading = asyncio.Lock()

    async def view(self) -> schemas.Pipelines:
        """Return all pipelines. Raises Refusal if the topic's leader does not answer."""
        async with self._reading:
            await self._read()
        return schemas.Pipelines(self._states.at(self._node.wall_ms()))

    async def _read(self) -> None:
        node = self._node
        topic = require_image(node).topic(PIPELINES_TOPIC)
        partition = None if topic is None else topic.partition(PARTITION)
        if topic is None or partition is None:
            self._states, self._topic_id = PipelineStates(), None
            return
        if topic.id != self._topic_id:
            self._states, self._topic_id = PipelineStates(), topic.id
        hosted = led_here(node, PIPELINES_TOPIC, PARTITION)
        if hosted is not None:
            await self._feed(LocalLog(node, hosted))
            return
        leader = require_other_leader(node, topic, partition, False)
        async with leader_log(node, leader, PIPELINES_TOPIC, PARTITION) as log:
            await self._feed(log)

    async def _feed(self, log: LogReader) -> None:
        start, end = await log.bounds()
        states = self._states
        if states.next_offset > end:  # the log lost its end
            states = self._states = PipelineStates()
        states.next_offset = max(states.next_offset, start)
        for _ in range(READS_MAX):
            if states.next_offset >= end:
                return
            batches = await log.read(states.next_offset)
            if not await self._node.run_blocking(partial(states.feed, batches)):
                return


def require_pipelines(access: Access) -> None:
    require_readable(access, PIPELINES_TOPIC, "the state of pipelines")


class PipelinesFeed(Feed):
    event = "pipelines"
    interval_s = 2.0

    def __init__(self, node: NodeView, pipelines: Pipelines) -> None:
        super().__init__(node)
        self._pipelines = pipelines

    async def tick(self) -> None:
        self.send(await self._pipelines.view())

    def visible(self, state: Any, access: Access) -> object:
        require_pipelines(access)
        return state
