"""The group service on a real loop: the offsets topic, append order, loading and timers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.groups.fake_broker import DEADLINE_S, FakeBroker, MemoryLog, garbage_batch, with_broker
from tests.groups.play import GROUP, join_request
from tests.node.support_authorization import allow

from chronik.authorization.acls import Operation, ResourceType
from chronik.groups.commits import CommitRequest
from chronik.groups.consumer_member import ConsumerHeartbeat
from chronik.groups.member import SyncRequest
from chronik.metadata.commands import CreateAcls
from chronik.metadata.image import OFFSETS_TOPIC
from chronik.node.coordinators import coordinator_topic
from chronik.wire.batch import read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError


def commit(offset: int, group_id: str = GROUP, partition: int = 0) -> CommitRequest:
    return CommitRequest(group_id, -1, "", None, ((("t", partition), offset, -1, ""),))


async def committed(broker: FakeBroker, group_id: str = GROUP) -> dict[tuple[str, int], int]:
    error, offsets = await broker.groups.committed(group_id, None)
    assert error is ErrorCode.none
    return {partition: each.offset for partition, each in offsets.items() if each is not None}


def offsets_log(broker: FakeBroker, group_id: str = GROUP) -> MemoryLog:
    return broker.offsets_log(group_id)


@with_broker()
async def test_first_coordinator_lookup_creates_the_compacted_offsets_topic(broker: FakeBroker) -> None:
    assert broker.groups.groups() == []
    assert broker.image.topic(OFFSETS_TOPIC) is None
    leader = await broker.groups.coordinator_of(GROUP)
    assert (leader.id, leader.host, leader.port) == (1, "localhost", 9092)
    topic = broker.image.require_topic(OFFSETS_TOPIC)
    assert len(topic.partitions) == broker.config.offsets_topic_partitions
    assert topic.configs["cleanup.policy"] == "compact"


@with_broker()
async def test_concurrent_first_requests_create_one_offsets_topic(broker: FakeBroker) -> None:
    leaders = await asyncio.gather(*(broker.groups.coordinator_of(f"g{number}") for number in range(20)))
    assert {leader.id for leader in leaders} == {1}


@with_broker()
async def test_first_commit_succeeds_before_the_offsets_topic_exists(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    assert await broker.groups.commit(commit(7)) == {("t", 0): ErrorCode.none}
    assert await committed(broker) == {("t", 0): 7}


@with_broker()
async def test_pending_commits_share_one_batch_and_keep_their_order(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await broker.groups.commit(commit(0))
    log = offsets_log(broker)
    before = len(log.batches)
    broker.appends_allowed.clear()
    commits = [asyncio.ensure_future(broker.groups.commit(commit(offset))) for offset in range(1, 51)]
    await asyncio.sleep(0)
    broker.appends_allowed.set()
    await asyncio.gather(*commits)
    counts = [read_batch_header(batch).record_count for batch in log.batches[before:]]
    assert sum(counts) == 50
    assert len(counts) <= 2
    assert await committed(broker) == {("t", 0): 50}


@with_broker()
async def test_failed_append_fails_its_commits_and_later_commits_succeed(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    broker.append_error = KafkaError(ErrorCode.kafka_storage_error, "full")
    assert await broker.groups.commit(commit(7)) == {("t", 0): ErrorCode.not_coordinator}
    broker.append_error = None
    assert await broker.groups.commit(commit(8)) == {("t", 0): ErrorCode.none}
    assert await committed(broker) == {("t", 0): 8}


@with_broker()
async def test_too_large_an_append_is_refused_and_the_next_one_succeeds(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.create_topic("t")
    assert await broker.groups.commit(commit(7)) == {("t", 0): ErrorCode.none}
    monkeypatch.setattr(coordinator_topic, "ONE_APPEND_BYTES_MAX", 1_000)
    large = CommitRequest(GROUP, -1, "", None, ((("t", 0), 9, -1, "x" * 1_000),))
    assert await broker.groups.commit(large) == {("t", 0): ErrorCode.invalid_commit_offset_size}
    assert await broker.groups.commit(commit(8)) == {("t", 0): ErrorCode.none}
    assert await committed(broker) == {("t", 0): 8}


@with_broker()
async def test_a_group_is_deleted_however_many_offsets_it_has(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its commits was small enough, and nothing else would ever remove what they wrote."""
    monkeypatch.setattr(coordinator_topic, "ONE_APPEND_BYTES_MAX", 1_000)
    await broker.create_topic("t", 100)
    for partition in range(100):
        assert await broker.groups.commit(commit(7, partition=partition)) == {("t", partition): ErrorCode.none}
    assert await broker.groups.delete_group(GROUP) is ErrorCode.none
    assert await committed(broker) == {}


