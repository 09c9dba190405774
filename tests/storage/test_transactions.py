"""Transactions in one log: the last stable offset, and the aborted transactions, through restarts and truncation."""

import errno
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from random import Random
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.storage.faulty_disk import Crash, FaultyDisk
from tests.storage.helpers import (
    FOLDER,
    NOW_MS,
    SMALL,
    TransactionalProducer,
    aborted,
    append,
    append_many,
    batch,
    headers,
    open_transactions,
    read,
    reopen,
    sync,
)

from chronik.storage.aborted import ENTRY, AbortedIndexDamaged, AbortedTransaction
from chronik.storage.log import Log
from chronik.storage.producers import BATCHES_KEPT, PRODUCERS_MAX, ProducerStates
from chronik.storage.scrubbing import SegmentScrub
from chronik.storage.segment import LogSegment, segment_path
from chronik.storage.transactions import ENDED_MAX, OpenTransactions
from chronik.wire.batch import Marker, encode_marker, read_marker
from chronik.wire.errors import ErrorCode, KafkaError

DAY_MS = 86_400_000


def new_log() -> Log:
    return reopen(FaultyDisk())


def follow(leader: Log, follower: Log) -> None:
    while follower.log_end_offset < leader.log_end_offset:
        data = read(leader, follower.log_end_offset, 500)
        follower.append_as_follower(data, headers(data), NOW_MS)


def refused(log: Log, records: bytes) -> ErrorCode:
    ((_, header),) = headers(records)
    with pytest.raises(KafkaError) as raised:
        log.producers.check(header)
    return raised.value.code


def refused_marker(log: Log, producer_id: int, epoch: int, coordinator_epoch: int) -> ErrorCode:
    end = log.log_end_offset
    with pytest.raises(KafkaError) as raised:
        log.append_marker(encode_marker(producer_id, epoch, True, coordinator_epoch, NOW_MS), 0, NOW_MS)
    assert log.log_end_offset == end
    return raised.value.code


# -- the last stable offset --------------------------------------------------------------------------------------------


def test_without_a_transaction_the_last_stable_offset_is_the_high_watermark() -> None:
    log = new_log()
    append_many(log, 3)
    append(log, batch(producer_id=1, producer_epoch=0, base_sequence=0))
    assert [log.last_stable_offset(watermark) for watermark in (0, 2, 4)] == [0, 2, 4]
    assert aborted(log) == [] and open_transactions(log) == {}


def test_an_open_transaction_holds_the_last_stable_offset_at_its_first_record() -> None:
    log = new_log()
    append_many(log, 2)
    producer = TransactionalProducer(log, 1)
    producer.send(2)
    append_many(log, 2)
    producer.send()
    assert open_transactions(log) == {1: 2}
    assert [log.last_stable_offset(watermark) for watermark in (1, 2, 3, 7)] == [1, 2, 2, 2]


def test_the_last_stable_offset_advances_only_when_the_marker_is_below_the_high_watermark() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    producer.send(3)
    marker = producer.commit()
    assert open_transactions(log) == {}
    assert log.last_stable_offset(marker) == 0
    assert log.last_stable_offset(marker + 1) == marker + 1


def test_the_earliest_of_several_transactions_decides_the_last_stable_offset() -> None:
    log = new_log()
    first, second, third = (TransactionalProducer(log, each) for each in (1, 2, 3))
    first.send()
    second.send()
    third.send()
    assert second.commit() == 3
    assert log.last_stable_offset(4) == 0
    assert first.abort() == 4
    # The marker of the first transaction is not replicated yet, and the third one is open.
    assert log.last_stable_offset(4) == 0
    assert log.last_stable_offset(5) == 2
    third.commit()
    assert log.last_stable_offset(5) == 2
    assert log.last_stable_offset(6) == 6


def test_the_last_stable_offset_is_not_below_the_log_start() -> None:
    log = new_log()
    TransactionalProducer(log, 1).send()
    append_many(log, 5)
    log.increment_log_start(3).run()
    assert log.last_stable_offset(6) == 3


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60), st.lists(st.integers(0, 80), max_size=8))
def test_the_last_stable_offset_equals_its_definition(events: list[tuple[int, bool]], watermarks: list[int]) -> None:
    transactions = OpenTransactions()
    ongoing: dict[int, int] = {}
    decided: list[tuple[int, int]] = []
    for offset, (producer_id, is_marker) in enumerate(events):
        if is_marker:
            ended = transactions.end(producer_id, offset)
            assert (ended is None) == (producer_id not in ongoing)
            if ended is not None:
                first = ongoing.pop(producer_id)
                decided.append((first, offset))
                assert ended == (first, offset, min(ongoing.values(), default=offset + 1))
        else:
            transactions.begin(producer_id, offset)
            ongoing.setdefault(producer_id, offset)
    for watermark in sorted(watermarks):
        unstable = [*ongoing.values(), *(first for first, marker in decided if marker >= watermark)]
        assert transactions.first_unstable(watermark) == min(unstable, default=None)


