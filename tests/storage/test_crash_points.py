"""A crash at every step of each operation that changes files: the log reopens in order, with every synced record."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from tests.storage.faulty_disk import Crash, FaultyDisk
from tests.storage.helpers import FOLDER, NOW_MS, SMALL, append, append_many, batch, offsets, read_all, reopen, sync

from chronik.storage.config import LogConfig
from chronik.storage.log import Log

COMPACTED = replace(SMALL, cleanup_compact=True, cleanup_delete=False, min_cleanable_ratio=0.0, delete_retention_ms=0)
SYNCED = 80
"""Records in the log, all synced, before each scenario begins."""

Story = Callable[[Log], None]


def keyed(log: Log, count: int) -> None:
    for i in range(count):
        append(log, batch(2, keys=[b"k%d" % (i % 7), b"once%d" % i], values=[b"%d" % i, b"x" * 20]))


def roll_and_sync(log: Log) -> None:
    for _ in range(4):
        append_many(log, 15)
        sync(log)


def delete_records(log: Log) -> None:
    log.increment_log_start(50).run()


def retain(log: Log) -> None:
    job = log.apply_retention(NOW_MS + 10 * log.config.retention_ms, log.log_end_offset)
    assert job is not None
    job.run()
    append_many(log, 5)
    sync(log)


def retain_a_part(log: Log) -> None:
    log.configure(replace(log.config, retention_bytes=3000))
    job = log.apply_retention(NOW_MS, log.log_end_offset)
    assert job is not None
    job.run()


def compact(log: Log) -> None:
    sync(log)
    job = log.compaction_job(NOW_MS, log.log_end_offset)
    if job is not None:
        job.run()
        log.finish_compaction(job).run()
    append_many(log, 2)
    sync(log)


def truncate(log: Log) -> None:
    log.truncate_to(33)


def truncate_fully(log: Log) -> None:
    log.truncate_fully(500)
    append_many(log, 2)
    sync(log)


def close(log: Log) -> None:
    append_many(log, 3)
    log.close()


def prepared(config: LogConfig) -> tuple[FaultyDisk, Log]:
    disk = FaultyDisk()
    log = reopen(disk, config)
    if config.cleanup_compact:
        keyed(log, SYNCED // 2)
    else:
        append_many(log, SYNCED)
    sync(log)
    return disk, log


def crashed(config: LogConfig, story: Story, at: int) -> FaultyDisk | None:
    """Return the disk after a crash at step `at` of the scenario, or None if it has no such step."""
    disk, log = prepared(config)
    disk.crash_at = disk.steps + at
    try:
        story(log)
    except Crash:
        return disk
    return None


def lowest_end(story: Story) -> int:
    return 33 if story is truncate else 0 if story is truncate_fully else SYNCED


@pytest.mark.parametrize("power_is_lost", [False, True])
@pytest.mark.parametrize(
    "story", [roll_and_sync, delete_records, retain, retain_a_part, truncate, truncate_fully, close]
)
def test_a_crash_at_any_step_leaves_a_log_without_holes(story: Story, power_is_lost: bool) -> None:
    steps = 0
    for seed in range(3 if power_is_lost else 1):
        steps = 0
        while (disk := crashed(SMALL, story, steps)) is not None:
            steps += 1
            disk.power_loss(Random(f"{seed}:{steps}")) if power_is_lost else disk.kill()
            log = reopen(disk)
            assert log.recovery is None or not log.recovery.is_damaged
            assert log.log_end_offset >= lowest_end(story)
            assert offsets(log) == list(range(log.log_start_offset, log.log_end_offset))
            if story is not truncate_fully and log.log_end_offset <= SYNCED:
                assert log.log_start_offset <= SYNCED
            end = log.log_end_offset
            append_many(log, 3)
            sync(log)
            assert log.close()
            log = reopen(disk)
            assert log.recovery is None
            assert log.log_end_offset == end + 3
            leftovers = [name for name in disk.listdir(FOLDER) if name.endswith((".tmp", ".deleted", ".cleaned"))]
            assert not leftovers
    assert steps > 2


class NothingByChance(Random):
    """The kernel has written back nothing without a sync."""

    def randint(self, a: int, b: int) -> int:
        return a


def begin(config: LogConfig) -> tuple[FaultyDisk, Log]:
    """Create an empty log."""
    disk = FaultyDisk()
    return disk, reopen(disk, config)


@pytest.mark.parametrize("start", [prepared, begin])
def test_records_synced_after_a_kill_at_any_step_survive_a_power_failure(
    start: Callable[[LogConfig], tuple[FaultyDisk, Log]],
) -> None:
    """The second process continues with files of the first one, whose names may not be durable yet."""
    steps = 0
    while True:
        disk, log = start(SMALL)
        disk.crash_at = disk.steps + steps
        try:
            for _ in range(20):
                append_many(log, 1, value_bytes=900)  # so that checkpoints end with their segment
                sync(log)
            break
        except Crash:
            disk.kill()
        steps += 1
        log = reopen(disk)
        append_many(log, 1)
        sync(log)
        end = log.log_end_offset
        disk.power_loss(NothingByChance())
        log = reopen(disk)
        assert log.log_end_offset == end, f"crashed at step {steps}"
        assert offsets(log) == list(range(end))
    assert steps > 20


@pytest.mark.parametrize("power_is_lost", [False, True])
def test_a_crash_at_any_step_of_compaction_keeps_the_last_record_of_each_key(power_is_lost: bool) -> None:
    for seed in range(3 if power_is_lost else 1):
        steps = 0
        while (disk := crashed(COMPACTED, compact, steps)) is not None:
            steps += 1
            disk.power_loss(Random(f"{seed}:{steps}")) if power_is_lost else disk.kill()
            log = reopen(disk, COMPACTED, recovery_point=SYNCED)
            assert log.recovery is None or not log.recovery.is_damaged
            records = [record for record in read_all(log) if record.offset < SYNCED]
            found = [record.offset for record in records]
            assert found == sorted(set(found))
            newest = {record.key: record.value for record in records}
            assert len(newest) == 7 + SYNCED // 2
            assert all(newest[b"k%d" % (i % 7)] == b"%d" % i for i in range(33, 40))
            assert log.log_start_offset == 0
            compact(log)
            assert log.close()
            log = reopen(disk, COMPACTED)
            assert log.recovery is None
            left = [name for name in disk.listdir(FOLDER) if name.endswith((".cleaned", ".swap", ".deleted"))]
            assert not left
        assert steps > 20


def test_a_log_recovers_from_a_crash_during_recovery() -> None:
    for seed in range(10):
        disk, log = prepared(SMALL)
        append_many(log, 30)
        disk.power_loss(Random(seed))
        for steps in range(50):
            disk.crash_at = disk.steps + steps
            try:
                log = reopen(disk)
            except Crash:
                disk.power_loss(Random(steps))
                continue
            break
        assert log.log_end_offset >= SYNCED
        assert offsets(log) == list(range(log.log_end_offset))
