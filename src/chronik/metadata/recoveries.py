"""Which replica leads when every candidate may lack committed records (KIP-966's unclean recovery).

This happens under durability `replicated`, when all replicas of a partition lose their page cache at once. No record of
such a partition is known to be safe, so the controller keeps as many as it can. It waits until every unproven replica
has reported how far its log goes, or until a timeout, and elects the longest log.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chronik.metadata.calls import ReplicaReport
from chronik.metadata.elections import BrokerStates
from chronik.metadata.image import ClusterImage, PartitionImage
from chronik.metadata.index import Key


@dataclass(slots=True)
class Recovery:
    """The latest report of each broker on one partition, with the broker's epoch at the time."""

    since_ms: int
    reports: dict[int, tuple[int, ReplicaReport]] = field(default_factory=dict)


class Recoveries:
    """Owned by the controller. Nothing here is durable: brokers report again until the partition has a leader."""

    def __init__(self, wait_ms: int) -> None:
        self._wait_ms = wait_ms
        self._recoveries: dict[Key, Recovery] = {}

    def reported(self, key: Key, broker_id: int, broker_epoch: int, report: ReplicaReport, now_ms: int) -> None:
        recovery = self._recoveries.setdefault(key, Recovery(now_ms))
        recovery.reports[broker_id] = broker_epoch, report

    def forget(self, key: Key) -> None:
        self._recoveries.pop(key, None)

    def candidate(
        self, image: ClusterImage, key: Key, partition: PartitionImage, brokers: BrokerStates, now_ms: int
    ) -> int | None:
        """Return the broker to elect; None while another replica may have a longer log."""
        recovery = self._recoveries.get(key)
        if recovery is None:
            return None
        lengths: dict[int, tuple[int, int]] = {}
        for broker_id, (broker_epoch, report) in recovery.reports.items():
            broker = image.brokers.get(broker_id)
            if broker is not None and broker.epoch == broker_epoch and broker_id in partition.unproven:
                lengths[broker_id] = report.last_epoch, report.log_end_offset
        if len(lengths) < len(partition.unproven) and now_ms - recovery.since_ms < self._wait_ms:
            return None
        able = [broker_id for broker_id in partition.replicas if broker_id in lengths and broker_id in brokers.can_lead]
        return max(able, key=lengths.__getitem__, default=None)
