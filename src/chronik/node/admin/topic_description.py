"""Topics as Metadata and DescribeTopicPartitions describe them to one client."""

from __future__ import annotations

from typing import NamedTuple

from chronik.metadata.image import NO_LEADER, ClusterImage, TopicImage
from chronik.node.serving.api import Request, Values
from chronik.wire.errors import ErrorCode


class AbsentBrokers(NamedTuple):
    """The live brokers that lack the client's listener, and the error of the partitions that they lead."""

    brokers: frozenset[int]
    error: ErrorCode

    @classmethod
    def on(
        cls, image: ClusterImage, request: Request, error: ErrorCode = ErrorCode.listener_not_found
    ) -> AbsentBrokers:
        listener = request.listener
        brokers = frozenset(
            broker.id for broker in image.brokers.values() if not broker.is_fenced and broker.address(listener) is None
        )
        return cls(brokers, error)


def described_topic(image: ClusterImage, topic: TopicImage, absent: AbsentBrokers) -> Values:
    values = _described_for_all(image, topic)
    if absent.brokers:
        for partition in values["partitions"]:
            replicas = partition["replica_nodes"]
            partition["offline_replicas"] = [
                replica for replica in replicas if replica in absent.brokers or not image.is_live(replica)
            ]
            if partition["leader_id"] in absent.brokers:
                partition |= {"leader_id": NO_LEADER, "error_code": absent.error}
    return values


def _described_for_all(image: ClusterImage, topic: TopicImage) -> Values:
    return {
        "error_code": ErrorCode.none,
        "name": topic.name,
        "topic_id": topic.id,
        "is_internal": topic.is_internal,
        "partitions": [
            {
                "error_code": ErrorCode.none if partition.leader >= 0 else ErrorCode.leader_not_available,
                "partition_index": partition.partition,
                "leader_id": partition.leader,
                "leader_epoch": partition.leader_epoch,
                "replica_nodes": partition.replicas,
                "isr_nodes": partition.isr,
                "offline_replicas": [replica for replica in partition.replicas if not image.is_live(replica)],
            }
            for partition in topic.partitions
        ],
    }
