"""Offsets in transactions on a real loop: TxnOffsetCommit, verification, batches in the log, loading, OffsetFetch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from tests.groups.fake_broker import FakeBroker, with_broker
from tests.groups.play import GROUP, PRODUCER
from tests.support.eventually import until

from chronik.groups.commits import CommitRequest
from chronik.groups.consumer_member import ConsumerHeartbeat
from chronik.groups.offsets import Producer
from chronik.groups.records import group_partition
from chronik.metadata.image import OFFSETS_TOPIC
from chronik.node.apis import offset_fetch, txn_offset_commit
from chronik.node.coordinators import coordinator_topic
from chronik.wire.batch import decode_batch, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

VERSIONS = range(txn_offset_commit.API.versions[0], txn_offset_commit.API.versions[1] + 1)


def topic(broker: FakeBroker, name: str) -> dict[str, Any]:
    """Return the fields that identify a topic, by name and from version 6 by id."""
    known = broker.image.topic(name)
    return {"name": name, "topic_id": UUID(int=1) if known is None else known.id}


async def commit(
    broker: FakeBroker, offset: int = 7, *, version: int = 5, producer: Producer = PRODUCER, **changes: Any
) -> ErrorCode:
    """Send TxnOffsetCommit for one partition, and return its error."""
    partition = {"partition_index": 0, "committed_offset": offset, "committed_metadata": None}
    values = {
        "transactional_id": "app-1",
        "group_id": GROUP,
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
        "topics": [{**topic(broker, "t"), "partitions": [partition]}],
        **changes,
    }
    answer = await broker.ask(txn_offset_commit.API, version, values)
    error = answer.topics[0].partitions[0].error_code
    assert isinstance(error, ErrorCode)
    return error


async def fetched(
    broker: FakeBroker, *, requires_stable: bool = False, version: int = 8, group_id: str = GROUP
) -> tuple[int, ErrorCode]:
    """Return the group's offset and error of partition t-0 by OffsetFetch."""
    topics = [{"name": "t", "partition_indexes": [0]}]
    one = {"group_id": group_id, "topics": topics}
    values = {**(one if version < 8 else {"groups": [one]}), "require_stable": requires_stable}
    answer = await broker.ask(offset_fetch.API, version, values)
    group = answer if version < 8 else answer.groups[0]
    partition = group.topics[0].partitions[0]
    return partition.committed_offset, partition.error_code


async def plain_commit(broker: FakeBroker, offset: int) -> None:
    request = CommitRequest(GROUP, -1, "", None, ((("t", 0), offset, -1, ""),))
    assert await broker.groups.commit(request) == {("t", 0): ErrorCode.none}


async def restarted(broker: FakeBroker) -> FakeBroker:
    again = FakeBroker(broker.logs)
    again.metadata.image = broker.image
    await again.start()
    return again


@pytest.mark.parametrize("version", VERSIONS)
@with_broker()
async def test_offset_takes_effect_when_the_transaction_commits(broker: FakeBroker, version: int) -> None:
    await broker.create_topic("t")
    assert await commit(broker, version=version) is ErrorCode.none
    assert await fetched(broker) == (-1, ErrorCode.none)
    broker.end_transaction(GROUP, PRODUCER, is_commit=True)
    assert await fetched(broker) == (7, ErrorCode.none)


