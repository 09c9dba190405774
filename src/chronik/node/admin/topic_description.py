"""Topics as Metadata and DescribeTopicPartitions describe them to one client."""

from __future__ import annotations

from typing import NamedTuple

from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.node.serving.api import Values
from chronik.wire.errors import ErrorCode


class AbsentBrokers(NamedTuple):
    """The live brokers that lack the client's listener, and the error of the partitions that they lead.

    `reachable` brokers are all other live ones.
    """

    brokers: frozenset[int]
    error: ErrorCode
    reachable: frozenset[int]

    @classmethod
    def on(cls, image: ClusterImage, listener: str, error: ErrorCode = ErrorCode.listener_not_found) -> AbsentBrokers:
        live = image.live_brokers()
        reachable = frozenset(broker.id for broker in live if broker.address(listener) is not None)
        return cls(frozenset(broker.id for broker in live) - reachable, error, reachable)


def described_topic(topic: TopicImage, absent: AbsentBrokers) -> Values:
    return {
        "error_code": ErrorCode.none,
        "name": topic.name,
        "topic_id": topic.id,
        "is_internal": topic.is_internal,
        "partitions": [_described_partition(partition, absent) for partition in topic.partitions],
    }


def _described_partition(partition: PartitionImage, absent: AbsentBrokers) -> Values:
    leader, error, replicas = partition.leader, ErrorCode.none, partition.replicas
    if leader < 0:
        error = ErrorCode.leader_not_available
    elif leader in absent.brokers:
        leader, error = NO_LEADER, absent.error
    are_reachable = absent.reachable.issuperset(replicas)
    return {
        "error_code": error,
        "partition_index": partition.partition,
        "leader_id": leader,
        "leader_epoch": partition.leader_epoch,
        "replica_nodes": replicas,
        "isr_nodes": partition.isr,
        "offline_replicas": () if are_reachable else [each for each in replicas if each not in absent.reachable],
    }
