"""Hand-overs that the controller requests from leaders, above all to preferred leaders, so that leaders stay balanced.

A leader that hands over loses nothing. Replacing it would lose records that it alone acknowledged (acks=1), so the
controller requests a hand-over first, and replaces the leader only if it does not hand over in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from chronik.metadata.calls import HandOver
from chronik.metadata.elections import BrokerStates
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage
from chronik.metadata.index import Key, PartitionIndex
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
            if _leader(image, key, hand_over) is None:
                del self._requested[key]
            elif now_ms >= until_ms:
                del self._requested[key]
                overdue.append((key, hand_over))
        return overdue


class Rebalance:
    """Requests hand-overs to the preferred leaders of some partitions, once per interval. Owned by the controller."""

    def __init__(
        self, hand_overs: HandOvers, index: PartitionIndex, interval_ms: int, partitions_max: int, now_ms: int
    ) -> None:
        self._hand_overs = hand_overs
        self._index = index
        self._interval_ms = interval_ms
        self._partitions_max = partitions_max
        self._next_ms = now_ms + interval_ms

    def request_due(self, image: ClusterImage, brokers: BrokerStates, now_ms: int) -> None:
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self._interval_ms
        for key, hand_over in islice(self._possible(image, brokers), self._partitions_max):
            self._hand_overs.request(key, hand_over, now_ms)

    def _possible(self, image: ClusterImage, brokers: BrokerStates) -> Iterable[tuple[Key, HandOver]]:
        """Yield the partitions whose preferred leader could lead but does not, by topic and number."""
        for name, number in sorted(self._index.not_preferred):
            topic = image.topics.get(name)
            partition = None if topic is None else topic.partition(number)
            if topic is None or partition is None or partition.is_reassigned:
                continue
            to = _able_preferred(partition, brokers)
            if to is not None:
                yield (name, number), HandOver(topic.id, number, partition.leader_epoch, to)


def preferred_hand_over(image: ClusterImage, brokers: BrokerStates, key: Key) -> HandOver:
    """Return the hand-over that makes the preferred replica lead, or raise the error that says why it cannot."""
    topic, partition = image.require_partition(*key)
    name = f"{topic.name}-{partition.partition}"
    if partition.leader == partition.replicas[0]:
        raise KafkaError(ErrorCode.election_not_needed, f"{name} is led by its preferred leader {partition.leader}")
    preferred = _able_preferred(partition, brokers)
    if preferred is None:
        raise KafkaError(
            ErrorCode.preferred_leader_not_available,
            f"broker {partition.replicas[0]} is not in sync with {name}, or not alive: its ISR is {[*partition.isr]}",
        )
    return HandOver(topic.id, partition.partition, partition.leader_epoch, preferred)


def _able_preferred(partition: PartitionImage, brokers: BrokerStates) -> int | None:
    """Return the preferred leader if it could take over from the current leader."""
    if not partition.replicas:
        return None
    preferred = partition.replicas[0]
    if partition.leader in (preferred, NO_LEADER) or preferred not in partition.isr:
        return None
    return preferred if preferred in brokers.can_lead else None


def _leader(image: ClusterImage, key: Key, hand_over: HandOver) -> int | None:
    """Return the partition's leader if the epoch of the request is current, else None."""
    topic = image.topics.get(key[0])
    partition = None if topic is None else topic.partition(key[1])
    if topic is None or partition is None or topic.id != hand_over.topic_id:
        return None
    return partition.leader if partition.leader_epoch == hand_over.leader_epoch else None
