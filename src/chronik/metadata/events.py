"""What changed between two images. Each event carries the new values, so listeners need no lookup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias
from uuid import UUID

import msgspec
from msgspec.structs import astuple

from chronik.authorization.acls import AclBinding
from chronik.metadata.commands import ConfigResource
from chronik.metadata.image import BrokerImage, ClusterImage, PartitionImage, TopicImage
from chronik.quotas.entities import QuotaEntity


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


class ClientQuotasChanged(msgspec.Struct, frozen=True, tag=True):
    """`values` is everything now set on the entity; empty if nothing is."""

    entity: QuotaEntity
    values: Mapping[str, float]


class ProducerIdsAllocated(msgspec.Struct, frozen=True, tag=True):
    broker_id: int
    first: int
    count: int


class ScramCredentialsChanged(msgspec.Struct, frozen=True, tag=True):
    """The users whose credentials changed. Without the credentials: they are secret."""

    users: tuple[str, ...]


class AclsCreated(msgspec.Struct, frozen=True, tag=True):
    """Only ACLs that did not exist before."""

    acls: tuple[AclBinding, ...]


class AclsDeleted(msgspec.Struct, frozen=True, tag=True):
    acls: tuple[AclBinding, ...]


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
    | ClientQuotasChanged
    | ProducerIdsAllocated
    | ScramCredentialsChanged
    | AclsCreated
    | AclsDeleted
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


_Configs: TypeAlias = Mapping[str, Mapping[str, str]]


def events_between(old: ClusterImage, new: ClusterImage) -> list[Event]:
    """Return the events that lead from the old image to the new one: brokers, then topics, deleted topics first.

    A node that lags far behind receives the newest image instead of the commands. Event listeners must not notice.
    """
    events: list[Event] = []
    if new.cluster_id != old.cluster_id:
        events.append(ClusterCreated(new.cluster_id))
    for broker_id, broker in sorted(old.brokers.items()):
        if broker_id not in new.brokers:
            events.append(BrokerUnregistered(broker))
    for broker_id, broker in sorted(new.brokers.items()):
        events += _broker_events(old.brokers.get(broker_id), broker)
    resources: tuple[tuple[ConfigResource, _Configs, _Configs], ...] = (
        ("broker", old.broker_configs, new.broker_configs),
        ("client_metrics", old.client_metrics, new.client_metrics),
        ("group", old.group_configs, new.group_configs),
    )
    for resource, all_before, all_after in resources:
        for name in sorted({*all_before, *all_after}):
            before, after = all_before.get(name, {}), all_after.get(name, {})
            if before != after:
                events.append(ConfigChanged(resource, name, after, _changed(before, after)))
    users = {*old.scram, *new.scram}
    changed = tuple(sorted(user for user in users if old.scram.get(user) != new.scram.get(user)))
    if changed:
        events.append(ScramCredentialsChanged(changed))
    events += _quota_events(old, new)
    for name, topic in sorted(old.topics.items()):
        kept = new.topics.get(name)
        if kept is None or kept.id != topic.id:
            events.append(TopicDeleted(topic))
    for name, topic in sorted(new.topics.items()):
        known = old.topics.get(name)
        if known is None or known.id != topic.id:
            events.append(TopicCreated(topic))
        else:
            events += _topic_events(known, topic)
    return [*events, *_acl_events(old, new)]


def _acl_events(old: ClusterImage, new: ClusterImage) -> list[Event]:
    """Return removals last: for a moment both the old and the new DENY apply, and never neither of them."""
    if old.acls is new.acls:
        return []
    created, deleted = new.acls - old.acls, old.acls - new.acls
    events: list[Event] = []
    if created:
        events.append(AclsCreated(tuple(sorted(created, key=astuple))))
    if deleted:
        events.append(AclsDeleted(tuple(sorted(deleted, key=astuple))))
    return events


def _quota_events(old: ClusterImage, new: ClusterImage) -> list[Event]:
    before = {quotas.entity: quotas.values for quotas in old.client_quotas}
    after = {quotas.entity: quotas.values for quotas in new.client_quotas}
    changed = [entity for entity in {**before, **after} if before.get(entity) != after.get(entity)]
    return [ClientQuotasChanged(entity, after.get(entity, {})) for entity in changed]


def _broker_events(old: BrokerImage | None, new: BrokerImage) -> list[Event]:
    if old is None or old.epoch != new.epoch or old.incarnation != new.incarnation:
        return [BrokerRegistered(new)]
    events: list[Event] = []
    if new.is_shutting_down and not old.is_shutting_down:
        events.append(BrokerShuttingDown(new))
    if new.is_fenced != old.is_fenced:
        events.append(BrokerFenced(new) if new.is_fenced else BrokerUnfenced(new))
    # Each of these events carries the whole broker.
    return events or ([BrokerRegistered(new)] if old != new else [])


def _topic_events(old: TopicImage, new: TopicImage) -> list[Event]:
    events: list[Event] = []
    if old.configs != new.configs:
        events.append(ConfigChanged("topic", new.name, new.configs, _changed(old.configs, new.configs)))
    added = new.partitions[len(old.partitions) :]
    if added:
        events.append(PartitionsCreated(new, added))
    for before, after in zip(old.partitions, new.partitions, strict=False):
        if before != after:
            events += partition_events(new, before, after)
    return events


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in sorted({*before, *after}) if before.get(name) != after.get(name))
