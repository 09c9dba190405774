"""The transaction coordinator, event by event."""

from __future__ import annotations

import pytest
from tests.transactions.driver import ID, PARTITIONS, TIMEOUT_MS, Driver

from chronik.groups.records import group_partition
from chronik.transactions.coordinator import APPEND_RETRY_MS, IDS_EXPIRED_MAX, ProducerIdAndEpoch, TransactionSettings
from chronik.transactions.records import UnreadableRecord, write_key, write_value
from chronik.transactions.transaction import EPOCH_MAX, TransactionMetadata, TransactionState
from chronik.wire.errors import ErrorCode

ORDERS = ("orders", 0)
AUDIT = ("audit", 3)


def open_transaction(driver: Driver) -> ProducerIdAndEpoch:
    producer = driver.producer(driver.init())
    assert driver.error(driver.add(producer, ORDERS, AUDIT)) is ErrorCode.none
    return producer


@pytest.mark.parametrize("commit", [True, False])
def test_transaction_is_answered_when_prepared_and_complete_when_marked(commit: bool) -> None:
    driver = Driver()
    producer = open_transaction(driver)
    assert driver.producer(driver.end(producer, commit=commit)) == producer
    assert driver.state().state.is_prepared
    assert driver.error(driver.add(producer, ORDERS)) is ErrorCode.concurrent_transactions
    (marker,) = driver.write_markers()
    assert (marker.partitions, marker.is_commit, marker.coordinator_epoch) == ((AUDIT, ORDERS), commit, 7)
    assert driver.state().state is (TransactionState.COMPLETE_COMMIT if commit else TransactionState.COMPLETE_ABORT)
    assert driver.state().partitions == frozenset()
    assert driver.error(driver.add(producer, ORDERS)) is ErrorCode.none


def test_nothing_is_answered_before_the_record_is_committed() -> None:
    driver = Driver()
    producer = open_transaction(driver)
    driver.holds_appends = True
    token = driver.end(producer)
    assert token not in driver.replies and not driver.markers
    assert driver.error(driver.end(producer)) is ErrorCode.concurrent_transactions
    assert driver.error(driver.add(producer, ("more", 1))) is ErrorCode.concurrent_transactions
    assert driver.error(driver.init()) is ErrorCode.concurrent_transactions
    driver.settle()
    assert driver.error(token) is ErrorCode.none and len(driver.markers) == 1


@pytest.mark.parametrize("is_written", [True, False])
def test_commit_whose_append_failed_may_be_repeated_or_end_as_abort(is_written: bool) -> None:
    driver = Driver()
    producer = open_transaction(driver)
    driver.holds_appends = True
    token = driver.end(producer)
    driver.settle(ErrorCode.request_timed_out, is_written=is_written)
    driver.holds_appends = False
    assert driver.error(token) is ErrorCode.coordinator_not_available and not driver.markers
    assert driver.error(driver.end(producer)) is ErrorCode.none
    assert driver.failed_over().markers[0].is_commit


def test_new_producer_fences_the_old_one_and_aborts_its_transaction() -> None:
    driver = Driver()
    old = open_transaction(driver)
    assert driver.error(driver.init()) is ErrorCode.concurrent_transactions
    (marker,) = driver.write_markers()
    assert not marker.is_commit and marker.producer_epoch == old.producer_epoch + 1
    new = driver.producer(driver.init())
    assert new == (old.producer_id, old.producer_epoch + 2)
    for error in (driver.error(driver.end(old)), driver.error(driver.add(old, ORDERS))):
        assert error is ErrorCode.producer_fenced
    assert [(each.is_commit, each.cause) for each in driver.ended] == [(False, "fenced")]


def test_timeout_aborts_and_fences_and_a_failed_append_is_repeated() -> None:
    driver = Driver()
    producer = open_transaction(driver)
    driver.tick(TIMEOUT_MS - 1)
    assert driver.state().state is TransactionState.ONGOING
    driver.holds_appends = True
    driver.tick(1)
    driver.settle(ErrorCode.not_enough_replicas, is_written=False)
    driver.holds_appends = False
    assert driver.coordinator.next_deadline_ms() == driver.now_ms + APPEND_RETRY_MS
    driver.tick(APPEND_RETRY_MS)
    driver.write_markers()
    assert driver.state().state is TransactionState.COMPLETE_ABORT
    assert driver.ended[0].cause == "timeout"
    assert driver.error(driver.end(producer)) is ErrorCode.producer_fenced


def test_new_coordinator_finishes_what_was_prepared_and_keeps_timeouts() -> None:
    driver = Driver()
    producer = open_transaction(driver)
    driver.now_ms += 40_000
    other = driver.failed_over()
    other.tick(TIMEOUT_MS - 40_000)
    (marker,) = other.write_markers()
    assert not marker.is_commit

    driver = Driver()
    producer = open_transaction(driver)
    driver.end(producer)
    other = driver.failed_over()
    (marker,) = other.write_markers()
    assert marker.is_commit and marker.partitions == (AUDIT, ORDERS)
    assert driver.error(driver.end(producer)) is ErrorCode.concurrent_transactions
    assert other.producer(other.end(producer)) == producer


