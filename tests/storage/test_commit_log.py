"""The commit log: acknowledged records survive crashes at any step, and nothing that was removed comes back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from errno import EIO, ENOSPC
from random import Random
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest
from tests.storage.faulty_disk import Crash, FaultyDisk, FaultyFile
from tests.storage.helpers import NOW_MS, SMALL, append, append_many, batch, offsets, read_all
from tests.storage.node_model import COMMIT_LOG_BYTES, PATH, Node

from chronik.storage import folder as folder_module
from chronik.storage.commit_log import (
    PAGE_BYTES,
    CommitLog,
    Entry,
    LogFrames,
    LogId,
    encode_frame,
)
from chronik.storage.config import LogConfig
from chronik.storage.folder import DataFolder, DataFolderError, RecoveryPoint
from chronik.storage.log import Log
from chronik.storage.replaying import read_entries
from chronik.storage.syncing import read_synced_end
from chronik.wire.errors import KafkaError

GENERATION = UUID(int=7)
TOPIC = UUID(int=42)
SEEDS = 25
LOG = LogId(TOPIC, 0)


def lives(seeds: range) -> Node:
    """Let nodes live and crash; return the last one, with the sums of all counts."""
    frames = replayed = voids = recycled = 0
    for seed in seeds:
        node = Node(f"s{seed}")
        node.live(crashes=6)
        frames, replayed = frames + node.frames, replayed + node.replayed
        voids, recycled = voids + node.voids, recycled + node.recycled
    node.frames, node.replayed, node.voids, node.recycled = frames, replayed, voids, recycled
    return node


def test_acknowledged_records_survive_crashes_at_any_step_of_a_node() -> None:
    node = lives(range(SEEDS))
    assert node.frames > 10 * SEEDS // 2
    assert node.replayed > 0
    assert node.voids > SEEDS
    assert node.recycled > SEEDS // 5


@contextmanager
def frames_are_not_replayed() -> Iterator[None]:
    with patch.object(folder_module, "replay", lambda *_: None):
        yield


@contextmanager
def files_are_recycled_before_their_segments_are_synced() -> Iterator[None]:
    def nothing(log: Log) -> None:
        log._syncs._forget_framed()

    with patch.object(Log, "flush_job", nothing):
        yield


@contextmanager
def truncation_leaves_frames() -> Iterator[None]:
    with patch.object(CommitLog, "void", lambda *_: None):
        yield


@contextmanager
def frames_are_not_synced() -> Iterator[None]:
    sync = FaultyFile.datasync

    def datasync(file: FaultyFile) -> None:
        if "/commit-log/" not in file._path:
            sync(file)

    with patch.object(FaultyFile, "datasync", datasync):
        yield


@contextmanager
def an_old_generation_counts() -> Iterator[None]:
    """As without generations: every run counts the frames of all earlier runs as well."""
    begin = DataFolder.begin_commit_log

    def begin_again(folder: DataFolder, generation: UUID, *rest: Any) -> CommitLog:
        return begin(folder, GENERATION, *rest)

    with patch.object(DataFolder, "begin_commit_log", begin_again):
        yield


@pytest.mark.parametrize(
    "bug",
    [
        frames_are_not_replayed,
        files_are_recycled_before_their_segments_are_synced,
        truncation_leaves_frames,
        frames_are_not_synced,
        an_old_generation_counts,
    ],
)
def test_random_crashes_find_a_planted_bug(bug: Callable[[], AbstractContextManager[None]]) -> None:
    with bug(), pytest.raises((AssertionError, OSError, KafkaError, ValueError)):
        lives(range(400))


def commit_log_on(disk: FaultyDisk, files: int = 2, count: Callable[[int], None] = lambda sequence: None) -> CommitLog:
    disk.mkdir("/c")
    commit_log = CommitLog(disk, "/c", GENERATION, 8 * PAGE_BYTES, 0, count, lambda: None)
    for _ in range(files):
        commit_log.add_file()
    return commit_log


def entry(number: int, log: LogId = LOG) -> Entry:
    return Entry(log, 0, number * 10, number + 1, b"%010d" % number)


def numbers(disk: FaultyDisk) -> list[int]:
    entries, report = read_entries(disk, "/c", GENERATION, 1)
    assert not report.damage, report.damage
    return [int(bytes(each.data)) for each in entries.get(LOG, ())]


def test_a_torn_frame_and_all_bytes_after_it_do_not_count() -> None:
    disk = FaultyDisk()
    commit_log = commit_log_on(disk)
    for number in range(3):
        assert commit_log.write([entry(number)]) == 1
    content = disk.content("/c/0")
    frame = b"".join(encode_frame(GENERATION.bytes, 3, 1, [entry(2)])).rstrip(b"\0")
    assert numbers(disk) == [0, 1, 2]
    for at in range(len(frame)):
        content[2 * PAGE_BYTES + at] ^= 1
        assert numbers(disk) == [0, 1]
        content[2 * PAGE_BYTES + at] ^= 1


def test_a_damaged_frame_before_an_intact_one_is_reported() -> None:
    disk = FaultyDisk()
    commit_log = commit_log_on(disk)
    for number in range(3):
        commit_log.write([entry(number)])
    disk.content("/c/0")[PAGE_BYTES + 70] ^= 1
    entries, report = read_entries(disk, "/c", GENERATION, 1)
    assert report.damage == "frame 2 is damaged, and frame 3 is intact"
    # The damaged frame may have cancelled the first one.
    assert [bytes(each.data) for each in entries[LOG]] == [entry(2).data]


def test_a_missing_commit_log_is_reported() -> None:
    _, report = read_entries(FaultyDisk(), "/c", GENERATION, 1)
    assert report.damage == "its folder is missing"


def test_frames_of_another_generation_do_not_count() -> None:
    disk = FaultyDisk()
    commit_log_on(disk).write([entry(0)])
    assert read_entries(disk, "/c", UUID(int=8), 1)[0] == {}


def test_a_void_entry_cancels_earlier_entries_of_its_log_only() -> None:
    disk = FaultyDisk()
    commit_log = commit_log_on(disk)
    other = LogId(TOPIC, 1)
    commit_log.write([entry(0), entry(0, other)])
    commit_log.void(LOG)
    commit_log.void(LOG)  # nothing is left to cancel
    commit_log.write([entry(1)])
    assert numbers(disk) == [1]
    assert len(read_entries(disk, "/c", GENERATION, 1)[0][other]) == 1
    assert read_entries(disk, "/c", GENERATION, 1)[1].frames == 3


def test_a_file_is_recycled_only_after_its_logs_are_flushed() -> None:
    disk = FaultyDisk()
    commit_log = commit_log_on(disk)
    written = [commit_log.write([entry(number)]) for number in range(20)]
    assert written == [1] * 7 + [2] * 7 + [None] * 6
    commit_log.flushed_upto = 1
    assert [commit_log.write([entry(number)]) for number in range(14, 24)] == [3] * 7 + [None] * 3
    assert numbers(disk) == list(range(7, 21))


def test_a_crash_while_a_recycled_file_is_overwritten_is_no_damage() -> None:
    disk = FaultyDisk()
    commit_log = commit_log_on(disk)
    for number in range(14):
        commit_log.write([entry(number)])
    commit_log.flushed_upto = 1
    commit_log.write([entry(14)])
    disk.content("/c/0")[50] ^= 1
    assert numbers(disk) == list(range(7, 14))


def test_the_loss_of_the_newest_file_is_noticed_although_recycled_files_have_intact_frames() -> None:
    disk, counted = FaultyDisk(), list[int]()
    commit_log = commit_log_on(disk, count=counted.append)
    for number in range(14):
        commit_log.write([entry(number)])
    commit_log.flushed_upto = 2
    # The frame before it notes that older ones are not needed any more.
    assert commit_log.write([entry(14)]) == 3
    assert counted == [1, 8, 16]
    disk.content("/c/0")[:] = bytes(8 * PAGE_BYTES)
    entries, report = read_entries(disk, "/c", GENERATION, counted[-1])
    assert (entries, report.damage) == ({}, "it has no intact frame from 16 on")


def test_a_frame_is_durable_although_the_folder_cannot_note_it() -> None:
    """The first frame of all must be noted: without a named generation no frame counts."""
    disk, counted = FaultyDisk(), list[int]()
    errors = [OSError(ENOSPC, "full")]

    def count(sequence: int) -> None:
        if counted and errors:
            raise errors.pop()
        counted.append(sequence)

    commit_log = commit_log_on(disk, count=count)
    assert [commit_log.write([entry(number)]) for number in range(8)] == [1] * 7 + [2]
    assert counted == [1] and not errors
    assert commit_log.write([entry(8)]) == 2
    assert counted == [1, 8]
    assert numbers(disk) == list(range(9))


def test_a_truncation_finds_room_in_a_full_commit_log() -> None:
    disk = FaultyDisk()
    commit_log = commit_log_on(disk, files=1)
    while commit_log.write([entry(0)]) is not None:
        pass
    commit_log.void(LOG)
    assert numbers(disk) == []
    assert commit_log.write([entry(1)]) == 2
    assert numbers(disk) == [1]


def test_a_truncation_while_a_file_is_added_uses_another_one() -> None:
    disk = FaultyDisk()
    commit_log = commit_log_on(disk, files=1)
    while commit_log.write([entry(0)]) is not None:
        pass
    voided = False

    def truncate(operation: str, path: str) -> None:
        nonlocal voided
        if operation == "pwrite" and not voided:
            voided = True
            commit_log.void(LOG)

    disk.fail = truncate
    commit_log.add_file()
    assert voided and numbers(disk) == []
    assert [commit_log.write([entry(number)]) for number in range(8)] == [2] * 6 + [3] * 2
    assert numbers(disk) == list(range(8))


def test_a_file_that_could_not_be_added_is_tried_again() -> None:
    disk = FaultyDisk()
    commit_log = commit_log_on(disk, files=1)
    disk.fail = lambda operation, path: ENOSPC if operation == "pwrite" else None
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            commit_log.add_file()
        assert commit_log.wants_file
    disk.fail = lambda operation, path: None
    commit_log.add_file()
    assert disk.listdir("/c") == ["0", "1"]


def test_a_broken_commit_log_refuses_truncations_until_it_no_longer_counts() -> None:
    disk = FaultyDisk()
    commit_log = commit_log_on(disk)
    commit_log.write([entry(0)])
    disk.fail = lambda operation, path: EIO if operation == "datasync" else None
    with pytest.raises(OSError, match="Input/output"):
        commit_log.write([entry(1)])
    disk.fail = lambda operation, path: None
    assert commit_log.write([entry(2)]) is None
    with pytest.raises(OSError, match="the commit log has failed"):
        commit_log.void(LOG)
    commit_log.retire()
    commit_log.void(LOG)
    assert commit_log.write([entry(3)]) is None


def framed(disk: FaultyDisk, config: LogConfig = SMALL) -> tuple[DataFolder, Log, CommitLog]:
    """Return a log with one synced batch in its segment; later syncs of it go to a commit log."""
    folder = DataFolder.open(disk, PATH, 1, "cluster")
    commit_log = folder.begin_commit_log(GENERATION, COMMIT_LOG_BYTES)
    commit_log.add_file()
    folder.claim_log("t", 0, TOPIC, NOW_MS)
    log = Log.open(disk, folder.log_path("t", 0), config, NOW_MS)
    log.frames = LogFrames(commit_log, LOG)
    append_many(log, 1)
    job = log.sync_job()
    assert job is not None
    assert not job.entry_bytes, "the first sync makes the segment's name durable"
    job.run()
    log.synced(job)
    return folder, log, commit_log


def sync_framed(log: Log, commit_log: CommitLog) -> None:
    job = log.sync_job()
    assert job is not None
    assert job.entry_bytes > 0
    entry = job.read_entry()
    assert entry is not None
    serial = commit_log.write([entry])
    assert serial is not None
    job.framed(serial)
    log.synced(job)


class NothingByChance(Random):
    """The kernel has written back nothing without a sync."""

    def randint(self, a: int, b: int) -> int:
        return a


def test_records_only_in_the_commit_log_survive_a_power_loss_and_a_crash_of_the_replay() -> None:
    steps = 0
    while True:
        disk = FaultyDisk()
        _, log, commit_log = framed(disk)
        for _ in range(3):
            append_many(log, 1)
            sync_framed(log, commit_log)
        disk.power_loss(NothingByChance())
        assert len(disk.content(f"{PATH}/logs/t-0/{0:020d}.log")) < log.size_bytes
        disk.crash_at = disk.steps + steps
        try:
            DataFolder.open(disk, PATH, 1, "cluster")
        except Crash:
            disk.power_loss(NothingByChance())
            folder = DataFolder.open(disk, PATH, 1, "cluster")
            log = Log.open(disk, folder.log_path("t", 0), SMALL, NOW_MS)
            assert offsets(log) == list(range(4))
            assert read_synced_end(disk, log.folder) == 4
            steps += 1
        else:
            break
    assert steps > 5


def test_a_crash_at_any_step_of_a_truncation_keeps_what_is_below_it() -> None:
    steps, ends = 0, set[int]()
    while True:
        disk = FaultyDisk()
        _, log, commit_log = framed(disk)
        for _ in range(4):
            append_many(log, 1)
            sync_framed(log, commit_log)
        disk.crash_at = disk.steps + steps
        try:
            log.truncate_to(3)
        except Crash:
            disk.power_loss(NothingByChance())
            folder = DataFolder.open(disk, PATH, 1, "cluster")
            ends.add(len(offsets(Log.open(disk, folder.log_path("t", 0), SMALL, NOW_MS))))
            steps += 1
        else:
            break
    assert ends <= {3, 5}
    assert steps > 3


def test_a_log_that_lost_what_the_commit_log_proves_is_reported() -> None:
    disk = FaultyDisk()
    folder, log, commit_log = framed(disk)
    append_many(log, 1)
    sync_framed(log, commit_log)
    disk.kill()
    del disk.names[f"{PATH}/logs/t-0/{0:020d}.log"]
    folder = DataFolder.open(disk, PATH, 1, "cluster")
    log = Log.open(disk, folder.log_path("t", 0), SMALL, NOW_MS)
    assert log.recovery is not None
    assert log.recovery.ends_below_recovery_point


def test_the_proof_of_a_logs_end_outlives_the_replay() -> None:
    disk = FaultyDisk()
    _, log, commit_log = framed(disk)
    append_many(log, 1)
    sync_framed(log, commit_log)
    disk.power_loss(NothingByChance())
    DataFolder.open(disk, PATH, 1, "cluster")
    disk.power_loss(NothingByChance())
    assert read_synced_end(disk, log.folder) == 2


def test_a_compacted_segment_is_not_overwritten_by_the_replay() -> None:
    disk = FaultyDisk()
    config = replace(SMALL, cleanup_compact=True, min_cleanable_ratio=0.0)
    folder, log, commit_log = framed(disk, config)
    for number in range(5):
        append(log, batch(1, keys=[b"k%d" % (number % 2)], values=[b"%d" % number]))
        sync_framed(log, commit_log)
    log.roll(NOW_MS)
    append(log, batch(1, keys=[b"k9"], values=[b"last"]))
    job = log.sync_job()
    assert job is not None
    job.run()
    log.synced(job)
    compaction = log.compaction_job(NOW_MS, log.log_end_offset)
    assert compaction is not None
    compaction.run()
    log.finish_compaction(compaction).run()
    before = [(record.offset, record.value) for record in read_all(log)]
    assert len(before) < 5
    disk.power_loss(NothingByChance())
    folder = DataFolder.open(disk, PATH, 1, "cluster")
    log = Log.open(disk, folder.log_path("t", 0), config, NOW_MS)
    assert [(record.offset, record.value) for record in read_all(log)] == before


def test_a_topic_of_the_same_name_does_not_get_the_entries_of_the_old_one() -> None:
    disk = FaultyDisk()
    folder, log, commit_log = framed(disk)
    append_many(log, 3)
    sync_framed(log, commit_log)
    disk.kill()
    # As after a deletion that a crash interrupted before the entries were void.
    folder.remove_log("t", 0)()
    folder.claim_log("t", 0, UUID(int=43), NOW_MS)
    log = Log.open(disk, folder.log_path("t", 0), SMALL, NOW_MS)
    append_many(log, 1)
    log.close()
    folder = DataFolder.open(disk, PATH, 1, "cluster")
    assert folder.replayed is not None
    assert (folder.replayed.unknown_logs, folder.replayed.logs) == (1, 0)
    assert offsets(Log.open(disk, folder.log_path("t", 0), SMALL, NOW_MS)) == [0]


def test_the_folder_has_format_2_only_while_the_commit_log_counts() -> None:
    disk = FaultyDisk()

    def meta() -> dict[str, object]:
        return dict(json.loads(bytes(disk.content(f"{PATH}/meta.json"))))

    folder, log, commit_log = framed(disk)
    assert meta()["format_version"] == 1
    append_many(log, 1)
    sync_framed(log, commit_log)
    assert meta()["format_version"] == 2
    assert log.close()
    folder.record_clean_shutdown({})
    assert meta() == {"format_version": 1, "node_id": 1, "cluster_id": "cluster"}
    folder.close()
    folder = DataFolder.open(disk, PATH, 1, "cluster")
    assert folder.was_clean
    assert folder.replayed is None
    folder.begin_commit_log(UUID(int=9), COMMIT_LOG_BYTES)
    disk.kill()
    DataFolder.open(disk, PATH, 1, "cluster").remove_commit_log()
    assert meta()["format_version"] == 1
    assert not disk.exists(f"{PATH}/commit-log")


def test_a_damaged_commit_log_is_kept_and_no_log_counts_as_complete() -> None:
    disk = FaultyDisk()
    folder, log, commit_log = framed(disk)
    for _ in range(3):
        append_many(log, 1)
        sync_framed(log, commit_log)
    folder.recovery_points_job({("t", 0): RecoveryPoint(TOPIC, 1)})()
    disk.kill()
    disk.content(f"{PATH}/commit-log/0")[PAGE_BYTES + 70] ^= 1
    steps = 0
    while True:
        # Also after a crash at any step, the proof is not forgotten.
        disk.crash_at = disk.steps + steps
        try:
            folder = DataFolder.open(disk, PATH, 1, "cluster")
        except Crash:
            disk.kill()
            steps += 1
        else:
            break
    assert steps > 5
    assert not folder.recovery_points
    kept = f"{PATH}/set-aside/commit-log-{GENERATION}"
    assert disk.listdir(kept) == ["0"]
    assert offsets(Log.open(disk, folder.log_path("t", 0), SMALL, NOW_MS)) == list(range(4))


@pytest.mark.parametrize("is_zeroed", [False, True], ids=["removed", "zeroed"])
def test_a_commit_log_that_lost_all_frames_is_damaged(is_zeroed: bool) -> None:
    disk = FaultyDisk()
    folder, log, commit_log = framed(disk)
    append_many(log, 1)
    sync_framed(log, commit_log)
    folder.recovery_points_job({("t", 0): RecoveryPoint(TOPIC, 1)})()
    disk.kill()
    if is_zeroed:
        content = disk.content(f"{PATH}/commit-log/0")
        content[:] = bytes(len(content))
    else:
        disk.remove(f"{PATH}/commit-log/0")
    folder = DataFolder.open(disk, PATH, 1, "cluster")
    assert folder.replayed is not None
    assert folder.replayed.damage == "it has no intact frame from 1 on"
    assert not folder.recovery_points


def test_a_kill_before_the_first_frame_is_no_damage() -> None:
    disk = FaultyDisk()
    framed(disk)
    disk.kill()
    assert DataFolder.open(disk, PATH, 1, "cluster").replayed is None


def test_a_first_frame_that_may_count_counts_no_longer_when_the_commit_log_is_retired() -> None:
    disk = FaultyDisk()
    _, log, commit_log = framed(disk)
    append_many(log, 1)
    # The new meta.json is in place, but the folder cannot be synced.
    disk.fail = lambda operation, path: EIO if (operation, path) == ("sync_dir", PATH) else None
    with pytest.raises(OSError, match="Input/output"):
        sync_framed(log, commit_log)
    assert commit_log.is_broken
    disk.fail = lambda operation, path: None
    commit_log.retire()
    disk.kill()
    assert DataFolder.open(disk, PATH, 1, "cluster").replayed is None


def test_a_damaged_generation_is_an_error_that_says_what_to_do() -> None:
    disk = FaultyDisk()
    _, log, commit_log = framed(disk)
    append_many(log, 1)
    sync_framed(log, commit_log)
    disk.kill()
    content = disk.content(f"{PATH}/meta.json")
    content[:] = bytes(content).replace(str(GENERATION).encode(), str(TOPIC).encode())
    with pytest.raises(DataFolderError, match="restore it"):
        DataFolder.open(disk, PATH, 1, "cluster")


def test_a_failed_flush_keeps_the_entries_and_stops_appends() -> None:
    disk = FaultyDisk()
    _, log, commit_log = framed(disk)
    append_many(log, 1)
    sync_framed(log, commit_log)
    job = log.flush_job()
    assert job is not None
    disk.fail = lambda operation, path: EIO if operation == "datasync" else None
    with pytest.raises(OSError, match="Input/output"):
        job.run()
    log.flush_failed(job)
    assert log.read_only_forever
    disk.fail = lambda operation, path: None
    with pytest.raises(OSError, match="an earlier sync failed"):
        log.flush_job()
    with pytest.raises(OSError, match="an earlier sync failed"):
        log.truncate_to(1)
    assert not log.close()
    with pytest.raises(OSError, match="an earlier sync failed"):
        log.flush_job()


def test_a_flush_beside_a_sync_of_the_segments_is_repeated() -> None:
    disk = FaultyDisk()
    _, log, commit_log = framed(disk)
    append_many(log, 1)
    sync_framed(log, commit_log)
    flush = log.flush_job()
    assert flush is not None
    append_many(log, 1)
    direct = log.sync_job()
    assert direct is not None
    flush.run()
    # The failure of a sync is reported once, and it may be this one.
    assert not log.flushed(flush)
    direct.run()
    log.synced(direct)
    assert log.flush_job() is None
    log.close()
    assert disk.open_files == 1 + 1, "the lock and the file of the commit log"


CHECKPOINTS = LogConfig(checkpoint_bytes=500)


def snapshots_of(disk: FaultyDisk, log: Log) -> list[int]:
    return [int(name.removesuffix(".snapshot")) for name in disk.listdir(log.folder) if name.endswith(".snapshot")]


def test_a_checkpoint_waits_for_the_flush_not_an_acknowledgment_for_the_checkpoint() -> None:
    disk = FaultyDisk()
    folder, log, commit_log = framed(disk, CHECKPOINTS)
    before = snapshots_of(disk, log)
    while log._syncs.bytes_since_checkpoint < 2 * CHECKPOINTS.checkpoint_bytes:
        append_many(log, 4)
        sync_framed(log, commit_log)
    assert snapshots_of(disk, log) == before
    end = log.log_end_offset
    flush = log.flush_job()
    assert flush is not None
    append_many(log, 1)
    sync_framed(log, commit_log)
    flush.run()
    assert log.flushed(flush)
    assert snapshots_of(disk, log) == [*before, end]
    assert read_synced_end(disk, log.folder) == end
    # Without a flush, it is written after some time, with a sync of the segment.
    while (job := log.sync_job()) is None or job.entry_bytes:
        if job is not None:
            job.framed(1)
            log.synced(job)
        append_many(log, 1)
    assert job.checkpoint is not None
    assert log._syncs.bytes_since_checkpoint == 0
    folder.close()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_truncated_log_has_no_checkpoint_of_what_it_lost(is_written: bool) -> None:
    disk = FaultyDisk()
    _, log, commit_log = framed(disk, CHECKPOINTS)
    while log._syncs.bytes_since_checkpoint < 2 * CHECKPOINTS.checkpoint_bytes:
        append_many(log, 4)
        sync_framed(log, commit_log)
    flush = log.flush_job()
    assert flush is not None
    if is_written:
        flush.run()
    log.truncate_to(3)
    if not is_written:
        flush.run()
    assert log.flushed(flush)
    assert all(offset <= 3 for offset in snapshots_of(disk, log))
    assert read_synced_end(disk, log.folder) <= 3