def test_many_unreplicated_markers_need_bounded_memory_and_never_raise_the_last_stable_offset() -> None:
    transactions = OpenTransactions()
    for number in range(10 * ENDED_MAX):
        transactions.begin(1, 2 * number)
        transactions.end(1, 2 * number + 1)
    end = 20 * ENDED_MAX
    assert len(list(transactions.ended())) <= ENDED_MAX + 1
    for watermark in range(0, end, 97):
        first = transactions.first_unstable(watermark)
        assert first is not None and first <= watermark // 2 * 2
    assert transactions.first_unstable(end) is None


# -- producers ---------------------------------------------------------------------------------------------------------


def test_a_marker_of_a_lower_producer_epoch_is_refused() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    producer.epoch = 5
    producer.send()
    assert refused_marker(log, 1, 4, 0) == ErrorCode.invalid_producer_epoch
    assert open_transactions(log) == {1: 0}
    producer.commit()
    assert open_transactions(log) == {}


def test_a_marker_of_an_earlier_coordinator_is_refused() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    producer.send()
    producer.end(True, coordinator_epoch=7)
    producer.send()
    assert refused_marker(log, 1, 0, 6) == ErrorCode.transaction_coordinator_fenced
    producer.end(True, coordinator_epoch=7)
    state = log.producers.get(1)
    assert state is not None and (state.coordinator_epoch, state.first_offset) == (7, None)


def test_a_marker_raises_the_epoch_and_the_next_sequence_is_zero() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    producer.send(3)
    late = producer.batch()
    producer.epoch = 1
    producer.abort()
    assert refused(log, late) == ErrorCode.invalid_producer_epoch
    assert refused(log, producer.batch()) == ErrorCode.out_of_order_sequence_number
    producer.sequence = 0
    assert producer.send() == 4
    assert open_transactions(log) == {1: 4}


def test_a_marker_of_the_same_epoch_keeps_the_sequence() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    assert producer.send() == 0
    producer.commit()
    assert producer.send() == 2


def test_a_batch_of_the_open_transaction_may_be_repeated() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    producer.send()
    producer.commit()
    sent = producer.batch()
    append(log, sent)
    repeated = log.producers.check(headers(sent)[0][1])
    assert repeated is not None and repeated.base_offset == 2


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("is_next_open", [True, False])
def test_a_sequence_of_an_ended_transaction_is_no_duplicate(is_kept: bool, is_next_open: bool) -> None:
    """Found by `make soak`: librdkafka uses a sequence again if it purges a resent message from its queue."""
    log = new_log()
    producer = TransactionalProducer(log, 1)
    purged = producer.batch()
    append(log, purged)
    for _ in range(0 if is_kept else BATCHES_KEPT):
        producer.send()
    producer.abort()
    if is_next_open:
        producer.send()
    assert refused(log, purged) == ErrorCode.invalid_txn_state


def test_a_marker_alone_fences_an_unknown_producer() -> None:
    log = new_log()
    log.append_marker(encode_marker(1, 3, False, 0, NOW_MS), 0, NOW_MS)
    producer = TransactionalProducer(log, 1)
    assert refused(log, producer.batch()) == ErrorCode.invalid_producer_epoch
    assert aborted(log) == [], "a transaction without records needs no entry"
    assert log.last_stable_offset(0) == 0


def test_a_batch_outside_the_open_transaction_is_refused() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    producer.send()
    plain = batch(producer_id=1, producer_epoch=0, base_sequence=1)
    assert refused(log, plain) == ErrorCode.invalid_txn_state
    producer.commit()
    append(log, plain)
    assert open_transactions(log) == {}


def test_a_new_epoch_continues_the_open_transaction() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    producer.send()
    producer.epoch, producer.sequence = 1, 0
    producer.send()
    assert open_transactions(log) == {1: 0}


def test_batches_of_the_group_coordinator_need_no_sequence() -> None:
    log = new_log()

    def offsets_batch(epoch: int, is_transactional: bool = True) -> bytes:
        return batch(2, producer_id=1, producer_epoch=epoch, is_transactional=is_transactional)

    for _ in range(3):
        ((at, header),) = headers(offsets_batch(2))
        assert log.producers.check(header) is None
        log.append(offsets_batch(2), [(at, header)], 0, NOW_MS)
    assert header.last_sequence == -1
    assert open_transactions(log) == {1: 0}
    assert refused(log, offsets_batch(1)) == ErrorCode.invalid_producer_epoch
    assert refused(log, offsets_batch(2, False)) == ErrorCode.invalid_txn_state