def test_repeated_end_has_the_same_outcome_and_another_outcome_is_refused() -> None:
    driver = Driver()
    producer = open_transaction(driver)
    driver.end(producer)
    assert driver.error(driver.end(producer)) is ErrorCode.concurrent_transactions
    driver.write_markers()
    assert driver.error(driver.end(producer)) is ErrorCode.none
    assert driver.error(driver.end(producer, commit=False)) is ErrorCode.invalid_txn_state
    assert len(driver.ended) == 1


def test_end_without_partitions_is_refused_for_old_clients() -> None:
    driver = Driver()
    producer = driver.producer(driver.init())
    for commit in (True, False):
        assert driver.error(driver.end(producer, commit=commit)) is ErrorCode.invalid_txn_state


# -- version 2 ---------------------------------------------------------------------------------------------------------


def test_version_2_raises_the_epoch_with_each_end_and_answers_a_repetition() -> None:
    driver = Driver()
    first = open_transaction(driver)
    second = driver.producer(driver.end(first, version=2))
    assert second == (first.producer_id, first.producer_epoch + 1)
    (marker,) = driver.write_markers()
    assert marker.producer_epoch == second.producer_epoch
    assert driver.producer(driver.end(first, version=2)) == second
    assert driver.error(driver.end(first, version=2, commit=False)) is ErrorCode.invalid_txn_state
    assert driver.error(driver.add(first, ORDERS)) is ErrorCode.producer_fenced
    assert driver.error(driver.add(second, ORDERS)) is ErrorCode.none
    assert driver.error(driver.end(first, version=2)) is ErrorCode.producer_fenced


def test_version_2_may_abort_a_transaction_that_added_nothing() -> None:
    driver = Driver()
    producer = driver.producer(driver.init())
    assert driver.error(driver.end(producer, version=2)) is ErrorCode.invalid_txn_state
    after = driver.producer(driver.end(producer, version=2, commit=False))
    assert after.producer_epoch == producer.producer_epoch + 1
    assert driver.state().state is TransactionState.COMPLETE_ABORT and not driver.markers
    assert driver.producer(driver.end(producer, version=2, commit=False)) == after


def used_up() -> tuple[Driver, ProducerIdAndEpoch]:
    """Return a producer whose next epoch is the last one, which is kept for fencing."""
    producer = ProducerIdAndEpoch(50, EPOCH_MAX - 1)
    metadata = TransactionMetadata(*producer, TIMEOUT_MS, TransactionState.EMPTY, 0)
    partition = group_partition(ID, PARTITIONS)
    return Driver(log={partition: [(write_key(ID), write_value(metadata))]}), producer


def test_version_2_gives_a_new_producer_id_when_the_epochs_are_used_up() -> None:
    driver, old = used_up()
    driver.add(old, ORDERS)
    new = driver.producer(driver.end(old, version=2))
    assert new.producer_epoch == 0 and new.producer_id != old.producer_id
    assert driver.error(driver.add(new, ORDERS)) is ErrorCode.concurrent_transactions
    (marker,) = driver.write_markers()
    assert (marker.producer_id, marker.producer_epoch) == (old.producer_id, EPOCH_MAX)
    assert driver.producer(driver.end(old, version=2)) == new
    assert driver.error(driver.add(new, ORDERS)) is ErrorCode.none
    assert driver.error(driver.add(old, ORDERS)) is ErrorCode.invalid_producer_id_mapping


def test_used_up_epochs_lead_to_a_new_producer_id_and_a_timeout_can_still_fence() -> None:
    driver, old = used_up()
    driver.add(old, ORDERS)
    driver.tick(TIMEOUT_MS)
    (marker,) = driver.write_markers()
    assert marker.producer_epoch == EPOCH_MAX
    new = driver.producer(driver.init())
    assert new.producer_epoch == 0 and new.producer_id != old.producer_id


# -- recovery of a producer (KIP-360) ----------------------------------------------------------------------------------


def test_producer_that_recovers_gets_the_next_epoch_once() -> None:
    driver = Driver()
    first = driver.producer(driver.init())
    second = driver.producer(driver.init(first))
    assert second == (first.producer_id, first.producer_epoch + 1)
    assert driver.producer(driver.init(first)) == second, "a repetition"
    other = driver.producer(driver.init())
    for fenced in (first, second):
        assert driver.error(driver.init(fenced)) is ErrorCode.producer_fenced
    assert driver.error(driver.init(ProducerIdAndEpoch(4711, 0))) is ErrorCode.producer_fenced
    assert driver.producer(driver.init(other)).producer_epoch == other.producer_epoch + 1


def test_producer_that_recovers_with_used_up_epochs_gets_one_new_producer_id() -> None:
    driver, old = used_up()
    new = driver.producer(driver.init(old))
    assert new.producer_epoch == 0
    assert driver.producer(driver.init(old)) == new


# -- verification, listing, expiry -------------------------------------------------------------------------------------


