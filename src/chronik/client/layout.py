"""A cluster's metadata: brokers, topics, and the leader of each partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from chronik.wire.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class BrokerLayout:
    """A broker and its advertised address."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionLayout:
    """One partition's replicas; `leader` is -1 if there is none."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    error: ErrorCode = ErrorCode.none


@dataclass(frozen=True, slots=True)
class TopicLayout:
    """One topic's partitions, by number."""

    name: str
    id: UUID | None
    is_internal: bool
    partitions: tuple[PartitionLayout, ...]
    error: ErrorCode = ErrorCode.none


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """The contents of one Metadata response."""

    cluster_id: str | None
    controller_id: int
    brokers: Mapping[int, BrokerLayout]
    topics: Mapping[str, TopicLayout]


def layout_of(response: Any) -> ClusterLayout:
    """Convert a Metadata response of any version."""
    return ClusterLayout(
        cluster_id=getattr(response, "cluster_id", None),
        controller_id=getattr(response, "controller_id", -1),
        brokers={
            broker.node_id: BrokerLayout(broker.node_id, broker.host, broker.port, getattr(broker, "rack", None))
            for broker in response.brokers
        },
        topics={topic.name: _topic(topic) for topic in response.topics if topic.name is not None},
    )


def _topic(topic: Any) -> TopicLayout:
    partitions = (
        PartitionLayout(
            partition=partition.partition_index,
            leader=partition.leader_id,
            leader_epoch=getattr(partition, "leader_epoch", -1),
            replicas=tuple(partition.replica_nodes),
            isr=tuple(partition.isr_nodes),
            error=partition.error_code,
        )
        for partition in topic.partitions
    )
    return TopicLayout(
        name=topic.name,
        id=getattr(topic, "topic_id", None),
        is_internal=getattr(topic, "is_internal", False),
        partitions=tuple(sorted(partitions, key=lambda partition: partition.partition)),
        error=topic.error_code,
    )
