"""A leader and the controller compute min.insync.replicas alike, also while replicas are being added."""

from __future__ import annotations

from itertools import product
from uuid import UUID

import pytest
from tests.node.support_replicas import TOPIC, Cluster, on_cluster

from chronik.metadata.commands import AlterConfigs
from chronik.metadata.elections import MIN_INSYNC_REPLICAS, Draft, TopicRules
from chronik.metadata.image import ClusterImage, PartitionImage, TopicImage
from chronik.node.config import NodeConfig
from chronik.node.topic_settings import partition_settings, topic_defaults, topic_settings

MOVES = [((1,), ()), ((1, 2), (2,)), ((1, 2, 3), ()), ((1, 2, 3), (2, 3)), ((1, 2, 3, 4), (4,)), ((4, 1, 2, 3), (4,))]


@pytest.mark.parametrize(("replicas", "adding"), MOVES)
def test_the_controller_keeps_eligible_leaders_exactly_if_the_leader_cannot_commit(
    replicas: tuple[int, ...], adding: tuple[int, ...]
) -> None:
    settled = tuple(replica for replica in replicas if replica not in adding)
    for on_topic, on_brokers in product([None, "1", "2", "3", "x"], [None, "1", "3"]):
        topic_configs = {} if on_topic is None else {MIN_INSYNC_REPLICAS: on_topic}
        # Another partition of the topic has more replicas, which must not affect this one.
        other = PartitionImage(1, 1, 0, (1, 2, 3, 4, 5), (1,))
        partition = PartitionImage(0, settled[0], 0, replicas, replicas, adding=adding)
        topic = TopicImage("t", UUID(int=1), (partition, other), topic_configs)
        broker_configs = {} if on_brokers is None else {MIN_INSYNC_REPLICAS: on_brokers}
        image = ClusterImage(topics={"t": topic}, broker_configs={"": broker_configs})

        settings = topic_settings(topic, topic_defaults(NodeConfig(), image))
        needed = partition_settings(settings, image, topic, 0).min_insync_replicas
        for in_sync in range(1, len(replicas)):
            draft = Draft(partition)
            draft.isr = replicas[:in_sync]
            draft._keep_eligible(TopicRules.of(image, topic))
            assert bool(draft.eligible) == (in_sync < needed), (on_topic, on_brokers, in_sync)


async def grows(cluster: Cluster) -> None:
    """Add two replicas on nodes that are down."""
    await cluster.kill(2)
    await cluster.kill(3)
    cluster.change(replicas=(1, 2, 3), adding=(2, 3))


@on_cluster(replicas=(1,))
async def test_a_partition_gaining_replicas_accepts_records_after_a_config_change(cluster: Cluster) -> None:
    await grows(cluster)
    await cluster[1].produce(b"before")
    cluster.commit(AlterConfigs("topic", TOPIC, {"retention.ms": "1000000"}))
    cluster[1].partition.check_enough_replicas()
    await cluster[1].produce(b"after")


@on_cluster(replicas=(1,), configs={MIN_INSYNC_REPLICAS: "2"})
async def test_a_partition_gaining_replicas_accepts_records_after_a_leader_restart(cluster: Cluster) -> None:
    await grows(cluster)
    await cluster[1].produce(b"before")
    await cluster.stop(1)
    await cluster.start(1)
    cluster[1].partition.check_enough_replicas()
    await cluster[1].produce(b"after")
