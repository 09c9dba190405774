"""A coordinator without a lease serves nothing; when it regains the lease, it resumes with its previous state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.groups.fake_broker import FakeBroker, with_broker
from tests.groups.play import GROUP, SESSION_MS, Play, join_request, subscription
from tests.groups.test_apis import join, stable_member

from chronik.groups.commits import CommitRequest
from chronik.groups.member import SyncRequest
from chronik.groups.records import group_partition
from chronik.metadata.events import LeaderChanged
from chronik.metadata.image import OFFSETS_TOPIC, PartitionImage
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
)
from chronik.node.coordinators import coordinator_topic, service
from chronik.wire.errors import ErrorCode, KafkaError

TOPIC_VALUES = {"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 9}]}
MEMBER = {"group_id": GROUP, "member_id": "m", "generation_id": 1}


def error_of(answer: Any) -> ErrorCode:
    code: ErrorCode = answer.error_code
    return code


REQUESTS: list[tuple[Any, int, dict[str, Any], Callable[[Any], ErrorCode]]] = [
    (
        join_group,
        9,
        {
            "group_id": GROUP,
            "session_timeout": 10_000,
            "rebalance_timeout": 60_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": subscription("t")}],
        },
        error_of,
    ),
    (sync_group, 5, {**MEMBER, "protocol_type": None, "protocol_name": None, "assignments": []}, error_of),
    (heartbeat, 4, MEMBER, error_of),
    (leave_group, 2, {"group_id": GROUP, "member_id": "m"}, error_of),
    (leave_group, 5, {"group_id": GROUP, "members": [{"member_id": "m"}]}, error_of),
    (
        offset_commit,
        9,
        {"group_id": GROUP, "generation_id_or_member_epoch": -1, "member_id": "", "topics": [TOPIC_VALUES]},
        lambda answer: error_of(answer.topics[0].partitions[0]),
    ),
    (
        offset_fetch,
        7,
        {"group_id": GROUP, "topics": [{"name": "t", "partition_indexes": [0]}], "require_stable": True},
        error_of,
    ),
    (
        offset_fetch,
        9,
        {"groups": [{"group_id": GROUP, "topics": None}], "require_stable": True},
        lambda answer: error_of(answer.groups[0]),
    ),
    (describe_groups, 6, {"groups": [GROUP]}, lambda answer: error_of(answer.groups[0])),
    (delete_groups, 2, {"groups_names": [GROUP]}, lambda answer: error_of(answer.results[0])),
    (
        offset_delete,
        0,
        {"group_id": GROUP, "topics": [{"name": "t", "partitions": [{"partition_index": 0}]}]},
        error_of,
    ),
]


async def committed_group(broker: FakeBroker) -> str:
    """Create a group whose member has committed offset 5 in generation 1; return the member's id."""
    await broker.create_topic("t")
    member = await stable_member(broker)
    commit = CommitRequest(GROUP, 1, member, None, ((("t", 0), 5, -1, ""),))
    assert await broker.groups.commit(commit) == {("t", 0): ErrorCode.none}
    return member


@pytest.mark.parametrize(("module", "version", "values", "error"), REQUESTS)
@with_broker()
async def test_coordinator_without_a_lease_refuses_requests_and_changes_nothing(
    broker: FakeBroker, module: Any, version: int, values: dict[str, Any], error: Callable[[Any], ErrorCode]
) -> None:
    member = await committed_group(broker)
    broker.has_lease = False
    assert error(await broker.ask(module.API, version, values)) is ErrorCode.not_coordinator
    broker.has_lease = True
    assert broker.groups.heartbeat(GROUP, member, 1, None) is ErrorCode.none
    _, offsets = await broker.groups.committed(GROUP, [("t", 0)])
    found = offsets[("t", 0)]
    assert found is not None and found.offset == 5


@pytest.mark.parametrize(("module", "version", "values", "error"), REQUESTS)
@with_broker()
async def test_coordinator_refuses_requests_while_it_hands_its_partition_over(
    broker: FakeBroker, module: Any, version: int, values: dict[str, Any], error: Callable[[Any], ErrorCode]
) -> None:
    await committed_group(broker)
    broker.hands_over.add((OFFSETS_TOPIC, group_partition(GROUP, broker.config.offsets_topic_partitions)))
    assert error(await broker.ask(module.API, version, values)) is ErrorCode.not_coordinator


@with_broker()
async def test_coordinator_without_a_lease_lists_no_groups_and_reports_no_lag(broker: FakeBroker) -> None:
    await committed_group(broker)
    assert len((await broker.ask(list_groups.API, 5, {})).groups) == 1
    assert len(list(broker.groups.lag_gauges())) == 1
    broker.has_lease = False
    answer = await broker.ask(list_groups.API, 5, {})
    assert (answer.error_code, answer.groups) == (ErrorCode.none, ())
    assert list(broker.groups.lag_gauges()) == []


@pytest.mark.parametrize("version", range(7))
@with_broker()
async def test_coordinator_is_not_available_without_a_lease(broker: FakeBroker, version: int) -> None:
    await committed_group(broker)
    broker.has_lease = False
    answer = await broker.ask(find_coordinator.API, version, {"key": GROUP, "coordinator_keys": [GROUP]})
    found = answer.coordinators[0] if version >= 4 else answer
    assert (found.error_code, found.node_id) == (ErrorCode.coordinator_not_available, -1)


@with_broker()
async def test_waiting_join_gets_not_coordinator_when_the_lease_expires(broker: FakeBroker) -> None:
    await committed_group(broker)
    waiting = asyncio.ensure_future(join(broker, 3))
    await asyncio.sleep(0)
    broker.has_lease = False
    assert (await waiting).error_code is ErrorCode.not_coordinator


