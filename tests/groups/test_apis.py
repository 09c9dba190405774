"""The group APIs in every advertised version, through the wire format of that version."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest
from tests.groups.fake_broker import FakeBroker, with_broker
from tests.groups.play import GROUP, subscription

from chronik.node.apis import (
    delete_groups,
    describe_groups,
    find_coordinator,
    heartbeat,
    join_group,
    leave_group,
    list_groups,
    offset_commit,
    offset_delete,
    offset_fetch,
    sync_group,
    txn_offset_commit,
)
from chronik.wire.errors import ErrorCode

MODULES = (
    delete_groups,
    describe_groups,
    find_coordinator,
    heartbeat,
    join_group,
    leave_group,
    list_groups,
    offset_commit,
    offset_delete,
    offset_fetch,
    sync_group,
    txn_offset_commit,
)


def versions(module: Any) -> range:
    lowest, highest = module.API.versions
    return range(lowest, highest + 1)


async def join(broker: FakeBroker, version: int = 5, member_id: str = "", **changes: Any) -> Any:
    values = {
        "group_id": GROUP,
        "session_timeout": 10_000,
        "rebalance_timeout": 60_000,
        "member_id": member_id,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": subscription("t")}],
        **changes,
    }
    return await broker.ask(join_group.API, version, values)


async def stable_member(broker: FakeBroker) -> str:
    """A group with one member in generation 1."""
    joined = await join(broker, 3)
    assignments = [{"member_id": joined.member_id, "assignment": b"A"}]
    values = {"group_id": GROUP, "generation_id": 1, "member_id": joined.member_id, "assignments": assignments}
    await broker.ask(sync_group.API, 3, values)
    return str(joined.member_id)


@pytest.mark.parametrize("version", versions(find_coordinator))
@with_broker()
async def test_find_coordinator_returns_the_coordinator(broker: FakeBroker, version: int) -> None:
    answer = await broker.ask(find_coordinator.API, version, {"key": GROUP, "coordinator_keys": [GROUP]})
    found = answer.coordinators[0] if version >= 4 else answer
    assert found.error_code is ErrorCode.none
    assert (found.node_id, found.host, found.port) == (1, "localhost", 9092)
    if version >= 4:
        assert found.key == GROUP


@with_broker()
async def test_find_coordinator_refuses_an_invalid_group_id(broker: FakeBroker) -> None:
    """Hashing a name takes time, and an untrusted client could send names of many megabytes."""
    answer = await broker.ask(find_coordinator.API, 6, {"coordinator_keys": ["x" * 20_000_000, GROUP]})
    errors = [found.error_code for found in answer.coordinators]
    assert errors == [ErrorCode.invalid_group_id, ErrorCode.none]


@pytest.mark.parametrize("version", versions(join_group))
@with_broker()
async def test_join_requires_a_member_id_from_version_4_on(broker: FakeBroker, version: int) -> None:
    answer = await join(broker, version)
    if version >= 4:
        assert answer.error_code is ErrorCode.member_id_required
        assert answer.generation_id == -1
        assert answer.protocol_name == ("" if version < 7 else None)
        answer = await join(broker, version, answer.member_id)
    assert answer.error_code is ErrorCode.none
    assert answer.generation_id == 1
    assert answer.leader == answer.member_id
    assert answer.protocol_name == "range"
    assert [each.metadata for each in answer.members] == [subscription("t")]
    if version >= 7:
        assert answer.protocol_type == "consumer"


@pytest.mark.parametrize("version", range(5, 10))
@with_broker()
async def test_static_member_joins_in_one_step(broker: FakeBroker, version: int) -> None:
    answer = await join(broker, version, group_instance_id="a")
    assert answer.error_code is ErrorCode.none
    assert answer.members[0].group_instance_id == "a"


@pytest.mark.parametrize("version", versions(sync_group))
@with_broker()
async def test_sync_returns_the_assignment(broker: FakeBroker, version: int) -> None:
    member = (await join(broker, 3)).member_id
    values = {
        "group_id": GROUP,
        "generation_id": 1,
        "member_id": member,
        "protocol_type": "consumer",
        "protocol_name": "range",
        "assignments": [{"member_id": member, "assignment": b"A"}],
    }
    answer = await broker.ask(sync_group.API, version, values)
    assert answer.error_code is ErrorCode.none
    assert answer.assignment == b"A"
    if version >= 5:
        assert (answer.protocol_type, answer.protocol_name) == ("consumer", "range")
    values["generation_id"] = 9
    assert (await broker.ask(sync_group.API, version, values)).error_code is ErrorCode.illegal_generation


@pytest.mark.parametrize("version", versions(heartbeat))
@with_broker()
async def test_heartbeat_succeeds_only_for_known_members(broker: FakeBroker, version: int) -> None:
    member = await stable_member(broker)
    values = {"group_id": GROUP, "generation_id": 1, "member_id": member}
    assert (await broker.ask(heartbeat.API, version, values)).error_code is ErrorCode.none
    values["member_id"] = "ghost"
    assert (await broker.ask(heartbeat.API, version, values)).error_code is ErrorCode.unknown_member_id


@pytest.mark.parametrize("version", versions(leave_group))
@with_broker()
async def test_leave_group_removes_only_known_members(broker: FakeBroker, version: int) -> None:
    member = await stable_member(broker)

    async def leave(member_id: str) -> ErrorCode:
        values = {"group_id": GROUP, "member_id": member_id, "members": [{"member_id": member_id}]}
        answer = await broker.ask(leave_group.API, version, values)
        if version < 3:
            return ErrorCode(answer.error_code)
        assert answer.error_code is ErrorCode.none
        assert answer.members[0].member_id == member_id
        return ErrorCode(answer.members[0].error_code)

    assert await leave("ghost") is ErrorCode.unknown_member_id
    assert await leave(member) is ErrorCode.none
    assert await leave(member) is ErrorCode.unknown_member_id


@pytest.mark.parametrize("version", versions(describe_groups))
@with_broker()
async def test_describe_groups_returns_known_and_unknown_groups(broker: FakeBroker, version: int) -> None:
    member = await stable_member(broker)
    answer = await broker.ask(describe_groups.API, version, {"groups": [GROUP, "nobody"]})
    known, unknown = answer.groups
    assert (known.group_id, known.group_state, known.protocol_data) == (GROUP, "Stable", "range")
    assert [each.member_id for each in known.members] == [member]
    assert known.members[0].client_host == "/127.0.0.1"
    assert known.members[0].member_assignment == b"A"
    assert unknown.group_state == "Dead"
    if version >= 6:
        assert unknown.error_code is ErrorCode.group_id_not_found
        assert "nobody" in unknown.error_message
    else:
        assert unknown.error_code is ErrorCode.none


@pytest.mark.parametrize("version", versions(list_groups))
@with_broker()
async def test_list_groups_filters_by_state_and_type(broker: FakeBroker, version: int) -> None:
    await stable_member(broker)

    async def names(**filters: list[str]) -> list[str]:
        answer = await broker.ask(list_groups.API, version, filters)
        assert answer.error_code is ErrorCode.none
        return [group.group_id for group in answer.groups]

    assert await names() == [GROUP]
    if version >= 4:
        assert await names(states_filter=["stable"]) == [GROUP]
        assert await names(states_filter=["Empty"]) == []
    if version >= 5:
        assert await names(types_filter=["Classic"]) == [GROUP]
        assert await names(types_filter=["consumer"]) == []


@pytest.mark.parametrize("version", versions(delete_groups))
@with_broker()
async def test_delete_groups_deletes_only_empty_groups(broker: FakeBroker, version: int) -> None:
    member = await stable_member(broker)

    async def delete() -> list[ErrorCode]:
        answer = await broker.ask(delete_groups.API, version, {"groups_names": [GROUP, "nobody"]})
        if version >= 3:
            assert [bool(result.error_message) for result in answer.results] == [
                result.error_code is not ErrorCode.none for result in answer.results
            ]
        return [result.error_code for result in answer.results]

    assert await delete() == [ErrorCode.non_empty_group, ErrorCode.group_id_not_found]
    await broker.ask(leave_group.API, 1, {"group_id": GROUP, "member_id": member})
    assert await delete() == [ErrorCode.none, ErrorCode.group_id_not_found]


def topic_key(version: int, name: str, topic_id: UUID) -> dict[str, Any]:
    return {"topic_id": topic_id} if version >= 10 else {"name": name}


def offset_of(answer: Any, version: int) -> list[tuple[int, int, str, ErrorCode]]:
    group = answer.groups[0] if version >= 8 else answer
    if version >= 2:
        assert group.error_code is ErrorCode.none
    return [
        (each.partition_index, each.committed_offset, each.metadata, each.error_code)
        for topic in group.topics
        for each in topic.partitions
    ]


def fetch_values(version: int, topics: list[dict[str, Any]] | None, group_id: str = GROUP) -> dict[str, Any]:
    if version >= 8:
        return {"groups": [{"group_id": group_id, "topics": topics}], "require_stable": True}
    return {"group_id": group_id, "topics": topics}


@pytest.mark.parametrize("version", versions(offset_commit))
@with_broker()
async def test_offset_commit_returns_an_error_code_for_each_partition(broker: FakeBroker, version: int) -> None:
    topic_id = await broker.create_topic("t")
    partitions = [
        {"partition_index": 0, "committed_offset": 7, "committed_metadata": None},
        {"partition_index": 1, "committed_offset": 7, "committed_metadata": ""},
    ]
    unknown_id = UUID(int=99)
    values = {
        "group_id": GROUP,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "topics": [
            {**topic_key(version, "t", topic_id), "partitions": partitions},
            {**topic_key(version, "nope", unknown_id), "partitions": partitions[:1]},
        ],
    }
    answer = await broker.ask(offset_commit.API, version, values)
    errors = [[each.error_code for each in topic.partitions] for topic in answer.topics]
    unknown = ErrorCode.unknown_topic_or_partition
    assert errors == [[ErrorCode.none, unknown], [ErrorCode.unknown_topic_id if version >= 10 else unknown]]
    if version >= 10:
        assert [topic.topic_id for topic in answer.topics] == [topic_id, unknown_id]
    else:
        assert [topic.name for topic in answer.topics] == ["t", "nope"]
    fetched = await broker.ask(offset_fetch.API, 5, fetch_values(5, None))
    assert offset_of(fetched, 5) == [(0, 7, "", ErrorCode.none)]


@pytest.mark.parametrize("version", versions(offset_fetch))
@with_broker()
async def test_offset_fetch_returns_minus_one_for_missing_offsets_without_an_error(
    broker: FakeBroker, version: int
) -> None:
    topic_id = await broker.create_topic("t", 2)
    partition = {
        "partition_index": 0,
        "committed_offset": 7,
        "committed_leader_epoch": 3,
        "committed_metadata": "why",
    }
    values = {"group_id": GROUP, "member_id": "", "topics": [{"name": "t", "partitions": [partition]}]}
    await broker.ask(offset_commit.API, 8, values)
    wanted = [{**topic_key(version, "t", topic_id), "partition_indexes": [0, 1]}]
    both = [(0, 7, "why", ErrorCode.none), (1, -1, "", ErrorCode.none)]
    assert offset_of(await broker.ask(offset_fetch.API, version, fetch_values(version, wanted)), version) == both
    strangers = await broker.ask(offset_fetch.API, version, fetch_values(version, wanted, "nobody"))
    assert [each[1] for each in offset_of(strangers, version)] == [-1, -1]
    if version >= 2:
        answer = await broker.ask(offset_fetch.API, version, fetch_values(version, None))
        assert offset_of(answer, version) == both[:1]
    if version >= 10:
        unknown = [{"topic_id": UUID(int=99), "partition_indexes": [0]}]
        answer = await broker.ask(offset_fetch.API, version, fetch_values(version, unknown))
        assert offset_of(answer, version) == [(0, -1, "", ErrorCode.unknown_topic_id)]


@pytest.mark.parametrize("version", versions(offset_fetch))
@with_broker()
async def test_offset_fetch_reports_not_coordinator_in_every_version(broker: FakeBroker, version: int) -> None:
    topic_id = await broker.create_topic("t")
    await broker.groups.topic.ensure_exists()
    await broker.groups.stop()
    wanted = [{**topic_key(version, "t", topic_id), "partition_indexes": [0]}]
    answer = await broker.ask(offset_fetch.API, version, fetch_values(version, wanted))
    if version >= 8:
        assert answer.groups[0].error_code is ErrorCode.not_coordinator
    elif version >= 2:
        assert answer.error_code is ErrorCode.not_coordinator
    else:
        assert answer.topics[0].partitions[0].error_code is ErrorCode.not_coordinator


@with_broker()
async def test_offset_delete_returns_an_error_code_for_each_partition(broker: FakeBroker) -> None:
    await broker.create_topic("t", 2)
    partition = {"partition_index": 0, "committed_offset": 7, "committed_metadata": ""}
    values = {"group_id": GROUP, "member_id": "", "topics": [{"name": "t", "partitions": [partition]}]}
    await broker.ask(offset_commit.API, 8, values)
    topics = [{"name": "t", "partitions": [{"partition_index": 0}, {"partition_index": 5}]}]
    answer = await broker.ask(offset_delete.API, 0, {"group_id": GROUP, "topics": topics})
    assert answer.error_code is ErrorCode.none
    errors = [each.error_code for each in answer.topics[0].partitions]
    assert errors == [ErrorCode.none, ErrorCode.unknown_topic_or_partition]
    answer = await broker.ask(offset_delete.API, 0, {"group_id": "nobody", "topics": topics})
    assert answer.error_code is ErrorCode.group_id_not_found


@pytest.mark.parametrize(
    ("module", "version"), [(module, version) for module in MODULES for version in versions(module)]
)
@with_broker()
async def test_stopped_node_answers_every_version_of_every_group_api(
    broker: FakeBroker, module: Any, version: int
) -> None:
    await broker.groups.stop()
    commit = {"topics": [{"partitions": [{"partition_index": 0, "committed_offset": 1}]}]}
    values: dict[str, Any] = commit if module in (offset_commit, txn_offset_commit) else {}
    async with asyncio.timeout(5):
        assert await broker.ask(module.API, version, values) is not None
