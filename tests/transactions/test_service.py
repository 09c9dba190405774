"""The transaction service on a real loop: the state topic, waiting requests, the lease, loading and timers."""

from __future__ import annotations

import asyncio

import pytest
from tests.groups.fake_broker import garbage_batch
from tests.transactions.fake_broker import ID, ORDERS, TransactionBroker, with_transactions

from chronik.metadata.events import LeaderChanged
from chronik.metadata.image import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, PartitionImage
from chronik.node.coordinators import service, transaction_service
from chronik.node.replicas.partition import TransactionMarker
from chronik.transactions import coordinator
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.wire.errors import ErrorCode, KafkaError

AUDIT = ("audit", 1)


async def end(broker: TransactionBroker, producer: ProducerIdAndEpoch, *, commit: bool = True) -> ErrorCode:
    values = await broker.transactions.end(ID, producer, is_commit=commit, client_version=0)
    error = values["error_code"]
    assert isinstance(error, ErrorCode)
    return error


@with_transactions()
async def test_first_producer_creates_the_compacted_state_topic(broker: TransactionBroker) -> None:
    assert broker.image.topic(TRANSACTIONS_TOPIC) is None
    leader = await broker.transactions.coordinator_of(ID)
    assert (leader.id, leader.host, leader.port) == (1, "localhost", 9092)
    topic = broker.image.require_topic(TRANSACTIONS_TOPIC)
    assert (len(topic.partitions), topic.configs["cleanup.policy"]) == (2, "compact")


@with_transactions()
async def test_every_producer_gets_an_id_of_its_own_and_uses_no_more_than_it_needs(broker: TransactionBroker) -> None:
    first = await broker.begin(name="one")
    assert (await broker.begin(name="two")).producer_id != first.producer_id
    used = broker.next_producer_id
    assert await broker.begin(name="one") == first._replace(producer_epoch=1)
    assert broker.next_producer_id == used, "a known transactional id keeps its producer id"


@with_transactions()
async def test_the_end_of_an_unknown_transaction_uses_no_producer_id(broker: TransactionBroker) -> None:
    await broker.begin(name="known")
    used = broker.next_producer_id
    for client_version in range(3):
        values = await broker.transactions.end(
            "unknown", ProducerIdAndEpoch(1, 0), is_commit=True, client_version=client_version
        )
        assert values["error_code"] is ErrorCode.invalid_producer_id_mapping
    assert broker.next_producer_id == used


@with_transactions()
async def test_clients_wait_while_the_controller_allocates_no_producer_ids(broker: TransactionBroker) -> None:
    producer = await broker.begin(name="known")
    broker.producer_ids_error = KafkaError(ErrorCode.request_timed_out, "no controller")
    with pytest.raises(KafkaError) as refused:
        await broker.transactions.init_producer("unknown", 60_000, None)
    assert refused.value.code is ErrorCode.coordinator_load_in_progress
    assert (await broker.begin(name="known")).producer_id == producer.producer_id


@with_transactions()
async def test_commit_is_answered_before_the_markers_are_written(broker: TransactionBroker) -> None:
    producer = await broker.begin(ORDERS, AUDIT)
    broker.markers_allowed.clear()
    assert await end(broker, producer) is ErrorCode.none
    assert not broker.markers
    broker.markers_allowed.set()
    await broker.until_state("CompleteCommit")
    marker = TransactionMarker(*producer, True, 0)
    assert sorted(broker.markers) == [(*AUDIT, marker), (*ORDERS, marker)]


@with_transactions()
async def test_next_transaction_waits_for_the_markers_of_the_last_one(broker: TransactionBroker) -> None:
    producer = await broker.begin(ORDERS)
    broker.markers_allowed.clear()
    await end(broker, producer)
    adding = asyncio.ensure_future(broker.transactions.add_partitions(ID, producer, [ORDERS]))
    await asyncio.sleep(0.01)
    assert not adding.done()
    broker.markers_allowed.set()
    assert await adding == {ORDERS: ErrorCode.none}
    assert len(broker.markers) == 1
    assert not broker.transactions._settling


@with_transactions()
async def test_client_may_retry_if_the_last_transaction_takes_long(
    broker: TransactionBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_service, "SETTLE_WAIT_S", 0.02)
    producer = await broker.begin(ORDERS)
    broker.markers_allowed.clear()
    await end(broker, producer)
    errors = await broker.transactions.add_partitions(ID, producer, [ORDERS])
    assert errors == {ORDERS: ErrorCode.concurrent_transactions}
    assert not broker.transactions._settling, "nothing is kept for a client that went away"