def test_markers_do_not_hide_unreplicated_batches_of_other_producers() -> None:
    log = new_log()
    transactional = TransactionalProducer(log, 1)
    transactional.send()
    append(log, batch(producer_id=2, producer_epoch=0, base_sequence=0))
    transactional.commit()
    log.append_marker(encode_marker(3, 0, True, 0, NOW_MS), 0, NOW_MS)
    assert log.producers.first_from(1) == [(2, 0, 0)]


def test_a_producer_with_an_open_transaction_never_expires() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    producer.send()
    log.apply_retention(NOW_MS + 100 * DAY_MS, 0)
    assert open_transactions(log) == {1: 0}
    producer.abort()
    assert aborted(log) == [(1, 0)]
    assert log.producers.expire(NOW_MS + 100 * DAY_MS) == 1


def test_the_limit_of_producers_spares_open_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PRODUCERS_MAX > 3
    monkeypatch.setattr("chronik.storage.producers.PRODUCERS_MAX", 3)
    log = new_log()
    TransactionalProducer(log, 1).send()
    for producer_id in range(2, 9):
        append(log, batch(producer_id=producer_id, producer_epoch=0, base_sequence=0))
    assert [each for each, _ in log.producers.items()] == [1, 7, 8]


def test_markers_move_no_producer_in_the_order_of_batches() -> None:
    states = ProducerStates(1000)
    for offset, producer_id in enumerate((1, 2)):
        ((_, header),) = headers(batch(producer_id=producer_id, producer_epoch=0, base_sequence=0))
        states.record(header, offset, NOW_MS)
    ((_, header),) = headers(encode_marker(1, 0, True, 4, NOW_MS))
    assert states.end_transaction(header, Marker(True, 4), 2, NOW_MS) is None
    assert [producer_id for producer_id, _ in states.items()] == [1, 2]


# -- aborted transactions ----------------------------------------------------------------------------------------------


def test_aborted_transactions_that_overlap_a_range_are_found_by_first_offset() -> None:
    log = new_log()
    first, second, third = (TransactionalProducer(log, each) for each in (1, 2, 3))
    first.send(2)  # 0-1
    second.send(2)  # 2-3
    third.send()  # 4
    second.abort()  # 5
    first.abort()  # 6
    third.commit()  # 7
    second.send()  # 8
    second.abort()  # 9
    assert aborted(log) == [(1, 0), (2, 2), (2, 8)]
    assert aborted(log, 0, 2) == [(1, 0)]
    assert aborted(log, 0, 3) == [(1, 0), (2, 2)]
    assert aborted(log, 6, 7) == [(1, 0)], "its marker is in the range"
    assert aborted(log, 7, 8) == []
    assert aborted(log, 9) == [(2, 8)]


def test_no_job_is_created_if_nothing_was_aborted_from_the_offset_on() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    producer.send()
    producer.commit()
    assert log.aborted_job(0, 2) is None
    producer.send()
    marker = producer.abort()
    append_many(log, 10)
    assert log.aborted_job(marker + 1, log.log_end_offset) is None
    assert log.aborted_job(marker, marker) is None


def test_a_transaction_is_found_from_a_segment_before_that_of_its_marker() -> None:
    log = new_log()
    producer = TransactionalProducer(log, 1)
    producer.send()
    append_many(log, 60)
    producer.send()
    append_many(log, 60)
    producer.abort()
    append_many(log, 60)
    assert log.segment_count > 4
    assert aborted(log, 0, 1) == aborted(log, 50, 60) == [(1, 0)]
    assert aborted(log, 140) == []


def test_every_range_finds_exactly_the_transactions_that_overlap_it() -> None:
    log = new_log()
    run_transactions(log, 42)
    transactions: list[tuple[int, int, int]] = []
    begun: dict[int, int] = {}
    offset = 0
    while offset < log.log_end_offset:
        data = read(log, offset)
        for at, header in headers(data):
            if header.is_control:
                first = begun.pop(header.producer_id, None)
                if first is not None and not read_marker(data, at).is_commit:
                    transactions.append((header.producer_id, first, header.base_offset))
            elif header.is_transactional:
                begun.setdefault(header.producer_id, header.base_offset)
            offset = header.next_offset
    assert len({log._segments.index_of(last) for _, _, last in transactions}) > 2
    for start in range(log.log_end_offset):
        for end in range(start + 1, log.log_end_offset + 1, 5):
            overlapping = [(each, first) for each, first, last in transactions if last >= start and first < end]
            assert aborted(log, start, end) == sorted(overlapping, key=lambda item: item[1])


