"""Internal topics gain replicas as brokers join: they may have been created when there was one broker."""

from __future__ import annotations

from chronik.metadata.elections import BrokerStates
from chronik.metadata.image import INTERNAL_TOPICS, ClusterImage, PartitionImage
from chronik.metadata.plans import Changes
from chronik.metadata.reassignment import reassign
from chronik.wire.errors import KafkaError


def grow_internal_topics(image: ClusterImage, brokers: BrokerStates, replication_factor: int, changes: Changes) -> None:
    """Start to add replicas to each internal partition that has fewer than `replication_factor` allows.

    New replicas go to brokers with the fewest replicas of that topic, on other racks first. The preferred leaders are
    rebalanced, because all partitions may have started on one broker.
    """
    target = min(replication_factor, len(brokers.can_lead))
    for name in sorted(INTERNAL_TOPICS):
        topic = image.topics.get(name)
        if topic is None or all(len(partition.replicas) >= target for partition in topic.partitions):
            continue
        hosted = dict.fromkeys(sorted(brokers.can_lead), 0)
        preferred = dict.fromkeys(sorted(brokers.can_lead), 0)
        for partition in topic.partitions:
            for replica in partition.replicas:
                hosted[replica] = hosted.get(replica, 0) + 1
        for partition in topic.partitions:
            if (
                len(partition.replicas) >= target
                or partition.is_reassigned
                or changes.has(topic.id, partition.partition)
            ):
                continue
            replicas = _grown(image, brokers, partition, target, hosted)
            first = min(
                (replica for replica in replicas if replica in brokers.can_lead), key=lambda replica: preferred[replica]
            )
            preferred[first] += 1
            replicas = (first, *(replica for replica in replicas if replica != first))
            try:
                changes.add(topic.id, reassign(image, brokers, topic, partition, replicas))
            except KafkaError:
                # No ISR member is alive: the partition grows when one returns.
                continue


def _grown(
    image: ClusterImage, brokers: BrokerStates, partition: PartitionImage, target: int, hosted: dict[int, int]
) -> tuple[int, ...]:
    replicas = partition.replicas
    while len(replicas) < target:
        racks = [image.brokers[replica].rack for replica in replicas if replica in image.brokers]
        free = [broker_id for broker_id in sorted(brokers.can_lead) if broker_id not in replicas]
        if not free:
            break
        chosen = min(
            free,
            key=lambda broker_id: (
                image.brokers[broker_id].rack is not None and image.brokers[broker_id].rack in racks,
                hosted.get(broker_id, 0),
                broker_id,
            ),
        )
        hosted[chosen] = hosted.get(chosen, 0) + 1
        replicas = (*replicas, chosen)
    return replicas
