"""Partition reassignment (KIP-455): how to start, change and cancel it.

A reassignment adds the new replicas to the old ones. Once all new replicas are in sync, the old ones are removed, in
the same change as the last ISR addition or the next time `elections` looks. Until then it can be cancelled or given
another target, relative to the replicas before it began. No timeout applies: a reassignment completes once its new
replicas have caught up, however long that takes, and survives a change of controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from chronik.metadata.commands import PartitionChange
from chronik.metadata.elections import BrokerStates, Draft, TopicRules
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.metadata.plans import Plan, outcomes_of
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
        if move.replicas is None and not partition.is_reassigned:
            raise KafkaError(
                ErrorCode.no_reassignment_in_progress, f"{topic.name}-{partition.partition} is not being moved"
            )
        if move.replicas is not None:
            _check_target(image, partition, move.replicas, may_change_factor)
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
            f"{topic.name}-{partition.partition} would be left without a leader: of {[*candidates]}, which could lead, "
            f"no replica in {[*draft.replicas]} can",
        )
    return draft.change()


def reassigning(
    image: ClusterImage, requested: Iterable[tuple[str, int]] | None
) -> Iterator[tuple[str, PartitionImage]]:
    """Yield the partitions being reassigned, all of them or the `requested` ones, by topic and number."""
    if requested is None:
        requested = [(name, index) for name, topic in image.topics.items() for index in range(len(topic.partitions))]
    for name, index in sorted(set(requested)):
        partition = image.partition(name, index)
        if partition is not None and partition.is_reassigned:
            yield name, partition


def _check_target(
    image: ClusterImage, partition: PartitionImage, replicas: tuple[int, ...], may_change_factor: bool
) -> None:
    if not replicas:
        raise KafkaError(ErrorCode.invalid_replica_assignment, "The assignment has no replicas.")
    if len(set(replicas)) != len(replicas):
        raise KafkaError(ErrorCode.invalid_replica_assignment, f"The assignment names a broker twice: {[*replicas]}")
    for broker_id in replicas:
        if broker_id not in image.brokers:
            raise KafkaError(
                ErrorCode.invalid_replica_assignment, f"The assignment names broker {broker_id}, which does not exist."
            )
    factor = len(partition.settled_replicas)
    if not may_change_factor and len(replicas) != factor:
        raise KafkaError(
            ErrorCode.invalid_replication_factor,
            f"The replication factor is {factor} and would become {len(replicas)}.",
        )
