"""Sessions, leases and fencing: which brokers are alive, and which may serve."""

from __future__ import annotations

from uuid import UUID

import msgspec
import pytest
from tests.metadata.controlled_cluster import Cluster

from chronik.metadata.calls import HeartbeatCall
from chronik.metadata.commands import FenceBroker
from chronik.metadata.events import BrokerFenced, BrokerUnfenced
from chronik.wire.errors import ErrorCode, KafkaError


def test_a_broker_stays_fenced_until_it_has_applied_its_registration() -> None:
    cluster = Cluster(0)
    cluster.incarnations[1] = UUID(int=1)
    cluster.register(1)
    assert cluster.broker(1).is_fenced
    cluster.applied[1] = cluster.broker(1).epoch - 1
    assert cluster.beat(1).lease_ms == 0
    assert cluster.due() == []
    cluster.applied[1] = cluster.broker(1).epoch
    cluster.beat(1)
    cluster.due()
    assert not cluster.broker(1).is_fenced
    assert isinstance(cluster.events[-1], BrokerUnfenced)


def test_a_silent_broker_is_fenced_only_when_its_session_ends() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.die(1, is_noticed=False)
    heard_ms = cluster.now_ms - cluster.now_ms % 300
    while cluster.now_ms < heard_ms + 1_900:
        cluster.run(100)
    assert not cluster.broker(1).is_fenced
    cluster.run(200)
    assert cluster.broker(1).is_fenced
    assert cluster.leader == 2


def test_a_refused_connection_ends_a_session_at_once() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.die(1)
    assert cluster.broker(1).is_fenced and cluster.leader == 2


def test_a_lease_is_shorter_than_the_session() -> None:
    cluster = Cluster()
    sent_ms = cluster.now_ms
    lease_ms = cluster.beat(1).lease_ms
    assert 0 < lease_ms < cluster.settings.session_timeout_ms
    cluster.alive.discard(1)
    while not cluster.broker(1).is_fenced:
        cluster.run(100)
    assert cluster.now_ms > sent_ms + lease_ms


def test_a_lease_starts_when_a_majority_last_confirmed_the_controller() -> None:
    cluster = Cluster()
    broker = cluster.broker(1)
    call = HeartbeatCall(1, cluster.incarnations[1], broker.epoch, cluster.image.version)
    full_ms = cluster.controller.heartbeat(call, cluster.now_ms, confirmed_ms=cluster.now_ms).lease_ms
    assert (
        cluster.controller.heartbeat(call, cluster.now_ms, confirmed_ms=cluster.now_ms - 500).lease_ms == full_ms - 500
    )
    assert cluster.controller.heartbeat(call, cluster.now_ms, confirmed_ms=cluster.now_ms - 9_000).lease_ms == 0


def test_a_broker_gets_no_lease_while_the_command_to_fence_it_is_pending() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.alive.discard(1)
    while not (commands := cluster.controller.due(cluster.now_ms)):
        cluster.now_ms += 100
        for other in (2, 3):
            cluster.beat(other)
    assert isinstance(commands[0], FenceBroker)
    assert cluster.beat(1).lease_ms == 0
    for command in commands:
        cluster.apply(command)
    assert cluster.beat(1).lease_ms == 0


def test_a_paused_broker_is_unfenced_only_when_it_knows_that_it_was_fenced() -> None:
    cluster = Cluster()
    cluster.create()
    known = cluster.image.version
    cluster.die(1, is_noticed=False)
    cluster.run(2_500)
    assert cluster.broker(1).is_fenced
    cluster.alive.add(1)
    cluster.applied[1] = known
    cluster.run(900)
    assert cluster.broker(1).is_fenced
    assert cluster.beat(1).lease_ms == 0
    del cluster.applied[1]
    cluster.run(600)
    assert not cluster.broker(1).is_fenced
    assert cluster.beat(1).lease_ms > 0
    assert cluster.leader == 2


