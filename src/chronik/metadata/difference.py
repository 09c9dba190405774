"""The changes between two images, as the events that the commands in between would have caused.

A node that lags far behind receives the newest image instead of the commands. Event listeners must not notice.
"""

from __future__ import annotations

from collections.abc import Mapping

from chronik.metadata.events import (
    BrokerFenced,
    BrokerRegistered,
    BrokerShuttingDown,
    BrokerUnfenced,
    BrokerUnregistered,
    ClusterCreated,
    ConfigChanged,
    Event,
    PartitionsCreated,
    TopicCreated,
    TopicDeleted,
    partition_events,
)
from chronik.metadata.image import BrokerImage, ClusterImage, TopicImage


def events_between(old: ClusterImage, new: ClusterImage) -> list[Event]:
    """Return the events that lead from the old image to the new one: brokers, then topics, deleted topics first."""
    events: list[Event] = []
    if new.cluster_id != old.cluster_id:
        events.append(ClusterCreated(new.cluster_id))
    for broker_id, broker in sorted(old.brokers.items()):
        if broker_id not in new.brokers:
            events.append(BrokerUnregistered(broker))
    for broker_id, broker in sorted(new.brokers.items()):
        events += _broker_events(old.brokers.get(broker_id), broker)
    for name in sorted({*old.broker_configs, *new.broker_configs}):
        before, after = old.broker_configs.get(name, {}), new.broker_configs.get(name, {})
        if before != after:
            events.append(ConfigChanged("broker", name, after, _changed(before, after)))
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
    return events


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
