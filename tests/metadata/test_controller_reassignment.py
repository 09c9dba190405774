"""Reassignments: started, changed, cancelled, and completed when the new replicas are in sync."""

from __future__ import annotations

import pytest
from tests.metadata.controlled_cluster import Cluster

from chronik.metadata.elections import BrokerStates
from chronik.metadata.events import ReplicasChanged
from chronik.metadata.reassignment import Move, plan_moves, reassigning
from chronik.wire.errors import ErrorCode, KafkaError


def move(cluster: Cluster, replicas: tuple[int, ...] | None, partition: int = 0) -> None:
    plan = plan_moves(cluster.image, BrokerStates.of(cluster.image), [Move("orders", partition, replicas)])
    for error in plan.outcomes:
        if error is not None:
            raise error
    if plan.command is not None:
        cluster.apply(plan.command)


def hand_over(cluster: Cluster, to: int) -> None:
    """The controller asks the leader to transfer leadership, and the leader does."""
    cluster.due()
    leader = cluster.leader
    assert [(each.partition, each.to) for each in cluster.beat(leader).hand_overs] == [(0, to)]
    cluster.alter_isr(cluster.proposal(cluster.isr, hand_over_to=to))


def refused(cluster: Cluster, replicas: tuple[int, ...] | None, code: ErrorCode) -> None:
    with pytest.raises(KafkaError) as raised:
        move(cluster, replicas)
    assert raised.value.code == code


def test_a_reassignment_removes_old_replicas_once_the_new_replicas_are_in_sync() -> None:
    cluster = Cluster(5)
    cluster.create("orders", (1, 2, 3))
    move(cluster, (3, 4, 5))
    partition = cluster.partition()
    assert (partition.replicas, partition.adding, partition.removing) == ((3, 4, 5, 1, 2), (4, 5), (1, 2))
    assert (partition.leader, partition.isr) == (1, (1, 2, 3))
    assert [each[1].partition for each in reassigning(cluster.image, None)] == [0]
    cluster.join(1, 2, 3, 4)
    assert cluster.partition().is_being_reassigned
    cluster.join(1, 2, 3, 4, 5)
    assert (cluster.partition().is_being_reassigned, cluster.leader) == (True, 1), "it hands over first"
    hand_over(cluster, 3)
    partition = cluster.partition()
    assert (partition.replicas, partition.isr, partition.leader) == ((3, 4, 5), (3, 4, 5), 3)
    assert not partition.is_being_reassigned
    told = [event for event in cluster.events if isinstance(event, ReplicasChanged)]
    assert [(event.added, event.removed) for event in told] == [((4, 5), ()), ((), (1, 2))]


def test_a_leader_that_remains_a_replica_keeps_its_leadership() -> None:
    cluster = Cluster(4)
    cluster.create("orders", (1, 2, 3))
    move(cluster, (4, 1, 2))
    cluster.join(1, 2, 3, 4)
    assert (cluster.leader, cluster.partition().leader_epoch) == (1, 0)


def test_a_reassignment_that_only_reorders_or_removes_replicas_completes_at_once() -> None:
    cluster = Cluster()
    cluster.create()
    move(cluster, (2, 3, 1))
    assert (cluster.partition().replicas, cluster.leader) == ((2, 3, 1), 1)
    move(cluster, (2,))
    assert cluster.partition().removing == (3, 1)
    hand_over(cluster, 2)
    assert (cluster.partition().replicas, cluster.isr, cluster.leader) == ((2,), (2,), 2)


def test_a_reassignment_keeps_old_replicas_until_the_target_replica_is_in_sync() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.join(1, 2)
    move(cluster, (3,))
    assert cluster.partition().removing == (1, 2)
    assert cluster.isr == (1, 2)
    cluster.join(1, 2, 3)
    hand_over(cluster, 3)
    assert cluster.partition().replicas == (3,)


def test_a_leader_under_removal_is_replaced_if_it_does_not_transfer_leadership() -> None:
    cluster = Cluster()
    cluster.create()
    move(cluster, (2, 3))
    cluster.run(cluster.settings.requested_hand_over_ms + 600)
    partition = cluster.partition()
    assert (partition.replicas, partition.isr, partition.leader) == ((2, 3), (2, 3), 2)


