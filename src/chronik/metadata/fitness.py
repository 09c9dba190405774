"""Fitness to lead: what a broker reports about its replicas, and the change that follows from it.

A replica leads, and counts as in sync, only while it can show that its log holds everything that it once acknowledged.
A broker that finds one of its logs missing, short, broken or spoiled reports it. At its start it does so before it is
unfenced, so that no such replica is elected first.
"""

from __future__ import annotations

from chronik.metadata.calls import ReportReplicasCall
from chronik.metadata.elections import BrokerStates, Draft, Loss, TopicRules
from chronik.metadata.image import NO_LEADER, ClusterImage
from chronik.metadata.reassignment import Plan
from chronik.wire.errors import ErrorCode, KafkaError


def plan_report(image: ClusterImage, brokers: BrokerStates, call: ReportReplicasCall) -> Plan:
    """The replicas that the broker has lost leave the ISR and the eligible leaders.

    The outcome of a report is an error where the replica stays, since it is the last that can be read.
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
        draft.lose(broker.id, Loss(report.loss))
        if broker.id in draft.isr or broker.id in draft.eligible:
            plan.outcomes[-1] = KafkaError(
                ErrorCode.eligible_leaders_not_available,
                f"{topic.name}-{report.partition} has no other replica in sync",
            )
            continue
        # A leader that reports its own log serves no more. Any other leader must not take the replica back into the ISR
        # for what it fetched before.
        draft.is_given_up = partition.leader == broker.id
        draft.begins_epoch = partition.leader not in (broker.id, NO_LEADER)
        draft.settle(brokers, TopicRules.of(image, topic))
        plan.changes.add(topic.id, draft.change())
    return plan