def test_the_index_has_the_format_of_kafka() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 1)
    producer = TransactionalProducer(log, 9)
    producer.send(2)
    TransactionalProducer(log, 10).send()
    producer.abort()
    log.close()
    path = segment_path(FOLDER, 0, ".txnindex")
    assert bytes(disk.content(path)) == ENTRY.pack(0, 9, 1, 4, 3) and ENTRY.size == 34


def test_a_log_without_aborts_has_no_index_file() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    producer = TransactionalProducer(log, 1)
    for _ in range(40):
        producer.send()
        producer.commit()
    sync(log)
    log.close()
    assert log.segment_count > 1 and not [name for name in disk.listdir(FOLDER) if name.endswith(".txnindex")]


def test_a_follower_derives_the_same_transactions() -> None:
    leader, follower = new_log(), new_log()
    run_transactions(leader, 42)
    follow(leader, follower)
    assert_same_transactions(leader, follower)


def run_transactions(log: Log, rounds: int) -> None:
    """Append commits, aborts and open transactions of three producers, over several segments."""
    producers = [TransactionalProducer(log, each) for each in (1, 2, 3)]
    for number in range(rounds):
        producer = producers[number % 3]
        producer.send(1 + number % 2)
        append_many(log, 1)
        if number % 5 < 3:
            producer.end(number % 2 == 0)
        if number % 4 == 3:
            sync(log)
    assert log.segment_count > 2 and aborted(log)


def assert_same_transactions(one: Log, other: Log) -> None:
    assert open_transactions(one) == open_transactions(other)
    end = one.log_end_offset
    assert other.log_end_offset == end
    for offset in range(one.log_start_offset, end, 3):
        for upto in (offset + 1, offset + 7, end):
            assert aborted(one, offset, upto) == aborted(other, offset, upto)
    assert stable_offsets(one) == stable_offsets(other)
    for producer_id, state in one.producers.items():
        known = other.producers.get(producer_id)
        assert known is not None and (known.epoch, known.batches) == (state.epoch, state.batches)
        assert (known.coordinator_epoch, known.first_offset) == (state.coordinator_epoch, state.first_offset)


def stable_offsets(log: Log) -> list[int | None]:
    """Return the first unstable offset for each high watermark. A copy answers: the log forgets what is replicated."""
    transactions = deepcopy(log.producers.transactions)
    return [transactions.first_unstable(watermark) for watermark in range(log.log_end_offset + 1)]


# -- restarts and truncation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint_bytes", [500, 1 << 20])
@pytest.mark.parametrize("is_clean", [True, False])
def test_a_restarted_log_has_the_same_transactions(is_clean: bool, checkpoint_bytes: int) -> None:
    disk, config = FaultyDisk(), replace(SMALL, checkpoint_bytes=checkpoint_bytes)
    log, expected = reopen(disk, config), new_log()
    run_transactions(log, 42)
    follow(log, expected)
    if is_clean:
        log.close()
    disk.kill()
    log = reopen(disk, config)
    assert (log.recovery is None) == is_clean
    assert_same_transactions(expected, log)


def test_a_truncated_log_opens_the_transactions_whose_markers_it_lost() -> None:
    full = new_log()
    run_transactions(full, 42)
    for end in range(1, full.log_end_offset, 7):
        log, expected = new_log(), new_log()
        follow(full, log)
        sync(log)
        log.truncate_to(end)
        data = read(full, 0, 1 << 20, end)
        while data:
            expected.append_as_follower(data, headers(data), NOW_MS)
            data = read(full, expected.log_end_offset, 1 << 20, end) if expected.log_end_offset < end else b""
        assert_same_transactions(expected, log)


def test_a_log_that_starts_anew_forgets_open_transactions() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    TransactionalProducer(log, 1).send()
    append_many(log, 100)
    sync(log)
    log.truncate_fully(500)
    assert open_transactions(log) == {} and log.last_stable_offset(500) == 500
    append_many(log, 1)
    disk.kill()
    assert open_transactions(reopen(disk)) == {}


def test_a_transaction_whose_records_were_all_deleted_is_forgotten_at_the_next_start() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    TransactionalProducer(log, 1).send()
    append_many(log, 100)
    sync(log)
    log.roll(NOW_MS)
    log.increment_log_start(log.log_end_offset).run()
    assert log.last_stable_offset(101) == 101
    log.close()
    log = reopen(disk)
    assert open_transactions(log) == {}


