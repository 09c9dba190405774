"""Controlled shutdown: other brokers lead first, all brokers know it, then the broker may stop."""

from __future__ import annotations

from tests.metadata.controlled_cluster import Cluster

from chronik.metadata.commands import ShutDownBroker
from chronik.metadata.image import NO_LEADER


def stop_is_granted(cluster: Cluster, broker_id: int, within_ms: int) -> bool:
    """Return whether shutdown is granted in time; the broker requests it every 50 ms."""
    for _ in range(within_ms // 50):
        cluster.now_ms += 50
        for other in sorted(cluster.alive):
            if other != broker_id and cluster.now_ms % 300 == 0:
                cluster.beat(other)
        result = cluster.beat(broker_id)
        cluster.due()
        if result.should_shut_down:
            return True
    return False


def test_a_broker_that_requests_shutdown_receives_its_leadership_transfers() -> None:
    cluster = Cluster()
    cluster.create("orders", (1, 2, 3), (2, 1, 3), (1, 3, 2))
    cluster.due()
    cluster.leaving.add(1)
    asked = cluster.beat(1)
    assert not asked.should_shut_down
    assert asked.lease_ms > 0, "it serves until others do"
    assert [(each.partition, each.to) for each in asked.hand_overs] == [(0, 2), (2, 3)]
    cluster.due()
    assert cluster.leader == 1, "it has its time"
    cluster.alter_isr(cluster.proposal((1, 2, 3), hand_over_to=2))
    assert [each.partition for each in cluster.beat(1).hand_overs] == [2]


def test_the_controller_takes_leadership_that_was_not_transferred_in_time() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.leaving.add(1)
    cluster.beat(1)
    cluster.run(cluster.settings.hand_over_ms + 100)
    assert (cluster.leader, cluster.isr) == (NO_LEADER, (2, 3)), "it has to know before another leads"
    cluster.beat(1)
    cluster.due()
    assert (cluster.leader, cluster.isr) == (2, (2, 3))
    assert cluster.broker(1).is_shutting_down and not cluster.broker(1).is_fenced
    assert sum(isinstance(command, ShutDownBroker) for command in cluster.commands) == 1


def test_a_stopping_broker_that_leads_nothing_leaves_the_isr_at_once() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.leaving.add(3)
    cluster.beat(3)
    cluster.due()
    assert cluster.isr == (1, 2)


def test_a_broker_may_stop_and_is_fenced_once_all_brokers_know_the_new_leader() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.applied[3] = cluster.image.version
    cluster.leaving.add(1)
    assert not stop_is_granted(cluster, 1, 1_500)
    assert cluster.leader == 2
    del cluster.applied[3]
    assert stop_is_granted(cluster, 1, 600)
    cluster.due()
    assert cluster.broker(1).is_fenced
    assert cluster.beat(1).should_shut_down


def test_shutdown_of_the_only_possible_leader_waits_for_a_replica_to_catch_up() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.join(1)
    cluster.leaving.add(1)
    assert not stop_is_granted(cluster, 1, 1_000)
    assert cluster.leader == 1
    cluster.join(1, 2)
    cluster.beat(1)
    cluster.due()
    assert (cluster.leader, cluster.isr) == (2, (2,))
    assert stop_is_granted(cluster, 1, 600)


def test_the_wait_before_a_shutdown_is_bounded() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.join(1)
    cluster.leaving.add(1)
    assert stop_is_granted(cluster, 1, cluster.settings.shutdown_patience_ms + 500)
    cluster.due()
    assert cluster.leader == 2, "it was eligible: the ISR was below its minimum"


def test_the_only_replica_stays_in_the_isr_when_its_broker_stops() -> None:
    cluster = Cluster()
    cluster.create("orders", (1,))
    cluster.leaving.add(1)
    assert stop_is_granted(cluster, 1, 1_000)
    cluster.due()
    assert (cluster.leader, cluster.isr) == (NO_LEADER, (1,))


def test_the_only_broker_may_stop_at_once() -> None:
    cluster = Cluster(1)
    cluster.create("orders", (1,))
    cluster.leaving.add(1)
    assert cluster.beat(1).should_shut_down


def test_a_new_controller_continues_a_shutdown_that_has_begun() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.leaving.add(1)
    cluster.beat(1)
    cluster.run(300)
    assert cluster.broker(1).is_shutting_down
    cluster.change_controller()
    for broker_id in (1, 2, 3):
        cluster.beat(broker_id)
    assert stop_is_granted(cluster, 1, 1_000)


def test_a_cleanly_stopped_broker_rejoins_and_leads_again() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.leaving.add(1)
    assert stop_is_granted(cluster, 1, 1_000)
    cluster.die(1)
    cluster.restart(1, was_clean=True)
    cluster.run(600)
    assert not cluster.broker(1).is_shutting_down and not cluster.broker(1).is_fenced
    cluster.join(1, 2, 3)
    cluster.run(8_000)
    assert cluster.leader == 1
