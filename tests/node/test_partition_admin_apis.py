"""ElectLeaders and the two reassignment APIs, through the wire format of every supported version."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.node.test_admin_apis import FakeBroker, call, create, running, versions, wanted

from chronik.metadata.commands import Assignment, ChangePartition, CreateTopic, FenceBroker, RegisterBroker
from chronik.node.apis import (
    alter_partition_reassignments,
    alter_replica_log_dirs,
    elect_leaders,
    list_partition_reassignments,
)
from chronik.wire.errors import ErrorCode, KafkaError

ORDERS = UUID(int=50)
PREFERRED, UNCLEAN = 0, 1


async def three_brokers(broker: FakeBroker, *isr: int) -> None:
    """Create topic orders with one partition on brokers 1, 2 and 3 and the given ISR."""
    for number in (2, 3, 4):
        await broker.metadata.propose(RegisterBroker(number, UUID(int=number), "h", number))
    replicas = (1, 2, 3)
    await broker.metadata.propose(CreateTopic("orders", ORDERS, (Assignment(replicas, isr or replicas),)))


def orders(broker: FakeBroker) -> Any:
    return broker.image.topics["orders"].partitions[0]


async def elect(broker: FakeBroker, kind: int, *partitions: int, version: int = 2) -> list[tuple[int, ErrorCode]]:
    named = [{"topic": "orders", "partitions": list(partitions)}] if partitions else None
    values = {"election_type": kind, "topic_partitions": named, "timeout": 5000}
    answer = await call(broker, elect_leaders.API, values, version)
    assert getattr(answer, "error_code", ErrorCode.none) == ErrorCode.none
    return [
        (result.partition_id, result.error_code)
        for topic in answer.replica_election_results
        for result in topic.partition_result
    ]


async def move(broker: FakeBroker, replicas: list[int] | None, version: int = 1, **fields: Any) -> ErrorCode:
    partitions = [{"partition_index": 0, "replicas": replicas}]
    values = {"timeout": 5000, "topics": [{"name": "orders", "partitions": partitions}], **fields}
    answer = await call(broker, alter_partition_reassignments.API, values, version)
    (topic,) = answer.responses
    (result,) = topic.partitions
    assert topic.name == "orders" and result.partition_index == 0
    assert (result.error_message is None) == (result.error_code == ErrorCode.none)
    code: ErrorCode = result.error_code
    return code


async def listed(broker: FakeBroker, *partitions: int) -> list[tuple[Any, ...]]:
    topics = [{"name": "orders", "partition_indexes": list(partitions)}] if partitions else None
    answer = await call(broker, list_partition_reassignments.API, {"timeout": 5000, "topics": topics})
    return [
        (topic.name, each.partition_index, each.replicas, each.adding_replicas, each.removing_replicas)
        for topic in answer.topics
        for each in topic.partitions
    ]


@pytest.mark.parametrize("version", versions(elect_leaders.API))
async def test_an_in_sync_preferred_leader_is_elected_once(tmp_path: Path, version: int) -> None:
    async with running(tmp_path) as broker:
        await three_brokers(broker)
        await broker.metadata.propose(ChangePartition(ORDERS, 0, 0, 2, (1, 2, 3)))
        assert await elect(broker, PREFERRED, 0, 7, version=version) == [
            (0, ErrorCode.none),
            (7, ErrorCode.unknown_topic_or_partition),
        ]
        assert orders(broker).leader == 1
        assert await elect(broker, PREFERRED, 0, version=version) == [(0, ErrorCode.election_not_needed)]


async def test_an_election_without_a_list_covers_all_partitions_that_need_one(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await three_brokers(broker)
        assert await elect(broker, PREFERRED) == []
        await broker.metadata.propose(ChangePartition(ORDERS, 0, 0, 2, (2, 3)))
        assert await elect(broker, PREFERRED) == [(0, ErrorCode.preferred_leader_not_available)]
        await broker.metadata.propose(ChangePartition(ORDERS, 0, 1, 2, (1, 2, 3)))
        assert await elect(broker, PREFERRED) == [(0, ErrorCode.none)]


async def test_an_unclean_election_picks_a_live_replica_only_if_there_is_no_leader(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await three_brokers(broker)
        assert await elect(broker, UNCLEAN, 0) == [(0, ErrorCode.election_not_needed)]
        await broker.metadata.propose(ChangePartition(ORDERS, 0, 0, -1, (2,)))
        await broker.metadata.propose(FenceBroker(2, broker.image.brokers[2].epoch))
        assert await elect(broker, UNCLEAN, 0) == [(0, ErrorCode.none)]
        assert (orders(broker).leader, orders(broker).isr) == (1, (1,))
        with pytest.raises(KafkaError):
            await elect(broker, 5, 0)


@pytest.mark.parametrize("version", versions(alter_partition_reassignments.API))
async def test_a_reassignment_is_started_listed_and_cancelled(tmp_path: Path, version: int) -> None:
    async with running(tmp_path) as broker:
        await three_brokers(broker)
        assert await listed(broker) == []
        assert await move(broker, None, version) == ErrorCode.no_reassignment_in_progress
        assert await move(broker, [1, 2, 4], version) == ErrorCode.none
        expected = [("orders", 0, (1, 2, 4, 3), (4,), (3,))]
        assert await listed(broker) == await listed(broker, 0, 5) == expected
        assert await listed(broker, 1) == []
        assert await move(broker, None, version) == ErrorCode.none
        assert await listed(broker) == []
        assert orders(broker).replicas == (1, 2, 3)


async def test_an_invalid_reassignment_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await three_brokers(broker)
        for replicas in ([], [1, 1], [1, 9]):
            assert await move(broker, replicas) == ErrorCode.invalid_replica_assignment
        kept = {"allow_replication_factor_change": False}
        assert await move(broker, [1, 2], **kept) == ErrorCode.invalid_replication_factor
        assert await move(broker, [1, 2]) == ErrorCode.none
        assert orders(broker).replicas == (1, 2)


async def test_a_new_topic_stores_the_nodes_default_min_insync_replicas(tmp_path: Path) -> None:
    async with running(tmp_path, topic_defaults={"min.insync.replicas": 3}) as broker:
        await create(broker, wanted("by-default"), wanted("by-choice", min_insync_replicas="2"))
        assert broker.image.topics["by-default"].configs == {"min.insync.replicas": "3"}
        assert broker.image.topics["by-choice"].configs == {"min.insync.replicas": "2"}


@pytest.mark.parametrize("version", versions(alter_replica_log_dirs.API))
async def test_a_replica_can_only_be_moved_to_the_folder_where_it_is(tmp_path: Path, version: int) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("orders", 2))
        own = broker.runtime.config.data_folder
        dirs = [
            {"path": path, "topics": [{"name": name, "partitions": [0, 5]}]}
            for path, name in ((own, "orders"), ("/elsewhere", "orders"), (own, "missing"))
        ]
        answer = await call(broker, alter_replica_log_dirs.API, {"dirs": dirs}, version)
        assert [
            (result.topic_name, [partition.error_code for partition in result.partitions]) for result in answer.results
        ] == [
            ("orders", [ErrorCode.none, ErrorCode.replica_not_available]),
            ("orders", [ErrorCode.log_dir_not_found] * 2),
            ("missing", [ErrorCode.replica_not_available] * 2),
        ]
