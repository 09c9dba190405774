"""A full disk and other failed writes: no acknowledged record is lost, and the log recovers by itself."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import NOW_MS, SMALL, append, append_many, batch, offsets, reopen, sync

from chronik.storage.config import LogConfig
from chronik.storage.disk import RealDisk, StorageError, StorageFull
from chronik.storage.log import Log
from chronik.wire.errors import ErrorCode


def fill(log: Log, now_ms: int = NOW_MS) -> StorageError:
    """Append until the disk is full."""
    for _ in range(10_000):
        try:
            append(log, batch(value_bytes=200), now_ms=now_ms)
        except StorageError as error:
            return error
    raise AssertionError("the disk never filled up")


def test_a_log_on_a_full_disk_refuses_appends_and_keeps_its_records() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 5)
    disk.capacity_bytes = 10_000
    error = fill(log)
    assert isinstance(error, StorageFull)
    assert error.code == ErrorCode.kafka_storage_error
    assert log.read_only
    assert not log.read_only_forever
    end = log.log_end_offset
    assert offsets(log) == list(range(end))
    sync(log)
    disk.kill()
    log = reopen(disk)
    assert offsets(log) == list(range(end))


def test_a_log_retries_after_one_second_and_accepts_appends_if_space_is_free() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    disk.capacity_bytes = 5_000
    fill(log)
    end = log.log_end_offset
    disk.capacity_bytes = 1 << 30
    with pytest.raises(StorageError, match="read-only"):
        append(log, batch(), now_ms=NOW_MS + 999)
    assert append(log, batch(), now_ms=NOW_MS + 1000).base_offset == end
    assert not log.read_only
    assert offsets(log) == list(range(end + 1))


def test_a_wall_clock_that_is_set_back_does_not_delay_the_next_retry() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    disk.capacity_bytes = 5_000
    fill(log)
    end = log.log_end_offset
    disk.capacity_bytes = 1 << 30
    assert append(log, batch(), now_ms=NOW_MS - 24 * 60 * 60 * 1000).base_offset == end


def test_a_log_tries_to_write_once_per_second_while_the_disk_is_full() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    disk.capacity_bytes = 5_000
    fill(log)
    for second in range(1, 4):
        with pytest.raises(StorageFull):
            append(log, batch(value_bytes=200), now_ms=NOW_MS + second * 1000)
        steps = disk.steps
        with pytest.raises(StorageError):
            append(log, batch(value_bytes=200), now_ms=NOW_MS + second * 1000 + 500)
        assert disk.steps == steps


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("operation", ["pwrite", "create"])
def test_a_failed_append_leaves_no_bytes_in_the_log(operation: str, code: int) -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 3)
    disk.fail = lambda op, path: code if op == operation and path.endswith(".log") else None
    error = fill(log)
    assert isinstance(error, StorageFull) == (code != errno.EIO)
    end = log.log_end_offset
    disk.fail = lambda op, path: None
    disk.kill()
    log = reopen(disk)
    assert log.log_end_offset == end
    assert log.recovery is None or log.recovery.truncated_bytes == 0
    append_many(log, 30)
    assert offsets(log) == list(range(end + 30))


def test_the_next_append_removes_a_torn_append_that_could_not_be_truncated() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(SMALL, preallocate_bytes_min=1 << 16, preallocate_bytes_max=1 << 16))
    append_many(log, 3)
    disk.fail = lambda op, path: errno.EIO if op in ("pwrite", "truncate") else None
    fill(log)
    with pytest.raises(StorageError):
        append(log, batch(), now_ms=NOW_MS + 1000)
    disk.fail = lambda op, path: None
    append(log, batch(), now_ms=NOW_MS + 2000)
    disk.kill()
    assert offsets(reopen(disk)) == [0, 1, 2, 3]


def test_failed_preallocation_does_not_fail_an_append_that_fits() -> None:
    disk = FaultyDisk()
    log = reopen(disk, LogConfig())
    disk.capacity_bytes = 1000
    append_many(log, 5)
    assert offsets(log) == list(range(5))


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_log_treats_the_systems_file_size_limit_as_a_full_disk(tmp_path: object) -> None:
    folder = f"{tmp_path}/topic-0"
    log = Log.open(RealDisk(), folder, LogConfig(), NOW_MS)
    with file_size_limit(200_000):
        error = fill(log)
    assert isinstance(error, StorageFull)
    end = log.log_end_offset
    assert end > 500
    assert append(log, batch(), now_ms=NOW_MS + 1000).base_offset == end
    assert log.close()
    log = Log.open(RealDisk(), folder, LogConfig(), NOW_MS)
    assert log.recovery is None
    assert offsets(log) == list(range(end + 1))
    log.close()
