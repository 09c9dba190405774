"""ConsumerGroupHeartbeat and ConsumerGroupDescribe through the wire format, with the group service and its log."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest
from tests.groups.fake_broker import FakeBroker, with_broker
from tests.groups.play import GROUP

from chronik.node.apis import (
    consumer_group_describe,
    consumer_group_heartbeat,
    describe_groups,
    list_groups,
    offset_commit,
    offset_fetch,
)
from chronik.wire.errors import ErrorCode, KafkaError


async def beat(broker: FakeBroker, member: str, epoch: int, version: int = 1, **changes: Any) -> Any:
    values = {
        "group_id": GROUP,
        "member_id": member,
        "member_epoch": epoch,
        "rebalance_timeout": -1,
        "subscribed_topic_names": None,
        "topic_partitions": None,
    }
    return await broker.ask(consumer_group_heartbeat.API, version, {**values, **changes})


async def join(broker: FakeBroker, member: str, version: int = 1, **changes: Any) -> Any:
    first = {"rebalance_timeout": 10_000, "subscribed_topic_names": ["t"], "topic_partitions": []}
    return await beat(broker, member, 0, version, **{**first, **changes})


def partitions(answer: Any) -> dict[UUID, tuple[int, ...]]:
    return {topic.topic_id: topic.partitions for topic in answer.assignment.topic_partitions}


@pytest.mark.parametrize("version", [0, 1])
@with_broker()
async def test_a_member_joins_commits_and_leaves(broker: FakeBroker, version: int) -> None:
    topic_id = await broker.create_topic("t", 2)
    answer = await join(broker, "" if version == 0 else "m", version)
    member = answer.member_id
    assert member if version == 0 else member == "m"
    assert (answer.error_code, answer.member_epoch) == (ErrorCode.none, 1)
    assert partitions(answer) == {topic_id: (0, 1)}
    assert (await beat(broker, member, 1, version)).assignment is None
    listed = await broker.ask(list_groups.API, 5, {"types_filter": ["Consumer"]})
    assert [(each.group_id, each.group_state, each.group_type) for each in listed.groups] == [
        (GROUP, "Stable", "consumer")
    ]
    described = (await broker.ask(consumer_group_describe.API, version, {"group_ids": [GROUP, "x"]})).groups
    assert [each.error_code for each in described] == [ErrorCode.none, ErrorCode.group_id_not_found]
    assert described[0].members[0].target_assignment.topic_partitions[0].partitions == (0, 1)
    dead = (await broker.ask(describe_groups.API, 6, {"groups": [GROUP]})).groups[0]
    assert (dead.error_code, dead.group_state) == (ErrorCode.group_id_not_found, "Dead")

    async def commit(epoch: int) -> ErrorCode:
        entry = {"partition_index": 0, "committed_offset": 3, "committed_metadata": ""}
        values = {
            "group_id": GROUP,
            "member_id": member,
            "generation_id_or_member_epoch": epoch,
            "topics": [{"topic_id": topic_id, "partitions": [entry]}],
        }
        answer = await broker.ask(offset_commit.API, 10, values)
        error = answer.topics[0].partitions[0].error_code
        assert isinstance(error, ErrorCode)
        return error

    async def fetch(epoch: int) -> Any:
        group = {
            "group_id": GROUP,
            "member_id": member,
            "member_epoch": epoch,
            "topics": [{"topic_id": topic_id, "partition_indexes": [0]}],
        }
        return (await broker.ask(offset_fetch.API, 10, {"groups": [group]})).groups[0]

    assert await commit(1) is ErrorCode.none
    assert await commit(0) is ErrorCode.stale_member_epoch
    assert (await fetch(1)).topics[0].partitions[0].committed_offset == 3
    assert (await fetch(2)).error_code is ErrorCode.stale_member_epoch
    assert (await beat(broker, member, -1, version)).member_epoch == -1
    assert (await beat(broker, member, 1, version)).error_code is ErrorCode.unknown_member_id


@with_broker()
async def test_an_expression_follows_topics_that_come_and_go(broker: FakeBroker) -> None:
    await broker.create_topic("logs-a")
    answer = await join(broker, "m", subscribed_topic_names=[], subscribed_topic_regex="logs-.*")
    assert len(partitions(answer)) == 1
    added = await broker.create_topic("logs-b")
    assert added in partitions(await beat(broker, "m", 1))
    invalid = await beat(broker, "m", 2, subscribed_topic_regex="(")
    assert invalid.error_code is ErrorCode.invalid_regular_expression
    assert "(" in invalid.error_message
    await broker.delete_topic("logs-b")
    answer = await beat(broker, "m", 2)
    assert added not in partitions(answer)


@with_broker()
async def test_a_new_coordinator_loads_the_group(broker: FakeBroker) -> None:
    await broker.create_topic("t", 2)
    await join(broker, "m")
    await join(broker, "n")
    again = FakeBroker(broker.logs)
    again.metadata.image = broker.metadata.image
    again.groups.metadata_changed(again.metadata.image, [])
    await again.start()
    answer = await beat(again, "m", 1)
    while answer.error_code in (ErrorCode.coordinator_load_in_progress, ErrorCode.not_coordinator):
        await asyncio.sleep(0.01)
        answer = await beat(again, "m", 1)
    assert answer.error_code is ErrorCode.none
    assert sum(map(len, partitions(answer).values())) == 1, "it must revoke one partition"
    await again.stop()


@with_broker()
async def test_a_failed_append_is_an_error_after_which_clients_retry(broker: FakeBroker) -> None:
    await broker.create_topic("t", 2)
    await join(broker, "m")
    broker.append_error = KafkaError(ErrorCode.not_enough_replicas)
    assert (await join(broker, "n")).error_code is ErrorCode.coordinator_not_available
    broker.append_error = None
    assert (await join(broker, "n")).error_code is ErrorCode.none
    broker.has_lease = False
    assert (await beat(broker, "m", 1)).error_code is ErrorCode.not_coordinator
