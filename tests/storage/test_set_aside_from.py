"""A damaged log is set aside from the damage on: it ends before the damage, is writable again, and deletes nothing."""

from __future__ import annotations

from random import Random

import pytest
from tests.storage.faulty_disk import Crash, FaultyDisk
from tests.storage.helpers import FOLDER, NOW_MS, append, append_many, batch, offsets, read_all, reopen, sync
from tests.storage.test_scrubbing import BATCHES, SECOND, delete_the_segment, filled, findings, path_of

from chronik.storage.log import Log

DATA = "/data"


def files(disk: FaultyDisk, folder: str) -> dict[str, bytes]:
    return {name: bytes(disk.content(f"{folder}/{name}")) for name in disk.listdir(folder)}


def test_a_log_continues_before_the_damaged_segments_that_were_set_aside() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    log.close()
    log = reopen(disk)
    first, second = log.closed_segments()[:2]
    before = files(disk, FOLDER)
    folders = log.set_aside_from(second + 3, DATA, NOW_MS)
    assert folders == [f"{DATA}/set-aside/topic-0-{second}-{NOW_MS}"]
    moved = files(disk, folders[0])
    assert {name for name in before if name.endswith(".log") and int(name[:20]) >= second} < set(moved)
    assert {name for name in before if name.endswith(".snapshot")} < set(moved)
    assert all(before[name] == content for name, content in moved.items())
    left = {name for name in files(disk, FOLDER) if name.endswith((".log", ".index", ".timeindex"))}
    assert left == {f"{first:020d}{suffix}" for suffix in (".log", ".index", ".timeindex")} | {f"{second:020d}.log"}
    assert (log.log_start_offset, log.log_end_offset, log.synced_end_offset) == (0, second, second)
    assert offsets(log) == list(range(second))
    assert log.epochs.entries() == [(0, 0)]
    for _ in range(BATCHES):
        append(log, batch(), epoch=9)
    sync(log)
    assert offsets(log) == list(range(second + BATCHES))
    assert log.epoch_of(second) == 9
    assert findings(log) == []
    log.close()
    log = reopen(disk, recovery_point=second + BATCHES)
    assert log.recovery is None and offsets(log) == list(range(second + BATCHES))


def test_producer_state_matches_the_new_log_end() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    for sequence in range(60):
        append(log, batch(producer_id=5, producer_epoch=0, base_sequence=sequence))
    second = log.closed_segments()[SECOND]
    log.set_aside_from(second, DATA, NOW_MS)
    known = log.producers.get(5)
    assert known is not None and known.batches[-1].last_sequence == second - 1


def test_setting_aside_the_first_segment_leaves_an_empty_log_at_its_start() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    log.increment_log_start(3).run()
    assert len(log.set_aside_from(3, DATA, NOW_MS)) == 1
    assert (log.log_start_offset, log.log_end_offset) == (3, 3)
    append_many(log, 2)
    assert offsets(log) == [3, 4]
    log.close()
    assert offsets(reopen(disk)) == [3, 4]


def test_setting_aside_from_the_log_end_moves_no_segment() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    assert log.set_aside_from(BATCHES, DATA, NOW_MS) == []
    assert not disk.exists(f"{DATA}/set-aside") and log.log_end_offset == BATCHES


def test_segments_after_a_missing_segment_are_set_aside_too() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    log.close()
    names = {name for name in disk.listdir(FOLDER) if name.endswith(".log")}
    delete_the_segment(disk, log)
    log = reopen(disk, recovery_point=BATCHES)
    assert log.is_broken and log.read_only_forever and log.recovery is not None
    damage = log.recovery.damages[0]
    (folder,) = log.set_aside_from(damage.offset, DATA, NOW_MS)
    moved = {name for name in disk.listdir(folder) if name.endswith(".log")}
    # The first segment is intact, but the segment before a gap is not trusted either.
    assert damage.segment_base == 0 and len(moved) == len(names) - 1
    assert not log.is_broken and not log.read_only and not log.read_only_forever
    assert log.log_end_offset == damage.segment_base
    append_many(log, 5)
    sync(log)
    log.close()
    log = reopen(disk)
    assert log.recovery is None and len(read_all(log)) == damage.segment_base + 5


def test_all_segments_are_set_aside_if_an_earlier_segment_is_damaged_too() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    disk.content(path_of(log, segment=0))[9] ^= 0x7F
    folders = log.set_aside_from(log.closed_segments()[2], DATA, NOW_MS)
    assert len(folders) == 2
    assert (log.log_start_offset, log.log_end_offset) == (0, 0)
    append_many(log, 3)
    assert offsets(log) == [0, 1, 2]


def test_a_log_whose_sync_failed_stays_read_only() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    append_many(log, 1)
    job = log.sync_job()
    assert job is not None
    log.sync_failed(job)
    log.set_aside_from(log.closed_segments()[SECOND], DATA, NOW_MS)
    assert log.read_only_forever


def test_a_failed_move_leaves_the_log_read_only_until_it_is_reopened() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    second = log.closed_segments()[SECOND]
    disk.fail = lambda operation, path: 5 if operation == "rename" and path.endswith(f"{second:020d}.log") else None
    with pytest.raises(OSError, match="Input/output"):
        log.set_aside_from(second, DATA, NOW_MS)
    assert log.read_only_forever and "set aside" in log.read_only_reason
    disk.fail = lambda operation, path: None
    disk.kill()
    log = reopen(disk)
    assert offsets(log) == list(range(log.log_end_offset)) and log.log_end_offset > second


def crashed(at: int) -> tuple[FaultyDisk, Log] | None:
    disk = FaultyDisk()
    log = filled(disk)
    disk.crash_at = disk.steps + at
    try:
        log.set_aside_from(log.closed_segments()[SECOND], DATA, NOW_MS)
    except Crash:
        return disk, log
    return None


@pytest.mark.parametrize("power_is_lost", [False, True])
def test_a_crash_at_any_step_leaves_no_holes_and_loses_no_segment(power_is_lost: bool) -> None:
    disk = FaultyDisk()
    filled(disk)
    before = files(disk, FOLDER)
    contents = {name: before[name].rstrip(b"\0") for name in before if name.endswith(".log")}
    for seed in range(3 if power_is_lost else 1):
        steps = 0
        while (found := crashed(steps)) is not None:
            disk, _ = found
            steps += 1
            disk.power_loss(Random(f"{seed}:{steps}")) if power_is_lost else disk.kill()
            for name, content in contents.items():
                places = [path for path in disk.names if path.endswith(f"/{name}")]
                assert any(bytes(disk.content(path)).rstrip(b"\0") == content for path in places), name
            log = reopen(disk, recovery_point=0)
            assert log.recovery is None or not log.recovery.is_damaged
            assert offsets(log) == list(range(log.log_end_offset))
            append_many(log, 3)
            sync(log)
            assert log.close()
        assert steps > 10
