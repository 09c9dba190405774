"""`chronik cluster restore-metadata` on real processes: a cluster without any metadata.db keeps every record."""

from __future__ import annotations

import shutil
from uuid import UUID

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from tests.cli.run_chronik import Outcome, chronik
from tests.cluster.conftest import StartNodes
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_logs import (
    check_all_are_read,
    check_whole_again,
    cut_at_a_batch,
    filled_topic,
    is_listed_up_to,
    log_of,
    produce,
    remove,
)
from tests.support.eventually import eventually

from chronik.wire.api import ApiKey

RECORDS = 2_000
COMMITTED = 700
TIMEOUT_S = 60.0


def lose_metadata(nodes: Nodes) -> None:
    for node_id in nodes.ids:
        for path in nodes.data_folder(node_id).glob("metadata.db*"):
            path.unlink()


def restore(nodes: Nodes) -> Outcome:
    return chronik("cluster", "restore-metadata", "--dir", str(nodes.folder))


def topic_ids(nodes: Nodes, *topics: str) -> dict[str, UUID]:
    return {topic.name: topic.topic_id for topic in nodes.metadata(*topics).topics}


def new_producer_id(nodes: Nodes) -> int:
    with nodes.connect(nodes.ids[0]) as client:
        values = {"transactional_id": None, "transaction_timeout": 0, "producer_id": -1, "producer_epoch": -1}
        return int(client.call(ApiKey.INIT_PRODUCER_ID, 4, values).producer_id)


def commit(nodes: Nodes, topic: str, offset: int | None = None) -> int:
    """Commit `offset` if given, and return the group's committed offset."""
    consumer = Consumer({"bootstrap.servers": nodes.bootstrap, "group.id": "billing", "enable.auto.commit": False})
    try:
        if offset is not None:
            consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
        (found,) = consumer.committed([TopicPartition(topic, 0)], TIMEOUT_S)
    finally:
        consumer.close()
    return int(found.offset)


@pytest.mark.parametrize("is_clean", [True, False])
def test_restore_metadata_keeps_all_records_committed_offsets_and_producer_ids(nodes: Nodes, is_clean: bool) -> None:
    topic, wide = nodes.new_topic(1), nodes.new_topic(5)
    failed: list[object] = []

    def answered(error: object, _: object) -> None:
        if error is not None:
            failed.append(error)

    producer = Producer({"bootstrap.servers": nodes.bootstrap, "enable.idempotence": True, "batch.num.messages": 100})

    def go_on(first: int, count: int) -> None:
        for number in range(first, first + count):
            producer.produce(topic, f"record-{number}".encode(), partition=0, on_delivery=answered)
            producer.poll(0)
        assert producer.flush(TIMEOUT_S) == 0 and failed == []

    go_on(0, RECORDS)
    for partition in range(5):
        producer.produce(wide, f"wide-{partition}".encode(), partition=partition, on_delivery=answered)
    assert producer.flush(TIMEOUT_S) == 0 and failed == []
    assert commit(nodes, topic, COMMITTED) == COMMITTED
    nodes.wait_in_sync()
    ids = topic_ids(nodes, topic, wide, "__consumer_offsets")
    epochs = {index: state.epoch for index, state in nodes.partitions(wide).items()}
    used_id = new_producer_id(nodes)
    if is_clean:
        nodes.stop_all()
    else:
        nodes.kill_all()
    lose_metadata(nodes)

    done = restore(nodes)
    assert done.code == 0, done.err
    assert topic in done.out and wide in done.out and "lost: settings of topics" in done.out
    nodes.start_all()
    assert topic_ids(nodes, topic, wide, "__consumer_offsets") == ids
    nodes.wait_in_sync()
    assert commit(nodes, topic) == COMMITTED
    check_all_are_read(nodes, topic, RECORDS)
    # The same producer continues with its next sequence, and no other producer gets its id.
    go_on(RECORDS, 500)
    assert new_producer_id(nodes) > used_id
    assert commit(nodes, topic, COMMITTED + 1) == COMMITTED + 1
    partitions = nodes.partitions(wide)
    assert sorted(partitions) == [0, 1, 2, 3, 4]
    assert all(state.epoch > epochs[index] for index, state in partitions.items())
    assert len({state.replicas[0] for state in partitions.values()}) == len(nodes.ids), "preferred leaders are spread"
    check_whole_again(nodes, topic, RECORDS + 500)
    for node_id in nodes.ids:
        assert not (nodes.data_folder(node_id) / "set-aside").exists(), "every log belongs to a topic"
    described = chronik("topic", "describe", "__consumer_offsets", "--json", "-b", nodes.bootstrap).json()
    assert described["configs"]["cleanup.policy"] == "compact"
    # And again after another restart.
    nodes.kill_all()
    nodes.start_all()
    check_whole_again(nodes, topic, RECORDS + 500)


def test_restore_metadata_uses_the_longest_logs_after_nodes_failed_to_start(start_nodes: StartNodes) -> None:
    nodes = start_nodes(recovery_point_interval_ms=200)
    topic = filled_topic(nodes, RECORDS)
    whole, cut, empty = nodes.partitions(topic)[0].replicas
    eventually(lambda: is_listed_up_to(nodes, cut, RECORDS), what="the recovery point is written")
    nodes.kill_all()
    lose_metadata(nodes)
    for node_id in nodes.ids:
        nodes.launch(node_id)
    eventually(lambda: not nodes.responsive, TIMEOUT_S, "all nodes give up")
    cut_at_a_batch(log_of(nodes, cut, topic))
    for path in nodes.data_folder(empty).iterdir():
        if path.name != "node.toml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    done = restore(nodes)
    assert done.code == 0, done.err
    assert f"node {empty} joins the cluster again when it starts" in done.err
    nodes.start_all()
    nodes.wait_in_sync()
    assert nodes.leader(topic) == whole
    assert set(nodes.partitions(topic)[0].replicas) == {whole, cut}
    check_all_are_read(nodes, topic, RECORDS)
    produce(nodes, topic, RECORDS, 100)
    check_all_are_read(nodes, topic, RECORDS + 100)
    nodes.no_surprises()


def test_a_partition_without_metadata_and_logs_stays_offline_until_recovered(start_nodes: StartNodes) -> None:
    nodes = start_nodes(recovery_point_interval_ms=200)
    topic, whole = nodes.new_topic(1), nodes.new_topic(1)
    produce(nodes, topic, 0, RECORDS)
    produce(nodes, whole, 0, RECORDS)
    nodes.wait_in_sync()
    chosen = nodes.ids[1]
    eventually(lambda: is_listed_up_to(nodes, chosen, RECORDS), what="the recovery point is written")
    nodes.stop_all()
    lose_metadata(nodes)
    for node_id in nodes.ids:
        remove(log_of(nodes, node_id, topic))

    done = restore(nodes)
    assert done.code == 0, done.err
    assert f"{topic}-0 stays offline" in done.out
    nodes.start_all()
    check_all_are_read(nodes, whole, RECORDS)
    assert nodes.partitions(topic)[0].leader == -1
    at = ("--partition", "0", "--from", str(chosen), "--accept-loss", "-b", nodes.bootstrap)
    recovered = chronik("topic", "recover", topic, *at)
    assert recovered.code == 0, recovered.err
    produce(nodes, topic, 0, 100)
    check_whole_again(nodes, topic, 100)