@with_broker(group_initial_rebalance_delay_ms=50)
async def test_waiting_sync_gets_not_coordinator_when_the_lease_expires(broker: FakeBroker) -> None:
    first = asyncio.ensure_future(join(broker, 3))
    second = asyncio.ensure_future(join(broker, 3))
    members = {answer.member_id: answer.leader for answer in await asyncio.gather(first, second)}
    follower = next(member for member, leader in members.items() if member != leader)
    values = {"group_id": GROUP, "generation_id": 1, "member_id": follower, "assignments": []}
    waiting = asyncio.ensure_future(broker.ask(sync_group.API, 3, values))
    await asyncio.sleep(0)
    broker.has_lease = False
    assert (await waiting).error_code is ErrorCode.not_coordinator


@with_broker()
async def test_commit_that_becomes_durable_after_the_lease_expires_is_not_acknowledged(broker: FakeBroker) -> None:
    await committed_group(broker)
    broker.appends_allowed.clear()
    commit = CommitRequest("other", -1, "", None, ((("t", 0), 9, -1, ""),))
    waiting = asyncio.ensure_future(broker.groups.commit(commit))
    await asyncio.sleep(0)
    broker.has_lease = False
    broker.appends_allowed.set()
    with pytest.raises(KafkaError) as refused:
        await waiting
    assert refused.value.code is ErrorCode.not_coordinator


@with_broker(group_min_session_timeout_ms=1)
async def test_sessions_do_not_expire_while_the_coordinator_has_no_lease(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LEASE_CHECK_S", 0.01)
    joined = await broker.groups.join(join_request(session_timeout_ms=1_000))
    member = joined["member_id"]
    await broker.groups.sync(SyncRequest(GROUP, 1, member, None, None, None, {member: b"A"}))
    broker.has_lease = False
    await asyncio.sleep(1.5)
    broker.has_lease = True
    # It is still a member of the same generation, although its session timeout has passed.
    assert broker.groups.heartbeat(GROUP, member, 1, None) is ErrorCode.none
    # Its session expires normally, because the session clock runs again.
    while (await broker.groups.describe(GROUP))["members"]:
        await asyncio.sleep(0.005)


@with_broker()
async def test_node_reloads_its_groups_when_it_leads_again_in_a_later_epoch(broker: FakeBroker) -> None:
    member = await committed_group(broker)
    index = group_partition(GROUP, broker.config.offsets_topic_partitions)
    before = broker.image.partition(OFFSETS_TOPIC, index)
    assert before is not None
    # Another coordinator led in between, and its writes reached the log. This node saw only the last epoch.
    away = FakeBroker(broker.logs)
    away.metadata.image = broker.image
    await away.start()
    commit = CommitRequest(GROUP, 1, member, None, ((("t", 0), 50, -1, ""),))
    assert await away.groups.commit(commit) == {("t", 0): ErrorCode.none}
    await away.stop()
    after = PartitionImage(index, 1, before.leader_epoch + 2, before.replicas, before.isr)
    topic_id = broker.image.require_topic(OFFSETS_TOPIC).id
    broker.groups.metadata_changed(broker.image, [LeaderChanged(OFFSETS_TOPIC, topic_id, after)])
    error, offsets = await broker.groups.committed(GROUP, [("t", 0)])
    while error is ErrorCode.coordinator_load_in_progress:
        await asyncio.sleep(0.001)
        error, offsets = await broker.groups.committed(GROUP, [("t", 0)])
    found = offsets[("t", 0)]
    assert error is ErrorCode.none
    assert found is not None and found.offset == 50


@with_broker()
async def test_commit_times_out_if_its_batch_is_never_replicated(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_topic, "APPEND_TIMEOUT_S", 0.05)
    await committed_group(broker)
    broker.appends_allowed.clear()
    commit = CommitRequest("other", -1, "", None, ((("t", 0), 9, -1, ""),))
    first = asyncio.ensure_future(broker.groups.commit(commit))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    # The second commit waits for the first one, but no longer than that.
    second = asyncio.ensure_future(broker.groups.commit(commit))
    for errors in await asyncio.gather(first, second):
        assert errors == {("t", 0): ErrorCode.coordinator_not_available}
    broker.appends_allowed.set()
    assert await broker.groups.commit(commit) == {("t", 0): ErrorCode.none}


# The state machine


def test_member_whose_waiting_join_is_refused_may_rejoin_the_same_rebalance() -> None:
    play = Play()
    (first,) = play.stable_group(1)
    newcomer = play.join()
    play.wait(SESSION_MS - 1)
    assert play.heartbeat(first, 1) is ErrorCode.rebalance_in_progress
    play.run(play.coordinator.refuse_waiting(play.at))
    assert play.error(newcomer) is ErrorCode.not_coordinator
    # The wait did not use up the member's session: a full session timeout starts here.
    play.wait(SESSION_MS - 1)
    member_id = play.answers[newcomer]["member_id"]
    again, rejoin = play.join(member_id), play.join(first)
    assert play.joined(again)[1] == play.joined(rejoin)[1] == 2


def test_refused_member_that_does_not_rejoin_expires_with_its_session() -> None:
    play = Play()
    (first,) = play.stable_group(1)
    newcomer = play.join()
    play.run(play.coordinator.refuse_waiting(play.at))
    rejoin = play.join(first)
    assert rejoin not in play.answers
    play.wait(SESSION_MS)
    assert play.joined(rejoin) == (first, 2)
    assert [each["member_id"] for each in play.described()["members"]] == [first]
    assert play.error(newcomer) is ErrorCode.not_coordinator