def test_a_broker_that_never_learns_of_its_lost_leadership_gets_no_more_leases() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.run(300)
    cluster.applied[1] = cluster.image.version
    cluster.alter_isr(cluster.proposal((1, 2, 3), hand_over_to=2))
    assert cluster.beat(1).lease_ms > 0
    cluster.run(2_500)
    assert not cluster.broker(1).is_fenced
    assert cluster.beat(1).lease_ms == 0
    del cluster.applied[1]
    assert cluster.beat(1).lease_ms > 0


def test_a_new_controller_gives_every_broker_a_full_session_to_send_a_heartbeat() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.run(1_700)
    cluster.alive.clear()
    cluster.run(1_500)
    cluster.change_controller()
    cluster.run(1_900)
    assert not any(broker.is_fenced for broker in cluster.image.brokers.values())
    assert cluster.leader == 1
    cluster.run(200)
    assert all(broker.is_fenced for broker in cluster.image.brokers.values())


def test_a_new_controller_immediately_fences_a_broker_that_refuses_connections() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.change_controller()
    cluster.die(1)
    assert cluster.broker(1).is_fenced
    cluster.beat(2)
    cluster.due()
    assert cluster.leader == 2


def test_a_new_controller_elects_only_brokers_that_have_sent_it_a_heartbeat() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.change_controller()
    cluster.die(1)
    assert cluster.leader == -1
    cluster.beat(3)
    cluster.due()
    assert cluster.leader == 3


def test_a_pause_of_the_controller_does_not_end_broker_sessions() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.now_ms += 60_000
    assert cluster.due() == []
    cluster.run(1_000)
    assert not any(broker.is_fenced for broker in cluster.image.brokers.values())


def test_a_delayed_heartbeat_does_not_revive_a_dead_process() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.controller.broker_gone(1, cluster.now_ms)
    cluster.now_ms += 50
    assert cluster.beat(1).lease_ms == 0
    cluster.alive.discard(1)
    cluster.due()
    assert cluster.broker(1).is_fenced


def test_a_live_broker_whose_address_refuses_connections_is_fenced_only_once() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.controller.broker_gone(1, cluster.now_ms)
    cluster.due()
    cluster.run(1_000)
    assert not cluster.broker(1).is_fenced
    cluster.controller.broker_gone(1, cluster.now_ms)
    assert cluster.due() == []


def test_a_process_whose_broker_id_was_taken_over_receives_an_error() -> None:
    cluster = Cluster()
    broker = cluster.broker(1)
    old = HeartbeatCall(1, cluster.incarnations[1], broker.epoch, cluster.image.version)
    cluster.restart(1)
    with pytest.raises(KafkaError, match="taken over by the node at host-1:9092") as raised:
        cluster.controller.heartbeat(old, cluster.now_ms)
    assert raised.value.code == ErrorCode.duplicate_broker_registration
    with pytest.raises(KafkaError) as raised:
        cluster.controller.heartbeat(msgspec.structs.replace(old, broker_id=9), cluster.now_ms)
    assert raised.value.code == ErrorCode.broker_id_not_registered


def test_heartbeats_show_whether_all_live_replicas_have_applied_a_version() -> None:
    cluster = Cluster()
    cluster.applied[2] = cluster.image.version
    cluster.create()
    for broker_id in (1, 2, 3):
        cluster.beat(broker_id)
    assert not cluster.controller.has_applied(cluster.image.version, (1, 2, 3))
    assert cluster.controller.has_applied(cluster.image.version, (1, 3))
    cluster.die(2)
    for broker_id in (1, 3):
        cluster.beat(broker_id)
    assert cluster.controller.has_applied(cluster.image.version, (1, 2, 3))


def test_one_command_fences_a_broker_that_leads_a_thousand_partitions() -> None:
    cluster = Cluster()
    cluster.create("orders", *((1, 2, 3),) * 1_000)
    cluster.controller.broker_gone(1, cluster.now_ms)
    commands = cluster.due()
    assert len(commands) == 1
    assert {partition.leader for partition in cluster.image.topics["orders"].partitions} == {2}
    assert sum(isinstance(event, BrokerFenced) for event in cluster.events) == 1
    assert cluster.due() == []
