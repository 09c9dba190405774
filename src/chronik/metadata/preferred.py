"""Leadership goes back to the preferred leader, the first of a partition's replicas, so that it stays spread out.

Elections that someone asks for (ElectLeaders) are here too. A leader that is asked to hand over loses nothing; one that
is just replaced loses what it acknowledged alone (acks=1), so the controller asks first (`calls.HandOver`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chronik.metadata.commands import PartitionChange
from chronik.metadata.elections import BrokerStates, Draft, TopicRules
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.metadata.index import Key
from chronik.metadata.reassignment import Plan, require_partition
from chronik.wire.errors import ErrorCode, KafkaError


def preferred_of(partition: PartitionImage, brokers: BrokerStates) -> int | None:
    """The preferred leader, where it could take over from the present one."""
    if not partition.replicas:
        return None
    preferred = partition.replicas[0]
    if partition.leader in (preferred, NO_LEADER) or preferred not in partition.isr:
        return None
    return preferred if preferred in brokers.can_lead else None


def led_by_preferred(
    image: ClusterImage, brokers: BrokerStates, topic: TopicImage, partition: PartitionImage
) -> PartitionChange | None:
    """The change that gives the leadership to the preferred leader; None where that cannot be, or is so."""
    preferred = preferred_of(partition, brokers)
    if preferred is None:
        return None
    draft = Draft(partition)
    draft.leader = preferred
    draft.settle(brokers, TopicRules.of(image, topic))
    return draft.change()


def imbalanced(
    image: ClusterImage, brokers: BrokerStates, candidates: Iterable[Key], limit: int
) -> list[tuple[TopicImage, PartitionImage, int]]:
    """Up to `limit` of the candidates whose preferred leader could lead and does not; by topic and number."""
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


def plan_elections(image: ClusterImage, brokers: BrokerStates, wanted: Sequence[Key], *, unclean: bool) -> Plan:
    """The elections that someone asks for: of preferred leaders, or of anybody where nobody in sync is left."""
    plan = Plan()
    for name, index in wanted:
        try:
            topic, partition = require_partition(image, name, index)
            plan.changes.add(topic.id, _elected(image, brokers, topic, partition, unclean))
        except KafkaError as error:
            plan.outcomes.append(error)
        else:
            plan.outcomes.append(None)
    return plan


def _elected(
    image: ClusterImage, brokers: BrokerStates, topic: TopicImage, partition: PartitionImage, unclean: bool
) -> PartitionChange | None:
    name = f"{topic.name}-{partition.partition}"
    if not unclean:
        preferred = partition.replicas[0]
        if partition.leader == preferred:
            raise KafkaError(ErrorCode.election_not_needed, f"{name} is led by its preferred leader {preferred}")
        change = led_by_preferred(image, brokers, topic, partition)
        if change is None:
            raise KafkaError(
                ErrorCode.preferred_leader_not_available,
                f"broker {preferred} is not in sync with {name}, or not alive: its ISR is {[*partition.isr]}",
            )
        return change
    if partition.leader != NO_LEADER and partition.leader in brokers.serving:
        raise KafkaError(ErrorCode.election_not_needed, f"{name} is led by broker {partition.leader}")
    draft = Draft(partition)
    rules = TopicRules.of(image, topic)
    draft.settle(brokers, TopicRules(rules.min_insync, is_unclean_allowed=True))
    if draft.leader == NO_LEADER:
        raise KafkaError(
            ErrorCode.eligible_leaders_not_available, f"none of the replicas {[*partition.replicas]} of {name} is alive"
        )
    return draft.change()