@pytest.mark.parametrize("place", ["encode_batch", "appended"])
@with_broker()
async def test_an_unexpected_exception_does_not_stop_later_appends(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    await broker.create_topic("t")
    assert await broker.groups.commit(commit(6)) == {("t", 0): ErrorCode.none}
    raised = asyncio.Event()

    def fail(*_: object, **__: object) -> None:
        raised.set()
        raise ValueError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(broker.groups._coordinator if place == "appended" else coordinator_topic, place, fail)
        first = asyncio.ensure_future(broker.groups.commit(commit(7)))
        await asyncio.wait_for(raised.wait(), DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        assert await broker.groups.commit(commit(8)) == {("t", 0): ErrorCode.none}
    assert await committed(broker) == {("t", 0): 8}
    if place == "encode_batch":
        assert await first == {("t", 0): ErrorCode.unknown_server_error}
    first.cancel()


@with_broker()
async def test_groups_and_offsets_survive_a_restart(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    joined = await broker.groups.join(join_request())
    member = joined["member_id"]
    await broker.groups.sync(SyncRequest(GROUP, 1, member, None, None, None, {member: b"A"}))
    await broker.groups.commit(commit(7, "simple"))

    again = FakeBroker(broker.logs)
    again.metadata.image = broker.image
    await again.start()
    states = {group["group_id"]: group["group_state"] for group in again.groups.groups()}
    assert states == {GROUP: "Stable", "simple": "Empty"}
    assert again.groups.heartbeat(GROUP, member, 1, None) is ErrorCode.none
    assert await committed(again, "simple") == {("t", 0): 7}
    await again.stop()


@with_broker()
async def test_damaged_batch_of_the_only_replica_loses_only_its_own_records(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await broker.groups.commit(commit(7))
    offsets_log(broker).append(garbage_batch())
    await broker.groups.commit(commit(8, partition=0))

    again = FakeBroker(broker.logs)
    again.metadata.image = broker.image
    await again.start()
    assert await committed(again) == {("t", 0): 8}
    assert any("groups_records_unreadable" in line for line in again.lines)
    await again.stop()


@with_broker()
async def test_damaged_batch_leaves_the_groups_to_a_coordinator_that_has_it(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await broker.groups.commit(commit(7))
    log = offsets_log(broker)
    log.append(garbage_batch())
    log.has_other_replica = True

    again = FakeBroker(broker.logs)
    again.metadata.image = broker.image
    await again.start()
    assert set(log.damaged_offsets) == {1}, "the replica is healed"
    assert (await again.groups.committed(GROUP, None))[0] is ErrorCode.coordinator_load_in_progress
    await again.stop()


@with_broker()
async def test_topic_deletion_writes_tombstones_for_its_committed_offsets(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await broker.groups.commit(commit(7))
    size = len(offsets_log(broker).batches)
    await broker.delete_topic("t")
    while len(offsets_log(broker).batches) == size:
        await asyncio.sleep(0.001)
    while await committed(broker):
        await asyncio.sleep(0.001)


@with_broker()
async def test_loading_removes_offsets_of_a_topic_that_was_deleted_while_the_node_was_down(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await broker.groups.commit(commit(7))
    await broker.groups.stop()
    await broker.delete_topic("t")

    again = FakeBroker(broker.logs)
    again.metadata.image = broker.image
    await again.start()
    while await committed(again):
        await asyncio.sleep(0.001)
    await again.stop()


@with_broker(group_min_session_timeout_ms=1)
async def test_session_expires_by_the_loops_clock(broker: FakeBroker) -> None:
    joined = await broker.groups.join(join_request(session_timeout_ms=50))
    member = joined["member_id"]
    assert broker.groups.heartbeat(GROUP, member, 1, None) is ErrorCode.none
    while (await broker.groups.describe(GROUP))["members"]:
        await asyncio.sleep(0.005)
    assert broker.groups.heartbeat(GROUP, member, 1, None) is ErrorCode.unknown_member_id


@with_broker()
async def test_an_expression_is_resolved_again_when_acls_change(broker: FakeBroker) -> None:
    await broker.create_topic("logs-a")
    await broker.create_topic("logs-b")
    everything = ConsumerHeartbeat(GROUP, "m", 0, "app", "/h", rebalance_timeout_ms=10_000, owned=frozenset())
    everything = replace(everything, topics=(), expression="logs-.*")
    first = replace(everything, may_describe=lambda name: name == "logs-a")
    answer = await broker.groups.consumer_heartbeat(first)
    assert len(answer["assignment"]["topic_partitions"]) == 1
    await broker.metadata.propose(CreateAcls((allow(Operation.DESCRIBE, ResourceType.TOPIC, "logs-b"),)))
    answer = await broker.groups.consumer_heartbeat(replace(everything, epoch=answer["member_epoch"]))
    assert len(answer["assignment"]["topic_partitions"]) == 2


@with_broker()
async def test_rebalances_are_counted(broker: FakeBroker) -> None:
    await broker.groups.join(join_request())
    assert broker.metrics.group_rebalances == 1


@with_broker()
async def test_stop_answers_waiting_requests_with_not_coordinator(broker: FakeBroker) -> None:
    joined = await broker.groups.join(join_request())
    waiting = asyncio.ensure_future(broker.groups.join(join_request()))
    await asyncio.sleep(0)
    await broker.groups.stop()
    assert (await waiting)["error_code"] is ErrorCode.not_coordinator
    assert broker.groups.heartbeat(GROUP, joined["member_id"], 1, None) is ErrorCode.not_coordinator


@with_broker()
async def test_cancelled_join_does_not_block_the_group(broker: FakeBroker) -> None:
    first = await broker.groups.join(join_request())
    waiting = asyncio.ensure_future(broker.groups.join(join_request()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    again = await broker.groups.join(join_request(first["member_id"]))
    assert again["generation_id"] == 2


@with_broker()
async def test_lag_is_the_distance_from_the_committed_offset_to_the_log_end(broker: FakeBroker) -> None:
    await broker.create_topic("t", 2)
    broker.logs[("t", 0)] = MemoryLog(log_end_offset=10)
    broker.logs[("t", 1)] = MemoryLog(log_end_offset=3)
    await broker.groups.commit(commit(7))
    await broker.groups.commit(commit(5, partition=1))
    assert list(broker.groups.lag_gauges()) == [(GROUP, "t", 0, 3), (GROUP, "t", 1, 0)]


@with_broker()
async def test_coordinator_forgets_groups_of_a_deleted_offsets_topic(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await broker.groups.commit(commit(7))
    await broker.delete_topic(OFFSETS_TOPIC)
    assert broker.groups.groups() == []
    broker.logs.clear()
    # The next request creates the topic again.
    assert await committed(broker) == {}
