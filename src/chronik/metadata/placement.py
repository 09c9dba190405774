"""Replica placement for new partitions.

The broker order alternates between racks and starts at a random position, so that many small topics do not all start at
the first broker. Leaders go round that order. With every round the followers shift by one more, so that a broker's
followers are spread too. Brokers that are down get replicas only if there are too few others: a restart must not keep
topics from being created.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from random import Random

from chronik.metadata.commands import Assignment
from chronik.metadata.image import BrokerImage, ClusterImage
from chronik.wire.errors import ErrorCode, KafkaError


def place_replicas(
    brokers: Sequence[BrokerImage],
    partitions: int,
    replication_factor: int,
    random: Random,
    first: int = 0,
    spare: Sequence[BrokerImage] = (),
) -> tuple[Assignment, ...]:
    """Return assignments for `partitions` new partitions from number `first`, each on `replication_factor` brokers.

    `spare` brokers are used if there are too few `brokers`; they do not lead and are in no ISR. Raises
    INVALID_REPLICATION_FACTOR if both together are too few. A partition's replicas are on different brokers, and on
    different racks if there are enough racks.
    """
    if replication_factor < 1:
        raise KafkaError(ErrorCode.invalid_replication_factor, "Replication factor must be larger than 0.")
    if replication_factor > len(brokers) + len(spare) or not brokers:
        raise KafkaError(
            ErrorCode.invalid_replication_factor,
            f"Replication factor: {replication_factor} larger than available brokers: {len(brokers) + len(spare)}.",
        )
    order = _alternate_racks(brokers)
    further = _alternate_racks(spare)
    start = random.randrange(len(order))
    shift = random.randrange(len(order))
    assignments = []
    for index in range(first, first + partitions):
        leader = order[(start + index) % len(order)]
        followers = _followers(order, (start + index) % len(order), shift + index // len(order), replication_factor - 1)
        isr = (leader.id, *(broker.id for broker in followers))
        missing = replication_factor - len(isr)
        turn = index % len(further) if missing else 0
        added = (further[turn:] + further[:turn])[:missing]
        assignments.append(Assignment(replicas=(*isr, *(broker.id for broker in added)), isr=isr))
    return tuple(assignments)


def assign_manually(image: ClusterImage, replicas: Sequence[int]) -> Assignment:
    """Return the assignment that a client requested, or raise INVALID_REPLICA_ASSIGNMENT."""
    check_replicas(image, replicas, "The manual partition assignment")
    isr = tuple(broker_id for broker_id in replicas if image.brokers[broker_id].may_join_isr)
    if not isr:
        raise KafkaError(
            ErrorCode.invalid_replica_assignment, f"None of the brokers {[*replicas]} of the assignment is alive."
        )
    return Assignment(replicas=tuple(replicas), isr=isr)


def check_replicas(image: ClusterImage, replicas: Sequence[int], what: str) -> None:
    """Raise INVALID_REPLICA_ASSIGNMENT unless the replicas are distinct brokers, at least one."""
    unknown = [broker_id for broker_id in replicas if broker_id not in image.brokers]
    if not replicas:
        reason = "has no replicas."
    elif len(set(replicas)) != len(replicas):
        reason = f"names a broker twice: {[*replicas]}"
    elif unknown:
        reason = f"names broker {unknown[0]}, which does not exist."
    else:
        return
    raise KafkaError(ErrorCode.invalid_replica_assignment, f"{what} {reason}")


def _followers(order: Sequence[BrokerImage], leader_at: int, shift: int, count: int) -> list[BrokerImage]:
    """Return `count` followers for the leader; brokers on unused racks come first."""
    others = [order[(leader_at + 1 + step) % len(order)] for step in range(len(order) - 1)]
    if others:
        turn = shift % len(others)
        others = others[turn:] + others[:turn]
    racks = [order[leader_at].rack]
    chosen: list[BrokerImage] = []
    rest: list[BrokerImage] = []
    for broker in others:
        if broker.rack is not None and broker.rack in racks:
            rest.append(broker)
        else:
            racks.append(broker.rack)
            chosen.append(broker)
    return (chosen + rest)[:count]


def _alternate_racks(brokers: Sequence[BrokerImage]) -> list[BrokerImage]:
    """Return the brokers by id, one from each rack in turn."""
    racks: dict[str, list[BrokerImage]] = {}
    for broker in sorted(brokers, key=lambda broker: broker.id):
        racks.setdefault(broker.rack or "", []).append(broker)
    turns = zip_longest(*(racks[rack] for rack in sorted(racks)))
    return [broker for turn in turns for broker in turn if broker is not None]