@with_broker()
async def test_offset_of_an_aborted_transaction_has_no_effect(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await plain_commit(broker, 3)
    await commit(broker)
    broker.end_transaction(GROUP, PRODUCER, is_commit=False)
    assert await fetched(broker, requires_stable=True) == (3, ErrorCode.none)


@pytest.mark.parametrize("version", [7, 8, 9])
@with_broker()
async def test_offset_fetch_with_require_stable_waits_for_the_transaction(broker: FakeBroker, version: int) -> None:
    await broker.create_topic("t")
    await plain_commit(broker, 3)
    await commit(broker)
    unstable = (-1, ErrorCode.unstable_offset_commit)
    assert await fetched(broker, requires_stable=True, version=version) == unstable
    assert await fetched(broker, version=version) == (3, ErrorCode.none)
    broker.end_transaction(GROUP, PRODUCER, is_commit=True)
    assert await fetched(broker, requires_stable=True, version=version) == (7, ErrorCode.none)


@with_broker()
async def test_offset_fetch_of_all_topics_lists_only_partitions_with_a_committed_offset(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await commit(broker)
    values = {"groups": [{"group_id": GROUP, "topics": None}], "require_stable": True}
    (group,) = (await broker.ask(offset_fetch.API, 8, values)).groups
    assert group.topics == ()
    await plain_commit(broker, 3)
    (group,) = (await broker.ask(offset_fetch.API, 8, values)).groups
    assert group.topics[0].partitions[0].error_code is ErrorCode.unstable_offset_commit


@with_broker()
async def test_offsets_are_written_in_a_transactional_batch_without_a_sequence(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await commit(broker, producer=Producer(7, 3))
    header = read_batch_header(broker.offsets_log(GROUP).batches[-1])
    assert header.is_transactional
    assert not header.is_control
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 3, -1)


@with_broker()
async def test_waiting_commits_of_different_transactions_share_a_write_but_no_batch(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await plain_commit(broker, 0)
    log = broker.offsets_log(GROUP)
    before = len(log.batches)
    broker.appends_allowed.clear()
    producers = [PRODUCER, PRODUCER, Producer(8, 0), None, None]
    # The first one is being written while the others arrive.
    waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(plain_commit(broker, 1))]
    await asyncio.sleep(0)
    for offset, producer in enumerate(producers):
        each = plain_commit(broker, offset) if producer is None else commit(broker, offset, producer=producer)
        waiting.append(broker.loop.create_task(each))
        await asyncio.sleep(0)
    writes = broker.append_count
    broker.appends_allowed.set()
    await asyncio.gather(*waiting)
    headers = [read_batch_header(batch) for batch in log.batches[before:]]
    assert [(each.producer_id, each.record_count) for each in headers] == [(-1, 1), (7, 2), (8, 1), (-1, 2)]
    assert broker.append_count == writes + 2


# Verification


@pytest.mark.parametrize("version", VERSIONS)
@with_broker()
async def test_transaction_is_verified_before_the_first_offset_and_version_5_adds_the_partition(
    broker: FakeBroker, version: int
) -> None:
    await broker.create_topic("t")
    assert await commit(broker, version=version) is ErrorCode.none
    assert await commit(broker, 8, version=version) is ErrorCode.none
    partition = (OFFSETS_TOPIC, group_partition(GROUP, broker.config.offsets_topic_partitions))
    assert broker.transaction_coordinators.calls == [("app-1", PRODUCER, partition, version >= 5)]
    broker.end_transaction(GROUP, PRODUCER, is_commit=True)
    assert await commit(broker, 9, version=version) is ErrorCode.none
    assert len(broker.transaction_coordinators.calls) == 2


@pytest.mark.parametrize(
    ("answer", "version", "error"),
    [
        (ErrorCode.invalid_producer_epoch, 3, ErrorCode.invalid_producer_epoch),
        (ErrorCode.invalid_producer_id_mapping, 5, ErrorCode.invalid_producer_id_mapping),
        (ErrorCode.transaction_abortable, 3, ErrorCode.invalid_txn_state),
        (ErrorCode.transaction_abortable, 4, ErrorCode.transaction_abortable),
        (ErrorCode.concurrent_transactions, 4, ErrorCode.coordinator_load_in_progress),
        (ErrorCode.concurrent_transactions, 5, ErrorCode.concurrent_transactions),
        (ErrorCode.network_exception, 5, ErrorCode.coordinator_load_in_progress),
        (ErrorCode.not_coordinator, 5, ErrorCode.coordinator_load_in_progress),
        (ErrorCode.coordinator_not_available, 2, ErrorCode.coordinator_load_in_progress),
        (ErrorCode.coordinator_not_available, 1, ErrorCode.coordinator_not_available),
    ],
)
@with_broker()
async def test_offsets_of_an_unverified_transaction_are_refused(
    broker: FakeBroker, answer: ErrorCode, version: int, error: ErrorCode
) -> None:
    await broker.create_topic("t")
    await broker.groups.topic.ensure_exists()
    broker.transaction_coordinators.answer = answer
    assert await commit(broker, version=version) is error
    assert broker.groups.groups() == []
    assert broker.offsets_log(GROUP).batches == []


@pytest.mark.parametrize("first_epoch", [0, 1])
@with_broker()
async def test_marker_during_verification_voids_it(broker: FakeBroker, first_epoch: int) -> None:
    await broker.create_topic("t")
    await broker.groups.topic.ensure_exists()
    broker.transaction_coordinators.may_answer.clear()
    producer = Producer(7, 1)
    waiting = asyncio.ensure_future(commit(broker, producer=producer))
    await until(lambda: bool(broker.transaction_coordinators.calls))
    broker.end_transaction(GROUP, Producer(7, 1 + first_epoch), is_commit=False)
    size = len(broker.offsets_log(GROUP).batches)
    broker.transaction_coordinators.answer = ErrorCode.transaction_abortable
    broker.transaction_coordinators.may_answer.set()
    # A marker of the same epoch may have ended the transaction before: the coordinator knows.
    expected = ErrorCode.invalid_producer_epoch if first_epoch else ErrorCode.transaction_abortable
    assert await waiting is expected
    assert len(broker.offsets_log(GROUP).batches) == size
    assert await fetched(broker, requires_stable=True) == (-1, ErrorCode.none)


@with_broker()
async def test_marker_of_the_last_transaction_does_not_void_the_next(broker: FakeBroker) -> None:
    """With version 2 both have the same epoch, and the first commit often arrives before the marker."""
    await broker.create_topic("t")
    await broker.groups.topic.ensure_exists()
    broker.transaction_coordinators.may_answer.clear()
    waiting = asyncio.ensure_future(commit(broker, producer=Producer(7, 1)))
    await until(lambda: bool(broker.transaction_coordinators.calls))
    broker.end_transaction(GROUP, Producer(7, 1), is_commit=True)
    broker.transaction_coordinators.may_answer.set()
    assert await waiting is ErrorCode.none
    assert len(broker.transaction_coordinators.calls) == 2, "the first answer may be older than the marker"


@with_broker()
async def test_marker_while_the_offsets_wait_for_earlier_appends_voids_the_transaction(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await commit(broker, 3)
    broker.appends_allowed.clear()
    earlier = asyncio.ensure_future(plain_commit(broker, 4))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(commit(broker, 5))
    await asyncio.sleep(0)
    broker.end_transaction(GROUP, PRODUCER, is_commit=False)
    broker.appends_allowed.set()
    await earlier
    assert await waiting is ErrorCode.invalid_txn_state
    assert await fetched(broker, requires_stable=True) == (4, ErrorCode.none)


@with_broker()
async def test_new_leader_epoch_during_verification_voids_it(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await plain_commit(broker, 3)
    broker.transaction_coordinators.may_answer.clear()
    waiting = asyncio.ensure_future(commit(broker))
    await until(lambda: bool(broker.transaction_coordinators.calls))
    broker.offsets_log(GROUP).leader_epoch += 1
    broker.transaction_coordinators.may_answer.set()
    assert await waiting is ErrorCode.not_coordinator


@with_broker()
async def test_marker_that_is_reported_before_the_append_it_follows_takes_effect_after_it(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await plain_commit(broker, 3)
    broker.commits_allowed.clear()
    waiting = asyncio.ensure_future(commit(broker))
    log = broker.offsets_log(GROUP)
    await until(lambda: len(log.batches) == 2)
    broker.end_transaction(GROUP, PRODUCER, is_commit=True)
    assert await fetched(broker) == (3, ErrorCode.none)
    broker.commits_allowed.set()
    assert await waiting is ErrorCode.none
    assert await fetched(broker, requires_stable=True) == (7, ErrorCode.none)


# Refusals


@with_broker()
async def test_only_existing_partitions_are_committed(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    partitions = [
        {"partition_index": index, "committed_offset": 7, "committed_metadata": "x" * size}
        for index, size in ((0, 0), (1, 0))
    ]
    topics = [
        {**topic(broker, "t"), "partitions": partitions},
        {**topic(broker, "nope"), "partitions": partitions[:1]},
    ]
    values = {"transactional_id": "a", "group_id": GROUP, "producer_id": 7, "producer_epoch": 0, "topics": topics}
    answer = await broker.ask(txn_offset_commit.API, 5, values)
    unknown = ErrorCode.unknown_topic_or_partition
    assert [[each.error_code for each in topic.partitions] for topic in answer.topics] == [
        [ErrorCode.none, unknown],
        [unknown],
    ]
    answer = await broker.ask(txn_offset_commit.API, 6, values)
    assert [[each.error_code for each in topic.partitions] for topic in answer.topics] == [
        [ErrorCode.none, unknown],
        [ErrorCode.unknown_topic_id],
    ]


@with_broker()
async def test_generation_of_a_member_is_checked_from_version_3_on(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    assert await commit(broker, version=3, generation_id=4, member_id="m") is ErrorCode.illegal_generation
    assert await commit(broker, version=2, generation_id=4, member_id="m") is ErrorCode.none


@with_broker()
async def test_version_6_names_missing_groups_and_stale_member_epochs(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    for version, missing, stale in (
        (5, ErrorCode.illegal_generation, ErrorCode.illegal_generation),
        (6, ErrorCode.group_id_not_found, ErrorCode.stale_member_epoch),
    ):
        group = f"g{version}"
        sender: dict[str, Any] = {"group_id": group, "member_id": "m"}
        assert await commit(broker, version=version, generation_id=4, **sender) is missing
        join = ConsumerHeartbeat(group, "m", 0, "app", "/h", rebalance_timeout_ms=1_000, owned=frozenset())
        answer = await broker.groups.consumer_heartbeat(replace(join, topics=("t",)))
        assert answer["member_epoch"] == 1
        assert await commit(broker, version=version, generation_id=4, **sender) is stale
        assert await commit(broker, version=version, generation_id=1, **sender) is ErrorCode.none


@with_broker()
async def test_invalid_group_id_is_refused_without_a_verification(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    assert await commit(broker, group_id="") is ErrorCode.invalid_group_id
    assert await commit(broker, group_id="g" * 20_000) is ErrorCode.invalid_group_id
    assert broker.transaction_coordinators.calls == []


@with_broker()
async def test_transactional_commit_without_a_lease_is_not_coordinator(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await plain_commit(broker, 3)
    broker.has_lease = False
    assert await commit(broker) is ErrorCode.not_coordinator


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (ErrorCode.kafka_storage_error, ErrorCode.not_coordinator),
        (ErrorCode.not_enough_replicas, ErrorCode.coordinator_not_available),
    ],
)
@with_broker()
async def test_failed_append_leaves_the_offset_stable(broker: FakeBroker, failure: ErrorCode, error: ErrorCode) -> None:
    await broker.create_topic("t")
    broker.append_error = KafkaError(failure, "full")
    assert await commit(broker) is error
    assert await fetched(broker, requires_stable=True) == (-1, ErrorCode.none)


@with_broker(offsets_topic_partitions=1)
async def test_offset_stays_pending_after_a_timeout_only_if_it_is_in_the_log(broker: FakeBroker) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator_topic, "APPEND_TIMEOUT_S", 0.05)
        await broker.create_topic("t")
        await plain_commit(broker, 3)
        broker.commits_allowed.clear()
        written = asyncio.ensure_future(commit(broker))
        log = broker.offsets_log(GROUP)
        await until(lambda: len(log.batches) == 2)
        waiting = asyncio.ensure_future(commit(broker, group_id="other", producer=Producer(8, 0)))
        assert await written is ErrorCode.coordinator_not_available
        assert await waiting is ErrorCode.coordinator_not_available
    assert len(log.batches) == 2
    assert await fetched(broker, requires_stable=True) == (-1, ErrorCode.unstable_offset_commit)
    assert await fetched(broker, requires_stable=True, group_id="other") == (-1, ErrorCode.none)


# Failover


@pytest.mark.parametrize("is_commit", [True, False])
@with_broker()
async def test_pending_offset_survives_a_coordinator_restart(broker: FakeBroker, is_commit: bool) -> None:
    await broker.create_topic("t")
    await plain_commit(broker, 3)
    await commit(broker)
    again = await restarted(broker)
    assert await fetched(again, requires_stable=True) == (-1, ErrorCode.unstable_offset_commit)
    again.end_transaction(GROUP, PRODUCER, is_commit=is_commit)
    expected = (7 if is_commit else 3, ErrorCode.none)
    assert await fetched(again, requires_stable=True) == expected
    final = await restarted(again)
    assert await fetched(final, requires_stable=True) == expected
    await again.stop()
    await final.stop()


@with_broker()
async def test_marker_that_nobody_reported_is_read_from_the_log(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await commit(broker, 7)
    broker.write_marker(GROUP, PRODUCER, is_commit=True)
    await commit(broker, 9, producer=Producer(8, 0))
    await plain_commit(broker, 8)
    again = await restarted(broker)
    assert await fetched(again) == (8, ErrorCode.none)
    again.end_transaction(GROUP, Producer(8, 0), is_commit=True)
    assert await fetched(again, requires_stable=True) == (8, ErrorCode.none), "the plain commit is the later one"
    await again.stop()


@with_broker()
async def test_deleted_topic_loses_its_pending_offsets(broker: FakeBroker) -> None:
    await broker.create_topic("t")
    await commit(broker)
    await broker.delete_topic("t")
    log = broker.offsets_log(GROUP)
    await until(lambda: len(log.batches) == 2)
    (tombstone,) = decode_batch(log.batches[-1])
    assert tombstone.value is None
    await until(lambda: broker.groups.groups() == [])