def index_paths(disk: FaultyDisk) -> list[str]:
    return [f"{FOLDER}/{name}" for name in disk.listdir(FOLDER) if name.endswith(".txnindex")]


def delete_file(disk: FaultyDisk, path: str) -> None:
    disk.remove(path)


def cut_off_an_entry(disk: FaultyDisk, path: str) -> None:
    del disk.content(path)[-ENTRY.size :]


def cut_into_an_entry(disk: FaultyDisk, path: str) -> None:
    del disk.content(path)[-3:]


def add_an_entry(disk: FaultyDisk, path: str) -> None:
    disk.content(path).extend(ENTRY.pack(0, 77, 1, 1 << 40, 2))


def flip(at: int) -> Callable[[FaultyDisk, str], None]:
    def flip_a_bit(disk: FaultyDisk, path: str) -> None:
        disk.content(path)[at] ^= 1

    return flip_a_bit


DAMAGES = [delete_file, cut_off_an_entry, cut_into_an_entry, add_an_entry, *(flip(at) for at in (1, 9, 17, 25, 33))]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_clean", [True, False])
def test_opening_a_log_rebuilds_a_damaged_index(damage: Callable[[FaultyDisk, str], None], is_clean: bool) -> None:
    disk, expected = FaultyDisk(), new_log()
    log = reopen(disk)
    run_transactions(log, 42)
    follow(log, expected)
    if is_clean:
        log.close()
    disk.kill()
    paths = index_paths(disk)
    assert len(paths) > 2
    for path in paths:
        content = bytes(disk.content(path))
        damage(disk, path)
        log = reopen(disk)
        assert_same_transactions(expected, log)
        if path != paths[-1]:
            assert bytes(disk.content(path)) == content
            assert log.recovery is not None and log.recovery.rebuilt_indexes
        assert log.close()


@pytest.mark.parametrize("damage", [each for each in DAMAGES if each is not add_an_entry])
def test_a_reader_gets_an_error_if_the_index_is_damaged(damage: Callable[[FaultyDisk, str], None]) -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    run_transactions(log, 42)
    damage(disk, index_paths(disk)[1])
    files = disk.open_files
    with pytest.raises(AbortedIndexDamaged) as raised:
        aborted(log)
    assert raised.value.code == ErrorCode.kafka_storage_error
    assert disk.open_files == files
    scrub = scrubbed(log, raised.value.base_offset)
    log.indexes_rebuilt(scrub, log.rebuild_indexes_job(scrub)())
    assert aborted(log)


@given(
    st.booleans(),
    st.lists(
        st.tuples(st.integers(0, 100), st.sampled_from(["remove", "cut", "flip"]), st.integers(0, 500)), max_size=6
    ),
)
@settings(max_examples=150, deadline=None)
def test_damage_to_any_file_but_the_batches_changes_no_transaction(
    is_clean: bool, damages: list[tuple[int, str, int]]
) -> None:
    disk, expected = FaultyDisk(), new_log()
    log = reopen(disk)
    run_transactions(log, 42)
    follow(log, expected)
    if is_clean:
        log.close()
    disk.kill()
    for number, kind, at in damages:
        names = [name for name in disk.listdir(FOLDER) if not name.endswith(".log")]
        path = f"{FOLDER}/{names[number % len(names)]}"
        content = disk.content(path)
        if kind == "remove":
            disk.remove(path)
        elif content and kind == "cut":
            del content[at % len(content) :]
        elif content:
            content[at % len(content)] ^= 1 << at % 8
    log = reopen(disk)
    assert open_transactions(log) == open_transactions(expected)
    assert aborted(log) == aborted(expected) and stable_offsets(log) == stable_offsets(expected)


def test_an_index_that_cannot_be_written_stays_in_memory_and_prevents_a_clean_close() -> None:
    disk, expected = FaultyDisk(), new_log()
    disk.fail = lambda operation, path: errno.ENOSPC if path.endswith(".txnindex") else None
    log = reopen(disk)
    run_transactions(log, 42)
    follow(log, expected)
    assert_same_transactions(expected, log)
    assert not log.close() and not index_paths(disk)
    disk.kill()
    disk.fail = lambda operation, path: None
    log = reopen(disk)
    assert_same_transactions(expected, log)
    assert log.close() and index_paths(disk)