def test_a_reassignment_does_not_complete_below_min_insync_replicas() -> None:
    cluster = Cluster(4)
    cluster.create("orders", (1, 2, 3))
    cluster.die(2)
    move(cluster, (1, 2, 4))
    cluster.die(1)
    cluster.join(3, 4)
    assert cluster.partition().is_being_reassigned, "of the new set only 4 is in sync"
    cluster.restart(1)
    cluster.run(600)
    cluster.join(1, 3, 4)
    hand_over(cluster, 1)
    assert cluster.partition().replicas == (1, 2, 4)


def test_cancelling_a_reassignment_restores_the_original_replicas() -> None:
    cluster = Cluster(5)
    cluster.create("orders", (1, 2, 3))
    refused(cluster, None, ErrorCode.no_reassignment_in_progress)
    move(cluster, (1, 4, 5))
    cluster.join(1, 2, 3, 4)
    move(cluster, None)
    partition = cluster.partition()
    assert (sorted(partition.replicas), sorted(partition.isr), partition.leader) == ([1, 2, 3], [1, 2, 3], 1)
    assert not partition.is_being_reassigned


def test_a_running_reassignment_accepts_new_target_replicas() -> None:
    cluster = Cluster(5)
    cluster.create("orders", (1, 2, 3))
    move(cluster, (1, 2, 4))
    move(cluster, (1, 2, 5))
    partition = cluster.partition()
    assert (partition.replicas, partition.adding, partition.removing) == ((1, 2, 5, 3), (5,), (3,))
    cluster.join(1, 2, 3, 5)
    assert cluster.partition().replicas == (1, 2, 5)


def test_a_reassignment_cannot_be_cancelled_if_no_in_sync_replica_would_remain() -> None:
    cluster = Cluster()
    cluster.create("orders", (1,))
    move(cluster, (2, 3))
    cluster.join(1, 2)
    cluster.die(1)
    assert (cluster.leader, cluster.isr) == (2, (2,))
    refused(cluster, None, ErrorCode.invalid_replica_assignment)
    refused(cluster, (1, 3), ErrorCode.invalid_replica_assignment)
    cluster.join(2, 3)
    assert cluster.partition().replicas == (2, 3)


@pytest.mark.parametrize("replicas", [(), (1, 1), (1, 9)])
def test_an_invalid_replica_assignment_is_refused(replicas: tuple[int, ...]) -> None:
    cluster = Cluster()
    cluster.create()
    refused(cluster, replicas, ErrorCode.invalid_replica_assignment)


def test_a_reassignment_changes_the_replication_factor_only_if_allowed() -> None:
    cluster = Cluster(4)
    cluster.create()
    states = BrokerStates.of(cluster.image)
    moves = [
        Move("orders", 0, (1, 2)),
        Move("orders", 9, (1, 2)),
        Move("orders", 0, (1, 2, 4)),
        Move("orders", 0, (1, 2, 4)),
    ]
    plan = plan_moves(cluster.image, states, moves, may_change_factor=False)
    assert [None if error is None else error.code for error in plan.outcomes] == [
        ErrorCode.invalid_replication_factor,
        ErrorCode.unknown_topic_or_partition,
        None,
        ErrorCode.invalid_request,
    ]


def test_min_insync_replicas_does_not_rise_before_the_reassignment_completes() -> None:
    cluster = Cluster()
    cluster.create("orders", (1,))
    move(cluster, (1, 2, 3))
    cluster.join(1, 2)
    assert cluster.partition().eligible == ()
    cluster.join(1)
    assert cluster.partition().eligible == ()
    cluster.join(1, 2, 3)
    cluster.join(1)
    assert cluster.partition().eligible == (2, 3)


def test_a_reassignment_continues_after_its_leader_dies_and_the_controller_changes() -> None:
    cluster = Cluster(4)
    cluster.create("orders", (1, 2, 3))
    move(cluster, (2, 3, 4))
    cluster.change_controller()
    cluster.die(1)
    cluster.run(600)
    assert cluster.leader == 2
    cluster.join(2, 3, 4)
    assert cluster.partition().replicas == (2, 3, 4)


def test_a_reassignment_waits_for_a_new_replica_that_is_down() -> None:
    cluster = Cluster(4)
    cluster.create("orders", (1, 2, 3))
    cluster.die(4)
    move(cluster, (1, 2, 4))
    cluster.run(5_000)
    assert cluster.partition().is_being_reassigned
    assert cluster.leader == 1
