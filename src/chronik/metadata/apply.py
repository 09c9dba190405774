"""apply(image, command) -> (next image, events): the only place where metadata changes.

Pure and deterministic. A command that does not fit the image (the topic already exists, the epoch is old) raises
KafkaError and changes nothing; every node refuses it in the same way. Rules that may differ between software versions
(names, config values, limits) are checked by the proposer, never here: replaying an old log must not fail.

Invariants of partitions after every change: the ISR is a subset of the replicas, the leader is in the ISR or absent, a
new leader means a new leader epoch, and every change raises the partition epoch. A change that would break one of these
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

from msgspec.structs import astuple, replace

from chronik.authentication.scram import ScramCredential
from chronik.metadata.commands import (
    AllocateProducerIds,
    AlterClientQuotas,
    AlterConfigs,
    AlterScramCredentials,
    Assignment,
    BrokerStatusChange,
    ChangePartition,
    ChangePartitions,
    Command,
    CreateAcls,
    CreateCluster,
    CreatePartitions,
    CreateTopic,
    DeleteAcls,
    DeleteTopic,
    FenceBroker,
    PartitionChange,
    RegisterBroker,
    ShutDownBroker,
    TopicChanges,
    UnfenceBroker,
    UnregisterBroker,
)
from chronik.metadata.elections import MIN_INSYNC_REPLICAS
from chronik.metadata.events import (
    AclsCreated,
    AclsDeleted,
    BrokerFenced,
    BrokerRegistered,
    BrokerShuttingDown,
    BrokerUnfenced,
    BrokerUnregistered,
    ClientQuotasChanged,
    ClusterCreated,
    ConfigChanged,
    Event,
    PartitionsCreated,
    ProducerIdsAllocated,
    ScramCredentialsChanged,
    TopicCreated,
    TopicDeleted,
    partition_events,
)
from chronik.metadata.image import (
    NO_CONTROLLER,
    NO_LEADER,
    BrokerImage,
    ClientQuotas,
    ClusterImage,
    PartitionImage,
    TopicImage,
)
from chronik.metadata.layered_map import LayeredMap
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
            changed, events = _register_broker(image, command)
        case FenceBroker():
            changed, events = _change_status(image, command, BrokerFenced, is_fenced=True)
        case UnfenceBroker():
            changed, events = _change_status(image, command, BrokerUnfenced, is_fenced=False)
        case ShutDownBroker():
            changed, events = _change_status(image, command, BrokerShuttingDown, is_shutting_down=True)
        case UnregisterBroker():
            changed, events = _unregister_broker(image, command)
        case CreateTopic():
            changed, events = _create_topic(image, command)
        case DeleteTopic():
            changed, events = _delete_topic(image, command)
        case CreatePartitions():
            changed, events = _create_partitions(image, command)
        case ChangePartition():
            changed, events = _change_partition(image, command)
        case ChangePartitions():
            changed, events = _change_partitions(image, command)
        case AlterConfigs():
            changed, events = _alter_configs(image, command)
        case AlterClientQuotas():
            changed, events = _alter_client_quotas(image, command)
        case AllocateProducerIds():
            changed, events = _allocate_producer_ids(image, command)
        case AlterScramCredentials():
            changed, events = _alter_scram_credentials(image, command)
        case CreateAcls():
            changed, events = _create_acls(image, command)
        case DeleteAcls():
            changed, events = _delete_acls(image, command)
    return replace(changed, version=image.version + 1), events


def _create_cluster(image: ClusterImage, command: CreateCluster) -> Applied:
    if image.cluster_id:
        raise KafkaError(ErrorCode.invalid_request, f"the cluster already has the id {image.cluster_id}")
    return replace(image, cluster_id=command.cluster_id), [ClusterCreated(command.cluster_id)]


# -- brokers -----------------------------------------------------------------------------------------------------------


def _register_broker(image: ClusterImage, command: RegisterBroker) -> Applied:
    """Register the broker: with a new epoch for a new process, unchanged if the same process registers again."""
    version = image.version + 1
    known = image.brokers.get(command.broker_id)
    kept = known if known is not None and known.incarnation == command.incarnation else None
    broker = BrokerImage(
        id=command.broker_id,
        epoch=version if kept is None else kept.epoch,
        host=command.host,
        port=command.port,
        incarnation=command.incarnation,
        rack=command.rack,
        is_fenced=command.starts_fenced if kept is None else kept.is_fenced,
        is_shutting_down=kept is not None and kept.is_shutting_down,
        status_version=version if kept is None else kept.status_version,
        durability=command.durability,
        folder_id=command.folder_id or (None if known is None else known.folder_id),
        internal=command.internal,
        http=command.http,
        listeners=command.listeners,
    )
    image, changed = _change_current(image, command.changes, is_strict=True)
    events = [BrokerRegistered(broker), *changed]
    if known is not None and kept is None:
        image, bumped = _bump_epochs(image, command.broker_id)
        events += bumped
    controller_id = command.broker_id if image.controller_id == NO_CONTROLLER else image.controller_id
    return replace(_with_broker(image, broker), controller_id=controller_id), events


def _change_status(
    image: ClusterImage,
    command: BrokerStatusChange,
    event: Callable[[BrokerImage], Event],
    **status: Any,
) -> Applied:
    broker = _require_broker(image, command.broker_id, command.broker_epoch)
    broker = replace(broker, status_version=image.version + 1, **status)
    image, events = _change_current(_with_broker(image, broker), command.changes, is_strict=False)
    return image, [event(broker), *events]


def _unregister_broker(image: ClusterImage, command: UnregisterBroker) -> Applied:
    broker = _require_broker(image, command.broker_id, command.broker_epoch)
    for topic in image.topics.values():
        for partition in topic.partitions:
            if broker.id in partition.replicas:
                raise KafkaError(
                    ErrorCode.invalid_request,
                    f"broker {broker.id} still has replicas, such as {topic.name}-{partition.partition}: "
                    "move them to other brokers first",
                )
    return replace(image, brokers=_without(image.brokers, broker.id)), [BrokerUnregistered(broker)]


def _require_broker(image: ClusterImage, broker_id: int, broker_epoch: int) -> BrokerImage:
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise KafkaError(ErrorCode.broker_id_not_registered, f"broker {broker_id} is not registered")
    if broker.epoch != broker_epoch:
        raise KafkaError(
            ErrorCode.stale_broker_epoch, f"broker {broker_id} is at epoch {broker.epoch}, not {broker_epoch}"
        )
    return broker


def _with_broker(image: ClusterImage, broker: BrokerImage) -> ClusterImage:
    return replace(image, brokers={**image.brokers, broker.id: broker})


# -- topics and configs ------------------------------------------------------------------------------------------------


def _create_topic(image: ClusterImage, command: CreateTopic) -> Applied:
    if command.name in image.topics:
        raise KafkaError(ErrorCode.topic_already_exists, f"topic {command.name!r} already exists")
    if command.id in image.names_by_id:
        raise KafkaError(ErrorCode.invalid_request, f"topic id {command.id} is taken")
    topic = TopicImage(command.name, command.id, _new_partitions(0, command.partitions), dict(command.configs))
    names_by_id = LayeredMap.of(image.names_by_id).replacing({topic.id: topic.name})
    return replace(_with_topic(image, topic), names_by_id=names_by_id), [TopicCreated(topic)]


def _delete_topic(image: ClusterImage, command: DeleteTopic) -> Applied:
    topic = _require_topic(image, command.name, command.id)
    topics = LayeredMap.of(image.topics).without(topic.name)
    names_by_id = LayeredMap.of(image.names_by_id).without(topic.id)
    return replace(image, topics=topics, names_by_id=names_by_id), [TopicDeleted(topic)]


def _create_partitions(image: ClusterImage, command: CreatePartitions) -> Applied:
    topic = _require_topic(image, command.name, command.id)
    if command.first != len(topic.partitions):
        raise KafkaError(
            ErrorCode.invalid_partitions, f"topic {topic.name!r} now has {len(topic.partitions)} partitions"
        )
    added = _new_partitions(command.first, command.partitions)
    topic = replace(topic, partitions=topic.partitions + added)
    return _with_topic(image, topic), [PartitionsCreated(topic, added)]


def _alter_configs(image: ClusterImage, command: AlterConfigs) -> Applied:
    events: list[Event] = []
    # From now on a leader may commit with a different set of replicas: eligible leaders may lack those records.
    is_other_minimum = MIN_INSYNC_REPLICAS in command.changes
    if command.resource == "topic":
        topic = image.require_topic(command.name)
        configs = _altered(topic.configs, command.changes)
        topic = replace(topic, configs=configs)
        after = _with_topic(image, _without_eligible(topic, events) if is_other_minimum else topic)
    elif command.resource == "client_metrics":
        configs = _altered(image.client_metrics.get(command.name, {}), command.changes)
        others = _without(image.client_metrics, command.name)
        after = replace(image, client_metrics={**others, command.name: configs} if configs else others)
    elif command.resource == "group":
        configs = _altered(image.group_configs.get(command.name, {}), command.changes)
        others = _without(image.group_configs, command.name)
        after = replace(image, group_configs={**others, command.name: configs} if configs else others)
    else:
        configs = _altered(image.broker_configs.get(command.name, {}), command.changes)
        after = replace(image, broker_configs={**image.broker_configs, command.name: configs})
        if is_other_minimum:
            after = _with_topics(
                after, {name: _without_eligible(topic, events) for name, topic in image.topics.items()}
            )
    changed = ConfigChanged(command.resource, command.name, configs, tuple(sorted(command.changes)))
    return after, [changed, *events]


def _alter_client_quotas(image: ClusterImage, command: AlterClientQuotas) -> Applied:
    entity = command.entity
    after = {**image.quotas_of(entity), **command.changes}
    values = {key: value for key, value in sorted(after.items()) if value is not None}
    kept = [quotas for quotas in image.client_quotas if quotas.entity != entity]
    if values:
        kept.append(ClientQuotas(entity, values))
    # A default is None, which does not compare with names.
    kept.sort(key=lambda quotas: [(kind, name is None, name or "") for kind, name in quotas.entity.parts])
    return replace(image, client_quotas=tuple(kept)), [ClientQuotasChanged(entity, values)]


def _allocate_producer_ids(image: ClusterImage, command: AllocateProducerIds) -> Applied:
    first = image.next_producer_id
    allocated = ProducerIdsAllocated(command.broker_id, first, command.count)
    return replace(image, next_producer_id=first + command.count), [allocated]


def _alter_scram_credentials(image: ClusterImage, command: AlterScramCredentials) -> Applied:
    altered: dict[str, Mapping[str, ScramCredential]] = {}
    for key in command.deletions:
        credentials = altered.get(key.user, image.scram.get(key.user, {}))
        if key.mechanism not in credentials:
            raise KafkaError(ErrorCode.resource_not_found, f"user {key.user!r} has no credential for {key.mechanism}")
        altered[key.user] = _without(credentials, key.mechanism)
    for upsert in command.upserts:
        credentials = altered.get(upsert.user, image.scram.get(upsert.user, {}))
        altered[upsert.user] = {**credentials, upsert.mechanism: upsert.credential}
    scram = {user: credentials for user, credentials in {**image.scram, **altered}.items() if credentials}
    return replace(image, scram=scram), [ScramCredentialsChanged(tuple(sorted(altered)))]


def _new_partitions(first: int, assignments: tuple[Assignment, ...]) -> tuple[PartitionImage, ...]:
    return tuple(
        PartitionImage(index, new.isr[0] if new.isr else NO_LEADER, 0, new.replicas, new.isr)
        for index, new in enumerate(assignments, first)
    )


def _altered(configs: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**configs, **changes}.items() if value is not None}


def _with_topic(image: ClusterImage, topic: TopicImage) -> ClusterImage:
    return _with_topics(image, {topic.name: topic})


def _with_topics(image: ClusterImage, topics: Mapping[str, TopicImage]) -> ClusterImage:
    """Add or replace the topics that are not the same object as in the image."""
    changed = {name: topic for name, topic in topics.items() if topic is not image.topics.get(name)}
    return replace(image, topics=LayeredMap.of(image.topics).replacing(changed)) if changed else image


def _require_topic(image: ClusterImage, name: str, topic_id: UUID) -> TopicImage:
    topic = image.topics.get(name)
    if topic is None or topic.id != topic_id:
        raise KafkaError(ErrorCode.unknown_topic_or_partition, f"topic {name!r} does not exist")
    return topic


def _without(entries: Mapping[K, V], key: K) -> dict[K, V]:
    return {each: value for each, value in entries.items() if each != key}


# -- ACLs --------------------------------------------------------------------------------------------------------------


def _create_acls(image: ClusterImage, command: CreateAcls) -> Applied:
    created = tuple(acl for acl in dict.fromkeys(command.acls) if acl not in image.acls)
    return (replace(image, acls=image.acls.union(created)), [AclsCreated(created)]) if created else (image, [])


def _delete_acls(image: ClusterImage, command: DeleteAcls) -> Applied:
    deleted = tuple(acl for acl in dict.fromkeys(command.acls) if acl in image.acls)
    return (replace(image, acls=image.acls.difference(deleted)), [AclsDeleted(deleted)]) if deleted else (image, [])


# -- partitions --------------------------------------------------------------------------------------------------------


def _change_partitions(image: ClusterImage, command: ChangePartitions) -> Applied:
    changed, events = _change_current(image, command.changes, is_strict=False)
    if not events:
        raise KafkaError(ErrorCode.invalid_update_version, "the partition epoch of every change is outdated")
    return changed, events


def _change_partition(image: ClusterImage, command: ChangePartition) -> Applied:
    topic_id, *change = astuple(command)
    return _change_current(image, (TopicChanges(topic_id, (PartitionChange(*change),)),), is_strict=True)


def _change_current(image: ClusterImage, changes: Iterable[TopicChanges], *, is_strict: bool) -> Applied:
    """Change all partitions whose epoch is current. If `is_strict`, one outdated epoch refuses all changes."""
    topics: dict[str, TopicImage] = {}
    events: list[Event] = []
    for of_topic in changes:
        topic = image.topic_by_id(of_topic.topic_id)
        if topic is None:
            if is_strict:
                raise KafkaError(ErrorCode.unknown_topic_or_partition, f"no topic has the id {of_topic.topic_id}")
            continue
        partitions = list(topic.partitions)
        before = len(events)
        for change in of_topic.partitions:
            old = partitions[change.partition] if 0 <= change.partition < len(partitions) else None
            if old is None or old.partition_epoch != change.partition_epoch:
                if is_strict:
                    raise _moved_on(topic, change, old)
                continue
            new = _changed(topic.name, old, change)
            partitions[change.partition] = new
            events += partition_events(topic, old, new)
        if len(events) > before:
            topics[topic.name] = replace(topic, partitions=tuple(partitions))
    return _with_topics(image, topics), events


def _bump_epochs(image: ClusterImage, broker_id: int) -> Applied:
    """Start a new leader epoch for every partition that `broker_id` leads.

    The new incarnation may have lost the tail of its log; under the old epoch one offset could name two records.
    """
    events: list[Event] = []
    topics = {}
    for name, topic in image.topics.items():
        led = [partition for partition in topic.partitions if partition.leader == broker_id]
        if led:
            bumped = [replace(partition, leader_epoch=partition.leader_epoch + 1) for partition in led]
            topics[name] = _with_partitions(topic, bumped, events)
    return _with_topics(image, topics), events


def _without_eligible(topic: TopicImage, events: list[Event]) -> TopicImage:
    """Remove the topic's eligible leaders, because records that they lack may be committed from now on.

    If the ISR is empty they stay: without a leader, nothing is committed until one of them leads.
    """
    eligible = [partition for partition in topic.partitions if partition.eligible and partition.isr]
    return _with_partitions(topic, [replace(partition, eligible=()) for partition in eligible], events)


def _with_partitions(topic: TopicImage, changed: Iterable[PartitionImage], events: list[Event]) -> TopicImage:
    """Replace these partitions and raise their partition epochs. If there are none, return the same topic."""
    partitions = list(topic.partitions)
    before = len(events)
    for partition in changed:
        old = partitions[partition.partition]
        new = replace(partition, partition_epoch=old.partition_epoch + 1)
        partitions[partition.partition] = new
        events += partition_events(topic, old, new)
    return topic if len(events) == before else replace(topic, partitions=tuple(partitions))


def _moved_on(topic: TopicImage, change: PartitionChange, partition: PartitionImage | None) -> KafkaError:
    if partition is None:
        return KafkaError(
            ErrorCode.unknown_topic_or_partition, f"topic {topic.name!r} has no partition {change.partition}"
        )
    return KafkaError(
        ErrorCode.invalid_update_version,
        f"{topic.name}-{partition.partition} is at partition epoch {partition.partition_epoch}, "
        f"not {change.partition_epoch}",
    )


def _changed(topic: str, old: PartitionImage, change: PartitionChange) -> PartitionImage:
    replicas = old.replicas if change.replicas is None else change.replicas
    leader = change.leader
    _check_sound(topic, change, replicas)
    last_known_leader = old.last_known_leader
    if leader != NO_LEADER:
        last_known_leader = NO_LEADER
    elif old.leader != NO_LEADER:
        last_known_leader = old.leader
    leader_epoch = old.leader_epoch + (leader != old.leader or change.begins_epoch)
    return PartitionImage(
        old.partition,
        leader,
        leader_epoch,
        replicas,
        change.isr,
        old.partition_epoch + 1,
        change.eligible,
        old.adding if change.adding is None else change.adding,
        old.removing if change.removing is None else change.removing,
        last_known_leader,
        change.unproven,
        leader_epoch if change.is_unclean else old.unclean_epoch,
    )


def _check_sound(topic: str, change: PartitionChange, replicas: tuple[int, ...]) -> None:
    isr = change.isr
    is_sound = (
        len(set(isr)) == len(isr)
        and all(member in replicas for member in isr)
        and (change.leader == NO_LEADER or change.leader in isr)
        and all(member in replicas and member not in isr for member in change.eligible)
        and all(member in replicas and member not in (*isr, *change.eligible) for member in change.unproven)
    )
    if not is_sound:
        raise KafkaError(
            ErrorCode.invalid_request,
            f"{topic}-{change.partition} cannot have leader {change.leader}, ISR {[*isr]} and eligible leaders "
            f"{[*change.eligible]} with replicas {[*replicas]}",
        )