def test_entries_that_could_not_be_written_are_cut_by_a_truncation() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    producer = TransactionalProducer(log, 1)

    def abort() -> None:
        producer.send()
        producer.abort()

    abort()
    sync(log)
    assert log._segments.all[-1].aborted.try_write()
    disk.fail = lambda operation, path: errno.ENOSPC if path.endswith(".txnindex") else None
    abort()
    abort()
    log.truncate_to(4)
    assert aborted(log) == [(1, 0), (1, 2)]
    disk.fail = lambda operation, path: None
    log.truncate_to(3)
    assert aborted(log) == [(1, 0)] and open_transactions(log) == {1: 2}
    assert log.close()
    assert aborted(reopen(disk)) == [(1, 0)]


def test_truncation_rebuilds_a_damaged_index() -> None:
    disk, expected = FaultyDisk(), new_log()
    log = reopen(disk)
    run_transactions(log, 42)
    follow(log, expected)
    path = index_paths(disk)[1]
    last = log._segments.all[[segment.aborted.path for segment in log._segments.all].index(path)].aborted.last
    assert last is not None
    disk.remove(path)
    for each in (log, expected):
        each.truncate_to(last.last_offset)
    assert_same_transactions(expected, log)


def test_a_new_segment_and_a_scanned_one_ignore_an_old_index_file() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 3)
    old = segment_path(FOLDER, 3, ".txnindex"), segment_path(FOLDER, 0, ".txnindex")
    for path in old:
        disk.open(path, create=True).pwrite(ENTRY.pack(0, 1, 0, 2, 3), 0)
    log.roll(NOW_MS)
    assert not disk.exists(old[0])
    disk.kill()
    log = reopen(disk)
    assert not disk.exists(old[1]) and aborted(log) == []


def test_a_log_that_lost_its_tail_below_its_start_forgets_open_transactions() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 1)
    TransactionalProducer(log, 1).send()
    sync(log)
    append_many(log, 20)
    log.increment_log_start(15).run()
    del disk.content(log._segments.all[0].path)[300:]
    disk.kill()
    log = reopen(disk, recovery_point=2)
    assert (log.log_start_offset, log.log_end_offset) == (15, 15)
    assert open_transactions(log) == {} and log.last_stable_offset(15) == 15


def test_a_snapshot_of_another_version_is_not_used_and_the_log_is_read() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append(log, batch(producer_id=4, producer_epoch=0, base_sequence=0))
    log.close()
    path = segment_path(FOLDER, 1, ".snapshot")
    content = disk.content(path)
    content[:2] = pack(">h", 2)
    log = reopen(disk)
    assert log.recovery is not None and log.recovery.scanned_batches == 1
    assert log.producers.check(headers(batch(producer_id=4, producer_epoch=0, base_sequence=0))[0][1]) is not None


# -- retention and damage ----------------------------------------------------------------------------------------------


def test_retention_and_set_aside_take_the_index_with_the_segment() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    run_transactions(log, 42)
    bases = [segment.base_offset for segment in log._segments.all]
    second, last = bases[1], bases[-2]
    expected = aborted(log, second, last)
    log.increment_log_start(second).run()
    assert segment_path(FOLDER, bases[0], ".txnindex") not in index_paths(disk)
    assert aborted(log, second, last) == expected
    before = index_paths(disk)
    (folder,) = log.set_aside_from(last, "/data", NOW_MS)
    assert segment_path(FOLDER, last, ".txnindex") in before
    assert segment_path(FOLDER, last, ".txnindex") not in index_paths(disk)
    assert f"{last:020d}.txnindex" in disk.listdir(folder)
    assert [each for each in aborted(log, second) if each in expected] == aborted(log, second)
    assert log.aborted_job(last, last + 100) is None


def test_retention_deletes_open_transactions_up_to_the_high_watermark_as_kafka_does() -> None:
    log = reopen(FaultyDisk(), replace(SMALL, retention_ms=1000))
    TransactionalProducer(log, 1).send()
    append_many(log, 100)
    job = log.apply_retention(NOW_MS + 5000, log.log_end_offset)
    assert job is not None
    job.run()
    assert log.log_start_offset == 101 == log.last_stable_offset(101)
    assert open_transactions(log) == {1: 0}