@with_transactions()
async def test_partitions_added_at_the_same_time_are_all_added(broker: TransactionBroker) -> None:
    """With version 2, the leaders of several partitions ask at once."""
    producer = await broker.begin()
    await broker.create_topic("orders", 20)
    partitions = [("orders", index) for index in range(20)]
    index = broker.transactions.partition_of(ID)
    assert index is not None
    log = broker.logs[(TRANSACTIONS_TOPIC, index)]
    before = log.log_end_offset
    answers = await asyncio.gather(*(broker.transactions.add_partitions(ID, producer, [each]) for each in partitions))
    assert log.log_end_offset - before == 2, "one record for the first, and one for all that waited for it"
    assert not broker.transactions._adding
    assert {error for answer in answers for error in answer.values()} == {ErrorCode.none}
    _, state = broker.transactions.describe(ID)
    assert state is not None and state.partitions == frozenset(partitions)


@with_transactions()
async def test_nothing_is_added_if_one_partition_does_not_exist(broker: TransactionBroker) -> None:
    producer = await broker.begin(ORDERS)
    errors = await broker.transactions.add_partitions(ID, producer, [("orders", 1), ("orders", 9)])
    assert errors == {
        ("orders", 1): ErrorCode.operation_not_attempted,
        ("orders", 9): ErrorCode.unknown_topic_or_partition,
    }
    _, state = broker.transactions.describe(ID)
    assert state is not None and state.partitions == {ORDERS}


@with_transactions()
async def test_transaction_is_aborted_at_its_timeout(broker: TransactionBroker) -> None:
    producer = await broker.begin(ORDERS, timeout_ms=20)
    await broker.until_state("CompleteAbort")
    fenced = producer._replace(producer_epoch=producer.producer_epoch + 1)
    assert broker.markers == [(*ORDERS, TransactionMarker(*fenced, False, 0))]
    assert await end(broker, producer) is ErrorCode.producer_fenced
    assert any('"transaction_aborted"' in line and '"timeout"' in line for line in broker.lines)


