"""Group commit: which records are durable, and the effect of a failed sync."""

import errno
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import (
    NOW_MS,
    SMALL,
    append,
    append_many,
    batch,
    headers,
    offsets,
    read_all,
    reopen,
    sync,
)

from chronik.storage.disk import Buffer, RealDisk
from chronik.storage.log import Log
from chronik.storage.segments import OPEN_CLOSED_SEGMENTS_MAX
from chronik.storage.syncing import UNSYNCED_FILES_MAX, SyncJob
from chronik.wire.errors import ErrorCode, KafkaError


def test_a_sync_covers_only_records_appended_before_it() -> None:
    log = reopen(FaultyDisk())
    append_many(log, 3)
    assert log.synced_end_offset == 0
    job = log.sync_job()
    assert job is not None
    append_many(log, 2)
    job.run()
    log.synced(job)
    assert log.synced_end_offset == 3
    sync(log)
    assert log.synced_end_offset == 5
    assert log.sync_job() is None


def test_a_log_has_one_sync_job_at_a_time() -> None:
    log = reopen(FaultyDisk())
    append(log, batch())
    job = log.sync_job()
    assert job is not None
    append(log, batch())
    assert log.sync_job() is None
    job.run()
    log.synced(job)
    assert log.sync_job() is not None


@pytest.mark.parametrize("seed", range(30))
def test_synced_records_survive_a_power_loss(seed: int) -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    random = Random(seed)
    synced = 0
    for _ in range(random.randint(1, 6)):
        append_many(log, random.randint(1, 25))
        if random.random() < 0.7:
            sync(log)
            synced = log.log_end_offset
    end = log.log_end_offset
    disk.power_loss(random)
    log = reopen(disk)
    assert synced <= log.log_end_offset <= end
    assert offsets(log) == list(range(log.log_end_offset))


def test_a_failed_sync_makes_the_log_read_only() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 3)
    sync(log)
    append(log, batch())
    job = log.sync_job()
    assert job is not None
    disk.fail = lambda operation, path: errno.EIO if operation == "datasync" else None
    with pytest.raises(OSError, match="Input/output"):
        job.run()
    log.sync_failed(job)
    disk.fail = lambda operation, path: None
    assert log.synced_end_offset == 3
    assert log.read_only
    assert log.read_only_forever
    assert log.sync_job() is None
    with pytest.raises(KafkaError) as raised:
        append(log, batch(), now_ms=1 << 60)
    assert raised.value.code == ErrorCode.kafka_storage_error
    assert len(read_all(log)) == 4, "reading goes on"
    assert not log.close()


def test_a_failed_checkpoint_does_not_fail_the_sync() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 60)
    disk.fail = lambda operation, path: errno.ENOSPC if ".tmp" in path else None
    sync(log)
    assert log.synced_end_offset == 60
    disk.fail = lambda operation, path: None
    append_many(log, 60)
    sync(log)
    disk.kill()
    log = reopen(disk)
    assert log.recovery is None or log.recovery.scanned_batches == 0
    assert offsets(log) == list(range(120))


def test_a_sync_job_acknowledges_no_record_above_a_later_truncation() -> None:
    log = reopen(FaultyDisk())
    append_many(log, 10)
    job = log.sync_job()
    assert job is not None
    log.truncate_to(4)
    append_many(log, 6)
    job.run()
    log.synced(job)
    assert log.synced_end_offset <= 4
    sync(log)
    assert log.synced_end_offset == 10


def test_a_sync_job_succeeds_after_its_segment_was_removed() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 100)
    job = log.sync_job()
    assert job is not None
    deletion = log.increment_log_start(100)
    deletion.run()
    job.run()
    log.synced(job)
    log.close()
    assert disk.open_files == 0


def test_the_number_of_open_files_is_bounded_without_syncs() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 1000)
    assert log.segment_count > 40
    assert disk.open_files <= UNSYNCED_FILES_MAX + OPEN_CLOSED_SEGMENTS_MAX + 1
    log.close()
    assert disk.open_files == 0


def test_syncs_and_reads_run_in_threads_during_appends_on_a_real_disk(tmp_path: Path) -> None:
    log = Log.open(RealDisk(), str(tmp_path / "topic-0"), SMALL, NOW_MS)
    with ThreadPoolExecutor(4) as threads:
        syncing: tuple[SyncJob, Future[None]] | None = None
        reads: list[tuple[int, Future[Buffer]]] = []
        for offset in range(2000):
            append(log, batch())
            if syncing is not None and syncing[1].done():
                syncing[1].result()
                log.synced(syncing[0])
                syncing = None
            if syncing is None:
                job = log.sync_job()
                syncing = (job, threads.submit(job.run)) if job is not None else None
            if offset % 10 == 0:
                wanted = offset * 7919 % (offset + 1)
                reads.append((wanted, threads.submit(log.read_job(wanted, 500, offset + 1))))
        for wanted, read in reads:
            assert headers(bytes(read.result()))[0][1].base_offset == wanted
        if syncing is not None:
            syncing[1].result()
            log.synced(syncing[0])
    assert log.close()
    assert offsets(Log.open(RealDisk(), str(tmp_path / "topic-0"), SMALL, NOW_MS)) == list(range(2000))
