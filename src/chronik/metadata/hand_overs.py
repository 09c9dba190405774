"""Hand-overs that the controller requests from leaders, above all to preferred leaders, so that leaders stay balanced.

A leader that hands over loses nothing. Replacing it would lose records that it alone acknowledged (acks=1), so the
controller requests a hand-over first, and replaces the leader only if it does not hand over in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from chronik.metadata.calls import HandOver
from chronik.metadata.elections import BrokerStates
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage
from chronik.metadata.index import Key
from chronik.wire.errors import ErrorCode, KafkaError


class HandOvers:
    """Owned by the controller. A new controller starts empty and requests again. One request for each partition."""

    def __init__(self, patience_ms: int) -> None:
        self._patience_ms = patience_ms
        self._requested: dict[Key, tuple[HandOver, int]] = {}

    def request(self, key: Key, hand_over: HandOver, now_ms: int) -> None:
        known = self._requested.get(key)
        if known is None or known[0] != hand_over:
            self._requested[key] = (hand_over, now_ms + self._patience_ms)

    def of(self, image: ClusterImage, leader: int) -> tuple[HandOver, ...]:
        """Return the hand-overs that the leader should carry out now."""
        return tuple(
            hand_over for key, (hand_over, _) in self._requested.items() if _leader(image, key, hand_over) == leader
        )

    def take_overdue(self, image: ClusterImage, now_ms: int) -> list[tuple[Key, HandOver]]:
        """Remove and return the hand-overs past their deadline; also forget completed ones."""
        overdue = []
        for key, (hand_over, until_ms) in list(self._requested.items()):
            is_completed = _leader(image, key, hand_over) is None
            if is_completed or now_ms >= until_ms:
                del self._requested[key]
            if now_ms >= until_ms and not is_completed:
                overdue.append((key, hand_over))
        return overdue


def preferred_hand_overs(
    image: ClusterImage, brokers: BrokerStates, keys: Iterable[Key]
) -> Iterator[tuple[Key, HandOver]]:
    """Yield the hand-overs of those partitions whose preferred leader could lead but does not."""
    for key in keys:
        partition = image.partition(*key)
        if partition is not None and not partition.is_being_reassigned and _can_prefer(partition, brokers):
            yield key, preferred_hand_over(image, brokers, key)


def _can_prefer(partition: PartitionImage, brokers: BrokerStates) -> bool:
    """Return whether the preferred replica does not lead but could. Cheap: the controller checks all partitions."""
    if not partition.replicas or partition.leader in (partition.replicas[0], NO_LEADER):
        return False
    return partition.replicas[0] in partition.isr and partition.replicas[0] in brokers.can_lead


def preferred_hand_over(image: ClusterImage, brokers: BrokerStates, key: Key) -> HandOver:
    """Return the hand-over that makes the preferred replica lead, or raise the error that explains why it cannot."""
    topic, partition = image.require_partition(*key)
    name = f"{topic.name}-{partition.partition}"
    if partition.leader == partition.replicas[0]:
        raise KafkaError(ErrorCode.election_not_needed, f"{name} is led by its preferred leader {partition.leader}")
    preferred = partition.replicas[0]
    if partition.leader == NO_LEADER or preferred not in partition.isr or preferred not in brokers.can_lead:
        raise KafkaError(
            ErrorCode.preferred_leader_not_available,
            f"broker {preferred} is not in sync with {name}, or not alive: its ISR is {[*partition.isr]}",
        )
    return HandOver(topic.id, partition.partition, partition.leader_epoch, preferred)


def _leader(image: ClusterImage, key: Key, hand_over: HandOver) -> int | None:
    """Return the partition's leader if the epoch of the request is current, else None."""
    topic = image.topics.get(key[0])
    partition = None if topic is None else topic.partition(key[1])
    if topic is None or partition is None or topic.id != hand_over.topic_id:
        return None
    return partition.leader if partition.leader_epoch == hand_over.leader_epoch else None
