"""Apply partition changes: leaders, ISRs and replicas. Part of `apply`, which states the rules.

Invariants after every change: the ISR is a subset of the replicas, the leader is in the ISR or absent, a new leader
means a new leader epoch, and every change raises the partition epoch. A change that would break one of these is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from chronik.metadata.commands import ChangePartition, PartitionChange, TopicChanges
from chronik.metadata.events import Event, IsrChanged, LeaderChanged, ReplicasChanged
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.wire.errors import ErrorCode, KafkaError


def change_partition(image: ClusterImage, command: ChangePartition) -> tuple[ClusterImage, list[Event]]:
    """Change one partition. Raises KafkaError if its epoch is outdated."""
    change = PartitionChange(
        command.partition,
        command.partition_epoch,
        command.leader,
        command.isr,
        command.eligible,
        command.replicas,
        command.adding,
        command.removing,
    )
    return change_partitions(image, (TopicChanges(command.topic_id, (change,)),), is_strict=True)


def change_partitions(
    image: ClusterImage, changes: Iterable[TopicChanges], *, is_strict: bool
) -> tuple[ClusterImage, list[Event]]:
    """Change all partitions whose epoch is current. If `is_strict`, one outdated epoch refuses all changes."""
    topics: dict[str, TopicImage] | None = None
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
            _tell(topic, old, new, events)
        if len(events) > before:
            if topics is None:
                topics = dict(image.topics)
            topics[topic.name] = msgspec.structs.replace(topic, partitions=tuple(partitions))
    if topics is None:
        return image, events
    return msgspec.structs.replace(image, topics=topics), events


def bump_epochs(image: ClusterImage, broker_id: int) -> tuple[ClusterImage, list[Event]]:
    """Start a new leader epoch for every partition that `broker_id` leads.

    The new incarnation may have lost the tail of its log; under the old epoch one offset could name two records.
    """
    topics = dict(image.topics)
    events: list[Event] = []
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
    return msgspec.structs.replace(image, topics=topics), events


def without_eligible(topic: TopicImage, events: list[Event]) -> TopicImage:
    """Remove the topic's eligible leaders, because records that they lack may be committed from now on.

    If the ISR is empty they stay: without a leader, nothing is committed until one of them leads.
    """
    if not any(partition.eligible for partition in topic.partitions):
        return topic
    partitions = list(topic.partitions)
    for old in topic.partitions:
        if old.eligible and old.isr:
            new = msgspec.structs.replace(old, eligible=(), partition_epoch=old.partition_epoch + 1)
            partitions[old.partition] = new
            _tell(topic, old, new, events)
    return msgspec.structs.replace(topic, partitions=tuple(partitions))


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


def _tell(topic: TopicImage, old: PartitionImage, new: PartitionImage, events: list[Event]) -> None:
    before = len(events)
    if new.replicas != old.replicas or new.adding != old.adding or new.removing != old.removing:
        events.append(
            ReplicasChanged(
                topic.name,
                topic.id,
                new,
                added=tuple(replica for replica in new.replicas if replica not in old.replicas),
                removed=tuple(replica for replica in old.replicas if replica not in new.replicas),
            )
        )
    if new.leader_epoch != old.leader_epoch:
        events.append(LeaderChanged(topic.name, topic.id, new))
    if new.isr != old.isr or len(events) == before:
        events.append(IsrChanged(topic.name, topic.id, new))
