"""apply(image, command) -> (next image, events): the only place where metadata changes.

Pure and deterministic. A command that does not fit the image (the topic already exists, the epoch is old) raises
KafkaError and changes nothing; every node refuses it in the same way. Rules that may differ between software versions
(names, config values, limits) are checked by the proposer, never here: replaying an old log must not fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import msgspec

from chronik.metadata.apply_brokers import (
    fence_broker,
    register_broker,
    shut_down_broker,
    unfence_broker,
    unregister_broker,
)
from chronik.metadata.apply_partitions import change_partition, change_partitions, without_eligible
from chronik.metadata.commands import (
    AllocateProducerIds,
    AlterConfigs,
    Assignment,
    ChangePartition,
    ChangePartitions,
    Command,
    CreateCluster,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    FenceBroker,
    RegisterBroker,
    ShutDownBroker,
    UnfenceBroker,
    UnregisterBroker,
)
from chronik.metadata.events import (
    ClusterCreated,
    ConfigChanged,
    Event,
    PartitionsCreated,
    ProducerIdsAllocated,
    TopicCreated,
    TopicDeleted,
)
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.metadata.min_insync import MIN_INSYNC_REPLICAS
from chronik.wire.errors import ErrorCode, KafkaError

Applied: TypeAlias = tuple[ClusterImage, list[Event]]
K = TypeVar("K")
V = TypeVar("V")


def apply(image: ClusterImage, command: Command) -> Applied:
    """Return the image after `command`, and what changed. Raises KafkaError if the command does not fit the image."""
    match command:
        case CreateCluster():
            changed, events = _create_cluster(image, command)
        case RegisterBroker():
            changed, events = register_broker(image, command)
        case FenceBroker():
            changed, events = fence_broker(image, command)
        case UnfenceBroker():
            changed, events = unfence_broker(image, command)
        case ShutDownBroker():
            changed, events = shut_down_broker(image, command)
        case UnregisterBroker():
            changed, events = unregister_broker(image, command)
        case CreateTopic():
            changed, events = _create_topic(image, command)
        case DeleteTopic():
            changed, events = _delete_topic(image, command)
        case CreatePartitions():
            changed, events = _create_partitions(image, command)
        case ChangePartition():
            changed, events = change_partition(image, command)
        case ChangePartitions():
            changed, events = _change_partitions(image, command)
        case AlterConfigs():
            changed, events = _alter_configs(image, command)
        case AllocateProducerIds():
            changed, events = _allocate_producer_ids(image, command)
    return msgspec.structs.replace(changed, version=image.version + 1), events


def _create_cluster(image: ClusterImage, command: CreateCluster) -> Applied:
    if image.cluster_id:
        raise KafkaError(ErrorCode.invalid_request, f"the cluster has the id {image.cluster_id} already")
    return msgspec.structs.replace(image, cluster_id=command.cluster_id), [ClusterCreated(command.cluster_id)]


def _create_topic(image: ClusterImage, command: CreateTopic) -> Applied:
    if command.name in image.topics:
        raise KafkaError(ErrorCode.topic_already_exists, f"topic {command.name!r} already exists")
    if command.id in image.names_by_id:
        raise KafkaError(ErrorCode.invalid_request, f"topic id {command.id} is taken")
    topic = TopicImage(
        name=command.name,
        id=command.id,
        partitions=_new_partitions(0, command.partitions),
        configs=dict(command.configs),
    )
    return (
        msgspec.structs.replace(
            image,
            topics=_with(image.topics, topic.name, topic),
            names_by_id=_with(image.names_by_id, topic.id, topic.name),
        ),
        [TopicCreated(topic)],
    )


def _delete_topic(image: ClusterImage, command: DeleteTopic) -> Applied:
    topic = image.topics.get(command.name)
    if topic is None or topic.id != command.id:
        raise KafkaError(ErrorCode.unknown_topic_or_partition, f"topic {command.name!r} does not exist")
    return (
        msgspec.structs.replace(
            image, topics=_without(image.topics, topic.name), names_by_id=_without(image.names_by_id, topic.id)
        ),
        [TopicDeleted(topic)],
    )


def _create_partitions(image: ClusterImage, command: CreatePartitions) -> Applied:
    topic = image.topics.get(command.name)
    if topic is None or topic.id != command.id:
        raise KafkaError(ErrorCode.unknown_topic_or_partition, f"topic {command.name!r} does not exist")
    if command.first != len(topic.partitions):
        raise KafkaError(
            ErrorCode.invalid_partitions, f"topic {topic.name!r} has {len(topic.partitions)} partitions meanwhile"
        )
    added = _new_partitions(command.first, command.partitions)
    topic = msgspec.structs.replace(topic, partitions=topic.partitions + added)
    return _with_topic(image, topic), [PartitionsCreated(topic, added)]


def _change_partitions(image: ClusterImage, command: ChangePartitions) -> Applied:
    after, events = change_partitions(image, command.changes, is_strict=False)
    if not events:
        raise KafkaError(ErrorCode.invalid_update_version, "every partition to be changed has moved on")
    return after, events


def _alter_configs(image: ClusterImage, command: AlterConfigs) -> Applied:
    events: list[Event] = []
    # From now on a leader may commit with a different set of replicas: eligible leaders may lack those records.
    is_other_minimum = MIN_INSYNC_REPLICAS in command.changes
    if command.resource == "topic":
        topic = image.require_topic(command.name)
        configs = _altered(topic.configs, command.changes)
        topic = msgspec.structs.replace(topic, configs=configs)
        after = _with_topic(image, without_eligible(topic, events) if is_other_minimum else topic)
    else:
        configs = _altered(image.broker_configs.get(command.name, {}), command.changes)
        after = msgspec.structs.replace(image, broker_configs=_with(image.broker_configs, command.name, configs))
        if is_other_minimum:
            topics = {name: without_eligible(topic, events) for name, topic in image.topics.items()}
            after = msgspec.structs.replace(after, topics=topics)
    changed = ConfigChanged(command.resource, command.name, configs, tuple(sorted(command.changes)))
    return after, [changed, *events]


def _allocate_producer_ids(image: ClusterImage, command: AllocateProducerIds) -> Applied:
    first = image.next_producer_id
    return (
        msgspec.structs.replace(image, next_producer_id=first + command.count),
        [ProducerIdsAllocated(command.broker_id, first, command.count)],
    )


def _new_partitions(first: int, assignments: tuple[Assignment, ...]) -> tuple[PartitionImage, ...]:
    return tuple(
        PartitionImage(
            partition=index,
            leader=assignment.isr[0] if assignment.isr else NO_LEADER,
            leader_epoch=0,
            replicas=assignment.replicas,
            isr=assignment.isr,
        )
        for index, assignment in enumerate(assignments, first)
    )


def _altered(configs: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    altered = dict(configs)
    for name, value in changes.items():
        if value is None:
            altered.pop(name, None)
        else:
            altered[name] = value
    return altered


def _with_topic(image: ClusterImage, topic: TopicImage) -> ClusterImage:
    return msgspec.structs.replace(image, topics=_with(image.topics, topic.name, topic))


def _with(entries: Mapping[K, V], key: K, value: V) -> dict[K, V]:
    copy = dict(entries)
    copy[key] = value
    return copy


def _without(entries: Mapping[K, V], key: K) -> dict[K, V]:
    copy = dict(entries)
    del copy[key]
    return copy
