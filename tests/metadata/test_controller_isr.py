"""ISR proposals of leaders: accepted if every epoch is current, otherwise refused with the reason."""

from __future__ import annotations

import msgspec
import pytest
from tests.metadata.controlled_cluster import Cluster

from chronik.metadata.calls import AlterIsrCall, IsrMember
from chronik.wire.errors import ErrorCode, KafkaError


def refused(cluster: Cluster, call: AlterIsrCall, code: ErrorCode) -> None:
    before = cluster.image
    with pytest.raises(KafkaError) as raised:
        cluster.alter_isr(call)
    assert raised.value.code == code
    assert cluster.image is before


def test_a_leader_removes_a_replica_from_the_isr_and_adds_it_again() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.join(1, 2)
    assert [*cluster.isr] == [1, 2]
    cluster.join(1, 3, 2)
    assert [*cluster.isr] == [1, 2, 3]
    assert (cluster.partition().leader_epoch, cluster.partition().partition_epoch) == (0, 2)


def test_an_isr_proposal_is_accepted_only_once() -> None:
    cluster = Cluster()
    cluster.create()
    call = cluster.proposal((1, 2))
    cluster.alter_isr(call)
    refused(cluster, call, ErrorCode.invalid_update_version)


def test_a_leader_leaves_the_isr_only_by_transferring_leadership() -> None:
    cluster = Cluster()
    cluster.create()
    refused(cluster, cluster.proposal((2, 3)), ErrorCode.invalid_request)
    cluster.alter_isr(cluster.proposal((2, 3), hand_over_to=2))
    assert (cluster.partition().leader, set(cluster.partition().isr)) == (2, {2, 3})


def test_a_proposal_from_a_former_leader_is_refused() -> None:
    cluster = Cluster()
    cluster.create()
    call = cluster.proposal((1,))
    cluster.alter_isr(cluster.proposal((1, 2, 3), hand_over_to=2))
    refused(cluster, call, ErrorCode.fenced_leader_epoch)
    pretended = msgspec.structs.replace(cluster.proposal((2,)), broker_id=1, broker_epoch=cluster.broker(1).epoch)
    refused(cluster, pretended, ErrorCode.fenced_leader_epoch)


def test_a_proposal_from_an_earlier_incarnation_of_the_leader_is_refused() -> None:
    cluster = Cluster(1)
    cluster.create("orders", (1,))
    call = cluster.proposal((1,))
    cluster.restart(1)
    cluster.run(600)
    refused(cluster, call, ErrorCode.stale_broker_epoch)


def test_a_replica_that_restarted_after_it_was_found_in_sync_cannot_join_the_isr() -> None:
    """KIP-903: a restarted replica may have lost records since the leader found it in sync."""
    cluster = Cluster(durability="replicated")
    cluster.create()
    cluster.join(1, 2)
    call = cluster.proposal((1, 2, 3))
    cluster.restart(3)
    cluster.run(600)
    refused(cluster, call, ErrorCode.ineligible_replica)
    cluster.join(1, 2, 3)


def test_a_replica_joins_the_isr_only_with_the_broker_epoch_of_its_fetches() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.join(1, 2)
    call = cluster.proposal((1, 2, 3))
    unknown = msgspec.structs.replace(call, new_isr=(*call.new_isr[:2], IsrMember(3)))
    refused(cluster, unknown, ErrorCode.ineligible_replica)
    stays = msgspec.structs.replace(call, new_isr=(call.new_isr[0], IsrMember(2), call.new_isr[2]))
    cluster.alter_isr(stays)
    assert cluster.isr == (1, 2, 3)


def test_a_broker_that_is_fenced_or_shutting_down_cannot_join_the_isr() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.die(3)
    refused(cluster, cluster.proposal((1, 2, 3)), ErrorCode.ineligible_replica)
    cluster.restart(3)
    cluster.run(600)
    cluster.leaving.add(3)
    cluster.beat(3)
    cluster.run(300)
    assert cluster.broker(3).is_shutting_down
    refused(cluster, cluster.proposal((1, 2, 3)), ErrorCode.ineligible_replica)


@pytest.mark.parametrize("members", [(2, 3), (1, 1), (1, 4), ()])
def test_an_isr_without_its_leader_or_with_invalid_members_is_refused(members: tuple[int, ...]) -> None:
    cluster = Cluster(4)
    cluster.create()
    refused(cluster, cluster.proposal(members), ErrorCode.invalid_request)


def test_a_proposal_with_epochs_newer_than_the_controllers_gets_not_controller() -> None:
    cluster = Cluster()
    cluster.create()
    call = cluster.proposal((1, 2))
    refused(cluster, msgspec.structs.replace(call, leader_epoch=5), ErrorCode.not_controller)
    refused(cluster, msgspec.structs.replace(call, partition_epoch=5), ErrorCode.not_controller)
    refused(cluster, msgspec.structs.replace(call, partition=7), ErrorCode.unknown_topic_or_partition)
    unknown = msgspec.structs.replace(call, topic_id=cluster.incarnations[1])
    refused(cluster, unknown, ErrorCode.unknown_topic_id)


def test_a_proposal_below_the_minimum_keeps_the_removed_replicas_eligible() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.join(1)
    assert (cluster.isr, cluster.partition().eligible) == ((1,), (2, 3))


def test_a_proposal_of_the_same_isr_invalidates_an_earlier_pending_proposal() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.join(1, 2)
    lost = cluster.proposal((1, 2, 3))
    cluster.join(1, 2)
    refused(cluster, lost, ErrorCode.invalid_update_version)


def test_a_leader_transfers_leadership_only_to_an_isr_member_that_can_lead() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.alter_isr(cluster.proposal((1, 2, 3), hand_over_to=3))
    assert (cluster.leader, cluster.isr, cluster.partition().leader_epoch) == (3, (1, 2, 3), 1)
    refused(cluster, cluster.proposal((2, 3), hand_over_to=1), ErrorCode.eligible_leaders_not_available)
    cluster.controller.broker_gone(2, cluster.now_ms)
    refused(cluster, cluster.proposal((1, 2, 3), hand_over_to=2), ErrorCode.eligible_leaders_not_available)
