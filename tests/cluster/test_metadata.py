"""All nodes report the same metadata, every node accepts every request, and no node leads more than its share."""

from __future__ import annotations

import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from tests.cluster.support_cluster import LocalNode, Nodes
from tests.cluster.support_offsets import seconds_until_followers_know
from tests.cluster.support_workload import PROGRESS, Workload
from tests.node.support_wire import batch, unique
from tests.support.eventually import eventually

from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

SPREAD_TIMEOUT_S = 60.0
MANY_PARTITIONS = 1_000
RESIDENT_BYTES_MAX = 100 * 1024 * 1024


def leaders(nodes: Nodes, topic: str) -> Counter[int]:
    return Counter(state.leader for state in nodes.partitions(topic).values())


def is_spread(nodes: Nodes, topic: str, partitions: int) -> bool:
    share = leaders(nodes, topic)
    assert sorted(share) == nodes.ids, f"led by {share}"
    assert max(share.values()) - min(share.values()) <= 1, f"led by {share}"
    assert share.total() == partitions
    return True


def offline_replicas(nodes: Nodes, topic: str, node_id: int) -> set[tuple[int, ...]]:
    """Return the offline replicas of the topic's partitions, as one node reports them."""
    answer = nodes.metadata(topic, node_id=node_id)
    return {tuple(state.offline_replicas) for state in answer.topics[0].partitions}


def metric(node: LocalNode, name: str) -> float:
    with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def test_every_node_lists_all_brokers_and_all_brokers_lead_an_equal_share(shared_nodes: Nodes) -> None:
    topic = shared_nodes.new_topic(9)
    assert is_spread(shared_nodes, topic, 9)
    for node_id in shared_nodes.ids:
        answer = shared_nodes.metadata(topic, node_id=node_id)
        named = {(int(broker.node_id), broker.port) for broker in answer.brokers}
        assert named == {(node.id, node.kafka.port) for node in shared_nodes}
        for state in answer.topics[0].partitions:
            assert sorted(state.replica_nodes) == shared_nodes.ids
            assert state.error_code is ErrorCode.none


@pytest.mark.timeout(180)
def test_a_restarted_node_leads_its_share_of_partitions_again(nodes: Nodes) -> None:
    topic = nodes.new_topic(6)
    assert is_spread(nodes, topic, 6)
    assert [offline_replicas(nodes, topic, node_id) for node_id in nodes.ids] == [{()}, {()}, {()}]
    nodes.kill(2)
    eventually(lambda: 2 not in leaders(nodes, topic), 30, "the others lead all of it")

    def is_named() -> bool:
        return all(offline_replicas(nodes, topic, other) == {(2,)} for other in (1, 3))

    eventually(is_named, 10, "node 2 is named as offline")
    nodes.start(2)
    eventually(lambda: is_spread(nodes, topic, 6), SPREAD_TIMEOUT_S, "node 2 leads its share again")
    assert [offline_replicas(nodes, topic, node_id) for node_id in nodes.ids] == [{()}, {()}, {()}]


def test_any_node_accepts_admin_requests_and_shows_their_effect_immediately(shared_nodes: Nodes) -> None:
    for node_id in shared_nodes.ids:
        name = unique("topic")
        with shared_nodes.connect(node_id) as client:
            wanted = {"name": name, "num_partitions": 3, "replication_factor": 3}
            made = client.call(ApiKey.CREATE_TOPICS, 7, {"topics": [wanted], "timeout": 10_000}).topics[0]
            assert made.error_code is ErrorCode.none, made.error_message
            assert len(client.metadata(name).topics[0].partitions) == 3
        # CreateTopics returns after the live replicas know the topic: the first request to each node succeeds.
        for other in shared_nodes.ids:
            with shared_nodes.connect(other) as client:
                assert client.metadata(name).topics[0].error_code is ErrorCode.none
                client.append(name, b"at once")
        with shared_nodes.connect(node_id) as client:
            gone = client.call(
                ApiKey.DELETE_TOPICS, 6, {"topics": [{"name": name, "topic_id": None}], "timeout": 10_000}
            ).responses[0]
            assert gone.error_code is ErrorCode.none
            assert client.metadata(name).topics[0].error_code is ErrorCode.unknown_topic_or_partition


def test_any_node_forwards_a_produced_record_to_the_leader_and_counts_it(shared_nodes: Nodes) -> None:
    topic = shared_nodes.new_topic(1)
    leader = shared_nodes.leader(topic)
    others = [node for node in shared_nodes.responsive if node.id != leader]
    before = [metric(node, "chronik_produce_forwarded_total") for node in others]
    for number, node in enumerate(others):
        with shared_nodes.connect(node.id) as client:
            for acks in (-1, 1):
                response = client.produce(topic, batch(b"%d/%d" % (number, acks)), acks=acks)
                assert response.error_code == 0, ErrorCode(response.error_code)
    after = [metric(node, "chronik_produce_forwarded_total") for node in others]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 2]
    with shared_nodes.connect(leader) as client:
        records = eventually(
            lambda: found if len(found := client.records(topic)) == 4 else None, 10, "all four are readable"
        )
    assert records is not None
    assert [record.value for record in records] == [b"0/-1", b"0/1", b"1/-1", b"1/1"]


@pytest.mark.timeout(300)
def test_a_thousand_new_partitions_do_not_disturb_a_running_producer(nodes: Nodes, tmp_path: Path) -> None:
    with Workload(nodes, nodes.new_topic(2), 2, members=0) as workload:
        workload.proceed(PROGRESS)
        wide = nodes.new_topic(MANY_PARTITIONS)
        assert len(nodes.partitions(wide)) == MANY_PARTITIONS
        assert is_spread(nodes, wide, MANY_PARTITIONS)
        workload.proceed(PROGRESS)
        workload.finish(tmp_path / "history.jsonl")
    nodes.no_surprises()


def test_followers_learn_the_high_watermark_without_further_requests(shared_nodes: Nodes) -> None:
    seconds_until_followers_know(shared_nodes, shared_nodes.new_topic(1), records=20)


def test_a_node_with_three_hundred_partitions_stays_below_its_memory_limit(nodes: Nodes) -> None:
    nodes.new_topic(300)
    nodes.wait_in_sync()
    for node_id in nodes.ids:
        assert nodes.resident_bytes(node_id) < RESIDENT_BYTES_MAX
