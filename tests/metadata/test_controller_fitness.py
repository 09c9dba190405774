"""Fitness to lead: replicas that have lost records are neither in sync nor elected."""

from __future__ import annotations

from uuid import UUID

import pytest
from tests.metadata.controlled_cluster import ORDERS, Cluster

from chronik.metadata.calls import ReplicaReport, ReportReplicasCall
from chronik.metadata.elections import BrokerStates, Loss, plan_unclean_elections
from chronik.metadata.image import NO_LEADER
from chronik.wire.errors import ErrorCode, KafkaError


def all_down() -> Cluster:
    """Create three brokers with one partition on all of them, and kill them together."""
    cluster = Cluster()
    cluster.create()
    cluster.die(1, 2, 3, is_noticed=False)
    cluster.change_controller()
    cluster.run(3_000)
    return cluster


def test_a_replica_that_reports_a_missing_log_before_it_is_unfenced_is_never_elected() -> None:
    cluster = all_down()
    cluster.restart(1)
    assert cluster.report(1, loss=Loss.CERTAIN) is None
    cluster.run(3_000)
    assert cluster.leader == NO_LEADER and 1 not in (*cluster.isr, *cluster.partition().eligible)
    cluster.restart(2)
    cluster.run(1_000)
    assert cluster.leader == 2, "the first whole replica that returns leads"


def test_an_eligible_replica_that_lost_its_log_is_not_elected() -> None:
    cluster = Cluster()
    cluster.create(min_insync_replicas="2")
    cluster.die(1)
    cluster.die(2)
    assert cluster.isr == (3,) and cluster.partition().eligible == (2,)
    cluster.die(3)
    cluster.restart(2)
    assert cluster.report(2, loss=Loss.CERTAIN) is None
    cluster.run(3_000)
    assert cluster.leader == NO_LEADER and cluster.partition().eligible == ()


def test_a_leader_that_reports_its_own_log_as_damaged_is_replaced_at_once() -> None:
    cluster = Cluster()
    cluster.create()
    assert cluster.leader == 1
    assert cluster.report(1, loss=Loss.SPOILED) is None
    assert cluster.leader == 2 and cluster.isr == (2, 3)


def test_a_follower_that_reports_a_damaged_log_cannot_rejoin_by_an_older_proposal() -> None:
    cluster = Cluster()
    cluster.create()
    proposal = cluster.proposal((1, 2, 3))
    epoch = cluster.partition().leader_epoch
    assert cluster.report(3, loss=Loss.SPOILED) is None
    assert (cluster.leader, cluster.isr, cluster.partition().leader_epoch) == (1, (1, 2), epoch + 1)
    with pytest.raises(KafkaError) as raised:
        cluster.alter_isr(proposal)
    assert raised.value.code is ErrorCode.fenced_leader_epoch


def test_the_last_replica_keeps_leading_if_its_log_is_only_damaged() -> None:
    cluster = Cluster()
    cluster.create("orders", (1,))
    refusal = cluster.report(1, loss=Loss.SPOILED)
    assert refusal is not None and refusal.code is ErrorCode.eligible_leaders_not_available
    assert cluster.leader == 1


def test_the_partition_goes_offline_when_its_last_replica_loses_its_log() -> None:
    cluster = Cluster()
    cluster.create("orders", (1,), unclean_leader_election_enable="false")
    assert cluster.report(1, loss=Loss.CERTAIN) is None
    cluster.run(3_000)
    assert (cluster.leader, cluster.isr) == (NO_LEADER, ())


def test_a_broker_with_an_old_copy_of_its_folder_leaves_the_isr_under_synced_too() -> None:
    cluster = Cluster()
    cluster.create()
    first = cluster.incarnations[2]
    cluster.die(2)
    cluster.restart(2, previous_incarnations=(first,))
    cluster.run(600)
    cluster.join(1, 2, 3)
    cluster.die(1, 2, 3, is_noticed=False)
    cluster.change_controller()
    cluster.run(3_000)
    assert 2 in cluster.isr
    cluster.restart(2, previous_incarnations=(first,))
    assert 2 not in (*cluster.isr, *cluster.partition().eligible)


@pytest.mark.parametrize("is_first_try_known", [True, False])
def test_a_crash_during_registration_does_not_mark_the_folder_as_an_old_copy(is_first_try_known: bool) -> None:
    cluster = Cluster()
    cluster.create()
    first = cluster.incarnations[2]
    cluster.die(1, 2, 3, is_noticed=False)
    cluster.change_controller()
    cluster.run(3_000)
    second = UUID(int=first.int + 100)
    if is_first_try_known:
        cluster.restart(2, previous_incarnations=(first,))
    cluster.incarnations[2] = second
    cluster.restart(2, previous_incarnations=(first, second))
    assert 2 in cluster.isr


def test_a_replica_report_from_a_replaced_process_is_refused() -> None:
    cluster = Cluster()
    cluster.create()
    report = ReplicaReport(ORDERS, 0, 0, -1, Loss.CERTAIN.value)
    call = ReportReplicasCall(2, cluster.image.brokers[2].epoch - 1, (report,))
    with pytest.raises(KafkaError) as raised:
        cluster.controller.report(cluster.image, call, cluster.now_ms)
    assert raised.value.code is ErrorCode.stale_broker_epoch


def test_a_requested_unclean_election_elects_the_first_replica_in_assignment_order() -> None:
    cluster = all_down()
    for broker_id in (1, 2, 3):
        cluster.restart(broker_id)
        cluster.report(broker_id, loss=Loss.CERTAIN)
    cluster.run(3_000)
    assert (cluster.leader, cluster.isr) == (NO_LEADER, ())
    epoch = cluster.partition().leader_epoch
    plan = plan_unclean_elections(cluster.image, BrokerStates.of(cluster.image), [("orders", 0)])
    assert plan.outcomes == [None] and plan.command is not None
    cluster.apply(plan.command)
    assert (cluster.leader, cluster.isr) == (1, (1,))
    assert cluster.partition().unclean_epoch == cluster.partition().leader_epoch == epoch + 1
