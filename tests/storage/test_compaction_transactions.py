"""Compaction of transactional records: nothing undecided is touched, and no decision is lost before its records."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.storage.faulty_disk import Crash, FaultyDisk
from tests.storage.helpers import (
    FOLDER,
    NOW_MS,
    TransactionalProducer,
    aborted,
    append,
    batch,
    headers,
    open_transactions,
    read_all,
    reopen,
    sync,
)
from tests.storage.test_compaction import CONFIG, DAY_MS, compact, put
from tests.storage.test_transactions import scrubbed

from chronik.storage.aborted import ENTRY
from chronik.storage.log import Log
from chronik.storage.segment import segment_path
from chronik.wire.batch import BatchHeader

EXPIRED = replace(CONFIG, producer_expiration_ms=1)
"""Producers are forgotten at once: compaction keeps no batch for them."""


def log_headers(log: Log) -> list[BatchHeader]:
    found: list[BatchHeader] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        batches = headers(bytes(log.read_job(offset, 1 << 20, log.log_end_offset)()))
        if not batches:
            break
        found += [header for _, header in batches]
        offset = batches[-1][1].next_offset
    return found


def markers(log: Log) -> list[int]:
    return [header.base_offset for header in log_headers(log) if header.is_control]


def data(log: Log) -> list[int]:
    """Return the offsets of the records that are not markers."""
    control = set(markers(log))
    return [record.offset for record in read_all(log) if record.offset not in control]


def another_pass(log: Log, now_ms: int) -> None:
    """Compact once more, although nothing but one record is new."""
    log.producers.expire(now_ms)
    put(log, b"pass", b"")
    log.roll(now_ms)
    assert compact(log, now_ms)


def test_compaction_ends_before_an_open_transaction() -> None:
    log = reopen(FaultyDisk(), CONFIG)
    for _ in range(40):
        put(log, b"key", b"value")
    log.roll(NOW_MS)
    boundary = log.log_end_offset
    producer = TransactionalProducer(log, 1)
    producer.send(keys=[b"key"])
    log.roll(NOW_MS)
    for _ in range(40):
        put(log, b"key", b"value")
    log.roll(NOW_MS)
    end = log.log_end_offset
    assert compact(log)
    assert data(log) == list(range(boundary - 1, end))
    marker = producer.commit()
    log.roll(NOW_MS)
    sync(log)
    job = log.compaction_job(NOW_MS, marker)
    assert job is None, "the marker is not below the high watermark"
    assert compact(log)
    assert data(log) == [end - 1]


def test_records_of_aborted_transactions_are_removed_and_supersede_no_other_record() -> None:
    log = reopen(FaultyDisk(), CONFIG)
    put(log, b"a", b"old")
    put(log, b"b", b"old")
    aborting, committing = TransactionalProducer(log, 1), TransactionalProducer(log, 2)
    aborting.send(2, keys=[b"a", b"c"])
    committing.send(keys=[b"b"])
    aborting.abort()
    committing.commit()
    log.roll(NOW_MS)
    assert compact(log)
    assert data(log) == [0, 4]
    assert markers(log) == [5, 6]


def test_an_aborted_transaction_whose_marker_is_in_a_later_segment_is_removed() -> None:
    log = reopen(FaultyDisk(), replace(CONFIG, min_compaction_lag_ms=1000))
    producer = TransactionalProducer(log, 1)
    producer.send(keys=[b"a"])
    producer.send(keys=[b"b"])
    log.roll(NOW_MS)
    append(log, batch(keys=[b"x"], timestamp_ms=NOW_MS + 5000))
    producer.abort()
    log.roll(NOW_MS)
    assert compact(log, NOW_MS + 2000)
    # The producer's last batch stays without records; the marker's segment is too new.
    assert [(header.base_offset, header.record_count) for header in log_headers(log)] == [(1, 0), (2, 1), (3, 1)]
    assert aborted(log, 1) == [(1, 0)]


def test_a_marker_is_kept_until_its_records_are_gone_and_its_delete_horizon_has_passed() -> None:
    log = reopen(FaultyDisk(), EXPIRED)
    producer = TransactionalProducer(log, 1)
    producer.send(keys=[b"a"])
    marker = producer.abort()
    another_pass(log, NOW_MS + 2)
    assert data(log) == [marker + 1] and markers(log) == [marker], "the pass that removed the records"
    later_ms = NOW_MS + 10 * DAY_MS
    another_pass(log, later_ms)
    assert markers(log) == [marker], "the pass that found no records sets the delete horizon"
    another_pass(log, later_ms + DAY_MS - 1)
    assert markers(log) == [marker]
    another_pass(log, later_ms + DAY_MS)
    assert markers(log) == []


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_marker_is_kept_while_a_record_of_its_transaction_remains(is_commit: bool) -> None:
    log = reopen(FaultyDisk(), CONFIG)
    producer = TransactionalProducer(log, 1)
    producer.send(keys=[b"a"])
    marker = producer.end(is_commit)
    log.roll(NOW_MS)
    for days in range(5):
        another_pass(log, NOW_MS + days * DAY_MS // 10)
    # The aborted batch is its producer's last: it has no records any more, but recovery still begins a transaction.
    first = log_headers(log)[0]
    assert (first.base_offset, first.record_count) == (0, int(is_commit))
    assert markers(log) == [marker]
    assert open_transactions(log) == {}


def test_the_marker_that_alone_knows_a_producers_epoch_is_kept() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(CONFIG, producer_expiration_ms=100 * DAY_MS))
    producer = TransactionalProducer(log, 1)
    producer.send(keys=[b"a"])
    producer.epoch = 1
    marker = producer.abort()
    for days in range(5):
        another_pass(log, NOW_MS + days * DAY_MS)
    assert markers(log) == [marker] and data(log)[0] > marker
    for name in disk.listdir(FOLDER):
        if name.endswith(".snapshot"):
            disk.remove(f"{FOLDER}/{name}")
    log.close()
    state = reopen(disk, CONFIG).producers.get(1)
    assert state is not None and state.epoch == 1


def test_a_marker_that_gets_a_delete_horizon_still_decides_the_same() -> None:
    disk = FaultyDisk()
    log = reopen(disk, EXPIRED)
    producer = TransactionalProducer(log, 1)
    producer.send(keys=[b"a"])
    producer.end(False, coordinator_epoch=6)
    another_pass(log, NOW_MS + 2)
    another_pass(log, NOW_MS + 5)
    (header,) = [header for header in log_headers(log) if header.is_control]
    assert header.attributes & 0x40 and header.base_timestamp == NOW_MS + 5 + DAY_MS
    disk.kill()
    for name in disk.listdir(FOLDER):
        if name.endswith(".snapshot"):
            disk.remove(f"{FOLDER}/{name}")
    state = reopen(disk, CONFIG).producers.get(1)
    assert state is not None and (state.epoch, state.coordinator_epoch, state.first_offset) == (0, 6, None)


def test_compaction_drops_entries_whose_records_it_dropped() -> None:
    disk = FaultyDisk()
    log = reopen(disk, CONFIG)
    gone, last = TransactionalProducer(log, 1), TransactionalProducer(log, 2)
    gone.send(keys=[b"a"])
    last.send(keys=[b"b"])
    gone.abort()
    last.abort()
    gone.send(keys=[b"a"])
    gone.commit()
    log.roll(NOW_MS)
    assert aborted(log) == [(1, 0), (2, 1)]
    assert compact(log)
    assert aborted(log) == [(2, 1)], "the producer's last batch remains, without records"
    path = segment_path(FOLDER, 0, ".txnindex")
    assert not disk.exists(path)
    put(log, b"new", b"value")
    sync(log)
    disk.power_loss(Random(0))
    assert disk.size(path) == ENTRY.size, "the next checkpoint has written it"
    log = reopen(disk, CONFIG)
    assert aborted(log) == [(2, 1)] and (log.recovery is None or not log.recovery.rebuilt_indexes)
    assert not [name for name in disk.listdir(FOLDER) if name.endswith((".cleaned", ".deleted"))]


def test_only_the_thread_that_compacts_opens_files() -> None:
    disk = FaultyDisk()
    log = reopen(disk, CONFIG)
    producer = TransactionalProducer(log, 1)
    producer.send(keys=[b"a"])
    producer.abort()
    log.roll(NOW_MS)
    files = disk.open_files
    sync(log)
    job = log.compaction_job(NOW_MS, log.log_end_offset)
    assert job is not None and job.find_aborted is not None and disk.open_files == files
    log.finish_compaction(job).run()
    assert disk.open_files == files


def test_a_crash_before_the_index_of_merged_segments_is_written_loses_no_decision() -> None:
    disk = FaultyDisk()
    # The pass ends inside the second segment, before the transaction.
    config = replace(CONFIG, compaction_keys_max=2)
    log = reopen(disk, config)
    put(log, b"a", b"value")
    log.roll(NOW_MS)
    put(log, b"b", b"value")
    producer = TransactionalProducer(log, 1)
    producer.send(keys=[b"c"])
    producer.abort()
    log.roll(NOW_MS)
    sync(log)
    assert compact(log)
    assert not [name for name in disk.listdir(FOLDER) if name.endswith(".txnindex")]
    disk.kill()
    log = reopen(disk, config)
    assert log.segment_count == 2 and data(log) == [0, 1, 2] and aborted(log) == [(1, 2)]


# -- at random ---------------------------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(["send", "send", "commit", "abort", "put", "roll"])), max_size=60
)


def play(log: Log, events: list[tuple[int, str]]) -> None:
    producers = {each: TransactionalProducer(log, each) for each in (1, 2, 3)}
    for number, (producer_id, kind) in enumerate(events):
        key = [b"k%d" % (number % 4)]
        match kind:
            case "send":
                producers[producer_id].send(keys=key)
            case "commit":
                producers[producer_id].commit()
            case "abort":
                producers[producer_id].abort()
            case "put":
                append(log, batch(keys=key))
            case "roll":
                log.roll(NOW_MS)


def committed(log: Log) -> dict[bytes | None, int]:
    """Return the last offset of each key, as a read_committed consumer sees it that keeps only the last values."""
    end = log.last_stable_offset(log.log_end_offset)
    control = set(markers(log))
    job = log.aborted_job(log.log_start_offset, end)
    transactions = [] if job is None else job()
    producers = {header.base_offset: header for header in log_headers(log)}
    batches = sorted(producers)
    latest: dict[bytes | None, int] = {}
    for record in read_all(log):
        header = producers[max(base for base in batches if base <= record.offset)]
        is_aborted = header.is_transactional and any(
            each.producer_id == header.producer_id and each.first_offset <= record.offset < each.last_offset
            for each in transactions
        )
        if record.offset < end and record.offset not in control and not is_aborted:
            latest[record.key] = record.offset
    return latest


@given(steps, st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_compaction_changes_nothing_that_a_read_committed_consumer_keeps(
    events: list[tuple[int, str]], passes: int
) -> None:
    disk = FaultyDisk()
    log = reopen(disk, CONFIG)
    play(log, events)
    expected = committed(log), open_transactions(log), log.last_stable_offset(log.log_end_offset)
    for number in range(passes):
        compact(log, NOW_MS + number * 2 * DAY_MS)
        assert (committed(log), open_transactions(log), log.last_stable_offset(log.log_end_offset)) == expected
        for base_offset in log.closed_segments():
            assert not scrubbed(log, base_offset).has_bad_index
    known = aborted(log)
    disk.kill()
    if passes == 2:
        # Without snapshots, recovery derives everything from the batches.
        for name in disk.listdir(FOLDER):
            if name.endswith(".snapshot"):
                disk.remove(f"{FOLDER}/{name}")
    log = reopen(disk, CONFIG)
    assert (committed(log), open_transactions(log), log.last_stable_offset(log.log_end_offset)) == expected
    # A transaction may now begin at a later batch, the first one that remains.
    assert all(any(each[0] == one[0] and each[1] >= one[1] for one in known) for each in aborted(log))


@given(steps, st.integers(0, 60), st.integers(0, 1 << 30), st.sampled_from([1, 3, 100]))
@settings(max_examples=200, deadline=None)
def test_a_crash_during_compaction_loses_no_decision(
    events: list[tuple[int, str]], crash_at: int, seed: int, keys_max: int
) -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(CONFIG, compaction_keys_max=keys_max))
    play(log, events)
    sync(log)
    expected = committed(log), open_transactions(log)
    disk.crash_at = disk.steps + crash_at
    try:
        compact(log)
        sync(log)
    except Crash:
        pass
    disk.crash_at = None
    disk.power_loss(Random(seed))
    log = reopen(disk, CONFIG)
    assert log.recovery is None or not log.recovery.is_damaged
    assert (committed(log), open_transactions(log)) == expected
    for base_offset in log.closed_segments():
        assert not scrubbed(log, base_offset).has_bad_index
