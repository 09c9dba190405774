"""The cluster and its topics as this node sees them: from its own metadata image and its own replicas."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple
from uuid import UUID

import msgspec

from chronik.metadata.image import ClusterImage, PartitionImage, TopicImage
from chronik.node.broker import BrokerState
from chronik.node.serving.access import Access
from chronik.observe import build
from chronik.web import schemas
from chronik.web.node_view import NodeView
from chronik.web.rights import sees_cluster, visible_damages, visible_topics

NAMED_PARTITIONS_MAX = 100
"""How many partitions with problems are listed by name. All of them are counted."""


class OwnView(NamedTuple):
    """What a node reports about itself in its view of the cluster."""

    node_id: int
    state: BrokerState
    disk_error: str | None
    controller_id: int
    damages: list[schemas.Damage]


def own_view(node: NodeView) -> OwnView:
    return OwnView(node.node_id, node.state, node.disk_error, node.controller_id, damages_view(node))


class ClusterScope(NamedTuple):
    """What is counted for a visitor, and which names it sees."""

    image: ClusterImage
    own: OwnView
    topics: list[TopicImage]
    visible: frozenset[str] | None
    """The topics whose names are shown; None if all are."""


def cluster_scope(image: ClusterImage, own: OwnView, access: Access) -> ClusterScope:
    """Return what a visitor sees of the cluster.

    As in Kafka's metadata, each sees the nodes. Without DESCRIBE on the cluster, only the topics that the visitor sees
    are counted, and the state of this node's disk is hidden. Names of hidden topics are never shown.
    """
    topics = topics_by_name(image)
    if access.is_open:
        return ClusterScope(image, own, topics, None)
    seen = visible_topics(access, topics)
    own = own._replace(damages=visible_damages(access, own.damages))
    if not sees_cluster(access):
        topics, own = seen, own._replace(disk_error=None)
    return ClusterScope(image, own, topics, frozenset(topic.name for topic in seen))


def cluster_view(scope: ClusterScope) -> schemas.Cluster:
    """Summarise nodes, leaders, and partitions with problems. Runs in any thread, because the image is immutable."""
    image, own, topics, visible = scope
    partitions = [(topic.name, partition) for topic in topics for partition in topic.partitions]
    leaders = Counter(partition.leader for _, partition in partitions)
    replicas = Counter(node for _, partition in partitions for node in partition.replicas)
    in_sync = Counter(node for _, partition in partitions for node in partition.isr)
    under_replicated = [(name, p.partition) for name, p in partitions if len(p.isr) < len(p.replicas)]
    leaderless = [(name, p.partition) for name, p in partitions if p.leader < 0]

    def named(found: list[tuple[str, int]]) -> list[str]:
        shown = found if visible is None else [each for each in found if each[0] in visible]
        return [f"{name}-{partition}" for name, partition in shown[:NAMED_PARTITIONS_MAX]]

    return schemas.Cluster(
        cluster_id=image.cluster_id,
        node_id=own.node_id,
        state=own.state,
        disk_error=own.disk_error,
        build=build.kind(),
        version=image.version,
        controller=own.controller_id if own.controller_id >= 0 else None,
        nodes=[
            schemas.Node(
                id=broker.id,
                state="fenced" if broker.is_fenced else "stopping" if broker.is_shutting_down else "alive",
                kafka=f"{broker.host}:{broker.port}",
                http=broker.http,
                rack=broker.rack,
                epoch=broker.epoch,
                leaders=leaders[broker.id],
                replicas=replicas[broker.id],
                in_sync=in_sync[broker.id],
            )
            for _, broker in sorted(image.brokers.items())
        ],
        topics=len(topics),
        partitions=len(partitions),
        under_replicated=len(under_replicated),
        leaderless=len(leaderless),
        under_replicated_partitions=named(under_replicated),
        leaderless_partitions=named(leaderless),
        damages=own.damages,
    )


def damages_view(node: NodeView, topic: str | None = None) -> list[schemas.Damage]:
    """Return the damage found in this node's logs since its start, newest first, with the outcome."""
    return [
        msgspec.convert(damage, schemas.Damage, from_attributes=True)
        for damage in reversed(node.damages)
        if topic is None or damage.topic == topic
    ]


def topics_by_name(image: ClusterImage) -> list[TopicImage]:
    return [topic for _, topic in sorted(image.topics.items())]


def topics_view(topics: list[TopicImage]) -> schemas.Topics:
    return schemas.Topics([schemas.TopicSummary(*topic_fields(topic), len(topic.partitions)) for topic in topics])


def topic_view(node: NodeView, topic: TopicImage) -> schemas.Topic:
    """Describe one topic. Offsets and damage are of the replicas on `node`; without a replica, offsets are null."""
    return schemas.Topic(
        *topic_fields(topic),
        configs=dict(sorted(topic.configs.items())),
        node=node.node_id,
        partitions=[_partition(node, topic, partition) for partition in topic.partitions],
        damages=damages_view(node, topic.name),
        shares=shares_view(node, topic.name),
    )


def shares_view(node: NodeView, topic: str) -> list[schemas.Share]:
    """Describe the share partitions of a topic that this node leads."""
    return [msgspec.convert(share._asdict(), schemas.Share) for share in node.metrics.shares() if share.topic == topic]


def topic_fields(topic: TopicImage) -> tuple[str, UUID, bool, int, int, int]:
    """Return the values of `schemas.TopicFields`."""
    return (
        topic.name,
        topic.id,
        topic.is_internal,
        max((len(partition.replicas) for partition in topic.partitions), default=0),
        sum(len(partition.isr) < len(partition.replicas) for partition in topic.partitions),
        sum(partition.leader < 0 for partition in topic.partitions),
    )


def _partition(node: NodeView, topic: TopicImage, partition: PartitionImage) -> schemas.Partition:
    layout, replica = partition_layout(partition), node.partition(topic.name, partition.partition)
    if replica is None:
        return schemas.Partition(*layout, None, None, None, None)
    ends = (replica.log_end_offset, replica.high_watermark, replica.last_stable_offset)
    return schemas.Partition(*layout, replica.log_start_offset, *ends)


def partition_layout(partition: PartitionImage) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...]]:
    """Return the values of `schemas.Partition` that come from the metadata."""
    return partition.partition, partition.leader, partition.leader_epoch, partition.replicas, partition.isr
