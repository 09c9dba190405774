"""Leader rebalancing: once per interval, request hand-overs to the preferred leaders of some partitions."""

from __future__ import annotations

from chronik.metadata.calls import HandOver
from chronik.metadata.elections import BrokerStates
from chronik.metadata.hand_overs import HandOvers
from chronik.metadata.image import ClusterImage
from chronik.metadata.index import PartitionIndex
from chronik.metadata.preferred import imbalanced


class Rebalance:
    """Schedules the rebalancing. Owned by the controller."""

    def __init__(self, interval_ms: int, partitions_max: int, now_ms: int) -> None:
        self._interval_ms = interval_ms
        self._partitions_max = partitions_max
        self._next_ms = now_ms + interval_ms

    def ask(
        self, image: ClusterImage, index: PartitionIndex, brokers: BrokerStates, hand_overs: HandOvers, now_ms: int
    ) -> None:
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self._interval_ms
        for topic, partition, to in imbalanced(image, brokers, index.not_preferred, self._partitions_max):
            asked = HandOver(topic.id, partition.partition, partition.leader_epoch, to)
            hand_overs.ask((topic.name, partition.partition), asked, now_ms)
