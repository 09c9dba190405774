"""The interface to a node that this package needs, and lookups of topics, partitions and leaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from chronik.metadata.image import BrokerImage, ClusterImage, PartitionImage, TopicImage
from chronik.node.broker import Broker
from chronik.node.replicas.healing import Damage
from chronik.node.replicas.partition import Partition
from chronik.node.runtime import Runtime
from chronik.observe.metrics import Metrics
from chronik.observe.traces import TraceRing
from chronik.web.answers import Parameters, Refusal

T = TypeVar("T")


class NodeView(Protocol):
    """A node's state, as seen from its event loop."""

    @property
    def node_id(self) -> int: ...

    @property
    def image(self) -> ClusterImage | None:
        """None until the node has opened its data directory."""

    @property
    def controller_id(self) -> int: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def traces(self) -> TraceRing: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def damages(self) -> Sequence[Damage]: ...

    def partition(self, topic: str, index: int) -> Partition | None: ...

    async def run_blocking(self, call: Callable[[], T]) -> T: ...


class LocalNode:
    """The node of this process. It is served before it has opened its data directory; `broker` is set after that."""

    def __init__(self, runtime: Runtime) -> None:
        self.node_id = runtime.node_id
        self.metrics = runtime.metrics
        self.traces = runtime.traces
        self.run_blocking = runtime.run_blocking
        self.broker: Broker | None = None

    @property
    def image(self) -> ClusterImage | None:
        return None if self.broker is None else self.broker.image

    @property
    def controller_id(self) -> int:
        return -1 if self.broker is None else self.broker.controller_id

    @property
    def is_ready(self) -> bool:
        return self.broker is not None and self.broker.is_ready

    @property
    def damages(self) -> Sequence[Damage]:
        return () if self.broker is None else self.broker.damages

    def partition(self, topic: str, index: int) -> Partition | None:
        return None if self.broker is None else self.broker.partition(topic, index)


def require_image(node: NodeView) -> ClusterImage:
    image = node.image
    if image is None:
        raise Refusal(503, "this node has no metadata yet: it is starting, ask again in a second")
    return image


def require_topic(node: NodeView, name: str) -> TopicImage:
    """Return the topic. The node must be ready to serve."""
    image = node.image
    found = None if image is None else image.topic(name)
    if found is None:
        raise Refusal(404, f"topic {name[:260]} does not exist here: see /api/topics")
    if not node.is_ready:
        raise Refusal(503, "this node does not serve now: it is starting, stopping or cut off; ask another node")
    return found


def require_partition(topic: TopicImage, index: int) -> PartitionImage:
    found = topic.partition(index)
    if found is None:
        last = len(topic.partitions) - 1
        raise Refusal(404, f"topic {topic.name} has no partition {index}: pass partition=0 to {last}")
    return found


def require_leader(node: NodeView, topic: TopicImage, partition: PartitionImage) -> BrokerImage:
    leader = require_image(node).brokers.get(partition.leader)
    if leader is None:
        name = f"{topic.name}-{partition.partition}"
        raise Refusal(503, f"{name} has no leader now: start its nodes {_list(partition.replicas)}, then ask again")
    return leader


def require_other_leader(
    node: NodeView, topic: TopicImage, partition: PartitionImage, parameters: Parameters
) -> BrokerImage:
    """Return the leader, which is another node. Raises Refusal if there is none, or if the request has own=1."""
    leader = require_leader(node, topic, partition)
    name = f"{topic.name}-{partition.partition}"
    if leader.id == node.node_id:
        raise Refusal(503, f"node {leader.id} is about to lead {name}: ask again")
    if parameters.flag("own"):
        raise Refusal(503, f"{name} is led by node {leader.id}: ask there, or leave own=1 out")
    return leader


def led_here(node: NodeView, topic: str, index: int) -> Partition | None:
    """Return the partition if this node currently leads it."""
    hosted = node.partition(topic, index)
    return hosted if hosted is not None and hosted.leads else None


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
