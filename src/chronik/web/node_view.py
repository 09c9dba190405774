"""The state of a node that this package needs, and lookups of topics, partitions and leaders."""

from __future__ import annotations

from collections.abc import Sequence

from chronik.metadata.image import BrokerImage, ClusterImage, PartitionImage, TopicImage
from chronik.node.broker import Broker, BrokerState
from chronik.node.replicas.healing import Damage
from chronik.node.replicas.partition import Partition
from chronik.node.runtime import Runtime
from chronik.web.answers import Refusal

NOT_READY = "starting, stopping or disconnected from the controller"
REASONS: dict[BrokerState, str] = {
    "starting": "the node is starting",
    "stopping": "the node is stopping",
    "disconnected": "the node is disconnected from the controller",
}


class NodeView:
    """The node of this process, as seen from its event loop. `broker` is None until the data directory is open."""

    def __init__(self, runtime: Runtime) -> None:
        self.node_id = runtime.node_id
        self.metrics = runtime.metrics
        self.traces = runtime.traces
        self.run_blocking = runtime.run_blocking
        self.wall_ms = runtime.env.wall_ms
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
    def state(self) -> BrokerState:
        return "starting" if self.broker is None else self.broker.state

    @property
    def disk_error(self) -> str | None:
        return None if self.broker is None else self.broker.disk_error

    @property
    def damages(self) -> Sequence[Damage]:
        return () if self.broker is None else self.broker.damages

    def partition(self, topic: str, index: int) -> Partition | None:
        return None if self.broker is None else self.broker.partition(topic, index)


def require_image(node: NodeView) -> ClusterImage:
    image = node.image
    if image is None:
        raise Refusal(503, "this node is starting and has no metadata yet: retry in a second")
    return image


def require_topic(node: NodeView, name: str) -> TopicImage:
    """Return the topic. The node must be ready to serve."""
    image = node.image
    topic = None if image is None else image.topic(name)
    if topic is None:
        raise Refusal(404, f"topic {name[:260]} does not exist: see /api/topics")
    if not node.is_ready:
        raise Refusal(503, f"this node is not serving: it is {NOT_READY}; use another node")
    return topic


def require_partition(topic: TopicImage, index: int) -> PartitionImage:
    partition = topic.partition(index)
    if partition is None:
        last = len(topic.partitions) - 1
        raise Refusal(404, f"topic {topic.name} has no partition {index}: pass partition=0 to {last}")
    return partition


def require_other_leader(node: NodeView, topic: TopicImage, partition: PartitionImage, is_own: bool) -> BrokerImage:
    """Return the leader, which is another node. Raises Refusal if there is none, or if the request has own=1."""
    leader = require_image(node).brokers.get(partition.leader)
    name = f"{topic.name}-{partition.partition}"
    if leader is None:
        replicas = ", ".join(map(str, partition.replicas))
        raise Refusal(503, f"{name} has no leader: start its nodes {replicas}, then retry")
    if leader.id == node.node_id:
        raise Refusal(503, f"node {leader.id} is becoming the leader of {name}: retry")
    if is_own:
        raise Refusal(503, f"node {leader.id} leads {name}: send the request there, or omit own=1")
    return leader


def led_here(node: NodeView, topic: str, index: int) -> Partition | None:
    """Return the partition if this node currently leads it."""
    hosted = node.partition(topic, index)
    return hosted if hosted is not None and hosted.leads else None
