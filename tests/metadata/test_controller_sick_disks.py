"""Brokers that cannot write: they lose leadership when their lease ends, and return when their disk recovers."""

from __future__ import annotations

from tests.metadata.controlled_cluster import Cluster


def test_a_broker_that_cannot_write_gets_no_lease_and_is_fenced_when_its_lease_ends() -> None:
    cluster = Cluster()
    cluster.create()
    granted_ms = cluster.now_ms
    lease_ms = cluster.beat(1).lease_ms
    assert lease_ms > 0
    cluster.sick.add(1)
    cluster.now_ms += 100
    assert cluster.beat(1).lease_ms == 0
    while not cluster.broker(1).is_fenced:
        assert cluster.leader == 1
        cluster.run(100)
    assert granted_ms + lease_ms < cluster.now_ms <= granted_ms + cluster.settings.session_timeout_ms + 200
    assert (cluster.leader, cluster.isr) == (2, (2, 3))


def test_a_fenced_broker_is_unfenced_only_when_it_can_write_again() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.sick.add(1)
    cluster.run(10_000)
    assert cluster.broker(1).is_fenced
    assert cluster.beat(1).is_fenced
    cluster.sick.clear()
    cluster.run(600)
    assert not cluster.broker(1).is_fenced
    assert cluster.beat(1).lease_ms > 0
    cluster.join(2, 3, 1)
    assert cluster.isr == (1, 2, 3)


def test_a_broker_whose_disk_recovers_before_its_session_ends_keeps_leadership() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.sick.add(1)
    cluster.run(1_200)
    cluster.sick.clear()
    cluster.run(3_000)
    assert not cluster.broker(1).is_fenced
    assert cluster.leader == 1


def test_a_broker_that_cannot_write_is_not_elected() -> None:
    cluster = Cluster()
    cluster.create("orders", (2, 1, 3))
    cluster.run(600)
    cluster.sick.add(1)
    cluster.beat(1)
    cluster.die(2)
    assert cluster.leader == 3


def test_a_new_controller_waits_for_leases_that_the_old_controller_may_have_granted() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.beat(1)
    cluster.sick.add(1)
    cluster.change_controller()
    began_ms = cluster.now_ms
    while not cluster.broker(1).is_fenced:
        assert cluster.beat(1).lease_ms == 0
        cluster.run(100)
    assert cluster.now_ms - began_ms >= cluster.settings.session_timeout_ms
    assert cluster.leader == 2


def test_a_broker_whose_disk_hangs_at_startup_stays_fenced() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.die(1)
    cluster.sick.add(1)
    cluster.restart(1)
    cluster.run(5_000)
    assert cluster.broker(1).is_fenced
    cluster.sick.clear()
    cluster.run(600)
    assert not cluster.broker(1).is_fenced


def test_a_broker_that_cannot_write_may_shut_down() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.sick.add(1)
    cluster.leaving.add(1)
    cluster.run(2_500)
    assert cluster.beat(1).should_shut_down
    assert cluster.leader == 2


def test_the_only_replica_leads_again_when_its_disk_recovers() -> None:
    cluster = Cluster()
    cluster.create("orders", (1,))
    cluster.sick.add(1)
    cluster.run(3_000)
    assert cluster.leader == -1
    cluster.sick.clear()
    cluster.run(900)
    assert cluster.leader == 1


def test_a_leader_that_cannot_write_may_transfer_leadership_before_its_session_ends() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.sick.add(1)
    cluster.beat(1)
    cluster.alter_isr(cluster.proposal((2, 3), hand_over_to=2))
    assert (cluster.leader, cluster.isr) == (2, (2, 3))
