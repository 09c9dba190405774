"""Leadership returns to preferred leaders, and internal topics gain replicas."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

from tests.metadata.controlled_cluster import Cluster

from chronik.metadata.calls import AlterIsrCall, IsrMember
from chronik.metadata.image import OFFSETS_TOPIC

OFFSETS = UUID(int=2_000)


def after_a_restart_of_1() -> Cluster:
    cluster = Cluster()
    cluster.create("orders", *((1, 2, 3), (2, 3, 1), (3, 1, 2)) * 2)
    cluster.die(1)
    cluster.restart(1)
    cluster.run(600)
    for partition in range(6):
        cluster.join(1, 2, 3, partition=partition)
    return cluster


def leaders(cluster: Cluster) -> list[int]:
    return [partition.leader for partition in cluster.image.topics["orders"].partitions]


def test_the_controller_requests_a_transfer_to_the_preferred_leader() -> None:
    cluster = after_a_restart_of_1()
    assert leaders(cluster) == [2, 2, 3, 2, 2, 3]
    asked: list[tuple[int, int]] = []
    while not asked:
        cluster.run(100)
        asked = [(each.partition, each.to) for each in cluster.beat(2).hand_overs]
    assert asked == [(0, 1), (3, 1)]
    assert leaders(cluster) == [2, 2, 3, 2, 2, 3]
    cluster.alter_isr(cluster.proposal((1, 2, 3), partition=0, hand_over_to=1))
    assert [each.partition for each in cluster.beat(2).hand_overs] == [3]


def test_a_leader_that_does_not_transfer_leadership_in_time_is_replaced() -> None:
    cluster = after_a_restart_of_1()
    cluster.run(cluster.settings.rebalance_interval_ms + cluster.settings.requested_hand_over_ms + 400)
    assert leaders(cluster) == [1, 2, 3, 1, 2, 3]
    version = cluster.image.version
    cluster.run(12_000)
    assert cluster.image.version == version, "what is in balance is left alone"


def test_a_preferred_leader_that_is_not_in_sync_is_not_elected() -> None:
    cluster = Cluster()
    cluster.create()
    cluster.die(1)
    cluster.restart(1)
    cluster.run(15_000)
    assert cluster.leader == 2


def test_internal_topics_gain_replicas_and_spread_leaders_as_brokers_join() -> None:
    cluster = Cluster(1)
    cluster.create(OFFSETS_TOPIC, *((1,),) * 6, topic_id=OFFSETS)
    cluster.run(1_000)
    assert not any(partition.is_being_reassigned for partition in cluster.image.topics[OFFSETS_TOPIC].partitions)
    for broker_id in (2, 3, 4):
        cluster.incarnations[broker_id] = UUID(int=broker_id)
        cluster.register(broker_id)
        cluster.alive.add(broker_id)
        cluster.run(600)
        catch_up(cluster)
    cluster.run(10_000)
    partitions = cluster.image.topics[OFFSETS_TOPIC].partitions
    assert all(len(partition.replicas) == 3 and not partition.is_being_reassigned for partition in partitions)
    assert all(partition.leader == partition.replicas[0] for partition in partitions)
    assert max(Counter(partition.leader for partition in partitions).values()) <= 3


def test_a_user_topic_keeps_its_replicas() -> None:
    cluster = Cluster()
    cluster.create("orders", (1,))
    cluster.run(10_000)
    assert cluster.partition().replicas == (1,)


def catch_up(cluster: Cluster) -> None:
    """Let the leaders find all replicas of the internal topic in sync."""
    for partition in cluster.image.topics[OFFSETS_TOPIC].partitions:
        members = tuple(IsrMember(member, cluster.broker(member).epoch) for member in partition.replicas)
        cluster.alter_isr(
            AlterIsrCall(
                partition.leader,
                OFFSETS,
                partition.partition,
                partition.leader_epoch,
                partition.partition_epoch,
                members,
            )
        )
