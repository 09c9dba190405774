"""Retention and DeleteRecords: they remove what is due, and nothing else."""

import errno
from dataclasses import replace

import pytest
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import FOLDER, NOW_MS, SMALL, append, append_many, batch, offsets, reopen, sync

from chronik.storage.log import Log
from chronik.wire.errors import ErrorCode, KafkaError

DAY_MS = 86_400_000


def aged(disk: FaultyDisk, **config: object) -> Log:
    """Create a log of ten segments, with a day of record time between them."""
    log = reopen(disk, replace(SMALL, retention_ms=-1, **config))  # type: ignore[arg-type]
    for day in range(10):
        append(log, batch(2, timestamp_ms=NOW_MS + day * DAY_MS))
        log.roll(NOW_MS)
    return log


def retain(log: Log, now_ms: int = NOW_MS + 10 * DAY_MS, upto_offset: int | None = None) -> int:
    job = log.apply_retention(now_ms, log.log_end_offset if upto_offset is None else upto_offset)
    if job is None:
        return 0
    job.run()
    return job.segments


def test_retention_removes_segments_whose_newest_record_is_too_old() -> None:
    disk = FaultyDisk()
    log = aged(disk)
    log.configure(replace(log.config, retention_ms=4 * DAY_MS))
    assert retain(log) == 6
    assert log.log_start_offset == 12
    assert offsets(log) == list(range(12, 20))
    assert len([name for name in disk.listdir(FOLDER) if name.endswith(".log")]) == 5
    log.close()
    assert reopen(disk).log_start_offset == 12


def test_retention_removes_no_segment_above_the_high_watermark() -> None:
    log = aged(FaultyDisk())
    log.configure(replace(log.config, retention_ms=0))
    assert retain(log, upto_offset=5) == 2
    assert log.log_start_offset == 4


def test_a_log_whose_records_all_expired_continues_at_its_end_offset() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(SMALL, retention_ms=DAY_MS))
    append_many(log, 30)
    assert retain(log) == 2
    assert (log.log_start_offset, log.log_end_offset, log.size_bytes) == (30, 30, 0)
    assert retain(log) == 0
    disk.kill()
    log = reopen(disk)
    assert (log.log_start_offset, log.log_end_offset) == (30, 30)
    assert append(log, batch()).base_offset == 30


def test_retention_removes_the_oldest_segments_above_retention_bytes() -> None:
    log = aged(FaultyDisk())
    size = log.size_bytes // 10
    log.configure(replace(log.config, retention_bytes=4 * size))
    assert retain(log) == 6
    assert log.size_bytes == 4 * size
    log.configure(replace(log.config, retention_bytes=4 * size - 1))
    assert retain(log) == 0, "a segment goes only if enough stays without it"


def test_without_the_delete_policy_only_delete_records_removes_segments() -> None:
    log = aged(FaultyDisk(), cleanup_delete=False)
    log.configure(replace(log.config, retention_ms=0, retention_bytes=0))
    assert retain(log) == 0
    log.increment_log_start(5).run()
    assert log.segment_count == 9
    assert log.log_start_offset == 5


def test_records_without_timestamps_do_not_expire() -> None:
    log = reopen(FaultyDisk(), replace(SMALL, retention_ms=0))
    append(log, batch(timestamp_ms=-1))
    assert retain(log) == 0


def test_a_zeroed_time_index_does_not_expire_segments() -> None:
    disk = FaultyDisk()
    log = aged(disk)
    log.close()
    for name in disk.listdir(FOLDER):
        if name.endswith(".timeindex"):
            disk.content(f"{FOLDER}/{name}")[:] = bytes(disk.size(f"{FOLDER}/{name}"))
    log = reopen(disk, replace(SMALL, retention_ms=10 * DAY_MS))
    assert retain(log) == 0


def test_deleted_records_stay_deleted_after_a_crash() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 50)
    sync(log)
    job = log.increment_log_start(33)
    assert log.log_start_offset == 33
    with pytest.raises(KafkaError):
        log.read(32, 100, 50)
    job.run()
    disk.kill()
    log = reopen(disk)
    assert log.log_start_offset == 33
    assert offsets(log) == list(range(33, 50))


def test_the_log_start_neither_decreases_nor_exceeds_the_log_end() -> None:
    log = reopen(FaultyDisk())
    append_many(log, 10)
    log.increment_log_start(7).run()
    log.increment_log_start(3).run()
    assert log.log_start_offset == 7
    with pytest.raises(KafkaError) as raised:
        log.increment_log_start(11)
    assert raised.value.code == ErrorCode.offset_out_of_range
    log.increment_log_start(10).run()
    assert append(log, batch()).base_offset == 10
    assert offsets(log) == [10]


def test_the_higher_log_start_wins_if_deletions_complete_out_of_order() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 10)
    first = log.increment_log_start(3)
    second = log.increment_log_start(6)
    second.run()
    first.run()
    sync(log)
    disk.kill()
    assert reopen(disk).log_start_offset == 6


def test_a_full_truncation_restarts_the_log_at_the_given_offset() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 50)
    log.increment_log_start(40).run()
    log.truncate_fully(1000)
    assert (log.log_start_offset, log.log_end_offset) == (1000, 1000)
    append(log, batch())
    disk.kill()
    assert offsets(reopen(disk)) == [1000]


def test_a_read_in_progress_finishes_after_retention_removed_its_segment() -> None:
    log = aged(FaultyDisk())
    job = log.read_job(3, 1000, 20)
    log.configure(replace(log.config, retention_ms=0))
    assert retain(log) == 10
    assert len(job()) > 0


def test_retention_frees_space_on_a_full_disk() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(SMALL, retention_ms=DAY_MS))
    append_many(log, 50)
    disk.capacity_bytes = disk.used_bytes()
    disk.fail = lambda operation, path: errno.ENOSPC if operation == "create" else None
    assert retain(log) == 2
    assert log.log_start_offset == 42
    assert offsets(log) == list(range(42, 50))
    disk.fail = lambda operation, path: None
    assert append(log, batch(), now_ms=NOW_MS + 10 * DAY_MS + 1000).base_offset == 50


def test_checking_old_segments_for_retention_leaves_no_files_open() -> None:
    disk = FaultyDisk()
    aged(disk).close()
    log = reopen(disk, replace(SMALL, retention_ms=100 * DAY_MS))
    assert retain(log) == 0
    assert disk.open_files == 0


def test_retention_removes_no_segment_from_a_log_whose_sync_failed() -> None:
    log = aged(FaultyDisk())
    append(log, batch())
    job = log.sync_job()
    assert job is not None
    log.sync_failed(job)
    log.configure(replace(log.config, retention_ms=0))
    assert retain(log) == 0
    with pytest.raises(KafkaError, match="read-only"):
        log.increment_log_start(5)
