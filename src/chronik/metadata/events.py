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


class TopicCreated(msgspec.Struct, frozen=True, tag=True):
    topic: TopicImage


class TopicDeleted(msgspec.Struct, frozen=True, tag=True):
    """`topic` is the topic as it was."""

    topic: TopicImage


class PartitionsCreated(msgspec.Struct, frozen=True, tag=True):
    """`topic` is the topic with all its partitions, `partitions` are the new ones."""

    topic: TopicImage
    partitions: tuple[PartitionImage, ...]


class LeaderChanged(msgspec.Struct, frozen=True, tag=True):
    """A leader starts to lead under a new leader epoch; it may be the same broker as before, in a new incarnation."""

    topic: str
    topic_id: UUID
    partition: PartitionImage


class IsrChanged(msgspec.Struct, frozen=True, tag=True):
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
    | TopicCreated
    | TopicDeleted
    | PartitionsCreated
    | LeaderChanged
    | IsrChanged
    | ConfigChanged
    | ProducerIdsAllocated
)
