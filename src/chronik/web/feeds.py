"""The feeds behind /api/events and their listeners. Each feed is computed once for all its listeners.

What a listener may see of it is decided each time it is sent: rights change while a stream is open.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_right
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec

from chronik.authorization.acls import ResourceType
from chronik.metadata.image import ClusterImage, PartitionImage, TopicImage
from chronik.node.serving.access import OPEN_ACCESS, Access
from chronik.web import schemas
from chronik.web.answers import Refusal
from chronik.web.client_metrics import client_metrics_view
from chronik.web.group_views import group_view, groups_view
from chronik.web.node_view import NodeView, require_image
from chronik.web.offsets import OffsetSampler, Sample
from chronik.web.rights import (
    hidden_group,
    hidden_topic,
    require_cluster,
    sees_topic,
    visible_configs,
    visible_group,
    visible_groups,
    visible_transactions,
)
from chronik.web.transaction_views import transactions_view
from chronik.web.views import (
    OwnView,
    cluster_scope,
    cluster_view,
    own_view,
    partition_layout,
    topic_fields,
    topics_by_name,
)

CHUNKS_WAITING_MAX = 32
CLUSTER_REPEAT_S = 3.0
PARTITIONS_PER_S = 400
"""With more partitions, sampling slows down, so that a page never keeps the nodes busy."""
SAMPLED_PARTITIONS_MAX = 2_000
"""Over all topics in the `topics` feed. Topics beyond this limit are listed without offsets."""


Rights: TypeAlias = tuple[str, str] | None
"""The principal and host of listeners that see the same; None if they see everything."""


class Listener:
    """One open stream. Owned by the event loop. What waits for a slow reader is bounded.

    For an event that carries a state, only the newest is kept. For an event that adds to earlier ones, the last
    `CHUNKS_WAITING_MAX` are kept.
    """

    def __init__(self, access: Access = OPEN_ACCESS) -> None:
        self.access = access
        self.rights: Rights = None if access.is_open else (access.principal, access.host)
        self._states: dict[str, bytes] = {}
        self._additions: list[bytes] = []
        self._is_closed = False
        self._wake = asyncio.Event()

    def send(self, event: str, data: bytes, *, adds: bool = False) -> None:
        line = b"event: %b\ndata: %b\n\n" % (event.encode(), data)
        if adds:
            self._additions.append(line)
            del self._additions[:-CHUNKS_WAITING_MAX]
        else:
            self._states[event] = line
        self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    async def take(self) -> bytes | None:
        """Wait for pending events and return them, or None if the stream is closed."""
        await self._wake.wait()
        if self._is_closed:
            return None
        self._wake.clear()
        lines = [*self._states.values(), *self._additions]
        self._states, self._additions = {}, []
        return b"".join(lines)


class Feed(ABC):
    """One kind of event. A feed runs from its first listener to its last. Owned by the event loop."""

    event: ClassVar[str]
    interval_s: ClassVar[float]

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[Listener, None] = {}
        self._latest: object = None
        self._task = self._loop.create_task(self._run(), name=f"feed-{self.event}")

    async def stopped(self) -> None:
        await asyncio.wait([self._task])

    def add(self, listener: Listener) -> None:
        self._listeners[listener] = None
        if self._latest is not None:
            listener.send(self.event, self._encode(self._latest, listener.access))

    def remove(self, listener: Listener) -> bool:
        """Remove a listener. Stop and return True if it was the last."""
        self._listeners.pop(listener, None)
        if not self._listeners:
            self._task.cancel()
        return not self._listeners

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self.tick()
                except Refusal as refusal:
                    self.send(schemas.Error(refusal.line))
                except Exception as error:
                    # Report the error on the page. The next tick may succeed.
                    self.send(schemas.Error(f"this node failed to read its state: {error!r}; please report it"))
                await asyncio.sleep(self.pause_s())
        finally:
            await self.close()

    def send(self, state: object) -> None:
        """Send to each listener what it may see of the state. Listeners with the same rights share the encoding."""
        self._latest = state
        encoded: dict[Rights, bytes] = {}
        for listener in self._listeners:
            data = encoded.get(listener.rights)
            if data is None:
                data = encoded[listener.rights] = self._encode(state, listener.access)
            listener.send(self.event, data)

    def _encode(self, state: object, access: Access) -> bytes:
        try:
            return msgspec.json.encode(state if access.is_open else self.visible(state, access))
        except Refusal as refusal:
            return msgspec.json.encode(schemas.Error(refusal.line))

    @abstractmethod
    def visible(self, state: Any, access: Access) -> object:
        """Return what a visitor without all rights may see of a state. Raise Refusal if that is nothing."""

    def pause_s(self) -> float:
        """Return the pause before the next tick."""
        return self.interval_s

    @abstractmethod
    async def tick(self) -> None:
        """Compute the current state and send it to the listeners."""

    async def close(self) -> None:
        """Release resources after the last listener has left."""
        return


class ClusterState(NamedTuple):
    image: ClusterImage | None
    own: OwnView
    is_ready: bool
    whole: schemas.Cluster | None
    """The view of a visitor that sees everything, if there is one."""


class ClusterFeed(Feed):
    event = "cluster"
    interval_s = 0.25

    def __init__(self, node: NodeView) -> None:
        super().__init__(node)
        self._sent: tuple[object, ...] = ()
        self._sent_at_s = 0.0

    async def tick(self) -> None:
        node, image = self._node, self._node.image
        own, is_ready = own_view(node), node.is_ready
        state = (None if image is None else image.version, own, is_ready)
        if state == self._sent and self._loop.time() - self._sent_at_s < CLUSTER_REPEAT_S:
            return
        whole: schemas.Cluster | None = None
        if image is not None and any(listener.access.is_open for listener in self._listeners):
            # Counting thousands of partitions takes time.
            whole = await asyncio.to_thread(cluster_view, cluster_scope(image, own, OPEN_ACCESS))
        self._sent, self._sent_at_s = state, self._loop.time()
        self.send(ClusterState(image, own, is_ready, whole))

    def _encode(self, state: object, access: Access) -> bytes:
        if not isinstance(state, ClusterState):
            return super()._encode(state, access)
        image, own, is_ready, whole = state
        fields: dict[str, object] = {"node_id": own.node_id, "error": "this node is starting and has no metadata yet"}
        if image is not None:
            if whole is None or not access.is_open:
                whole = cluster_view(cluster_scope(image, own, access))
            fields = msgspec.structs.asdict(whole)
        return msgspec.json.encode({**fields, "is_ready": is_ready})

    def visible(self, state: Any, access: Access) -> object:
        return state  # an error: `_encode` filters the cluster


class SampledFeed(Feed):
    """A feed with offsets from all over the cluster. `name` is that of the topic or group, if the feed is about one."""

    def __init__(self, node: NodeView, name: str = "") -> None:
        super().__init__(node)
        self._name = name
        self._sampler = OffsetSampler(node)

    def pause_s(self) -> float:
        return max(self.interval_s, len(self._sampler.samples) / PARTITIONS_PER_S)

    async def close(self) -> None:
        await self._sampler.aclose()


class LivePartition(schemas.Partition, frozen=True):
    """`node` is the node that reported the offsets, `age_ms` how long ago. `lag` is that of the high watermark.

    `stuck_ms` is how long the high watermark has been stuck although the log end is beyond it.
    """

    lag: int | None = None
    rate: float | None = None
    stuck_ms: int = 0
    node: int | None = None
    age_ms: int | None = None


class LiveTopic(schemas.TopicFields, frozen=True):
    configs: dict[str, str] | None
    partitions: list[LivePartition]


class TopicFeed(SampledFeed):
    event = "topic"
    interval_s = 0.5

    async def tick(self) -> None:
        image = require_image(self._node)
        topic = image.topic(self._name)
        if topic is None:
            raise Refusal(404, f"topic {self._name[:260]} does not exist")
        if self._node.is_ready:
            await self._sampler.sample(image, [topic])
        now_s = self._loop.time()
        partitions = [
            _live_partition(partition, self._sampler.samples.get((topic.name, partition.partition)), now_s)
            for partition in topic.partitions
        ]
        self.send(LiveTopic(*topic_fields(topic), dict(sorted(topic.configs.items())), partitions))

    def visible(self, state: Any, access: Access) -> object:
        if not sees_topic(access, self._name):
            raise Refusal(403, hidden_topic(self._name))
        if not isinstance(state, LiveTopic):
            return state
        return msgspec.structs.replace(state, configs=visible_configs(access, state.name, state.configs))


def _live_partition(partition: PartitionImage, sample: Sample | None, now_s: float) -> LivePartition:
    layout = partition_layout(partition)
    if sample is None:
        return LivePartition(*layout, None, None, None, None)
    return LivePartition(
        *layout,
        sample.log_start_offset,
        sample.log_end_offset,
        sample.high_watermark,
        sample.last_stable_offset,
        lag=sample.lag,
        rate=round(sample.rate, 1),
        stuck_ms=sample.stuck_ms(now_s),
        node=sample.node,
        age_ms=int((now_s - sample.at_s) * 1000),
    )


class LiveTopicSummary(schemas.TopicSummary, frozen=True):
    """`lag` and `stuck_ms` are the largest of all partitions."""

    records: int | None
    rate: float | None
    lag: int | None
    stuck_ms: int


class LiveTopics(msgspec.Struct, frozen=True):
    topics: list[LiveTopicSummary]
    version: int


class TopicsFeed(SampledFeed):
    event = "topics"
    interval_s = 1.0

    async def tick(self) -> None:
        image = require_image(self._node)
        topics = topics_by_name(image)
        if self._node.is_ready:
            await self._sampler.sample(image, _first(topics))
        now_s = self._loop.time()
        self.send(LiveTopics([self._summary(topic, now_s) for topic in topics], image.version))

    def visible(self, state: Any, access: Access) -> object:
        if not isinstance(state, LiveTopics):
            return state
        return LiveTopics([line for line in state.topics if sees_topic(access, line.name)], state.version)

    def _summary(self, topic: TopicImage, now_s: float) -> LiveTopicSummary:
        samples = [self._sampler.samples.get((topic.name, partition.partition)) for partition in topic.partitions]
        known = [sample for sample in samples if sample is not None]
        return LiveTopicSummary(
            *topic_fields(topic),
            partitions=len(topic.partitions),
            records=sum(sample.log_end_offset - sample.log_start_offset for sample in known) if known else None,
            rate=round(sum(sample.rate for sample in known), 1) if known else None,
            lag=max((sample.lag for sample in known), default=None),
            stuck_ms=max((sample.stuck_ms(now_s) for sample in known), default=0),
        )


def _first(topics: list[TopicImage]) -> list[TopicImage]:
    """Return the topics to sample: as many as fit into `SAMPLED_PARTITIONS_MAX`."""
    totals = list(accumulate(len(topic.partitions) for topic in topics))
    return topics[: bisect_right(totals, SAMPLED_PARTITIONS_MAX)]


class GroupsFeed(SampledFeed):
    event = "groups"
    interval_s = 2.0

    async def tick(self) -> None:
        self.send(await groups_view(self._node, self._sampler))

    def visible(self, state: Any, access: Access) -> object:
        return visible_groups(access, state) if isinstance(state, schemas.Groups) else state


class GroupFeed(SampledFeed):
    event = "group"
    interval_s = 1.0

    async def tick(self) -> None:
        self.send(await group_view(self._name, self._node, self._sampler))

    def visible(self, state: Any, access: Access) -> object:
        if not access.sees(ResourceType.GROUP, self._name):
            raise Refusal(403, hidden_group(self._name))
        return visible_group(access, state) if isinstance(state, schemas.Group) else state


class TransactionsFeed(SampledFeed):
    event = "transactions"
    interval_s = 2.0

    async def tick(self) -> None:
        self.send(await transactions_view(self._node, self._sampler))

    def visible(self, state: Any, access: Access) -> object:
        return visible_transactions(access, state) if isinstance(state, schemas.Transactions) else state


class ClientsFeed(Feed):
    event = "clients"
    interval_s = 2.0

    async def tick(self) -> None:
        self.send(client_metrics_view(self._node, with_values=False))

    def visible(self, state: Any, access: Access) -> object:
        require_cluster(access, "the metrics of clients")
        return state
