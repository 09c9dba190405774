"""Group commit: what counts as durable, and what a failed sync does."""

import errno
from random import Random

import pytest

from chronik.wire.errors import ErrorCode, KafkaError
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import append, append_many, batch, offsets, read_all, reopen, sync


def test_a_sync_covers_what_was_appended_before_it_and_not_after() -> None:
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


def test_one_job_at_a_time() -> None:
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
def test_what_was_synced_survives_the_loss_of_power(seed: int) -> None:
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


def test_a_failed_sync_is_never_taken_for_a_success() -> None:
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


def test_a_checkpoint_that_fails_does_not_fail_the_sync() -> None:
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


def test_a_job_that_a_truncation_overtook_counts_for_nothing() -> None:
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


def test_a_sync_of_a_segment_that_was_let_go_meanwhile_works() -> None:
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
