"""The APIs of share groups through the wire format, with the group service, its log and fake share coordinators."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from tests.groups.fake_broker import FakeBroker, with_broker
from tests.groups.play import GROUP

from chronik.node.apis import (
    alter_share_group_offsets,
    consumer_group_heartbeat,
    delete_groups,
    delete_share_group_offsets,
    describe_share_group_offsets,
    join_group,
    list_groups,
    offset_fetch,
    share_group_describe,
    share_group_heartbeat,
)
from chronik.shares.state import InitialState, SharePartitionKey
from chronik.wire.errors import ErrorCode


async def beat(broker: FakeBroker, member: str, epoch: int, **changes: Any) -> Any:
    values = {"group_id": GROUP, "member_id": member, "member_epoch": epoch, "subscribed_topic_names": None}
    return await broker.ask(share_group_heartbeat.API, 1, {**values, **changes})


async def join(broker: FakeBroker, member: str, *topics: str) -> Any:
    return await beat(broker, member, 0, subscribed_topic_names=topics or ("t",))


def partitions(answer: Any) -> dict[UUID, tuple[int, ...]]:
    return {topic.topic_id: topic.partitions for topic in answer.assignment.topic_partitions}


async def offsets(broker: FakeBroker, topics: dict[str, list[int]] | None = None, version: int = 1) -> Any:
    requested = topics and [{"topic_name": name, "partitions": indexes} for name, indexes in topics.items()]
    values = {"groups": [{"group_id": GROUP, "topics": requested}]}
    return (await broker.ask(describe_share_group_offsets.API, version, values)).groups[0]


async def alter(broker: FakeBroker, offsets: dict[tuple[str, int], int], group: str = GROUP) -> Any:
    topics = [
        {"topic_name": name, "partitions": [{"partition_index": index, "start_offset": offset}]}
        for (name, index), offset in offsets.items()
    ]
    return await broker.ask(alter_share_group_offsets.API, 0, {"group_id": group, "topics": topics})


async def delete(broker: FakeBroker, *topics: str) -> Any:
    values = {"group_id": GROUP, "topics": [{"topic_name": name} for name in topics]}
    return await broker.ask(delete_share_group_offsets.API, 0, values)


@with_broker()
async def test_a_member_joins_is_assigned_at_once_and_leaves(broker: FakeBroker) -> None:
    topic_id = await broker.create_topic("t", 2)
    answer = await join(broker, "m")
    assert (answer.error_code, answer.member_id) == (ErrorCode.none, "m")
    assert partitions(answer) == {topic_id: (0, 1)}, "the answer waits for the state of the partitions"
    epoch = answer.member_epoch
    assert set(broker.share_state.states) == {SharePartitionKey(GROUP, topic_id, index) for index in (0, 1)}
    assert (await beat(broker, "m", epoch)).assignment is None
    listed = await broker.ask(list_groups.API, 5, {"types_filter": ["Share"]})
    assert [(each.group_id, each.group_state, each.group_type, each.protocol_type) for each in listed.groups] == [
        (GROUP, "Stable", "share", "share")
    ]
    described = (await broker.ask(share_group_describe.API, 1, {"group_ids": [GROUP, "x"]})).groups
    assert [each.error_code for each in described] == [ErrorCode.none, ErrorCode.group_id_not_found]
    assert (described[0].group_epoch, described[0].assignor_name) == (epoch, "simple")
    assert described[0].members[0].assignment.topic_partitions[0].partitions == (0, 1)
    assert (await beat(broker, "m", -1)).member_epoch == -1
    listed = await broker.ask(list_groups.API, 5, {"states_filter": ["Empty"]})
    assert [each.group_id for each in listed.groups] == [GROUP]


@with_broker()
async def test_a_join_does_not_wait_long_for_a_silent_share_coordinator(broker: FakeBroker) -> None:
    topic_id = await broker.create_topic("t")
    broker.share_state.may_answer.clear()
    answer = await join(broker, "m")
    assert partitions(answer) == {}
    broker.share_state.may_answer.set()
    async with asyncio.timeout(5):
        while (answer := await beat(broker, "m", answer.member_epoch)).assignment is None:
            await asyncio.sleep(0.01)
    assert partitions(answer) == {topic_id: (0,)}


@with_broker()
async def test_other_protocols_cannot_use_a_share_group(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await join(broker, "m")
    heartbeat = {"group_id": GROUP, "member_id": "c", "member_epoch": 0, "rebalance_timeout": 1_000}
    heartbeat |= {"subscribed_topic_names": ["t"], "topic_partitions": []}
    answer = await broker.ask(consumer_group_heartbeat.API, 1, heartbeat)
    assert answer.error_code is ErrorCode.group_id_not_found
    values = {"group_id": GROUP, "session_timeout": 10_000, "rebalance_timeout": 10_000, "member_id": ""}
    values |= {"protocol_type": "consumer", "protocols": [{"name": "range", "metadata": b""}]}
    assert (await broker.ask(join_group.API, 7, values)).error_code is ErrorCode.inconsistent_group_protocol
    fetched = await broker.ask(offset_fetch.API, 8, {"groups": [{"group_id": GROUP, "topics": None}]})
    assert (fetched.groups[0].error_code, fetched.groups[0].topics) == (ErrorCode.none, ())


@with_broker()
async def test_a_consumer_group_refuses_members_of_share_groups(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    heartbeat = {"group_id": GROUP, "member_id": "c", "member_epoch": 0, "rebalance_timeout": 1_000}
    heartbeat |= {"subscribed_topic_names": ["t"], "topic_partitions": []}
    await broker.ask(consumer_group_heartbeat.API, 1, heartbeat)
    assert (await join(broker, "m")).error_code is ErrorCode.group_id_not_found
    assert (await alter(broker, {("t", 0): 3})).error_code is ErrorCode.group_id_not_found
    assert (await offsets(broker)).error_code is ErrorCode.group_id_not_found


@with_broker()
async def test_offsets_are_altered_described_and_deleted_while_the_group_is_empty(broker: FakeBroker) -> None:
    topic_id = await broker.create_topic("t", 2)
    await broker.create_topic("u")
    epoch = (await join(broker, "m")).member_epoch
    assert (await alter(broker, {("t", 0): 3})).error_code is ErrorCode.non_empty_group
    assert (await delete(broker, "t")).error_code is ErrorCode.non_empty_group
    await beat(broker, "m", -1)
    answer = await alter(broker, {("t", 0): 3, ("t", 7): 1, ("x", 0): 1, ("u", 0): -5})
    errors = [(topic.topic_name, each.error_code) for topic in answer.responses for each in topic.partitions]
    assert errors == [
        ("t", ErrorCode.none),
        ("t", ErrorCode.unknown_topic_or_partition),
        ("x", ErrorCode.unknown_topic_or_partition),
        ("u", ErrorCode.invalid_request),
    ]
    state = broker.share_state.states[SharePartitionKey(GROUP, topic_id, 0)]
    assert state == InitialState(state.state_epoch, 3)
    assert state.state_epoch > epoch, "the leader notices a new state epoch"
    described = await offsets(broker, {"t": [0, 1, 9], "u": [0]})
    found = {
        (topic.topic_name, each.partition_index): (each.start_offset, each.lag, each.error_code)
        for topic in described.topics
        for each in topic.partitions
    }
    none, unknown = ErrorCode.none, ErrorCode.unknown_topic_or_partition
    assert found[("t", 0)] == (3, 6, none), "10 records, 3 before the start, 1 that is done after it"
    assert found[("t", 1)] == (-1, -1, none), "nothing was fetched so far"
    assert found[("t", 9)] == (-1, -1, unknown)
    assert found[("u", 0)] == (-1, -1, none), "the group has never read it"
    assert [topic.topic_name for topic in (await offsets(broker, version=0)).topics] == ["t"]
    deleted = await delete(broker, "t", "u", "x")
    assert [each.error_code for each in deleted.responses] == [none, none, unknown]
    assert not broker.share_state.states
    assert not (await offsets(broker)).topics


@with_broker()
async def test_altering_offsets_creates_the_group(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    assert (await alter(broker, {("t", 0): 5})).error_code is ErrorCode.none
    assert (await offsets(broker, {"t": [0]})).topics[0].partitions[0].start_offset == 5
    assert partitions(await join(broker, "m")), "the state that a client made is kept"
    assert (await offsets(broker, {"t": [0]})).topics[0].partitions[0].start_offset == 5


@with_broker()
async def test_a_group_is_deleted_with_the_state_of_its_partitions(broker: FakeBroker) -> None:
    await broker.create_topic("t", 2)
    await join(broker, "m")

    async def delete_group() -> ErrorCode:
        answer = await broker.ask(delete_groups.API, 2, {"groups_names": [GROUP]})
        error = answer.results[0].error_code
        assert isinstance(error, ErrorCode)
        return error

    assert await delete_group() is ErrorCode.non_empty_group
    await beat(broker, "m", -1)
    broker.share_state.error = ErrorCode.coordinator_not_available
    assert await delete_group() is ErrorCode.coordinator_not_available, "its state would be left behind"
    assert (await offsets(broker)).error_code is ErrorCode.none, "the group is still there"
    broker.share_state.error = ErrorCode.none
    assert await delete_group() is ErrorCode.none, "the interrupted deletion is repeated"
    assert not broker.share_state.states
    assert await delete_group() is ErrorCode.group_id_not_found


@with_broker()
async def test_a_member_cannot_join_while_offsets_are_altered(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await join(broker, "m")
    await beat(broker, "m", -1)
    broker.share_state.may_answer.clear()
    asked = broker.share_state.call_count
    altering = asyncio.create_task(alter(broker, {("t", 0): 5}))
    async with asyncio.timeout(5):
        while broker.share_state.call_count == asked:
            await asyncio.sleep(0)
    assert (await join(broker, "m")).error_code is ErrorCode.coordinator_load_in_progress
    broker.share_state.may_answer.set()
    assert (await altering).responses[0].partitions[0].error_code is ErrorCode.none
    assert (await join(broker, "m")).error_code is ErrorCode.none
