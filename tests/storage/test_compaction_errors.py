"""Disk errors while compacted segments replace the old ones: the log stays usable, and no key loses its value."""

import errno
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from tests.storage.faulty_disk import Crash, FaultyDisk
from tests.storage.helpers import FOLDER, NOW_MS, SMALL, append, batch, read_all, reopen, sync

from chronik.storage.compaction import CompactionJob
from chronik.storage.disk import StorageError
from chronik.storage.log import Log

COMPACTED = replace(SMALL, cleanup_compact=True, cleanup_delete=False, min_cleanable_ratio=0.0)
KEYS = 7
RECORDS = 140
ONCE = 1
FOREVER = 1 << 30


def put(log: Log, number: int) -> None:
    append(log, batch(keys=[b"k%d" % (number % KEYS)], values=[b"%d" % number]))


def ready_to_swap() -> tuple[FaultyDisk, Log, CompactionJob]:
    """Return a log with several groups of segments to replace, one of which leaves nothing."""
    disk = FaultyDisk()
    log = reopen(disk, COMPACTED)
    for number in range(RECORDS):
        put(log, number)
    log.roll(NOW_MS)
    sync(log)
    job = log.compaction_job(NOW_MS, log.log_end_offset)
    assert job is not None
    job.run()
    groups = job.usable_groups(log._segments.all)
    assert {group.has_successor for group in groups} == {True, False}
    return disk, log, job


def fail(disk: FaultyDisk, at: int, count: int, code: int) -> list[str]:
    """Let `count` steps fail from the step `at` on; return a list to which failed operations are added."""
    first = disk.steps + at
    failed: list[str] = []

    def failing(operation: str, path: str) -> int | None:
        if not first < disk.steps <= first + count:
            return None
        failed.append(f"{operation} {path}")
        return code

    disk.fail = failing
    return failed


def cure(disk: FaultyDisk) -> None:
    disk.fail = lambda operation, path: None


def check_values(log: Log, end: int = RECORDS) -> None:
    values = {record.key: record.value for record in read_all(log)}
    expected = {b"k%d" % (number % KEYS): b"%d" % number for number in range(end)}
    assert values == expected


def leftovers(disk: FaultyDisk) -> list[str]:
    return [name for name in disk.listdir(FOLDER) if name.endswith((".cleaned", ".swap", ".deleted"))]


def check_reopened(disk: FaultyDisk, end: int = RECORDS) -> None:
    log = reopen(disk, COMPACTED, recovery_point=end)
    assert log.recovery is None or not log.recovery.is_damaged
    assert not log.read_only
    assert log.log_end_offset == end
    check_values(log, end)
    assert not leftovers(disk)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_one_error_at_any_step_of_the_swap_leaves_a_writable_log(code: int) -> None:
    outcomes: set[bool] = set()
    step = 0
    while True:
        disk, log, job = ready_to_swap()
        failed = fail(disk, step, ONCE, code)
        deletion = log.finish_compaction(job)
        cure(disk)
        if not failed:
            break
        assert not log.read_only, failed
        outcomes.add(job.swap_error is None)
        check_values(log)
        deletion.run()
        assert not leftovers(disk), failed
        check_values(log)
        put(log, RECORDS)
        sync(log)
        again = log.compaction_job(NOW_MS, log.log_end_offset)
        if again is not None:
            again.run()
            log.finish_compaction(again).run()
            assert again.swap_error is None
        check_values(log, RECORDS + 1)
        sync(log)
        disk.power_loss(Random(step))
        check_reopened(disk, RECORDS + 1)
        step += 1
    assert outcomes == {True, False}, "some swaps are completed, others undone"


@pytest.mark.parametrize("end", range(0, RECORDS + 1, 20))
@pytest.mark.parametrize("refused", [".swap", ".index.deleted", ".log.deleted", f"{27:020d}.log.deleted"])
def test_a_log_is_whole_after_its_swap_was_undone(refused: str, end: int) -> None:
    disk, log, job = ready_to_swap()
    disk.fail = lambda operation, path: errno.EIO if operation == "rename" and path.endswith(refused) else None
    deletion = log.finish_compaction(job)
    assert job.swap_error is not None and not log.read_only
    cure(disk)
    deletion.run()
    assert len(read_all(log)) == RECORDS
    log.truncate_to(end)
    assert len(read_all(log)) == log.log_end_offset == end
    disk.power_loss(Random(end))
    assert len(read_all(reopen(disk, COMPACTED))) == end


def test_a_lasting_error_loses_nothing_and_the_next_start_completes_the_swap() -> None:
    stuck = 0
    step = 0
    while True:
        disk, log, job = ready_to_swap()
        failed = fail(disk, step, FOREVER, errno.EIO)
        try:
            log.finish_compaction(job)
        except StorageError as error:
            assert "restart the node" in error.message
            assert log.read_only_forever
            stuck += 1
        cure(disk)
        if not failed:
            break
        disk.power_loss(Random(step))
        check_reopened(disk)
        step += 1
    assert stuck


def test_a_crash_at_any_step_after_an_error_loses_nothing() -> None:
    """The error occurs at any step of the swap, the crash at any step after it, with power loss."""
    crashes = 0
    step = 0
    while True:
        crash = step + 1
        while True:
            disk, log, job = ready_to_swap()
            failed = fail(disk, step, ONCE, errno.EIO)
            disk.crash_at = disk.steps + crash
            try:
                with suppress(OSError):  # from the removal of old files, which the next start repeats
                    log.finish_compaction(job).run()
                break
            except Crash:
                crashes += 1
            cure(disk)
            disk.power_loss(Random(f"{step}:{crash}"))
            check_reopened(disk)
            crash += 1
        if not failed:
            break
        step += 1
    assert crashes > 100
