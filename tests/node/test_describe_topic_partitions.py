"""DescribeTopicPartitions: pages of partitions, in the order of topics and partitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.node.support_wire import WireClient, connect, unique
from tests.support.node import Node

from chronik.authorization.acls import ResourceType
from chronik.node.serving.access import OPEN_ACCESS
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


@pytest.fixture
def client(shared_node: Node) -> Iterator[WireClient]:
    with connect(shared_node) as client:
        yield client


def describe(client: WireClient, *topics: str, limit: int = 2000, cursor: tuple[str, int] | None = None) -> Any:
    values = {
        "topics": [{"name": name} for name in topics],
        "response_partition_limit": limit,
        "cursor": None if cursor is None else {"topic_name": cursor[0], "partition_index": cursor[1]},
    }
    return client.call(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, values)


def partitions(answer: Any) -> list[tuple[str, int]]:
    return [(topic.name, partition.partition_index) for topic in answer.topics for partition in topic.partitions]


def cursor_of(answer: Any) -> tuple[str, int] | None:
    cursor = answer.next_cursor
    return None if cursor is None else (cursor.topic_name, cursor.partition_index)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
def test_pages_together_describe_every_partition_once(client: WireClient, limit: int) -> None:
    prefix = unique("paged")
    names = [f"{prefix}-{letter}" for letter in "abc"]
    for name, count in zip(names, (2, 1, 3), strict=True):
        client.create_topic(name, partitions=count)
    missing = f"{prefix}-b-missing"
    found: list[tuple[str, int]] = []
    cursor: tuple[str, int] | None = None
    errors: set[tuple[str, int]] = set()
    while True:
        answer = describe(client, names[2], missing, names[0], names[1], limit=limit, cursor=cursor)
        assert len(partitions(answer)) <= limit
        found += partitions(answer)
        errors |= {(topic.name, topic.error_code) for topic in answer.topics if topic.error_code}
        cursor = cursor_of(answer)
        if cursor is None:
            break
    assert found == [(names[0], 0), (names[0], 1), (names[1], 0), (names[2], 0), (names[2], 1), (names[2], 2)]
    assert errors == {(missing, ErrorCode.unknown_topic_or_partition)}


def test_a_description_has_what_metadata_has_and_the_eligible_leaders(client: WireClient) -> None:
    name = client.new_topic(partitions=2)
    (known,) = client.call(ApiKey.METADATA, 13, {"topics": [{"name": name}]}).topics
    (topic,) = describe(client, name).topics
    assert (topic.name, topic.topic_id, topic.is_internal) == (name, known.topic_id, False)
    assert topic.topic_authorized_operations == OPEN_ACCESS.authorized_operations(ResourceType.TOPIC)
    for partition, same in zip(topic.partitions, known.partitions, strict=True):
        for field in ("partition_index", "leader_id", "leader_epoch", "replica_nodes", "isr_nodes", "offline_replicas"):
            assert getattr(partition, field) == getattr(same, field)
        assert (partition.eligible_leader_replicas, partition.last_known_elr) == ((), ())


def test_without_names_all_topics_are_described_from_the_cursor_on(client: WireClient) -> None:
    first, second = sorted((client.new_topic(), client.new_topic(partitions=3)))
    assert {(first, 0), (second, 0)} <= set(partitions(describe(client)))
    found = partitions(describe(client, cursor=(second, 1)))
    assert (second, 0) not in found
    assert all(name >= second for name, _ in found)
    # The cursor's topic may be deleted between two pages.
    gone = second + "-deleted"
    assert all(name > gone for name, _ in partitions(describe(client, cursor=(gone, 7))))


def test_invalid_names_and_cursors_are_refused_and_nothing_is_created(client: WireClient) -> None:
    (topic,) = describe(client, "no/such").topics
    assert topic.error_code == ErrorCode.invalid_topic_exception
    name = unique("never")
    assert describe(client, name).topics[0].error_code == ErrorCode.unknown_topic_or_partition
    assert describe(client, name).topics[0].error_code == ErrorCode.unknown_topic_or_partition
    (refused,) = describe(client, name, cursor=(name, -1)).topics
    assert refused.error_code == ErrorCode.invalid_request
