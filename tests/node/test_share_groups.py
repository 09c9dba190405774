"""Share groups on real nodes: ShareFetch and ShareAcknowledge, sessions, failover, and the state behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.node.cluster_harness import DEADLINE_S, LocalNodes
from tests.node.support_shares import (
    ACCEPT,
    GROUP,
    REJECT,
    RELEASE,
    RENEW,
    Delivered,
    ShareMember,
    initialize,
    member_of_leader,
    produce,
)
from tests.node.support_transactions import create_topic, leader
from tests.node.support_wire import decoded
from tests.support.eventually import until

from chronik.client.connection import Connection
from chronik.client.errors import ClientError
from chronik.metadata.image import SHARE_STATE_TOPIC
from chronik.node.broker import Broker
from chronik.node.coordinators.share_coordinator import ShareCoordinatorService
from chronik.node.membership.topic_plans import NewTopic
from chronik.node.replicas.partition import Partition, TransactionMarker
from chronik.node.shares.share_partitions import LedShare, SharePartitions
from chronik.shares.state import InitialState, SharePartitionKey, WrittenState
from chronik.storage.reading import ReadJob
from chronik.wire.api import ApiKey
from chronik.wire.batch import encode_batch, encode_marker, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import NewRecord, Record

TOPIC = "orders"
SETTINGS: dict[str, Any] = {
    "share_state_topic_partitions": 3,
    "group_share_min_record_lock_duration_ms": 1,
    "group_share_delivery_count_limit": 3,
}
NONE = ErrorCode.none


@asynccontextmanager
async def one_node(folder: Path, partitions: int = 1, **settings: Any) -> AsyncIterator[Broker]:
    changed = {**SETTINGS, "default_replication_factor": 1, **settings}
    async with LocalNodes(folder, 1, **changed) as nodes:
        (broker,) = await nodes.start_all()
        await create_topic(nodes, TOPIC, partitions, 1)
        await initialize(broker, TOPIC)
        yield broker


def values(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


async def test_members_share_a_partition_and_get_each_record_once(tmp_path: Path) -> None:
    async with one_node(tmp_path) as broker:
        for text in ("one", "two", "three"):
            await produce(broker, TOPIC, 0, values(text))
        first, second = await ShareMember.open(broker, TOPIC, "a"), await ShareMember.open(broker, TOPIC, "b")
        assert await first.fetch(records=2) == (NONE, NONE, [Delivered(0, b"one", 1), Delivered(1, b"two", 1)])
        assert await second.fetch() == (NONE, NONE, [Delivered(2, b"three", 1)])
        assert await first.fetch(0, (0, 1, ACCEPT)) == (NONE, NONE, [])
        assert await second.acknowledge((2, 2, ACCEPT)) is NONE
        assert await second.acknowledge((0, 0, ACCEPT)) is ErrorCode.invalid_record_state
        assert await second.acknowledge((2, 2, ACCEPT)) is ErrorCode.invalid_record_state


async def test_record_limit_mode_cuts_batches_and_released_records_come_again(tmp_path: Path) -> None:
    async with one_node(tmp_path) as broker:
        await produce(broker, TOPIC, 0, values("a", "b", "c", "d"))
        first, second = await ShareMember.open(broker, TOPIC, "a"), await ShareMember.open(broker, TOPIC, "b")
        assert [each.offset for each in (await first.fetch(records=1, strict=True))[2]] == [0]
        assert [each.offset for each in (await second.fetch(records=2, strict=True))[2]] == [1, 2]
        assert await second.acknowledge((1, 1, RELEASE), (2, 2, REJECT)) is NONE
        assert [(each.offset, each.deliveries) for each in (await first.fetch())[2]] == [(1, 2), (3, 1)]


async def test_a_fetch_waits_for_records_and_for_releases(tmp_path: Path) -> None:
    async with one_node(tmp_path) as broker:
        first, second = await ShareMember.open(broker, TOPIC, "a"), await ShareMember.open(broker, TOPIC, "b")
        fetching = asyncio.ensure_future(first.fetch(wait_ms=10_000))
        await until(lambda: len(broker.shares.sessions) == 1)
        await produce(broker, TOPIC, 0, values("x"))
        assert (await fetching)[2] == [Delivered(0, b"x", 1)]
        fetching = asyncio.ensure_future(second.fetch(wait_ms=10_000))
        await until(lambda: len(broker.shares.sessions) == 2)
        assert await first.acknowledge((0, 0, RELEASE)) is NONE
        assert (await fetching)[2] == [Delivered(0, b"x", 2)]
        fetching = asyncio.ensure_future(first.fetch(wait_ms=10_000))
        second.close()
        assert (await fetching)[2] == [Delivered(0, b"x", 3)], "a lost connection releases its records"


async def test_only_a_fetch_of_zero_bytes_gets_no_records(tmp_path: Path) -> None:
    async with one_node(tmp_path) as broker:
        await produce(broker, TOPIC, 0, values("a", "b"))
        member = await ShareMember.open(broker, TOPIC)
        assert await member.fetch(max_bytes=0) == (NONE, NONE, [])
        assert [each.offset for each in (await member.fetch(max_bytes=1))[2]] == [0, 1], "a batch is never cut"


async def test_a_fetch_that_waits_does_not_run_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with one_node(tmp_path) as broker:
        members = [await ShareMember.open(broker, TOPIC, name) for name in ("a", "b")]
        fetches, fetch = [0], SharePartitions.fetch

        async def counted(*values: Any) -> Any:
            fetches[0] += 1
            return await fetch(*values)

        monkeypatch.setattr(SharePartitions, "fetch", counted)
        await asyncio.gather(*(member.fetch(wait_ms=200) for member in members))
        assert fetches[0] <= 8


@pytest.mark.parametrize("arrival", ["record", "release"])
async def test_a_fetch_notices_what_arrives_while_it_reads_another_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrival: str
) -> None:
    async with one_node(tmp_path, partitions=2) as broker:
        first, second = await ShareMember.open(broker, TOPIC, "a"), await ShareMember.open(broker, TOPIC, "b")
        await first.fetch(0)
        await first.fetch(1)
        if arrival == "release":
            for index in (0, 1):
                await produce(broker, TOPIC, index, values("x"))
                assert len((await second.fetch(index))[2]) == 1
        read: list[int] = []
        is_reading, continue_reading, fetch = asyncio.Event(), asyncio.Event(), SharePartitions.fetch

        async def suspended(shares: SharePartitions, led: LedShare, *values: Any) -> Any:
            read.append(led.key.partition)
            if len(read) == 2:
                is_reading.set()
                await continue_reading.wait()
            return await fetch(shares, led, *values)

        monkeypatch.setattr(SharePartitions, "fetch", suspended)
        async with asyncio.timeout(DEADLINE_S):
            fetching = asyncio.ensure_future(first.fetch(0, wait_ms=300_000))
            await is_reading.wait()
            if arrival == "record":
                await produce(broker, TOPIC, read[0], values("x"))
            else:
                assert await second.acknowledge((0, 0, RELEASE), index=read[0]) is NONE
            continue_reading.set()
            assert [(each.offset, each.value) for each in (await fetching)[2]] == [(0, b"x")]


async def test_locks_end_unless_they_are_renewed(tmp_path: Path) -> None:
    async with one_node(tmp_path, group_share_record_lock_duration_ms=300) as broker:
        await produce(broker, TOPIC, 0, values("a", "b"))
        first, second = await ShareMember.open(broker, TOPIC, "a"), await ShareMember.open(broker, TOPIC, "b")
        assert len((await first.fetch())[2]) == 2 and first.lock_ms == 300
        fetching = asyncio.ensure_future(second.fetch(wait_ms=10_000))
        for _ in range(4):
            await asyncio.sleep(0.1)
            assert await first.acknowledge((1, 1, RENEW), is_renew_ack=True) is NONE
        assert [(each.offset, each.deliveries) for each in (await fetching)[2]] == [(0, 2)]
        assert await first.acknowledge((0, 0, ACCEPT)) is ErrorCode.invalid_record_state
        assert await first.acknowledge((1, 1, ACCEPT)) is NONE
        assert await first.acknowledge((1, 1, RENEW)) is ErrorCode.invalid_request, "not announced"


async def test_sessions_follow_their_epochs_and_end_with_a_release(tmp_path: Path) -> None:
    async with one_node(tmp_path, group_share_max_share_sessions=1) as broker:
        await produce(broker, TOPIC, 0, values("a"))
        first, second = await ShareMember.open(broker, TOPIC, "a"), await ShareMember.open(broker, TOPIC, "b")
        assert await first.acknowledge((0, 0, ACCEPT)) is ErrorCode.invalid_share_session_epoch
        first.epoch = 1
        assert (await first.fetch())[0] is ErrorCode.share_session_not_found
        first.epoch = 0
        assert len((await first.fetch())[2]) == 1
        assert (await second.fetch())[0] is ErrorCode.share_session_limit_reached
        first.epoch = 7
        assert (await first.fetch())[0] is ErrorCode.invalid_share_session_epoch
        assert await first.end() is NONE
        second.epoch = 0
        assert (await second.fetch())[2] == [Delivered(0, b"a", 2)]


async def test_uninitialized_deleted_and_unknown_partitions_are_errors_of_the_partition(tmp_path: Path) -> None:
    async with one_node(tmp_path) as broker:
        stranger = await ShareMember.open(broker, TOPIC, "a", group="other")
        assert (await stranger.fetch())[0] is ErrorCode.unknown_topic_or_partition
        assert (await stranger.fetch(7))[0] is ErrorCode.unknown_topic_or_partition
        stranger.close()
        await until(lambda: not broker.shares._led, "nothing is kept of a group without state")
        member = await ShareMember.open(broker, TOPIC, "a")
        await produce(broker, TOPIC, 0, values("a"))
        assert len((await member.fetch())[2]) == 1
        key = SharePartitionKey(GROUP, member.topic_id, 0)
        assert await broker.share_state.delete([key], 5_000) == {key: NONE}
        assert await member.acknowledge((0, 0, ACCEPT)) is ErrorCode.unknown_topic_or_partition
        assert (await member.fetch())[0] is ErrorCode.unknown_topic_or_partition


async def test_new_start_offsets_are_used_by_the_next_session(tmp_path: Path) -> None:
    async with one_node(tmp_path) as broker:
        await produce(broker, TOPIC, 0, values("a", "b"))
        member = await ShareMember.open(broker, TOPIC)
        assert (await member.fetch(0))[2] and await member.acknowledge((0, 1, ACCEPT)) is NONE
        assert await member.end() is NONE
        key = SharePartitionKey(GROUP, member.topic_id, 0)
        summary = (await broker.share_state.read_summary([key], 5_000))[key]
        assert (summary.start_offset, summary.state_epoch) == (2, 1)
        assert await broker.share_state.initialize({key: InitialState(2, 1)}, 5_000) == {key: NONE}
        member.epoch = 0
        assert (await member.fetch())[2] == [Delivered(1, b"b", 1)]


@pytest.mark.parametrize("policy", ["earliest", "latest"])
async def test_a_group_without_a_start_offset_begins_where_its_config_says(tmp_path: Path, policy: str) -> None:
    async with one_node(tmp_path) as broker:
        await produce(broker, TOPIC, 0, values("old"))
        await set_group_config(broker, "other", "share.auto.offset.reset", policy)
        await initialize(broker, TOPIC, group="other", start=-1)
        member = await ShareMember.open(broker, TOPIC, group="other")
        await member.fetch()
        key = SharePartitionKey("other", member.topic_id, 0)
        summary = (await broker.share_state.read_summary([key], 5_000))[key]
        assert summary.start_offset == (0 if policy == "earliest" else 1), "stored before anything is delivered"


async def set_group_config(broker: Broker, group: str, name: str, value: str) -> None:
    connection = await Connection.open("127.0.0.1", broker.server.port)
    change = {"name": name, "config_operation": 0, "value": value}
    resource = {"resource_type": 32, "resource_name": group, "configs": [change]}
    answer = await connection.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, {"resources": [resource], "validate_only": False})
    assert answer.responses[0].error_code is NONE
    connection.close()
    await until(lambda: name in broker.image.group_configs.get(group, {}))


@pytest.mark.parametrize("level", ["read_committed", "read_uncommitted"])
async def test_aborted_records_are_delivered_only_to_read_uncommitted_groups(tmp_path: Path, level: str) -> None:
    async with one_node(tmp_path) as broker:
        await set_group_config(broker, GROUP, "share.isolation.level", level)
        partition = broker.partition(TOPIC, 0)
        assert partition is not None
        for producer_id, is_commit in ((7, False), (8, True)):
            records: list[NewRecord] = [(None, value, [], 1) for value in values("x", "y")]
            batch = encode_batch(
                records, producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True
            )
            partition.append_internal(bytes(batch), 1)
            partition.log.append_marker(encode_marker(producer_id, 0, is_commit, 0, 1), partition.leader_epoch, 1)
        await produce(broker, TOPIC, 0, values("plain"))
        member = await ShareMember.open(broker, TOPIC)
        got = [each.offset for _ in range(2) for each in (await member.fetch())[2]]
        assert got == ([3, 4, 6] if level == "read_committed" else [0, 1, 3, 4, 6])
        assert await member.acknowledge(*((offset, offset, ACCEPT) for offset in got)) is NONE
        assert await member.end() is NONE
        key = SharePartitionKey(GROUP, member.topic_id, 0)
        assert (await broker.share_state.read_summary([key], 5_000))[key].start_offset == 7


@pytest.mark.parametrize("last", ["marker", "deleted"])
async def test_no_lag_is_left_by_what_no_consumer_can_acknowledge(tmp_path: Path, last: str) -> None:
    async with one_node(tmp_path) as broker:
        await produce(broker, TOPIC, 0, values("a"))
        member = await ShareMember.open(broker, TOPIC)
        assert (await member.fetch())[2] and await member.acknowledge((0, 0, ACCEPT)) is NONE
        partition = broker.partition(TOPIC, 0)
        assert partition is not None
        if last == "marker":
            partition.append_marker(TransactionMarker(7, 0, True, 0), 1)
        else:
            await produce(broker, TOPIC, 0, values("b"))
            await delete_all_records(broker)
        await until(lambda: partition.high_watermark == 2)
        assert (await member.fetch(0))[2] == []
        assert await member.end() is NONE
        key = SharePartitionKey(GROUP, member.topic_id, 0)
        async with asyncio.timeout(DEADLINE_S):
            while (await broker.share_state.read_summary([key], 5_000))[key].start_offset != 2:
                await asyncio.sleep(0.01)


async def delete_all_records(broker: Broker) -> None:
    connection = await Connection.open("127.0.0.1", broker.server.port)
    topics = [{"name": TOPIC, "partitions": [{"partition_index": 0, "offset": -1}]}]
    answer = await connection.call(ApiKey.DELETE_RECORDS, {"topics": topics, "timeout": 10_000})
    assert answer.topics[0].partitions[0].error_code is NONE
    connection.close()


async def test_a_record_that_is_never_accepted_is_archived_at_the_limit(tmp_path: Path) -> None:
    async with one_node(tmp_path) as broker:
        await produce(broker, TOPIC, 0, values("poison"))
        member = await ShareMember.open(broker, TOPIC)
        for count in (1, 2, 3):
            assert (await member.fetch())[2] == [Delivered(0, b"poison", count)]
            assert await member.acknowledge((0, 0, RELEASE)) is NONE
        assert (await member.fetch())[2] == []


async def test_state_survives_restarts_and_changes_of_the_leader(tmp_path: Path) -> None:
    """Any of the nodes may lead the partition or its state, and be killed."""
    async with LocalNodes(tmp_path, 3, **SETTINGS) as nodes:
        await nodes.start_all()
        await create_topic(nodes, TOPIC, 1, 3)
        broker = await until(lambda: leader(nodes, TOPIC, 0))
        await initialize(broker, TOPIC)
        await produce(broker, TOPIC, 0, values("a", "b", "c", "d", "e"))
        member = await member_of_leader(nodes, TOPIC)
        assert len((await member.fetch())[2]) == 5
        assert await member.acknowledge((0, 0, ACCEPT), (2, 2, ACCEPT), (3, 3, RELEASE)) is NONE
        await nodes.kill(member.broker)
        member = await member_of_leader_again(nodes, member.broker)
        got = await fetch_until_delivered(nodes, member, 3)
        assert got.keys() == {1, 3, 4}, "accepted records do not return, and no other is lost"
        assert got[3] == 2, "released records keep their delivery count"


async def member_of_leader_again(nodes: LocalNodes, old: Broker) -> ShareMember:
    await until(lambda: leader(nodes, TOPIC, 0) not in (None, old))
    return await member_of_leader(nodes, TOPIC, "member-2")


async def fetch_until_delivered(nodes: LocalNodes, member: ShareMember, count: int) -> dict[int, int]:
    got: dict[int, int] = {}
    async with asyncio.timeout(DEADLINE_S):
        while len(got) < count:
            try:
                error, _, delivered = await member.fetch(wait_ms=200)
            except ClientError:
                error, delivered = ErrorCode.not_leader_or_follower, []
            got.update({each.offset: each.deliveries for each in delivered})
            if error is ErrorCode.not_leader_or_follower:
                member = await member_of_leader(nodes, TOPIC, "member-2")
    return got


async def test_a_deposed_leader_cannot_acknowledge(tmp_path: Path) -> None:
    async with one_node(tmp_path) as broker:
        await produce(broker, TOPIC, 0, values("a"))
        member = await ShareMember.open(broker, TOPIC)
        assert len((await member.fetch())[2]) == 1
        key = SharePartitionKey(GROUP, member.topic_id, 0)
        state = (await broker.share_state.read({key: 1_000}, 5_000))[key]
        assert state.error is NONE, "the leader of a later epoch has read the state"
        assert await member.acknowledge((0, 0, ACCEPT)) is ErrorCode.not_leader_or_follower
        assert (await broker.share_state.read_summary([key], 5_000))[key].start_offset == 0


async def test_state_client_reaches_coordinators_on_all_nodes(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, 3, **SETTINGS) as nodes:
        brokers = await nodes.start_all()
        await create_topic(nodes, TOPIC, 6, 3)
        await initialize(brokers[0], TOPIC)
        topic = brokers[0].image.require_topic(TOPIC)
        keys = [SharePartitionKey(GROUP, topic.id, index) for index in range(6)]
        leaders = {each.leader for each in brokers[0].image.require_topic(SHARE_STATE_TOPIC).partitions}
        assert len(leaders) > 1
        for number, broker in enumerate(brokers):
            written = {key: WrittenState(1, 5, number, (), number) for key in keys}
            assert set((await broker.share_state.write(written, 10_000)).values()) == {NONE}
            read = await broker.share_state.read_summary(keys, 10_000)
            assert [read[key].start_offset for key in keys] == [number] * 6
            assert {each.delivery_complete_count for each in read.values()} == {number}
        assert set((await brokers[1].share_state.delete(keys, 10_000)).values()) == {NONE}
        read_state = await brokers[2].share_state.read(dict.fromkeys(keys, 9), 10_000)
        assert {each.error for each in read_state.values()} == {ErrorCode.invalid_request}


async def test_an_unexpected_exception_for_one_key_is_its_error_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with one_node(tmp_path, partitions=2) as broker:
        topic_id = broker.image.require_topic(TOPIC).id
        good, bad = (SharePartitionKey(GROUP, topic_id, index) for index in range(2))
        write = ShareCoordinatorService.write

        async def fail(service: ShareCoordinatorService, key: SharePartitionKey, written: WrittenState) -> ErrorCode:
            if key == bad:
                raise ValueError("planted")
            return await write(service, key, written)

        monkeypatch.setattr(ShareCoordinatorService, "write", fail)
        written = WrittenState(1, 5, 3, (), 0)
        assert await broker.share_state.write({bad: written, good: written}, 5_000) == {
            bad: ErrorCode.unknown_server_error,
            good: NONE,
        }


async def test_rejected_records_are_copied_to_the_dead_letter_topic(tmp_path: Path) -> None:
    async with one_node(tmp_path, errors_deadletterqueue_auto_create_topics_enable=True) as broker:
        await set_group_config(broker, GROUP, "errors.deadletterqueue.copy.record.enable", "true")
        await set_group_config(broker, GROUP, "errors.deadletterqueue.topic.name", "dlq.orders")
        await produce(broker, TOPIC, 0, values("good", "bad"))
        member = await ShareMember.open(broker, TOPIC)
        assert len((await member.fetch())[2]) == 2
        assert await member.acknowledge((0, 0, ACCEPT), (1, 1, REJECT)) is NONE
        key = SharePartitionKey(GROUP, member.topic_id, 0)
        async with asyncio.timeout(DEADLINE_S):
            while (await broker.share_state.read_summary([key], 5_000))[key].start_offset != 2:
                await asyncio.sleep(0.02)
        copied = broker.partition("dlq.orders", 0)
        assert copied is not None and copied.high_watermark == 1
        (record,) = decoded(copied.log.read_job(0, 4096, 1)())
        assert record.value == b"bad"
        headers = dict(record.headers)
        assert {name: headers[f"__dlq.errors.{name}"] for name in ("topic", "partition", "offset", "group")} == {
            "topic": b"orders",
            "partition": b"0",
            "offset": b"1",
            "group": GROUP.encode(),
        }
        assert headers["__dlq.errors.delivery.count"] == b"1"


async def reject_first(broker: Broker) -> None:
    member = await ShareMember.open(broker, TOPIC)
    delivered = (await member.fetch())[2]
    assert await member.acknowledge((0, delivered[-1].offset, REJECT)) is NONE


async def copies(broker: Broker, count: int) -> list[Record]:
    """Wait until the dead-letter topic has this many records."""
    await until(lambda: (copied := broker.partition("dlq.orders", 0)) is not None and copied.high_watermark >= count)
    copied = broker.partition("dlq.orders", 0)
    assert copied is not None
    return decoded(copied.log.read_job(0, 1 << 20, copied.high_watermark)())


@asynccontextmanager
async def node_with_dead_letters(folder: Path) -> AsyncIterator[Broker]:
    async with one_node(folder, errors_deadletterqueue_auto_create_topics_enable=True) as broker:
        await set_group_config(broker, GROUP, "errors.deadletterqueue.copy.record.enable", "true")
        await set_group_config(broker, GROUP, "errors.deadletterqueue.topic.name", "dlq.orders")
        yield broker


@pytest.mark.parametrize("fault", ["new leader", "damage"])
async def test_no_copy_is_given_up_because_the_record_cannot_be_read_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    attempts, damages = [0], list[int]()

    def hide(partition: Partition) -> None:
        """As at a leader whose watermark has not reached the start of its epoch."""
        attempts[0] += 1
        raise KafkaError(ErrorCode.offset_not_available, "the watermark is 0")

    def damaged(job: ReadJob) -> bytes:
        attempts[0] += 1
        job.damaged_at = job.offset
        return b""

    async with node_with_dead_letters(tmp_path) as broker:
        await produce(broker, TOPIC, 0, values("bad"))
        with monkeypatch.context() as patched:
            member = await ShareMember.open(broker, TOPIC)
            assert len((await member.fetch())[2]) == 1
            partition = broker.partition(TOPIC, 0)
            assert partition is not None
            patched.setattr(Partition, "found_damaged", lambda partition, offset, *_: damages.append(offset))
            if fault == "damage":
                patched.setattr(ReadJob, "__call__", damaged)
            else:
                patched.setattr(Partition, "check_end_is_known", hide)
                patched.setattr(Partition, "high_watermark", property(lambda each: 0 if each is partition else 1))
            assert await member.acknowledge((0, 0, REJECT)) is NONE
            await until(lambda: attempts[0] >= 2)
        assert [record.value for record in await copies(broker, 1)] == [b"bad"]
        assert set(damages) == ({0} if fault == "damage" else set())


async def test_copies_fit_into_the_dead_letter_topic(tmp_path: Path) -> None:
    async with node_with_dead_letters(tmp_path) as broker:
        new = NewTopic(
            "dlq.orders", configs={"errors.deadletterqueue.group.enable": "true", "max.message.bytes": "4000"}
        )
        await broker.topics.create(new)
        await produce(broker, TOPIC, 0, [b"x" * 1_000] * 20 + [b"y" * 5_000], codec=1)
        await reject_first(broker)
        copied = await copies(broker, 21)
        assert [len(record.value or b"") for record in copied] == [1_000] * 20 + [0]
        assert [dict(record.headers)["__dlq.errors.offset"] for record in copied] == [b"%d" % at for at in range(21)]
        partition = broker.partition("dlq.orders", 0)
        assert partition is not None
        data = memoryview(partition.log.read_job(0, 1 << 20, 21)())
        while data:
            header = read_batch_header(data)
            assert header.size_bytes <= 4_000
            data = data[header.size_bytes :]


@pytest.mark.parametrize("topic", ["dlq.missing", "orders"])
async def test_records_are_archived_without_a_dead_letter_topic_that_can_be_used(tmp_path: Path, topic: str) -> None:
    async with one_node(tmp_path) as broker:
        await set_group_config(broker, GROUP, "errors.deadletterqueue.topic.name", topic)
        await produce(broker, TOPIC, 0, values("bad"))
        member = await ShareMember.open(broker, TOPIC)
        assert len((await member.fetch())[2]) == 1 and await member.acknowledge((0, 0, REJECT)) is NONE
        key = SharePartitionKey(GROUP, member.topic_id, 0)
        async with asyncio.timeout(DEADLINE_S):
            while (await broker.share_state.read_summary([key], 5_000))[key].start_offset != 1:
                await asyncio.sleep(0.02)
        partition = broker.partition(TOPIC, 0)
        assert partition is not None and partition.log_end_offset == 1
