"""Compaction: the last record of every key stays, with its offset; all other records may be removed."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import (
    FOLDER,
    NOW_MS,
    SMALL,
    TransactionalProducer,
    append,
    batch,
    headers,
    offsets,
    open_transactions,
    read,
    read_all,
    reopen,
    sync,
)

from chronik.storage.config import LogConfig
from chronik.storage.log import Log
from chronik.storage.segment import segment_path
from chronik.wire.batch import decode_batch

DAY_MS = 86_400_000
CONFIG = replace(SMALL, cleanup_compact=True, cleanup_delete=False, min_cleanable_ratio=0.0, delete_retention_ms=DAY_MS)


def put(log: Log, key: bytes, value: bytes | None, **kwargs: Any) -> int:
    return append(log, batch(keys=[key], values=[value], **kwargs)).base_offset


def compact(log: Log, now_ms: int = NOW_MS) -> bool:
    sync(log)
    job = log.compaction_job(now_ms, log.log_end_offset)
    if job is None:
        return False
    job.run()
    log.finish_compaction(job).run()
    return True


def test_compaction_keeps_the_last_record_of_each_key_at_its_offset() -> None:
    log = reopen(FaultyDisk(), CONFIG)
    for i in range(30):
        put(log, b"k%d" % (i % 3), b"%d" % i)
    log.roll(NOW_MS)
    assert compact(log)
    assert [(r.offset, r.key, r.value) for r in read_all(log)] == [
        (27, b"k0", b"27"),
        (28, b"k1", b"28"),
        (29, b"k2", b"29"),
    ]
    assert (log.log_start_offset, log.log_end_offset) == (0, 30)


def test_compaction_merges_small_adjacent_segments() -> None:
    log = reopen(FaultyDisk(), CONFIG)
    for i in range(200):
        put(log, b"k%d" % (i % 3), b"%d" % i)
    before = log.segment_count
    log.roll(NOW_MS)
    # The first pass fills a group up to the size limit. Its output is small, so the second pass adds the next segment.
    assert compact(log)
    put(log, b"k0", b"new")
    log.roll(NOW_MS)
    assert compact(log)
    assert log.segment_count == 2 < before
    assert len(read_all(log)) == 3


def test_compaction_skips_the_active_segment_and_uncommitted_records() -> None:
    log = reopen(FaultyDisk(), CONFIG)
    for _ in range(100):
        put(log, b"key", b"value")
    first_closed_end = log._segments.all[1].base_offset
    sync(log)
    job = log.compaction_job(NOW_MS, first_closed_end)
    assert job is not None
    job.run()
    log.finish_compaction(job).run()
    assert offsets(log) == list(range(first_closed_end - 1, 100))


def test_compaction_copies_a_batch_that_keeps_all_records_unchanged() -> None:
    log = reopen(FaultyDisk(), replace(CONFIG, segment_bytes=10_000))
    append(log, batch(3, keys=[b"a", b"b", b"c"], codec=1))
    append(log, batch(2, keys=[b"d", b"d"], codec=1))
    before = read(log, 0)
    log.roll(NOW_MS)
    assert compact(log)
    after = read(log, 0)
    size = headers(before)[0][1].size_bytes
    assert after[:size] == before[:size]
    assert [record.offset for record in decode_batch(after, size)] == [4]


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
def test_compaction_filters_batches_of_every_codec(codec: int) -> None:
    log = reopen(FaultyDisk(), CONFIG)
    keys = [b"a", b"b", b"a", b"c"]
    append(log, batch(4, keys=keys, values=[b"1", b"2", b"3", b"4"], codec=codec))
    append(log, batch(1, keys=[b"c"], values=[b"5"], codec=codec))
    log.roll(NOW_MS)
    assert compact(log)
    assert [(r.offset, r.key, r.value, r.timestamp_ms) for r in read_all(log)] == [
        (1, b"b", b"2", NOW_MS + 1),
        (2, b"a", b"3", NOW_MS + 2),
        (4, b"c", b"5", NOW_MS),
    ]
    assert all(header.codec == codec for _, header in headers(read(log, 0)))


def test_a_tombstone_is_removed_after_delete_retention() -> None:
    log = reopen(FaultyDisk(), CONFIG)
    put(log, b"gone", b"value")
    put(log, b"gone", None)
    put(log, b"here", b"value")
    log.roll(NOW_MS)
    assert compact(log)
    assert [(r.offset, r.value, r.timestamp_ms) for r in read_all(log)] == [(1, None, NOW_MS), (2, b"value", NOW_MS)]
    put(log, b"other", b"value")
    log.roll(NOW_MS)
    assert compact(log, NOW_MS + DAY_MS - 1)
    assert 1 in offsets(log)
    put(log, b"another", b"value")
    log.roll(NOW_MS)
    assert compact(log, NOW_MS + DAY_MS)
    assert offsets(log) == [2, 3, 4]


def test_a_compaction_pass_has_a_key_limit_and_the_next_pass_continues() -> None:
    log = reopen(FaultyDisk(), replace(CONFIG, compaction_keys_max=10))
    for i in range(100):
        put(log, b"k%d" % (i % 50), b"%d" % i)
    log.roll(NOW_MS)
    passes = 0
    while compact(log):
        passes += 1
        newest = {record.key: record.value for record in read_all(log)}
        assert newest == {b"k%d" % (i % 50): b"%d" % i for i in range(100)}
    assert passes == 10
    assert offsets(log) == list(range(50, 100))


def test_compaction_keeps_the_last_batch_of_a_producer_as_an_empty_batch() -> None:
    disk = FaultyDisk()
    log = reopen(disk, CONFIG)
    for sequence in range(3):
        append(log, batch(2, keys=[b"a", b"b"], producer_id=9, producer_epoch=0, base_sequence=2 * sequence))
    append(log, batch(2, keys=[b"a", b"b"]))
    log.roll(NOW_MS)
    assert compact(log)
    assert [(h.base_offset, h.record_count) for _, h in headers(read(log, 0))] == [(4, 0), (6, 2)]
    for name in disk.listdir(FOLDER):
        if name.endswith(".snapshot"):
            disk.remove(f"{FOLDER}/{name}")
    disk.kill()
    log = reopen(disk, CONFIG)
    state = log.producers.get(9)
    assert state is not None
    assert state.batches[-1].last_sequence == 5


def test_a_log_is_compacted_only_above_the_min_cleanable_ratio() -> None:
    disk = FaultyDisk()
    config = replace(CONFIG, min_cleanable_ratio=0.5)
    log = reopen(disk, config)
    for i in range(40):
        put(log, b"k%d" % i, b"v" * 100)
    log.roll(NOW_MS)
    assert compact(log)
    assert not compact(log)
    put(log, b"k1", b"new")
    log.roll(NOW_MS)
    assert not compact(log)
    log.close()
    log = reopen(disk, config)
    assert not compact(log), "how far it is compacted was forgotten"


def test_records_are_compacted_only_after_the_min_compaction_lag() -> None:
    log = reopen(FaultyDisk(), replace(CONFIG, min_compaction_lag_ms=1000))
    put(log, b"key", b"old")
    put(log, b"key", b"new")
    log.roll(NOW_MS)
    assert not compact(log, NOW_MS + 999)
    assert compact(log, NOW_MS + 1000)


def test_a_compaction_is_discarded_if_retention_removed_its_segments() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(CONFIG, cleanup_delete=True, retention_ms=1000))
    for _ in range(60):
        put(log, b"key", b"value")
    sync(log)
    job = log.compaction_job(NOW_MS, log.log_end_offset)
    assert job is not None
    job.run()
    deletion = log.apply_retention(NOW_MS + 5000, log.log_end_offset)
    assert deletion is not None
    deletion.run()
    log.finish_compaction(job).run()
    assert log.log_start_offset == log.log_end_offset == 60
    assert [name for name in disk.listdir(FOLDER) if "cleaned" in name] == []
    assert read_all(log) == []


def test_a_failed_compaction_leaves_the_log_unchanged() -> None:
    disk = FaultyDisk()
    log = reopen(disk, CONFIG)
    for _ in range(60):
        put(log, b"key", b"value")
    sync(log)
    job = log.compaction_job(NOW_MS, log.log_end_offset)
    assert job is not None
    disk.capacity_bytes = disk.used_bytes() + 10
    with pytest.raises(OSError, match="space"):
        job.run()
    log.finish_compaction(job).run()
    disk.capacity_bytes = 1 << 40
    assert offsets(log) == list(range(60))
    assert not [name for name in disk.listdir(FOLDER) if "cleaned" in name]
    assert compact(log)


def test_compaction_does_not_disturb_a_read_in_progress() -> None:
    log = reopen(FaultyDisk(), CONFIG)
    for _ in range(60):
        put(log, b"key", b"value")
    expected = read(log, 3)
    job = log.read_job(3, 1 << 20, 60)
    assert compact(log)
    assert bytes(job()) == expected


@settings(max_examples=40)
@given(
    writes=st.lists(
        st.tuples(st.integers(0, 6), st.one_of(st.none(), st.binary(max_size=30))), min_size=1, max_size=80
    ),
    keys_max=st.integers(1, 8),
    data=st.data(),
)
def test_compaction_never_changes_the_latest_value_of_a_key(
    writes: list[tuple[int, bytes | None]], keys_max: int, data: st.DataObject
) -> None:
    disk = FaultyDisk()
    config: LogConfig = replace(CONFIG, compaction_keys_max=keys_max, segment_bytes=600, delete_retention_ms=10)
    log = reopen(disk, config)
    expected: dict[bytes, bytes | None] = {}
    now_ms = NOW_MS
    for key, value in writes:
        name = b"k%d" % key
        put(log, name, value, producer_id=key, producer_epoch=0, base_sequence=0)
        expected[name] = value
        now_ms += 1
        match data.draw(st.sampled_from(["go on", "go on", "go on", "compact", "roll", "reopen"])):
            case "compact":
                compact(log, now_ms)
            case "roll":
                log.roll(now_ms)
            case "reopen":
                log.close()
                log = reopen(disk, config)
    log.roll(now_ms)
    while compact(log, now_ms):
        pass
    records = read_all(log)
    found = {record.key: record.value for record in records}
    assert {k: v for k, v in found.items() if v is not None} == {k: v for k, v in expected.items() if v is not None}
    assert len(records) == len(found)
    assert log.log_end_offset == len(writes)
    assert log.log_start_offset == 0
    # A read at any offset succeeds: it skips removed records.
    remaining = [record.offset for record in records]
    for offset in range(len(writes)):
        got = headers(read(log, offset, 1))
        if any(o >= offset for o in remaining):
            assert got
            assert got[0][1].last_offset >= offset


def test_a_read_in_a_gap_of_the_newest_batches_returns_the_batch_after_the_gap() -> None:
    leader, follower = reopen(FaultyDisk(), CONFIG), reopen(FaultyDisk(), CONFIG)
    for key in (b"a", b"b", b"b", b"c"):
        put(leader, key, b"value")
    leader.roll(NOW_MS)
    assert compact(leader)
    put(leader, b"d", b"value")
    assert offsets(leader) == [0, 2, 3, 4]
    records = read(leader, 0) + read(leader, 4)
    follower.append_as_follower(records, headers(records), NOW_MS)
    for offset, expected in ((0, 0), (1, 2), (2, 2), (3, 3)):
        assert headers(read(follower, offset, 1))[0][1].base_offset == expected
    assert offsets(follower) == [0, 2, 3, 4]


def test_a_truncation_in_a_gap_ends_the_log_after_its_last_batch() -> None:
    """Otherwise the log would end lower after a restart, as if it had lost durable records."""
    disk = FaultyDisk()
    log = reopen(disk, CONFIG)
    for at in (0, 1, 5, 6):
        records = bytearray(batch(keys=[b"k"]))
        records[:8] = at.to_bytes(8, "big")
        log.append_as_follower(records, headers(bytes(records)), NOW_MS)
    sync(log)
    log.truncate_to(4)
    assert log.log_end_offset == 2 and offsets(log) == [0, 1]
    sync(log)
    disk.kill()
    log = reopen(disk, CONFIG)
    assert log.log_end_offset == 2 and (log.recovery is None or not log.recovery.is_damaged)


def test_a_segment_that_a_power_loss_emptied_is_no_gap_of_compaction() -> None:
    disk = FaultyDisk()
    log = reopen(disk, CONFIG)
    put(log, b"a", b"value")
    sync(log)
    put(log, b"b", b"value")
    log.roll(NOW_MS)
    put(log, b"c", b"value")
    # The newest segment reached the disk, the end of the one before it did not.
    path = segment_path(FOLDER, 0)
    size = headers(bytes(disk.content(path)))[0][1].size_bytes
    disk.kill()
    del disk.content(path)[size:]
    log = reopen(disk, CONFIG)
    assert log.log_end_offset == 1 and offsets(log) == [0]
    assert log.recovery is not None and not log.recovery.is_damaged


def test_a_snapshot_from_before_a_compaction_opens_no_transaction() -> None:
    disk = FaultyDisk()
    log = reopen(disk, CONFIG)
    producer = TransactionalProducer(log, 1)
    producer.send(keys=[b"a"])
    log.roll(NOW_MS)
    # Compaction neither changes this segment nor merges it with others, so the snapshot in it stays valid.
    put(log, b"b", b"v" * CONFIG.segment_bytes)
    sync(log)
    old = {name: bytes(disk.content(f"{FOLDER}/{name}")) for name in disk.listdir(FOLDER) if ".snapshot" in name}
    log.roll(NOW_MS)
    producer.abort()
    log.producers.expire(1 << 60)
    for number in range(3):
        put(log, b"pass", b"")
        log.roll(NOW_MS)
        compact(log, NOW_MS + number * 2 * DAY_MS)
    assert log.close()
    disk.kill()
    for name in disk.listdir(FOLDER):
        if name.endswith(".snapshot"):
            disk.remove(f"{FOLDER}/{name}")
    for name, data in old.items():
        disk.open(f"{FOLDER}/{name}", create=True).pwrite(data, 0)
    log = reopen(disk, CONFIG)
    assert open_transactions(log) == {} and log.last_stable_offset(log.log_end_offset) == log.log_end_offset
