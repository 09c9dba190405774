"""Gives leaderships back to preferred leaders, some at a time: leaders are asked to hand over, then replaced."""

from __future__ import annotations

from chronik.metadata.calls import HandOver
from chronik.metadata.changes import Changes
from chronik.metadata.elections import BrokerStates
from chronik.metadata.image import ClusterImage
from chronik.metadata.index import Key, PartitionIndex
from chronik.metadata.preferred import imbalanced, led_by_preferred


class Rebalance:
    """What was asked of which leader, and since when. Owned by the controller; lost with it, and then asked again."""

    def __init__(self, interval_ms: int, hand_over_ms: int, partitions_max: int, now_ms: int) -> None:
        self._interval_ms = interval_ms
        self._hand_over_ms = hand_over_ms
        self._partitions_max = partitions_max
        self._next_ms = now_ms + interval_ms
        self._forced_ms = 0
        self._asked: dict[Key, HandOver] = {}

    def hand_overs(self, image: ClusterImage, leader: int) -> tuple[HandOver, ...]:
        """What the leader should hand over now."""
        if not self._asked:
            return ()
        return tuple(
            asked
            for (name, index), asked in self._asked.items()
            if (partition := image.partition(name, index)) is not None
            and (partition.leader, partition.leader_epoch) == (leader, asked.leader_epoch)
        )

    def add_due(
        self, image: ClusterImage, index: PartitionIndex, brokers: BrokerStates, changes: Changes, now_ms: int
    ) -> None:
        """Once in an interval asks the leaders; those that have not done it in time are replaced."""
        if self._asked and now_ms >= self._forced_ms:
            for name, number in self._asked:
                topic = image.topics.get(name)
                partition = None if topic is None else topic.partition(number)
                asked = self._asked[(name, number)]
                if topic is None or partition is None or topic.id != asked.topic_id:
                    continue
                if partition.leader_epoch == asked.leader_epoch and not partition.is_reassigned:
                    changes.add(topic.id, led_by_preferred(image, brokers, topic, partition))
            self._asked = {}
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self._interval_ms
        self._forced_ms = now_ms + self._hand_over_ms
        self._asked = {
            (topic.name, partition.partition): HandOver(topic.id, partition.partition, partition.leader_epoch, to)
            for topic, partition, to in imbalanced(image, brokers, index.not_preferred, self._partitions_max)
        }
