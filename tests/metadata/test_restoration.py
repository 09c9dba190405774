"""Metadata restored from logs: topics, partitions, replicas, and which replicas can lead."""

from __future__ import annotations

from uuid import UUID

import pytest

from chronik.metadata.image import NO_LEADER, ClusterImage, decode_image, encode_image
from chronik.metadata.restoration import KEEP_ALL, FoundLog, RestorationConflict, restored_image

ORDERS = UUID(int=1)
NEW = UUID(int=99)
OWN = {"__consumer_offsets": {"cleanup.policy": "compact"}}


def log(
    node_id: int,
    end: int = 100,
    epoch: int = 3,
    *,
    topic: str = "orders",
    partition: int = 0,
    topic_id: UUID | None = ORDERS,
    producer_id: int = -1,
    watermark: int = 0,
) -> FoundLog:
    path = f"/node-{node_id}/logs/{topic}-{partition}"
    return FoundLog(node_id, path, topic, partition, topic_id, end, epoch, producer_id, watermark)


def restored(*logs: FoundLog) -> ClusterImage:
    image = restored_image("cluster", logs, OWN, lambda: NEW)
    assert decode_image(encode_image(image)) == image
    for topic in image.topics.values():
        assert [partition.partition for partition in topic.partitions] == list(range(len(topic.partitions)))
        for partition in topic.partitions:
            assert partition.leader == NO_LEADER and partition.replicas and set(partition.isr) <= {*partition.replicas}
    return image


def test_restored_topics_keep_their_ids_partitions_and_replicas() -> None:
    offsets = UUID(int=2)
    image = restored(
        log(3), log(1), log(2), log(2, partition=1), log(3, partition=1),
        log(1, topic="__consumer_offsets", topic_id=offsets),
    )  # fmt: skip
    assert image.cluster_id == "cluster"
    orders = image.topics["orders"]
    assert (orders.id, orders.configs) == (ORDERS, KEEP_ALL)
    assert [partition.replicas for partition in orders.partitions] == [(1, 2, 3), (3, 2)], "leaders are spread"
    assert image.topics["__consumer_offsets"].configs == OWN["__consumer_offsets"]
    assert image.names_by_id == {ORDERS: "orders", offsets: "__consumer_offsets"}


def test_only_replicas_with_the_longest_log_are_in_sync() -> None:
    image = restored(log(1, 90, 4), log(2, 100, 3), log(3, 90, 4), log(4, 80, 4))
    (partition,) = image.topics["orders"].partitions
    assert (partition.replicas, partition.isr) == ((1, 2, 3, 4), (1, 3))
    assert partition.leader_epoch > 4


def test_a_partition_stays_offline_if_no_log_has_all_committed_records() -> None:
    image = restored(log(1, 90, 4, watermark=80), log(2, 0, -1, watermark=91))
    (partition,) = image.topics["orders"].partitions
    assert (partition.replicas, partition.isr) == ((1, 2), ())


def test_a_partition_without_a_log_is_restored_offline_on_the_nodes_of_its_topic() -> None:
    image = restored(log(1), log(2), log(1, partition=2), log(2, partition=2))
    _, missing, _ = image.topics["orders"].partitions
    assert (set(missing.replicas), missing.isr) == ({1, 2}, ())


def test_producer_ids_continue_after_the_highest_id_found_in_the_logs() -> None:
    assert restored(log(1, producer_id=5000), log(2, producer_id=7000)).next_producer_id > 7000


def test_restored_cluster_has_producer_ids_left_if_a_client_invented_the_highest_one() -> None:
    assert restored(log(1, producer_id=2**63 - 1)).next_producer_id < 2**63 - 1_000


def test_a_log_without_a_topic_id_uses_the_id_of_other_logs_or_a_new_id() -> None:
    assert restored(log(1, topic_id=None), log(2)).topics["orders"].id == ORDERS
    assert restored(log(1, topic_id=None)).topics["orders"].id == NEW


def test_two_topics_with_the_same_name_raise_a_conflict_that_names_both_logs() -> None:
    with pytest.raises(RestorationConflict, match=r"/node-1/logs/orders-0 and /node-2/logs/orders-1 .*move the logs"):
        restored(log(1), log(2, partition=1, topic_id=UUID(int=7)))
