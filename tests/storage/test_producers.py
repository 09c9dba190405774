"""Idempotent producers: duplicate batches are recognized, gaps are refused, old epochs are fenced."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import NOW_MS, SMALL, append, batch, headers, reopen, sync

from chronik.storage.log import Log
from chronik.storage.producers import BATCHES_KEPT, ProducerStates
from chronik.wire.batch import BatchHeader
from chronik.wire.errors import ErrorCode, KafkaError

LAST_SEQUENCE = (1 << 31) - 1


def header(sequence: int, count: int = 1, epoch: int = 0, producer_id: int = 1) -> BatchHeader:
    return headers(batch(count, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence))[0][1]


def sent(*sequences: int) -> ProducerStates:
    states = ProducerStates(1000)
    for offset, sequence in enumerate(sequences):
        states.record(header(sequence), offset, NOW_MS)
    return states


def refused(states: ProducerStates, batch_header: BatchHeader) -> ErrorCode:
    with pytest.raises(KafkaError) as raised:
        states.check(batch_header)
    return raised.value.code


def test_batches_in_sequence_are_accepted() -> None:
    assert sent(0, 1, 2).check(header(3)) is None


def test_a_duplicate_batch_returns_its_original_offsets() -> None:
    states = sent(0, 1, 2)
    duplicate = states.check(header(1))
    assert duplicate is not None
    assert (duplicate.base_offset, duplicate.last_offset) == (1, 1)


def test_a_sequence_gap_is_refused() -> None:
    assert refused(sent(0, 1), header(3)) == ErrorCode.out_of_order_sequence_number


def test_a_batch_older_than_the_kept_batches_is_a_duplicate_without_an_offset() -> None:
    states = sent(*range(BATCHES_KEPT + 3))
    assert refused(states, header(0)) == ErrorCode.duplicate_sequence_number
    assert states.check(header(BATCHES_KEPT + 2)) is not None


def test_a_batch_that_the_log_never_had_is_not_a_duplicate() -> None:
    """Found by the cluster tests: the log knew the producer from its later batches only, and acknowledged this one."""
    states = sent(*range(10, 10 + BATCHES_KEPT + 3))
    assert refused(states, header(9)) == ErrorCode.out_of_order_sequence_number
    assert refused(states, header(10)) == ErrorCode.duplicate_sequence_number
    assert refused(sent(*range(BATCHES_KEPT + 3)), header(0)) == ErrorCode.duplicate_sequence_number


def test_a_batch_that_skips_sequences_is_resent_if_earlier_ones_may_follow() -> None:
    def early(states: ProducerStates, batch_header: BatchHeader) -> ErrorCode:
        with pytest.raises(KafkaError) as raised:
            states.check(batch_header, may_be_early=True)
        return raised.value.code

    assert early(ProducerStates(1000), header(7)) == ErrorCode.not_enough_replicas
    assert early(sent(0, 1), header(3)) == ErrorCode.not_enough_replicas
    assert early(sent(0, 1), header(3, epoch=1)) == ErrorCode.not_enough_replicas
    assert early(sent(*range(BATCHES_KEPT + 3)), header(0)) == ErrorCode.duplicate_sequence_number
    assert ProducerStates(1000).check(header(0), may_be_early=True) is None
    assert sent(0, 1).check(header(2), may_be_early=True) is None
    assert sent(0, 1).check(header(1), may_be_early=True) is not None


def test_the_same_sequences_in_different_batches_are_refused() -> None:
    states = ProducerStates(1000)
    states.record(header(0, 3), 0, NOW_MS)
    assert refused(states, header(1, 2)) == ErrorCode.out_of_order_sequence_number


def test_sequences_wrap_to_zero() -> None:
    states = ProducerStates(1000)
    states.record(header(LAST_SEQUENCE - 1, 2), 0, NOW_MS)
    assert states.check(header(0)) is None
    states.record(header(0), 2, NOW_MS)
    assert states.check(header(LAST_SEQUENCE - 1, 2)) is not None
    across = ProducerStates(1000)
    across.record(header(LAST_SEQUENCE, 3), 0, NOW_MS)
    assert across.check(header(2)) is None


def test_an_old_epoch_is_fenced_and_a_new_epoch_starts_at_sequence_zero() -> None:
    states = ProducerStates(1000)
    states.record(header(5, epoch=3), 0, NOW_MS)
    assert refused(states, header(6, epoch=2)) == ErrorCode.invalid_producer_epoch
    assert refused(states, header(6, epoch=4)) == ErrorCode.out_of_order_sequence_number
    assert states.check(header(0, epoch=4)) is None


def test_an_unknown_producer_may_start_at_any_sequence() -> None:
    assert ProducerStates(1000).check(header(17)) is None


def test_inactive_producers_expire() -> None:
    states = sent(0)
    assert states.expire(NOW_MS + 1000) == 0
    assert states.expire(NOW_MS + 1001) == 1
    assert states.check(header(9)) is None


def test_a_log_restores_its_producers_after_crash_clean_restart_and_truncation() -> None:
    disk = FaultyDisk()
    config = replace(SMALL, checkpoint_bytes=500)
    log = reopen(disk, config)

    def put(log: Log, sequence: int) -> None:
        append(log, batch(producer_id=4, producer_epoch=0, base_sequence=sequence))

    for sequence in range(40):
        put(log, sequence)
        if sequence % 7 == 0:
            sync(log)
    disk.kill()
    log = reopen(disk, config)
    assert log.producers.check(header(39, producer_id=4)) is not None
    assert log.producers.check(header(40, producer_id=4)) is None
    log.close()
    log = reopen(disk, config)
    assert log.producers.check(header(35, producer_id=4)) is not None
    assert refused(log.producers, header(34, producer_id=4)) == ErrorCode.duplicate_sequence_number
    log.truncate_to(30)
    assert log.producers.check(header(29, producer_id=4)) is not None
    assert refused(log.producers, header(39, producer_id=4)) == ErrorCode.out_of_order_sequence_number
    assert log.producers.check(header(30, producer_id=4)) is None


def test_the_first_sequence_of_a_producer_survives_a_clean_restart_and_a_crash() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(SMALL, checkpoint_bytes=500))
    for sequence in range(20, 40):
        append(log, batch(producer_id=4, producer_epoch=0, base_sequence=sequence))
    log.close()
    for _ in range(2):
        log = reopen(disk)
        assert refused(log.producers, header(19, producer_id=4)) == ErrorCode.out_of_order_sequence_number
        assert refused(log.producers, header(20, producer_id=4)) == ErrorCode.duplicate_sequence_number
        disk.kill()


def test_producer_state_survives_removal_of_segments_by_retention() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(SMALL, retention_ms=1000))
    append(log, batch(producer_id=4, producer_epoch=0, base_sequence=0))
    sync(log)
    job = log.apply_retention(NOW_MS + 1001, 1)
    assert job is not None
    job.run()
    sync(log)
    disk.kill()
    log = reopen(disk)
    assert log.producers.check(header(0, producer_id=4)) is not None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20), st.integers(0, LAST_SEQUENCE))
def test_every_kept_batch_is_a_duplicate_and_only_the_next_batch_is_accepted(counts: list[int], first: int) -> None:
    states = ProducerStates(1000)
    sequence = first
    batches: list[tuple[int, int]] = []
    for offset, count in enumerate(counts):
        states.record(header(sequence, count), offset, NOW_MS)
        batches.append((sequence, count))
        sequence = sequence + count & LAST_SEQUENCE
    for base, count in batches[-BATCHES_KEPT:]:
        assert states.check(header(base, count)) is not None
    assert states.check(header(sequence)) is None
    for base, count in batches[:-BATCHES_KEPT]:
        assert refused(states, header(base, count)) == ErrorCode.duplicate_sequence_number
    assert refused(states, header(sequence + 1 & LAST_SEQUENCE)) == ErrorCode.out_of_order_sequence_number
