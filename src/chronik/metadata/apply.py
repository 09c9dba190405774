"""apply(image, command) -> (next image, events): the only place where metadata changes.

Pure and deterministic. A command that does not fit the image (the topic exists already, the epoch is old) raises
KafkaError and changes nothing; it is refused alike wherever it is applied. Rules that may differ between versions of
the software (names, config values, limits) are checked by whoever proposes, never here: replaying an old log must not
fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import msgspec

from chronik.metadata.commands import (
    AllocateProducerIds,
    AlterConfigs,
    Assignment,
    ChangePartition,
    Command,
    CreateCluster,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    RegisterBroker,
)
from chronik.metadata.events import (
    BrokerRegistered,
    ClusterCreated,
    ConfigChanged,
    Event,
    IsrChanged,
    LeaderChanged,
    PartitionsCreated,
    ProducerIdsAllocated,
    TopicCreated,
    TopicDeleted,
)
from chronik.metadata.image import (
    NO_CONTROLLER,
    NO_LEADER,
    BrokerImage,
    ClusterImage,
    PartitionImage,
    TopicImage,
)
from chronik.wire.errors import ErrorCode, KafkaError

Applied: TypeAlias = tuple[ClusterImage, list[Event]]
K = TypeVar("K")
V = TypeVar("V")


def apply(image: ClusterImage, command: Command) -> Applied:
    """The image after `command`, and what changed. KafkaError where the command does not fit the image."""
    match command:
        case CreateCluster():
            changed, events = _create_cluster(image, command)
        case RegisterBroker():
            changed, events = _register_broker(image, command)
        case CreateTopic():
            changed, events = _create_topic(image, command)
        case DeleteTopic():
            changed, events = _delete_topic(image, command)
        case CreatePartitions():
            changed, events = _create_partitions(image, command)
        case ChangePartition():
            changed, events = _change_partition(image, command)
        case AlterConfigs():
            changed, events = _alter_configs(image, command)
        case AllocateProducerIds():
            changed, events = _allocate_producer_ids(image, command)
    return msgspec.structs.replace(changed, version=image.version + 1), events


def _create_cluster(image: ClusterImage, command: CreateCluster) -> Applied:
    if image.cluster_id:
        raise KafkaError(ErrorCode.invalid_request, f"the cluster has the id {image.cluster_id} already")
    return msgspec.structs.replace(image, cluster_id=command.cluster_id), [ClusterCreated(command.cluster_id)]


def _register_broker(image: ClusterImage, command: RegisterBroker) -> Applied:
    known = image.brokers.get(command.broker_id)
    restarted = known is not None and known.incarnation != command.incarnation
    epoch = known.epoch if known is not None and not restarted else image.version + 1
    broker = BrokerImage(
        id=command.broker_id,
        epoch=epoch,
        host=command.host,
        port=command.port,
        incarnation=command.incarnation,
        rack=command.rack,
    )
    events: list[Event] = [BrokerRegistered(broker)]
    topics = image.topics
    if restarted:
        topics = _bump_epochs(image, command.broker_id, events)
    controller_id = command.broker_id if image.controller_id == NO_CONTROLLER else image.controller_id
    return (
        msgspec.structs.replace(
            image, brokers=_with(image.brokers, broker.id, broker), topics=topics, controller_id=controller_id
        ),
        events,
    )


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


def _change_partition(image: ClusterImage, command: ChangePartition) -> Applied:
    topic = image.topic_by_id(command.topic_id)
    partition = None if topic is None else topic.partition(command.partition)
    if topic is None or partition is None:
        raise KafkaError(
            ErrorCode.unknown_topic_or_partition, f"no partition {command.partition} of topic id {command.topic_id}"
        )
    if partition.partition_epoch != command.partition_epoch:
        raise KafkaError(
            ErrorCode.invalid_update_version,
            f"{topic.name}-{partition.partition} is at partition epoch {partition.partition_epoch}, "
            f"not {command.partition_epoch}",
        )
    is_led_anew = command.leader != partition.leader
    changed = msgspec.structs.replace(
        partition,
        leader=command.leader,
        leader_epoch=partition.leader_epoch + int(is_led_anew),
        isr=command.isr,
        partition_epoch=partition.partition_epoch + 1,
    )
    events: list[Event] = []
    if is_led_anew:
        events.append(LeaderChanged(topic.name, topic.id, changed))
    if command.isr != partition.isr:
        events.append(IsrChanged(topic.name, topic.id, changed))
    at = command.partition
    partitions = (*topic.partitions[:at], changed, *topic.partitions[at + 1 :])
    return _with_topic(image, msgspec.structs.replace(topic, partitions=partitions)), events


def _alter_configs(image: ClusterImage, command: AlterConfigs) -> Applied:
    if command.resource == "topic":
        topic = image.require_topic(command.name)
        configs = _altered(topic.configs, command.changes)
        after = _with_topic(image, msgspec.structs.replace(topic, configs=configs))
    else:
        configs = _altered(image.broker_configs.get(command.name, {}), command.changes)
        after = msgspec.structs.replace(image, broker_configs=_with(image.broker_configs, command.name, configs))
    return after, [ConfigChanged(command.resource, command.name, configs, tuple(sorted(command.changes)))]


def _allocate_producer_ids(image: ClusterImage, command: AllocateProducerIds) -> Applied:
    first = image.next_producer_id
    return (
        msgspec.structs.replace(image, next_producer_id=first + command.count),
        [ProducerIdsAllocated(command.broker_id, first, command.count)],
    )


def _bump_epochs(image: ClusterImage, broker_id: int, events: list[Event]) -> Mapping[str, TopicImage]:
    """The topics with a new leader epoch wherever `broker_id` leads.

    The new incarnation may have lost the tail of its log; under the old epoch one offset could name two records.
    """
    topics = dict(image.topics)
    for topic in image.topics.values():
        if not any(partition.leader == broker_id for partition in topic.partitions):
            continue
        partitions = tuple(
            msgspec.structs.replace(
                partition,
                leader_epoch=partition.leader_epoch + 1,
                partition_epoch=partition.partition_epoch + 1,
            )
            if partition.leader == broker_id
            else partition
            for partition in topic.partitions
        )
        topics[topic.name] = msgspec.structs.replace(topic, partitions=partitions)
        events += [
            LeaderChanged(topic.name, topic.id, partition) for partition in partitions if partition.leader == broker_id
        ]
    return topics


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