@with_transactions()
async def test_waiting_request_is_refused_when_the_lease_ends(
    broker: TransactionBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LEASE_CHECK_S", 0.005)
    producer = await broker.begin(ORDERS)
    broker.appends_allowed.clear()
    ending = asyncio.ensure_future(end(broker, producer))
    await asyncio.sleep(0)
    broker.has_lease = False
    broker.transactions._check_lease()
    with pytest.raises(KafkaError) as refused:
        await ending
    assert refused.value.code is ErrorCode.not_coordinator
    for request in (broker.begin(), broker.transactions.add_partitions(ID, producer, [ORDERS])):
        with pytest.raises(KafkaError) as refused:
            await request
        assert refused.value.code is ErrorCode.not_coordinator
    broker.appends_allowed.set()
    # The outcome was written, and is known once the lease is renewed.
    broker.has_lease = True
    await broker.until_state("CompleteCommit")
    assert await end(broker, producer) is ErrorCode.none


@with_transactions()
async def test_no_transaction_times_out_while_its_coordinator_has_no_lease(
    broker: TransactionBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LEASE_CHECK_S", 0.005)
    producer = await broker.begin(ORDERS, timeout_ms=100)
    broker.has_lease = False
    broker.transactions._check_lease()
    await asyncio.sleep(0.2)
    broker.has_lease = True
    assert await end(broker, producer) is ErrorCode.none
    await broker.until_state("CompleteCommit")


@with_transactions()
async def test_ids_are_not_listed_while_the_list_could_be_incomplete(broker: TransactionBroker) -> None:
    await broker.begin(ORDERS)
    assert [name for name, _ in broker.transactions.transactions()] == [ID]
    broker.has_lease = False
    with pytest.raises(KafkaError) as refused:
        broker.transactions.transactions()
    assert refused.value.code is ErrorCode.coordinator_not_available
    broker.has_lease = True
    broker.transactions.start_loading(1)
    with pytest.raises(KafkaError) as refused:
        broker.transactions.transactions()
    assert refused.value.code is ErrorCode.coordinator_load_in_progress


@with_transactions()
async def test_coordinator_that_leads_again_finishes_what_was_prepared(broker: TransactionBroker) -> None:
    producer = await broker.begin(ORDERS)
    broker.markers_allowed.clear()
    assert await end(broker, producer) is ErrorCode.none
    index = broker.transactions.partition_of(ID)
    assert index is not None
    before = broker.image.partition(TRANSACTIONS_TOPIC, index)
    assert before is not None
    topic_id = broker.image.require_topic(TRANSACTIONS_TOPIC).id
    elsewhere = PartitionImage(index, 2, before.leader_epoch + 1, before.replicas, before.isr)
    broker.transactions.metadata_changed(broker.image, [LeaderChanged(TRANSACTIONS_TOPIC, topic_id, elsewhere)])
    assert broker.transactions.describe(ID)[0] is ErrorCode.not_coordinator
    assert broker.transactions._markers.pending_count() == 0, "the new coordinator sends the markers"
    again = PartitionImage(index, 1, before.leader_epoch + 2, before.replicas, before.isr)
    broker.transactions.metadata_changed(broker.image, [LeaderChanged(TRANSACTIONS_TOPIC, topic_id, again)])
    broker.markers_allowed.set()
    await broker.until_state("CompleteCommit")


@with_transactions()
async def test_marker_of_a_deleted_topic_is_not_needed(broker: TransactionBroker) -> None:
    producer = await broker.begin(ORDERS, AUDIT)
    await broker.delete_topic("audit")
    assert await end(broker, producer) is ErrorCode.none
    await broker.until_state("CompleteCommit")
    assert [(topic, index) for topic, index, _ in broker.markers] == [ORDERS]


@with_transactions()
async def test_marker_of_offsets_reaches_the_groups_once_it_is_written(broker: TransactionBroker) -> None:
    producer = await broker.begin()
    await broker.groups.topic.ensure_exists()
    index = broker.groups.partition_of("readers")
    assert index is not None
    partition = (OFFSETS_TOPIC, index)
    assert await broker.coordinators.verify(ID, *producer, [partition], True) == {partition: ErrorCode.none}
    broker.marker_errors[partition] = [ErrorCode.not_enough_replicas]
    await end(broker, producer)
    await broker.until_state("CompleteCommit")
    assert broker.offsets_ended == [(index, *producer, True)], "not for the marker that failed"


@with_transactions()
async def test_marker_waits_until_the_groups_of_its_partition_are_loaded(broker: TransactionBroker) -> None:
    await broker.groups.topic.ensure_exists()
    broker.groups.unload(0)
    marker = TransactionMarker(1, 0, True, 0)
    assert await broker.marker_writer.write(marker, OFFSETS_TOPIC, 0) is ErrorCode.not_leader_or_follower
    assert not broker.markers and not broker.offsets_ended


@with_transactions(transactional_id_expiration_ms=1_000)
async def test_unused_ids_are_removed_from_the_log(broker: TransactionBroker) -> None:
    await broker.begin(name="idle")
    broker.transactions._run(broker.transactions._coordinator.expire_ids(broker.transactions._now()))
    assert [name for name, _ in broker.transactions.transactions()] == ["idle"]
    broker.wall_now_ms += 10_000
    broker.transactions._run(broker.transactions._expired(broker.transactions._now()))
    while list(broker.transactions.transactions()):
        await asyncio.sleep(0.001)
    reloaded = TransactionBroker(broker.logs)
    reloaded.metadata.image = broker.image
    await reloaded.start()
    assert list(reloaded.transactions.transactions()) == []
    await reloaded.stop()


@with_transactions(transactional_id_expiration_ms=1_000)
async def test_thousands_of_unused_ids_expire_without_waiting_for_the_next_round(
    broker: TransactionBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "IDS_EXPIRED_MAX", 2)
    monkeypatch.setattr(transaction_service, "IDS_EXPIRED_MAX", 2)
    monkeypatch.setattr(transaction_service, "EXPIRY_PAUSE_S", 0.001)
    for number in range(5):
        await broker.begin(name=f"idle-{number}")
    broker.wall_now_ms += 10_000
    broker.transactions._expire()
    while list(broker.transactions.transactions()):
        await asyncio.sleep(0.001)


@with_transactions()
async def test_metrics_show_open_transactions_and_how_they_ended(broker: TransactionBroker) -> None:
    producer = await broker.begin(ORDERS)
    await broker.begin(ORDERS, name="other")
    await broker.begin(name="idle")
    broker.wall_now_ms += 1_500
    broker.markers_allowed.clear()
    assert broker.transactions.gauges() == (2, 1.5, 0)
    await end(broker, producer)
    assert broker.transactions.gauges() == (1, 1.5, 1)
    await broker.transactions.init_producer("other", 1_000, None)
    broker.markers_allowed.set()
    await broker.until_state("CompleteCommit")
    assert broker.transactions.gauges()[0] == 0
    assert broker.metrics.transactions_committed == 1
    assert broker.metrics.transactions_aborted == {"client": 0, "timeout": 0, "fenced": 1}
    broker.has_lease = False
    assert broker.transactions.gauges() == (0, 0.0, 0), "another node may coordinate them by now"


@with_transactions()
async def test_damaged_state_is_not_skipped_and_its_clients_wait(broker: TransactionBroker) -> None:
    producer = await broker.begin(ORDERS)
    index = broker.transactions.partition_of(ID)
    assert index is not None
    log = broker.logs[(TRANSACTIONS_TOPIC, index)]
    log.append(garbage_batch())

    again = TransactionBroker(broker.logs)
    again.metadata.image = broker.image
    await again.start()
    values = await again.transactions.end(ID, producer, is_commit=True, client_version=0)
    assert values["error_code"] is ErrorCode.coordinator_load_in_progress
    (line,) = [line for line in again.lines if "transactions_load_failed" in line]
    assert "the batch at offset 2 is damaged" in line and "intact replica" in line
    assert set(log.damaged_offsets) == {2}, "the replica is healed"

    # As an intact replica that leads.
    del log.batches[2:]
    log.log_end_offset = 2
    await again.until_state("Ongoing")
    await again.stop()
