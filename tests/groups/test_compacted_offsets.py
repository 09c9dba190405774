"""A compacted log gives the same offsets, committed and pending, as the log before compaction."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.groups.kafka_offsets import KafkaOffsets
from tests.groups.play import GROUP, PARTITION, Held, LogEntry, Marker, Play
from tests.groups.test_offsets import entries
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import NOW_MS, reopen
from tests.storage.test_compaction import CONFIG, DAY_MS, compact

from chronik.groups.coordinator import GroupCoordinator
from chronik.node.coordinators.coordinator_topic import LOAD_CHUNK_BYTES, read_chunk
from chronik.storage.log import Log
from chronik.wire.batch import check_batches, encode_batch, encode_marker
from chronik.wire.errors import ErrorCode
from chronik.wire.records import NewRecord

# Coordinators write no tombstone in a transaction: it takes effect at once, but not for compaction.
stored = entries.filter(lambda entry: not isinstance(entry, Held) or entry.record[1] is not None)

EXPIRED = replace(CONFIG, producer_expiration_ms=1)
"""Producers are forgotten at once, so that compaction may remove their markers."""


def write(log: Log, entry: LogEntry) -> None:
    if isinstance(entry, Marker):
        log.append_marker(encode_marker(*entry.producer, entry.is_commit, 0, NOW_MS), 0, NOW_MS)
        return
    key, value = entry.record if isinstance(entry, Held) else entry
    records: list[NewRecord] = [(key, value, [], NOW_MS)]
    if isinstance(entry, Held):
        producer_id, epoch = entry.producer
        batch = encode_batch(records, producer_id=producer_id, producer_epoch=epoch, is_transactional=True)
    else:
        batch = encode_batch(records)
    view = memoryview(bytearray(batch))
    log.append(view, check_batches(view, len(view), from_producer=False), 0, NOW_MS)


def loaded(log: Log) -> GroupCoordinator:
    coordinator = Play(is_loaded=False).coordinator
    coordinator.start_loading(PARTITION)
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        chunk = read_chunk(log.read_job(offset, LOAD_CHUNK_BYTES, log.log_end_offset))
        if chunk is None:
            break
        offset = chunk.next_offset
        for records, producer, is_commit in chunk.parts:
            if producer is not None and is_commit is not None:
                coordinator.replay_marker(PARTITION, producer, is_commit)
            else:
                coordinator.replay(PARTITION, records, producer)
    assert coordinator.finish_loading(PARTITION, Play().at) == 0
    return coordinator


def check(log: Log, written: list[LogEntry]) -> None:
    coordinator = loaded(log)
    expected = KafkaOffsets(written)
    error, committed = coordinator.committed(GROUP, None)
    assert error is ErrorCode.none
    assert {partition: each and each.offset for partition, each in committed.items()} == expected.of(GROUP)
    assert coordinator.unstable_partitions(GROUP) == expected.unstable(GROUP)


@settings(max_examples=300)
@given(st.lists(st.tuples(stored, st.sampled_from((False, False, True))), min_size=1, max_size=30), st.booleans())
def test_compaction_keeps_committed_and_pending_offsets(steps: list[tuple[LogEntry, bool]], expires: bool) -> None:
    log = reopen(FaultyDisk(), EXPIRED if expires else CONFIG)
    written: list[LogEntry] = []
    now_ms = NOW_MS
    for entry, compacts in steps:
        write(log, entry)
        written.append(entry)
        if compacts:
            # Later than the delete horizons that the last compaction has set.
            now_ms += 2 * DAY_MS
            log.producers.expire(now_ms)
            log.roll(now_ms)
            compact(log, now_ms)
            check(log, written)
    check(log, written)
