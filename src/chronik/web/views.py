"""A node's view of its cluster as JSON values, from its own metadata image and its own replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from chronik.metadata.image import ClusterImage, PartitionImage, TopicImage
from chronik.web.node_view import NodeView

NAMED_PARTITIONS_MAX = 100
"""How many partitions with problems are listed by name. All of them are counted."""


def cluster_view(
    node_id: int, image: ClusterImage, controller_id: int, damages: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Summarise nodes, leaders, and partitions with problems. Runs in any thread, because the image is immutable.

    `damages` are those of this node's own logs.
    """
    leaders: Counter[int] = Counter()
    replicas: Counter[int] = Counter()
    in_sync: Counter[int] = Counter()
    partitions = 0
    under_replicated: list[str] = []
    leaderless: list[str] = []
    for topic, partition in _partitions(image):
        partitions += 1
        leaders[partition.leader] += 1
        replicas.update(partition.replicas)
        in_sync.update(partition.isr)
        name = f"{topic.name}-{partition.partition}"
        if len(partition.isr) < len(partition.replicas):
            under_replicated.append(name)
        if partition.leader < 0:
            leaderless.append(name)
    return {
        "cluster_id": image.cluster_id,
        "node_id": node_id,
        "version": image.version,
        "controller": controller_id if controller_id >= 0 else None,
        "nodes": [
            {
                "id": broker.id,
                "state": "fenced" if broker.is_fenced else "stopping" if broker.is_shutting_down else "alive",
                "kafka": f"{broker.host}:{broker.port}",
                "http": broker.http,
                "rack": broker.rack,
                "epoch": broker.epoch,
                "leaders": leaders[broker.id],
                "replicas": replicas[broker.id],
                "in_sync": in_sync[broker.id],
            }
            for _, broker in sorted(image.brokers.items())
        ],
        "topics": len(image.topics),
        "partitions": partitions,
        "under_replicated": len(under_replicated),
        "leaderless": len(leaderless),
        "under_replicated_partitions": under_replicated[:NAMED_PARTITIONS_MAX],
        "leaderless_partitions": leaderless[:NAMED_PARTITIONS_MAX],
        "damages": damages,
    }


def damages_view(node: NodeView, topic: str | None = None) -> list[dict[str, Any]]:
    """Return the damage found in this node's logs since its start, newest first, with the outcome."""
    return [
        {
            "topic": damage.topic,
            "partition": damage.partition,
            "offset": damage.offset,
            "how": damage.how,
            "reason": damage.reason,
            "found_ms": damage.found_ms,
            "state": damage.state,
            "waits_for": damage.waits_for,
            "set_aside": list(damage.set_aside),
            "healed_ms": damage.healed_ms,
        }
        for damage in reversed(node.damages)
        if topic is None or damage.topic == topic
    ]


def topics_view(image: ClusterImage) -> dict[str, Any]:
    """Return one line per topic."""
    return {"topics": [topic_summary(topic) for _, topic in sorted(image.topics.items())]}


def topic_view(node: NodeView, topic: TopicImage) -> dict[str, Any]:
    """Describe one topic. Offsets and damage are of the replicas on `node`; without a replica, offsets are null."""
    return {
        **topic_summary(topic),
        "configs": dict(sorted(topic.configs.items())),
        "node": node.node_id,
        "partitions": [_partition(node, topic, partition) for partition in topic.partitions],
        "damages": damages_view(node, topic.name),
    }


def topic_summary(topic: TopicImage) -> dict[str, Any]:
    return {
        "name": topic.name,
        "id": str(topic.id),
        "internal": topic.is_internal,
        "partitions": len(topic.partitions),
        "replication_factor": max((len(partition.replicas) for partition in topic.partitions), default=0),
        "under_replicated": sum(len(partition.isr) < len(partition.replicas) for partition in topic.partitions),
        "leaderless": sum(partition.leader < 0 for partition in topic.partitions),
    }


def _partition(node: NodeView, topic: TopicImage, partition: PartitionImage) -> dict[str, Any]:
    replica = node.partition(topic.name, partition.partition)
    return {
        "partition": partition.partition,
        "leader": partition.leader,
        "epoch": partition.leader_epoch,
        "replicas": list(partition.replicas),
        "isr": list(partition.isr),
        "log_start_offset": None if replica is None else replica.log_start_offset,
        "log_end_offset": None if replica is None else replica.log_end_offset,
        "high_watermark": None if replica is None else replica.high_watermark,
    }


def _partitions(image: ClusterImage) -> Iterator[tuple[TopicImage, PartitionImage]]:
    for _, topic in sorted(image.topics.items()):
        for partition in topic.partitions:
            yield topic, partition
