"""Partition reassignment (KIP-455): how to start, change and cancel it.

A reassignment adds the new replicas to the old ones. Once all new replicas are in sync, the old ones are removed, in
the same change as the last ISR addition, or when `elections` next examines the partition. Until then it can be
cancelled or given another target; both start from the replicas before it began. No timeout applies: a reassignment
completes once its new replicas have caught up, however long that takes, and survives a change of controller.

When brokers join, internal topics gain replicas in the same way: they may have been created when there was one broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from chronik.metadata.commands import PartitionChange
from chronik.metadata.elections import BrokerStates, Draft, TopicRules
from chronik.metadata.image import INTERNAL_TOPICS, NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.metadata.placement import check_replicas
from chronik.metadata.plans import Changes, Plan, outcomes_of
from chronik.wire.errors import ErrorCode, KafkaError


@dataclass(frozen=True, slots=True)
class Move:
    """A requested set of replicas for a partition; None cancels the reassignment in progress."""

    topic: str
    partition: int
    replicas: tuple[int, ...] | None


def plan_moves(
    image: ClusterImage, brokers: BrokerStates, moves: Sequence[Move], *, may_change_factor: bool = True
) -> Plan:
    """Start, change or cancel the reassignments, each independently."""
    plan = Plan()

    def plan_move(move: Move) -> None:
        topic, partition = image.require_partition(move.topic, move.partition)
        if plan.changes.has(topic.id, partition.partition):
            raise KafkaError(ErrorCode.invalid_request, f"{topic.name}-{partition.partition} is named twice")
        if move.replicas is None and not partition.is_being_reassigned:
            raise KafkaError(
                ErrorCode.no_reassignment_in_progress,
                f"{topic.name}-{partition.partition} is not being reassigned",
            )
        if move.replicas is not None:
            check_replicas(image, move.replicas, "The assignment")
            factor, new_factor = len(partition.settled_replicas), len(move.replicas)
            if not may_change_factor and new_factor != factor:
                raise KafkaError(
                    ErrorCode.invalid_replication_factor,
                    f"The replication factor is {factor} and would become {new_factor}.",
                )
        plan.changes.add(topic.id, reassign(image, brokers, topic, partition, move.replicas))

    plan.outcomes = outcomes_of(plan_move, moves)
    return plan


def reassign(
    image: ClusterImage,
    brokers: BrokerStates,
    topic: TopicImage,
    partition: PartitionImage,
    target: tuple[int, ...] | None,
) -> PartitionChange | None:
    """Return the change that starts the reassignment to `target`, or, if None, back to the original replicas."""
    before = partition.settled_replicas
    target = before if target is None else target
    draft = Draft(partition)
    draft.adding = tuple(replica for replica in target if replica not in before)
    draft.removing = tuple(replica for replica in before if replica not in target)
    draft.replicas = target + draft.removing
    draft.isr = tuple(member for member in partition.isr if member in draft.replicas)
    draft.eligible = tuple(member for member in partition.eligible if member in draft.replicas)
    draft.unproven = tuple(member for member in partition.unproven if member in draft.replicas)
    draft.settle(brokers, TopicRules.of(image, topic))
    has_leader = partition.leader != NO_LEADER
    candidates = (*partition.isr, *partition.eligible, *partition.unproven)
    is_lost = bool(candidates) and not (draft.isr or draft.eligible or draft.unproven)
    if is_lost or (partition.isr and not draft.isr) or (has_leader and draft.leader == NO_LEADER):
        raise KafkaError(
            ErrorCode.invalid_replica_assignment,
            f"{topic.name}-{partition.partition} would be left without a leader: none of the replicas "
            f"{[*draft.replicas]} could lead, only {[*candidates]}",
        )
    return draft.change()


def reassigning(
    image: ClusterImage, requested: Iterable[tuple[str, int]] | None
) -> Iterator[tuple[str, PartitionImage]]:
    """Yield the partitions being reassigned, all of them or the `requested` ones, by topic and number."""
    if requested is None:
        for name, topic in sorted(image.topics.items()):
            yield from ((name, each) for each in topic.partitions if each.is_being_reassigned)
        return
    for name, index in sorted(set(requested)):
        partition = image.partition(name, index)
        if partition is not None and partition.is_being_reassigned:
            yield name, partition


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
            is_changing = partition.is_being_reassigned or changes.has(topic.id, partition.partition)
            if is_changing or len(partition.replicas) >= target:
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
