"""Registration: a new process loses its predecessor's leadership, and replicas that may lack records leave the ISR."""

from __future__ import annotations

from uuid import UUID

import pytest
from tests.metadata.controlled_cluster import Cluster

from chronik.metadata.image import NO_LEADER
from chronik.metadata.registration import plan_unregistration
from chronik.wire.errors import ErrorCode, KafkaError


def test_a_leader_that_restarts_unnoticed_loses_leadership_to_an_in_sync_replica() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.restart(1)
    assert (cluster.leader, cluster.isr) == (2, (2, 3))
    assert cluster.partition().leader_epoch == 1


def test_under_synced_the_only_isr_member_stays_in_the_isr_after_a_crash() -> None:
    cluster = Cluster(durability="synced")
    cluster.create()
    cluster.die(2, 3)
    cluster.restart(1)
    assert (cluster.isr, cluster.leader) == ((1,), NO_LEADER)
    cluster.run(600)
    assert cluster.leader == 1


def test_under_synced_an_eligible_leader_stays_eligible_after_a_crash() -> None:
    cluster = Cluster(durability="synced")
    cluster.create()
    cluster.die(2)
    cluster.die(3)
    assert cluster.partition().eligible == (3,)
    cluster.restart(3)
    assert cluster.partition().eligible == (3,)
    cluster.die(1)
    cluster.run(600)
    assert cluster.leader == 3


def test_under_replicated_a_crashed_broker_is_neither_in_sync_nor_eligible() -> None:
    cluster = Cluster(durability="replicated")
    cluster.create()
    cluster.die(2)
    cluster.die(3)
    cluster.restart(3)
    assert (cluster.isr, cluster.partition().eligible) == ((1,), ())
    cluster.run(600)
    cluster.die(1)
    cluster.run(5_000)
    assert cluster.leader == NO_LEADER


def test_under_replicated_a_follower_that_crashed_unnoticed_cannot_become_leader() -> None:
    cluster = Cluster(durability="replicated")
    cluster.create(min_insync_replicas="1")
    cluster.join(1, 2)
    cluster.restart(2)
    assert (cluster.leader, cluster.isr) == (1, (1,))
    cluster.die(1)
    cluster.run(5_000)
    assert cluster.leader == NO_LEADER
    cluster.restart(1, was_clean=True)
    cluster.run(600)
    assert cluster.leader == 1


def test_under_replicated_a_cleanly_stopped_broker_stays_eligible() -> None:
    cluster = Cluster(durability="replicated")
    cluster.create()
    cluster.die(2)
    cluster.die(3)
    cluster.restart(3, was_clean=True, previous_epoch=cluster.broker(3).epoch)
    assert cluster.partition().eligible == (3,)


def test_a_clean_stop_of_an_unregistered_process_does_not_hide_an_earlier_crash() -> None:
    cluster = Cluster(durability="replicated")
    cluster.create()
    cluster.die(2)
    cluster.die(3)
    cluster.restart(3, was_clean=True, previous_epoch=-1)
    assert cluster.partition().eligible == ()


def test_the_durability_of_the_crashed_process_decides_whether_it_stays_eligible() -> None:
    cluster = Cluster(durability="replicated")
    cluster.create()
    cluster.die(2)
    cluster.die(3)
    cluster.restart(3, durability="synced")
    assert cluster.partition().eligible == ()


def lose_all_page_caches() -> Cluster:
    cluster = Cluster(durability="replicated")
    cluster.create()
    cluster.alive.clear()
    cluster.change_controller()
    for broker_id in (1, 2, 3):
        cluster.restart(broker_id)
    assert cluster.isr == () and cluster.partition().unproven == (1, 2, 3)
    return cluster


def test_the_replica_with_the_longest_log_leads_after_all_page_caches_are_lost() -> None:
    cluster = lose_all_page_caches()
    cluster.run(600)
    assert cluster.leader == NO_LEADER, "nobody has reported"
    for broker_id, length in ((1, (4, 90)), (2, (5, 80)), (3, (5, 70))):
        cluster.report(broker_id, *length)
    cluster.run(300)
    assert (cluster.leader, cluster.isr, cluster.partition().unproven) == (2, (2,), ())
    assert cluster.partition().unclean_epoch == -1, "no replica may cut records that were committed"


def test_the_wait_for_reports_from_unproven_replicas_is_bounded() -> None:
    cluster = lose_all_page_caches()
    cluster.report(3, 5, 70)
    cluster.run(5_000)
    assert cluster.leader == NO_LEADER
    cluster.run(6_000)
    assert cluster.leader == 3


def test_a_log_report_from_an_earlier_process_does_not_decide_an_election() -> None:
    cluster = lose_all_page_caches()
    cluster.report(3, 5, 70)
    cluster.die(3)
    cluster.restart(3)
    cluster.run(12_000)
    assert cluster.leader == NO_LEADER


def test_a_broker_with_another_data_folder_is_neither_in_sync_nor_eligible() -> None:
    cluster = Cluster(0)
    for broker_id in (1, 2, 3):
        cluster.incarnations[broker_id] = UUID(int=broker_id)
        cluster.register(broker_id, folder_id=UUID(int=broker_id))
        cluster.alive.add(broker_id)
    cluster.run(600)
    cluster.create("orders", (1, 2), (1,))
    cluster.join(1)
    cluster.die(1)
    cluster.restart(1, folder_id=UUID(int=99))
    assert (cluster.isr, cluster.partition().eligible) == ((), ())
    cluster.run(5_000)
    assert cluster.leader == NO_LEADER
    assert cluster.partition(1).leader == NO_LEADER, "an administrator has to accept the loss first"


def test_a_second_node_with_the_same_id_is_refused_while_the_first_node_is_alive() -> None:
    cluster = Cluster()
    first = cluster.incarnations[1]
    with pytest.raises(KafkaError, match="node id 1 is in use by the node at host-1:9092") as raised:
        cluster.restart(1, port=9999)
    assert raised.value.code == ErrorCode.duplicate_broker_registration
    assert cluster.broker(1).incarnation == first
    cluster.incarnations[1] = first
    cluster.die(1)
    cluster.restart(1, port=9999)
    assert cluster.broker(1).port == 9999


def test_a_second_node_at_the_same_address_with_another_folder_is_refused() -> None:
    cluster = Cluster(0)
    cluster.incarnations[1] = UUID(int=1)
    cluster.register(1, folder_id=UUID(int=5))
    cluster.beat(1)
    with pytest.raises(KafkaError):
        cluster.restart(1, folder_id=UUID(int=6))


def test_repeating_a_registration_after_a_lost_response_changes_nothing() -> None:
    cluster = Cluster()
    cluster.create()
    before = cluster.broker(1)
    cluster.register(1)
    assert cluster.broker(1) == before
    assert cluster.leader == 1 and cluster.partition().leader_epoch == 0


@pytest.mark.parametrize("is_running", [True, False])
def test_a_broker_can_be_unregistered_only_when_it_has_no_replicas(is_running: bool) -> None:
    cluster = Cluster()
    cluster.create("orders", (1, 2))
    if not is_running:
        cluster.die(2, 3)
    with pytest.raises(KafkaError, match="still has replicas, such as orders-0"):
        cluster.apply(plan_unregistration(cluster.image, 2))
    cluster.apply(plan_unregistration(cluster.image, 3))
    assert sorted(cluster.image.brokers) == [1, 2]
    if not is_running:
        cluster.run(1_000)
    with pytest.raises(KafkaError):
        plan_unregistration(cluster.image, 3)
