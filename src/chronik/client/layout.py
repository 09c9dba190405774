"""A cluster's metadata: brokers, topics, and the leader of each partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from chronik.wire.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class BrokerLayout:
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
    brokers = (
        BrokerLayout(each.node_id, each.host, each.port, getattr(each, "rack", None)) for each in response.brokers
    )
    return ClusterLayout(
        getattr(response, "cluster_id", None),
        getattr(response, "controller_id", -1),
        {broker.node_id: broker for broker in brokers},
        {topic.name: _topic(topic) for topic in response.topics if topic.name is not None},
    )


def _topic(topic: Any) -> TopicLayout:
    partitions = (
        PartitionLayout(
            each.partition_index,
            each.leader_id,
            getattr(each, "leader_epoch", -1),
            tuple(each.replica_nodes),
            tuple(each.isr_nodes),
            each.error_code,
        )
        for each in sorted(topic.partitions, key=lambda each: int(each.partition_index))
    )
    topic_id, is_internal = getattr(topic, "topic_id", None), getattr(topic, "is_internal", False)
    return TopicLayout(topic.name, topic_id, is_internal, tuple(partitions), topic.error_code)