@pytest.mark.parametrize("damage", DAMAGES)
def test_scrubbing_finds_a_wrong_index_and_rebuilding_restores_it(damage: Callable[[FaultyDisk, str], None]) -> None:
    disk, expected = FaultyDisk(), new_log()
    log = reopen(disk)
    run_transactions(log, 42)
    log.roll(NOW_MS)
    sync(log)
    follow(log, expected)
    path = index_paths(disk)[1]
    assert all(not scrubbed(log, base).has_bad_index for base in log.closed_segments())
    content = bytes(disk.content(path))
    damage(disk, path)
    bad = [scrub for scrub in (scrubbed(log, base) for base in log.closed_segments()) if scrub.has_bad_index]
    assert [(scrub.segment.aborted.path, scrub.damage) for scrub in bad] == [(path, "")]
    log.indexes_rebuilt(bad[0], log.rebuild_indexes_job(bad[0])())
    assert_same_transactions(expected, log)
    append_many(log, 1)
    append_many(expected, 1)
    sync(log)
    assert bytes(disk.content(path)) == content
    assert bytes(disk.names[path].durable) == content
    disk.power_loss(Random(0))
    log = reopen(disk)
    assert bytes(disk.content(path)) == content
    assert_same_transactions(expected, log)


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: [entries[0]._replace(producer_id=8), *entries[1:]],
        lambda entries: [*entries[:-1], entries[-1]._replace(first_offset=entries[-1].first_offset + 1)],
        lambda entries: [*entries[:-1], entries[-1]._replace(last_offset=entries[-1].last_offset - 1)],
        lambda entries: [*entries[:-1], entries[-1]._replace(last_stable_offset=entries[-1].last_offset + 5)],
        lambda entries: entries[:-1],
        lambda entries: [*entries, entries[-1]._replace(last_offset=entries[-1].last_offset + 1)],
    ],
)
def test_scrubbing_compares_the_index_with_the_markers(
    change: Callable[[list[AbortedTransaction]], list[AbortedTransaction]],
) -> None:
    log = new_log()
    run_transactions(log, 42)
    segment = log._segments.all[1]
    entries = segment.aborted.view().read()
    assert entries[-1].first_offset > segment.base_offset
    # The checksum is right, as after a bug.
    segment.aborted.replace(change(entries))
    scrub = scrubbed(log, segment.base_offset)
    assert scrub.has_bad_aborted
    log.indexes_rebuilt(scrub, log.rebuild_indexes_job(scrub)())
    assert segment.aborted.view().read() == entries


def test_an_index_is_not_derived_from_segments_that_compaction_has_replaced() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(SMALL, cleanup_compact=True, min_cleanable_ratio=0.0, segment_bytes=250))
    producer = TransactionalProducer(log, 1)
    producer.send(keys=[b"a"])
    log.roll(NOW_MS)
    producer.send(keys=[b"b"])
    base_offset = log.closed_segments()[0] + 1
    marker = producer.abort()
    producer.send(keys=[b"c"])
    producer.commit()
    log.roll(NOW_MS)
    sync(log)
    disk.remove(segment_path(FOLDER, base_offset, ".txnindex"))
    scrub = scrubbed(log, base_offset)
    job = log.rebuild_indexes_job(scrub)
    # Another segment takes the place of the one in which the transaction begins.
    first = log._segments.all[0]
    log._segments.replace([first], LogSegment(disk, FOLDER, first.base_offset, first.size_bytes))
    disk.rename(first.path, first.path + ".deleted")
    fresh = job()
    disk.rename(first.path + ".deleted", first.path)
    assert not log.indexes_rebuilt(scrub, fresh)
    assert log.indexes_rebuilt(scrub, log.rebuild_indexes_job(scrub)())
    assert aborted(log) == [(1, 0)]
    assert log.aborted_job(0, 1) is not None and marker == 2


def test_rebuilding_an_index_without_entries_removes_its_file() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    producer = TransactionalProducer(log, 1)
    producer.send()
    producer.commit()
    log.roll(NOW_MS)
    sync(log)
    path = segment_path(FOLDER, 0, ".txnindex")
    # As after a bug: an entry for a transaction that was committed.
    log._segments.all[0].aborted.replace([AbortedTransaction(1, 0, 1, 2)])
    scrub = scrubbed(log, 0)
    assert scrub.has_bad_aborted
    assert log.indexes_rebuilt(scrub, log.rebuild_indexes_job(scrub)())
    assert not disk.exists(path) and not scrubbed(log, 0).has_bad_index and aborted(log) == []
    assert log.close() and reopen(disk).recovery is None


def scrubbed(log: Log, base_offset: int) -> SegmentScrub:
    scrub = log.scrub(base_offset)
    assert scrub is not None
    while not scrub.is_done:
        scrub.step()
    assert not scrub.damage
    return scrub


