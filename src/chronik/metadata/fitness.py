"""Fitness to lead: what a broker reports about its replicas, and the change that follows.

A replica leads, and is in sync, only while it can show that its log holds everything that it once acknowledged. A
broker that finds one of its logs missing, short, corrupt or spoiled reports it. On startup it does so before it is
unfenced, so that no such replica is elected.

Some losses leave no trace on disk: a file system that forgot a sync, or a copy of the folder made while the same
process ran. If such a replica leads, a follower notices, because it knows of committed records that the leader lacks.
The follower reports the leader.

Under durability `replicated`, all replicas of a partition can lose their page cache at once. No record of such a
partition is known to be safe, so the controller keeps as many as it can (`Recoveries`, KIP-966's unclean recovery). It
waits until every unproven replica has reported how far its log goes, or until a timeout, and elects the longest log.
"""

from __future__ import annotations

from chronik.metadata.calls import UNKNOWN_EPOCH, ReplicaReport, ReportReplicasCall
from chronik.metadata.elections import BrokerStates, Draft, Loss, TopicRules
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage
from chronik.metadata.index import Key
from chronik.metadata.plans import Plan
from chronik.wire.errors import ErrorCode, KafkaError


def plan_report(image: ClusterImage, brokers: BrokerStates, call: ReportReplicasCall) -> Plan:
    """Remove the reported replicas from the ISR and the eligible leaders.

    The outcome of a report is an error if the replica stays because it is the last readable one.
    """
    broker = image.brokers.get(call.broker_id)
    if broker is None or broker.epoch != call.broker_epoch:
        raise KafkaError(
            ErrorCode.stale_broker_epoch, f"broker {call.broker_id} is not registered with epoch {call.broker_epoch}"
        )
    plan = Plan()
    for report in call.reports:
        topic = image.topic_by_id(report.topic_id)
        partition = None if topic is None else topic.partition(report.partition)
        plan.outcomes.append(None)
        if topic is None or partition is None or broker.id not in partition.replicas or not report.loss:
            continue
        draft = Draft(partition)
        loser = _loser(partition, broker.id, report)
        if loser is None:
            continue
        draft.lose(loser, Loss(report.loss))
        if loser in draft.isr or loser in draft.eligible:
            plan.outcomes[-1] = KafkaError(
                ErrorCode.eligible_leaders_not_available,
                f"{topic.name}-{report.partition} has no other replica in sync",
            )
            continue
        # A leader that reports its own log no longer serves. Any other leader must not add the replica back to the ISR
        # because of its earlier fetches.
        draft.has_leader_resigned = partition.leader == broker.id
        draft.begins_epoch = partition.leader not in (loser, NO_LEADER)
        draft.settle(brokers, TopicRules.of(image, topic))
        plan.changes.add(topic.id, draft.change())
    return plan


def _loser(partition: PartitionImage, broker_id: int, report: ReplicaReport) -> int | None:
    """Return the replica that the report is about; None if the report is outdated or not trusted.

    A broker that is in sync or eligible holds every committed record, so only it knows what a leader lacks.
    """
    if report.leader_epoch == UNKNOWN_EPOCH:
        return broker_id
    is_trusted = broker_id in partition.isr or broker_id in partition.eligible
    is_current = partition.leader not in (NO_LEADER, broker_id) and partition.leader_epoch == report.leader_epoch
    return partition.leader if is_trusted and is_current else None


class Recoveries:
    """Owned by the controller. Nothing here is durable: brokers report again until the partition has a leader."""

    def __init__(self, wait_ms: int) -> None:
        self._wait_ms = wait_ms
        self._recoveries: dict[Key, tuple[int, dict[int, tuple[int, ReplicaReport]]]] = {}
        """When the first report arrived, and the latest report of each broker, with the broker's epoch at the time."""

    def reported(self, key: Key, broker_id: int, broker_epoch: int, report: ReplicaReport, now_ms: int) -> None:
        _, reports = self._recoveries.setdefault(key, (now_ms, {}))
        reports[broker_id] = broker_epoch, report

    def forget(self, key: Key) -> None:
        self._recoveries.pop(key, None)

    def candidate(
        self, image: ClusterImage, key: Key, partition: PartitionImage, brokers: BrokerStates, now_ms: int
    ) -> int | None:
        """Return the broker to elect; None while another replica may have a longer log."""
        if key not in self._recoveries:
            return None
        since_ms, reports = self._recoveries[key]
        lengths: dict[int, tuple[int, int]] = {}
        for broker_id, (broker_epoch, report) in reports.items():
            broker = image.brokers.get(broker_id)
            if broker is not None and broker.epoch == broker_epoch and broker_id in partition.unproven:
                lengths[broker_id] = report.last_epoch, report.log_end_offset
        if len(lengths) < len(partition.unproven) and now_ms - since_ms < self._wait_ms:
            return None
        able = [broker_id for broker_id in partition.replicas if broker_id in lengths and broker_id in brokers.can_lead]
        return max(able, key=lengths.__getitem__, default=None)
