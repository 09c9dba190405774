"""What a command changed. Each event carries the new values, so listeners need no lookup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias
from uuid import UUID

import msgspec

from chronik.metadata.commands import ConfigResource
from chronik.metadata.image import BrokerImage, PartitionImage, TopicImage


class ClusterCreated(msgspec.Struct, frozen=True, tag=True):
    cluster_id: str


class BrokerRegistered(msgspec.Struct, frozen=True, tag=True):
    broker: BrokerImage


class BrokerFenced(msgspec.Struct, frozen=True, tag=True):
    broker: BrokerImage


class BrokerUnfenced(msgspec.Struct, frozen=True, tag=True):
    broker: BrokerImage


class BrokerShuttingDown(msgspec.Struct, frozen=True, tag=True):
    broker: BrokerImage


class BrokerUnregistered(msgspec.Struct, frozen=True, tag=True):
    """`broker` is the broker before its removal."""

    broker: BrokerImage


class TopicCreated(msgspec.Struct, frozen=True, tag=True):
    topic: TopicImage


class TopicDeleted(msgspec.Struct, frozen=True, tag=True):
    """`topic` is the topic before its deletion."""

    topic: TopicImage


class PartitionsCreated(msgspec.Struct, frozen=True, tag=True):
    """`topic` is the topic with all its partitions; `partitions` are the new ones."""

    topic: TopicImage
    partitions: tuple[PartitionImage, ...]


class PartitionEvent(msgspec.Struct, frozen=True):
    """The partition after the change."""

    topic: str
    topic_id: UUID
    partition: PartitionImage


class ReplicasChanged(PartitionEvent, frozen=True, tag=True):
    """The set of replicas changed: `added` brokers open a log, `removed` ones delete theirs. Precedes LeaderChanged.

    Both are empty if only the order of the replicas or the state of the reassignment changed.
    """

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class LeaderChanged(PartitionEvent, frozen=True, tag=True):
    """A new leader epoch: a new leader, none, or a new incarnation of the same broker."""


class IsrChanged(PartitionEvent, frozen=True, tag=True):
    """The ISR changed under the same or a new leader; or only `partition_epoch`, which the leader's proposals need."""


class ConfigChanged(msgspec.Struct, frozen=True, tag=True):
    """`configs` is everything now set on the resource; `changed` names the changed keys."""

    resource: ConfigResource
    name: str
    configs: Mapping[str, str]
    changed: tuple[str, ...]


class ProducerIdsAllocated(msgspec.Struct, frozen=True, tag=True):
    broker_id: int
    first: int
    count: int


Event: TypeAlias = (
    ClusterCreated
    | BrokerRegistered
    | BrokerFenced
    | BrokerUnfenced
    | BrokerShuttingDown
    | BrokerUnregistered
    | TopicCreated
    | TopicDeleted
    | PartitionsCreated
    | ReplicasChanged
    | LeaderChanged
    | IsrChanged
    | ConfigChanged
    | ProducerIdsAllocated
)


def partition_events(topic: TopicImage, old: PartitionImage, new: PartitionImage) -> list[Event]:
    """Return the events of a partition's change. Every change has one: it raises at least the partition epoch."""
    events: list[Event] = []
    if (old.replicas, old.adding, old.removing) != (new.replicas, new.adding, new.removing):
        added = tuple(replica for replica in new.replicas if replica not in old.replicas)
        removed = tuple(replica for replica in old.replicas if replica not in new.replicas)
        events.append(ReplicasChanged(topic.name, topic.id, new, added, removed))
    if old.leader_epoch != new.leader_epoch:
        events.append(LeaderChanged(topic.name, topic.id, new))
    if old.isr != new.isr or not events:
        events.append(IsrChanged(topic.name, topic.id, new))
    return events
