"""Preferred leader elections: leadership returns to a partition's first replica, so that leaders stay balanced.

Elections requested by clients (ElectLeaders) are here too. A leader that hands over loses nothing. Replacing it would
lose records that it alone acknowledged (acks=1), so the controller requests a hand-over first (`hand_overs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from chronik.metadata.calls import HandOver
from chronik.metadata.commands import PartitionChange
from chronik.metadata.elections import BrokerStates, Draft, TopicRules
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.metadata.index import Key
from chronik.metadata.reassignment import Plan, require_partition
from chronik.wire.errors import ErrorCode, KafkaError


def preferred_of(partition: PartitionImage, brokers: BrokerStates) -> int | None:
    """Return the preferred leader if it could take over from the current leader."""
    if not partition.replicas:
        return None
    preferred = partition.replicas[0]
    if partition.leader in (preferred, NO_LEADER) or preferred not in partition.isr:
        return None
    return preferred if preferred in brokers.can_lead else None


def preferred_hand_over(image: ClusterImage, brokers: BrokerStates, key: Key) -> HandOver:
    """Return the hand-over that makes the preferred replica lead, or raise the error that says why it cannot."""
    topic, partition = require_partition(image, *key)
    name = f"{topic.name}-{partition.partition}"
    if partition.leader == partition.replicas[0]:
        raise KafkaError(ErrorCode.election_not_needed, f"{name} is led by its preferred leader {partition.leader}")
    preferred = preferred_of(partition, brokers)
    if preferred is None:
        raise KafkaError(
            ErrorCode.preferred_leader_not_available,
            f"broker {partition.replicas[0]} is not in sync with {name}, or not alive: its ISR is {[*partition.isr]}",
        )
    return HandOver(topic.id, partition.partition, partition.leader_epoch, preferred)


def imbalanced(
    image: ClusterImage, brokers: BrokerStates, candidates: Iterable[Key], limit: int
) -> list[tuple[TopicImage, PartitionImage, int]]:
    """Return up to `limit` candidates whose preferred leader could lead but does not, by topic and number."""
    found: list[tuple[TopicImage, PartitionImage, int]] = []
    for name, index in sorted(candidates):
        topic = image.topics.get(name)
        partition = None if topic is None else topic.partition(index)
        if topic is None or partition is None or partition.is_reassigned:
            continue
        preferred = preferred_of(partition, brokers)
        if preferred is not None:
            found.append((topic, partition, preferred))
            if len(found) == limit:
                break
    return found


def plan_unclean_elections(image: ClusterImage, brokers: BrokerStates, wanted: Sequence[Key]) -> Plan:
    """Plan the requested unclean elections, in the order of the replicas, which an administrator can set."""
    plan = Plan()
    for key in wanted:
        try:
            topic, partition = require_partition(image, *key)
            plan.changes.add(topic.id, _elected(image, brokers, topic, partition))
        except KafkaError as error:
            plan.outcomes.append(error)
        else:
            plan.outcomes.append(None)
    return plan


def _elected(
    image: ClusterImage, brokers: BrokerStates, topic: TopicImage, partition: PartitionImage
) -> PartitionChange | None:
    name = f"{topic.name}-{partition.partition}"
    if partition.leader != NO_LEADER and partition.leader in brokers.serving:
        raise KafkaError(ErrorCode.election_not_needed, f"{name} is led by broker {partition.leader}")
    draft = Draft(partition)
    # The administrator chose not to wait for the previous leader or for replicas that may have longer logs.
    brokers = replace(brokers, unaware=frozenset())
    draft.unproven = ()
    draft.settle(brokers, replace(TopicRules.of(image, topic), is_unclean_allowed=False))
    if draft.leader == NO_LEADER:
        draft.elect_unclean(brokers, partition.replicas)
    if draft.leader == NO_LEADER:
        raise KafkaError(
            ErrorCode.eligible_leaders_not_available, f"none of the replicas {[*partition.replicas]} of {name} is alive"
        )
    return draft.change()