def test_verification_accepts_only_partitions_of_the_open_transaction() -> None:
    driver = Driver()
    producer = driver.producer(driver.init())
    verify = driver.coordinator.verify_partitions
    assert verify(ID, producer, [ORDERS]) == (ErrorCode.none, {ORDERS: False})
    driver.add(producer, ORDERS)
    assert verify(ID, producer, [ORDERS, AUDIT]) == (ErrorCode.none, {ORDERS: True, AUDIT: False})
    assert verify(ID, producer._replace(producer_epoch=9), [ORDERS])[0] is ErrorCode.producer_fenced
    assert verify("unknown", producer, [ORDERS])[0] is ErrorCode.invalid_producer_id_mapping
    driver.end(producer)
    assert verify(ID, producer, [ORDERS])[0] is ErrorCode.concurrent_transactions
    driver.write_markers()
    assert verify(ID, producer, [ORDERS]) == (ErrorCode.none, {ORDERS: False})


def test_unused_transactional_ids_expire_and_open_ones_stay() -> None:
    driver = Driver(TransactionSettings(id_expiration_ms=1_000))
    open_transaction(driver)
    driver.init(name="idle")
    driver.now_ms += 1_001
    driver.expire()
    assert [name for name, _ in driver.coordinator.transactions()] == [ID]
    assert driver.coordinator.describe("idle")[0] is ErrorCode.transactional_id_not_found
    assert driver.failed_over().coordinator.describe("idle")[0] is ErrorCode.transactional_id_not_found


def test_thousands_of_unused_ids_expire_in_parts() -> None:
    driver = Driver(TransactionSettings(id_expiration_ms=1_000))
    for number in range(IDS_EXPIRED_MAX + 10):
        driver.init(name=f"idle-{number}")
    driver.now_ms += 1_001
    driver.expire()
    assert len(list(driver.coordinator.transactions())) == 10
    driver.expire()
    assert not list(driver.coordinator.transactions())


def test_waiting_clients_are_sent_to_the_new_coordinator() -> None:
    driver = Driver()
    producer = open_transaction(driver)
    driver.holds_appends = True
    token = driver.end(producer)
    driver.unload(driver.coordinator.partition_of(ID) or 0)
    assert driver.error(token) is ErrorCode.not_coordinator
    driver.settle()
    assert driver.error(driver.end(producer)) is ErrorCode.not_coordinator
    assert driver.failed_over().markers[0].is_commit


def test_invalid_requests_are_refused() -> None:
    driver = Driver()
    assert driver.error(driver.init(name="")) is ErrorCode.invalid_request
    assert driver.error(driver.init(timeout_ms=0)) is ErrorCode.invalid_transaction_timeout
    assert driver.error(driver.init(timeout_ms=900_001)) is ErrorCode.invalid_transaction_timeout
    producer = driver.producer(driver.init())
    other = producer._replace(producer_id=producer.producer_id + 1)
    assert driver.error(driver.add(other, ORDERS)) is ErrorCode.invalid_producer_id_mapping
    assert driver.error(driver.end(producer, name="unknown")) is ErrorCode.invalid_producer_id_mapping
    driver.coordinator.partition_count = 0
    assert driver.error(driver.init()) is ErrorCode.coordinator_not_available


def test_prepared_transaction_shows_the_partitions_that_have_no_marker_yet() -> None:
    driver = Driver()
    producer = open_transaction(driver)
    driver.end(producer)
    assert driver.state().partitions == {ORDERS, AUDIT}
    driver.coordinator.marker_written(ID, producer, AUDIT, driver.at)
    assert driver.state().partitions == {ORDERS}


def test_settled_is_reported_when_the_next_transition_may_begin() -> None:
    driver = Driver()
    producer = open_transaction(driver)
    driver.settled.clear()
    driver.end(producer)
    assert not driver.settled, "its markers are not written yet"
    driver.write_markers()
    assert driver.settled == [ID]


@pytest.mark.parametrize("damaged", [(write_key(ID), b"no value"), (b"\0", b"")])
def test_partition_with_an_unreadable_state_is_not_served(damaged: tuple[bytes, bytes]) -> None:
    """The state may be a decision to commit: the one before it would abort the transaction."""
    driver = Driver()
    producer = open_transaction(driver)
    partition = group_partition(ID, PARTITIONS)
    coordinator = driver.coordinator
    coordinator.unload(partition, driver.at)
    coordinator.start_loading(partition)
    coordinator.replay(partition, [*driver.log[partition], damaged])
    with pytest.raises(UnreadableRecord):
        coordinator.finish_loading(partition, 8, driver.at)
    assert coordinator.is_loading and not coordinator.is_loaded(partition)
    assert driver.error(driver.end(producer)) is ErrorCode.coordinator_load_in_progress
    coordinator.start_loading(partition)
    coordinator.replay(partition, [*driver.log[partition], (b"\0\1", b"of another kind"), (None, b"of no id")])
    coordinator.finish_loading(partition, 8, driver.at)
    assert driver.state().state is TransactionState.ONGOING
