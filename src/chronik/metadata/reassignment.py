"""Moving replicas to other brokers (KIP-455): how a move begins, is changed and is called off.

A move adds the new replicas beside the old ones; when all of them are in sync the old ones go, in the same change as
the last ISR addition or whenever `elections` next looks. Until then the move can be called off, or aimed elsewhere:
what counts is where the replicas were before it began. Nothing is decided by time, so a move ends once its new replicas
have caught up, however long that takes, and survives a change of the controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from chronik.metadata.changes import Changes
from chronik.metadata.commands import ChangePartitions, PartitionChange
from chronik.metadata.elections import BrokerStates, Draft, TopicRules
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.wire.errors import ErrorCode, KafkaError


@dataclass(frozen=True, slots=True)
class Move:
    """Where someone wants the replicas of a partition to be; None calls off a move."""

    topic: str
    partition: int
    replicas: tuple[int, ...] | None


@dataclass(slots=True)
class Plan:
    """What is to be done for a request, and for each of its entries the error that kept it from being done, if any."""

    changes: Changes = field(default_factory=Changes)
    outcomes: list[KafkaError | None] = field(default_factory=list)

    @property
    def command(self) -> ChangePartitions | None:
        return self.changes.command()


def plan_moves(
    image: ClusterImage, brokers: BrokerStates, moves: Sequence[Move], *, may_change_factor: bool = True
) -> Plan:
    """The moves begun, changed or called off; each by itself."""
    plan = Plan()
    for move in moves:
        try:
            topic, partition = require_partition(image, move.topic, move.partition)
            if plan.changes.has(topic.id, partition.partition):
                raise KafkaError(ErrorCode.invalid_request, f"{topic.name}-{partition.partition} is named twice")
            if move.replicas is None and not partition.is_reassigned:
                raise KafkaError(
                    ErrorCode.no_reassignment_in_progress, f"{topic.name}-{partition.partition} is not being moved"
                )
            if move.replicas is not None:
                _check_target(image, partition, move.replicas, may_change_factor)
            plan.changes.add(topic.id, moved(image, brokers, topic, partition, move.replicas))
        except KafkaError as error:
            plan.outcomes.append(error)
        else:
            plan.outcomes.append(None)
    return plan


def moved(
    image: ClusterImage,
    brokers: BrokerStates,
    topic: TopicImage,
    partition: PartitionImage,
    target: tuple[int, ...] | None,
) -> PartitionChange | None:
    """The change that sets the replicas on their way to `target`, or back where they were."""
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


def moving(image: ClusterImage, wanted: Iterable[tuple[str, int]] | None) -> Iterator[tuple[str, PartitionImage]]:
    """The partitions on the move, of all or of those wanted; by topic and number."""
    if wanted is None:
        for name, topic in sorted(image.topics.items()):
            for partition in topic.partitions:
                if partition.is_reassigned:
                    yield name, partition
        return
    for name, index in sorted(set(wanted)):
        found = image.partition(name, index)
        if found is not None and found.is_reassigned:
            yield name, found


def require_partition(image: ClusterImage, name: str, index: int) -> tuple[TopicImage, PartitionImage]:
    topic = image.topics.get(name)
    partition = None if topic is None else topic.partition(index)
    if topic is None or partition is None:
        raise KafkaError(ErrorCode.unknown_topic_or_partition, f"{name}-{index} does not exist")
    return topic, partition


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
