"""What a command changed, for those who act on it: each event carries the new values, so no lookup is needed."""

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
    """`broker` is the broker as it was."""

    broker: BrokerImage


class TopicCreated(msgspec.Struct, frozen=True, tag=True):
    topic: TopicImage


class TopicDeleted(msgspec.Struct, frozen=True, tag=True):
    """`topic` is the topic as it was."""

    topic: TopicImage


class PartitionsCreated(msgspec.Struct, frozen=True, tag=True):
    """`topic` is the topic with all its partitions, `partitions` are the new ones."""

    topic: TopicImage
    partitions: tuple[PartitionImage, ...]


class ReplicasChanged(msgspec.Struct, frozen=True, tag=True):
    """Other brokers than before have replicas: `added` open a log, `removed` delete theirs. Comes before LeaderChanged.

    Both are empty where only the order changed, or what is on the move.
    """

    topic: str
    topic_id: UUID
    partition: PartitionImage
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class LeaderChanged(msgspec.Struct, frozen=True, tag=True):
    """A new leader epoch: another leader, none, or the same broker as before in a new incarnation."""

    topic: str
    topic_id: UUID
    partition: PartitionImage


class IsrChanged(msgspec.Struct, frozen=True, tag=True):
    """The ISR changed under the same or a new leader; or only `partition_epoch`, which the leader needs to propose."""

    topic: str
    topic_id: UUID
    partition: PartitionImage


class ConfigChanged(msgspec.Struct, frozen=True, tag=True):
    """`configs` is all that is now set on the resource; `changed` names the keys that were touched."""

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