@pytest.mark.parametrize("is_commit", [True, False])
@pytest.mark.parametrize("flipped_byte", [17, 40])  # the CRC, the timestamp
def test_a_rotten_marker_that_is_readable_still_decides(is_commit: bool, flipped_byte: int) -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    producer = TransactionalProducer(log, 7)
    producer.send()
    marker = producer.end(is_commit)
    producer.send()
    sync(log)
    flip_marker(disk, log, marker, flipped_byte)
    log = reopen(disk, recovery_point=3)
    assert log.recovery is not None
    ((offset, text),) = [(damage.offset, damage.transaction) for damage in log.recovery.damages]
    decision = "commits" if is_commit else "aborts"
    assert (offset, text) == (marker, f"this marker {decision} the transaction of producer 7 from offset 0 on")
    assert open_transactions(log) == {7: 2}
    assert aborted(log) == ([] if is_commit else [(7, 0)])


@pytest.mark.parametrize("flipped_byte", [43, 51, 68])  # the producer's id, its epoch, the type of the control record
def test_a_rotten_marker_that_does_not_fit_leaves_the_transaction_open(flipped_byte: int) -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    producer = TransactionalProducer(log, 7)
    producer.send()
    marker = producer.commit()
    append_many(log, 1)
    sync(log)
    flip_marker(disk, log, marker, flipped_byte, 0x40)
    log = reopen(disk, recovery_point=3)
    assert log.recovery is not None
    assert ["hanging" in damage.transaction for damage in log.recovery.damages] == [True]
    assert open_transactions(log) == {7: 0} and log.last_stable_offset(3) == 0
    assert (
        refused(log, batch(producer_id=7, producer_epoch=0, base_sequence=5)) == ErrorCode.out_of_order_sequence_number
    )


def flip_marker(disk: FaultyDisk, log: Log, offset: int, at: int, bits: int = 1) -> None:
    """Damage a byte of the marker in the first segment; no snapshot knows what it says."""
    start = next(start for start, header in headers(read(log, 0)) if header.base_offset == offset)
    disk.kill()
    for name in disk.listdir(FOLDER):
        if name.endswith((".snapshot", ".txnindex")):
            disk.remove(f"{FOLDER}/{name}")
    disk.content(segment_path(FOLDER, 0))[start + at] ^= bits


# -- crashes -----------------------------------------------------------------------------------------------------------


def assert_decided_by_markers(log: Log) -> None:
    """Each transactional batch is aborted, committed or open, as the next marker of its producer says."""
    undecided: dict[int, list[int]] = {}
    decided: list[tuple[int, int, bool]] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        data = read(log, offset)
        for at, header in headers(data):
            if header.is_control:
                is_commit = read_marker(data, at).is_commit
                decided += [(base, header.producer_id, is_commit) for base in undecided.pop(header.producer_id, [])]
            elif header.is_transactional:
                undecided.setdefault(header.producer_id, []).append(header.base_offset)
            offset = header.next_offset
    job = log.aborted_job(log.log_start_offset, log.log_end_offset)
    transactions = [] if job is None else job()
    for base, producer_id, is_commit in decided:
        covering = [
            each
            for each in transactions
            if each.producer_id == producer_id and each.first_offset <= base < each.last_offset
        ]
        assert len(covering) == (not is_commit)
    open_ = open_transactions(log)
    assert all((open_[producer_id] or 0) <= bases[0] for producer_id, bases in undecided.items())
    first = min((base for bases in undecided.values() for base in bases), default=log.log_end_offset)
    stable = log.last_stable_offset(log.log_end_offset)
    assert stable <= first
    assert stable == first or log.log_start_offset > 0, "only a deleted record may hold it back"


def append_transactions(log: Log) -> None:
    run_transactions(log, 14)
    sync(log)


def truncate(log: Log) -> None:
    log.truncate_to(40)
    append_transactions(log)


def delete(log: Log) -> None:
    log.increment_log_start(40).run()
    append_transactions(log)


def set_aside(log: Log) -> None:
    log.set_aside_from(40, "/data", NOW_MS)
    append_transactions(log)


def close(log: Log) -> None:
    log.close()


@pytest.mark.parametrize("power_is_lost", [False, True])
@pytest.mark.parametrize("story", [append_transactions, truncate, delete, set_aside, close])
def test_a_crash_at_any_step_changes_no_decision(story: Callable[[Log], None], power_is_lost: bool) -> None:
    steps = 0
    while True:
        disk = FaultyDisk()
        log = reopen(disk)
        run_transactions(log, 26)
        disk.crash_at = disk.steps + steps
        try:
            story(log)
            break
        except Crash:
            steps += 1
        disk.power_loss(Random(steps)) if power_is_lost else disk.kill()
        log = reopen(disk)
        assert_decided_by_markers(log)
        if steps % 3 == 0:
            # The second process continues with the files of the first one.
            append_transactions(log)
            disk.power_loss(Random(steps)) if power_is_lost else disk.kill()
            assert_decided_by_markers(reopen(disk))
    assert steps > 3
