"""The feeds behind /api/events. Each feed is computed once for all its listeners."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

import msgspec

from chronik.metadata.image import PartitionImage, TopicImage
from chronik.web.answers import Refusal
from chronik.web.asked_brokers import AskedBrokers
from chronik.web.group_views import group_view, groups_view
from chronik.web.listeners import Listener
from chronik.web.node_view import NodeView, require_image
from chronik.web.offsets import OffsetSampler, Sample
from chronik.web.views import cluster_view, damages_view, topic_summary

CLUSTER_REPEAT_S = 3.0
PARTITIONS_PER_S = 400
"""With more partitions, sampling slows down, so that a page never keeps the nodes busy."""
SAMPLED_PARTITIONS_MAX = 2_000
"""Over all topics in the `topics` feed. Topics beyond this limit are listed without offsets."""


class Feed(ABC):
    """One kind of event. A feed runs from its first listener to its last. Owned by the event loop."""

    event: ClassVar[str]
    interval_s: ClassVar[float]

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[Listener, None] = {}
        self._latest: bytes | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_unheard(self) -> bool:
        return not self._listeners

    def start(self) -> None:
        self._task = self._loop.create_task(self._run(), name=f"feed-{self.event}")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def stopped(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    def add(self, listener: Listener) -> None:
        self._listeners[listener] = None
        if self._latest is not None:
            listener.tell(self.event, self._latest)

    def remove(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self.tick()
                except Refusal as refusal:
                    self.tell({"error": refusal.line})
                except Exception as error:
                    # Report the error on the page. The next tick may succeed.
                    self.tell({"error": f"this node could not tell: {error!r}; please report it"})
                await asyncio.sleep(self.pause_s())
        finally:
            await self.close()

    def tell(self, value: dict[str, Any]) -> None:
        self._latest = msgspec.json.encode(value)
        for listener in self._listeners:
            listener.tell(self.event, self._latest)

    def pause_s(self) -> float:
        """Return the pause before the next tick."""
        return self.interval_s

    @abstractmethod
    async def tick(self) -> None:
        """Compute the current state and send it to the listeners."""

    async def close(self) -> None:
        """Release resources after the last listener has left."""
        return


class ClusterFeed(Feed):
    event = "cluster"
    interval_s = 0.25

    def __init__(self, node: NodeView) -> None:
        super().__init__(node)
        self._told: tuple[object, ...] = ()
        self._told_at_s = 0.0

    async def tick(self) -> None:
        node, image = self._node, self._node.image
        damages = damages_view(node)
        controller_id = -1 if image is None else node.controller_id
        state = (None if image is None else image.version, controller_id, node.is_ready, damages)
        if state == self._told and self._loop.time() - self._told_at_s < CLUSTER_REPEAT_S:
            return
        view: dict[str, Any] = {"node_id": node.node_id, "error": "this node has no metadata yet: it is starting"}
        if image is not None:
            work = partial(cluster_view, node.node_id, image, controller_id, damages)
            view = await self._loop.run_in_executor(None, work)
        self._told, self._told_at_s = state, self._loop.time()
        self.tell({**view, "is_ready": state[2]})


class SampledFeed(Feed):
    """A feed with offsets from all over the cluster."""

    def __init__(self, node: NodeView) -> None:
        super().__init__(node)
        self._sampler = OffsetSampler(node)

    def pause_s(self) -> float:
        return max(self.interval_s, len(self._sampler.samples) / PARTITIONS_PER_S)

    async def close(self) -> None:
        await self._sampler.close()


class TopicFeed(SampledFeed):
    event = "topic"
    interval_s = 0.5

    def __init__(self, node: NodeView, topic: str) -> None:
        super().__init__(node)
        self._topic = topic

    async def tick(self) -> None:
        image = require_image(self._node)
        topic = image.topic(self._topic)
        if topic is None:
            raise Refusal(404, f"topic {self._topic[:260]} does not exist")
        if self._node.is_ready:
            await self._sampler.sample(image, [topic])
        now_s = self._loop.time()
        samples = self._sampler.samples
        self.tell(
            {
                **topic_summary(topic),
                "configs": dict(sorted(topic.configs.items())),
                "partitions": [
                    partition_line(partition, samples.get((topic.name, partition.partition)), now_s)
                    for partition in topic.partitions
                ],
            }
        )


class TopicsFeed(SampledFeed):
    event = "topics"
    interval_s = 1.0

    async def tick(self) -> None:
        image = require_image(self._node)
        topics = [topic for _, topic in sorted(image.topics.items())]
        if self._node.is_ready:
            await self._sampler.sample(image, _first(topics))
        now_s = self._loop.time()
        lines = [self._line(topic, now_s) for topic in topics]
        self.tell({"topics": lines, "version": image.version})

    def _line(self, topic: TopicImage, now_s: float) -> dict[str, Any]:
        samples = [self._sampler.samples.get((topic.name, partition.partition)) for partition in topic.partitions]
        known = [sample for sample in samples if sample is not None]
        return {
            **topic_summary(topic),
            "records": sum(sample.log_end_offset - sample.log_start_offset for sample in known) if known else None,
            "rate": round(sum(sample.rate for sample in known), 1) if known else None,
            "lag": max((sample.lag for sample in known), default=None),
            "stands_ms": max((_stands_ms(sample, now_s) for sample in known), default=0),
        }


class GroupsFeed(SampledFeed):
    event = "groups"
    interval_s = 2.0

    def __init__(self, node: NodeView) -> None:
        super().__init__(node)
        self._brokers = AskedBrokers()

    async def tick(self) -> None:
        self.tell(await groups_view(self._node, self._sampler, self._brokers))

    async def close(self) -> None:
        await self._brokers.close()
        await super().close()


class GroupFeed(SampledFeed):
    event = "group"
    interval_s = 1.0

    def __init__(self, node: NodeView, group: str) -> None:
        super().__init__(node)
        self._group = group
        self._brokers = AskedBrokers()

    async def tick(self) -> None:
        self.tell(await group_view(self._group, self._node, self._sampler, self._brokers))

    async def close(self) -> None:
        await self._brokers.close()
        await super().close()


def partition_line(partition: PartitionImage, sample: Sample | None, now_s: float) -> dict[str, Any]:
    """Describe one partition. `node` is the node that reported the offsets, `age_ms` how long ago."""
    line: dict[str, Any] = {
        "partition": partition.partition,
        "leader": partition.leader,
        "epoch": partition.leader_epoch,
        "replicas": partition.replicas,
        "isr": partition.isr,
        "log_start_offset": None,
        "log_end_offset": None,
        "high_watermark": None,
        "lag": None,
        "rate": None,
        "stands_ms": 0,
        "node": None,
        "age_ms": None,
    }
    if sample is not None:
        line.update(
            log_start_offset=sample.log_start_offset,
            log_end_offset=sample.log_end_offset,
            high_watermark=sample.high_watermark,
            lag=sample.lag,
            rate=round(sample.rate, 1),
            stands_ms=_stands_ms(sample, now_s),
            node=sample.node,
            age_ms=int((now_s - sample.at_s) * 1000),
        )
    return line


def _stands_ms(sample: Sample, now_s: float) -> int:
    return 0 if sample.stands_since_s is None else int((now_s - sample.stands_since_s) * 1000)


def _first(topics: list[TopicImage]) -> list[TopicImage]:
    """Return the topics to sample: as many as fit into `SAMPLED_PARTITIONS_MAX`."""
    taken = 0
    for at, topic in enumerate(topics):
        taken += len(topic.partitions)
        if taken > SAMPLED_PARTITIONS_MAX:
            return topics[:at]
    return topics
