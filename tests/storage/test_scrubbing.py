"""Scrubbing: each kind of damage to a closed segment is found, and an intact segment is never reported."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from struct import pack_into, unpack_from

import pytest
from tests.storage.faulty_disk import FaultyDisk, FaultyFile
from tests.storage.helpers import FOLDER, NOW_MS, SMALL, append, append_many, batch, headers, offsets, reopen, sync
from tests.storage.test_compaction import CONFIG as COMPACTED
from tests.storage.test_compaction import compact, put

from chronik.storage import scrubbing
from chronik.storage.config import LogConfig
from chronik.storage.log import Log
from chronik.storage.scrubbing import SegmentScrub
from chronik.storage.segment import segment_path
from chronik.wire.batch import HEADER_BYTES

BATCHES = 100
SECOND = 1
"""The index of the damaged segment: neither the first nor the last."""


def filled(disk: FaultyDisk, config: LogConfig = SMALL) -> Log:
    log = reopen(disk, config)
    for epoch in range(4):
        for _ in range(BATCHES // 4):
            append(log, batch(), epoch=epoch)
    sync(log)
    assert log.segment_count > 4
    return log


def scrubbed(log: Log, segment: int) -> SegmentScrub:
    scrub = log.scrub(log.closed_segments()[segment])
    assert scrub is not None
    while not scrub.is_done:
        assert log.still_has(scrub)
        scrub.step()
    return scrub


def findings(log: Log) -> list[tuple[int, str, bool]]:
    """Return base offset, damage and index state of each segment that is not intact."""
    results = [scrubbed(log, segment) for segment in range(len(log.closed_segments()))]
    return [(each.segment.base_offset, each.damage, each.has_bad_index) for each in results if not is_whole(each)]


def is_whole(scrub: SegmentScrub) -> bool:
    return not scrub.damage and not scrub.has_bad_index


def path_of(log: Log, suffix: str = ".log", segment: int = SECOND) -> str:
    return segment_path(FOLDER, log.closed_segments()[segment], suffix)


def batches_of(disk: FaultyDisk, path: str) -> list[tuple[int, int]]:
    """Return the position and base offset of each batch."""
    return [(at, header.base_offset) for at, header in headers(bytes(disk.content(path)))]


# -- damage ------------------------------------------------------------------------------------------------------------


def flip_a_bit_of_a_record(disk: FaultyDisk, log: Log) -> int:
    at, offset = batches_of(disk, path_of(log))[3]
    disk.content(path_of(log))[at + HEADER_BYTES + 5] ^= 4
    return offset


def lie_about_an_offset(up: int) -> Callable[[FaultyDisk, Log], int]:
    def damage(disk: FaultyDisk, log: Log) -> int:
        at, offset = batches_of(disk, path_of(log))[3]
        pack_into(">q", disk.content(path_of(log)), at, offset + up)
        return offset

    return damage


def lie_about_the_last_offset(disk: FaultyDisk, log: Log) -> int:
    at, offset = batches_of(disk, path_of(log))[-1]
    pack_into(">q", disk.content(path_of(log)), at, offset + 1)
    return offset


def lie_about_a_leader_epoch(disk: FaultyDisk, log: Log) -> int:
    at, offset = batches_of(disk, path_of(log))[-1]
    disk.content(path_of(log))[at + 15] ^= 8
    return offset


def break_the_chain(disk: FaultyDisk, log: Log) -> int:
    at, offset = batches_of(disk, path_of(log))[3]
    disk.content(path_of(log))[at + 9] ^= 0x7F
    return offset


def cut_between_two_batches(disk: FaultyDisk, log: Log) -> int:
    at, _ = batches_of(disk, path_of(log))[5]
    del disk.content(path_of(log))[at:]
    return log.closed_segments()[SECOND]


def cut_in_the_middle_of_a_batch(disk: FaultyDisk, log: Log) -> int:
    at, _ = batches_of(disk, path_of(log))[5]
    del disk.content(path_of(log))[at + 20 :]
    return log.closed_segments()[SECOND]


def zero_the_last_batches(disk: FaultyDisk, log: Log) -> int:
    content = disk.content(path_of(log))
    at, offset = batches_of(disk, path_of(log))[5]
    content[at:] = bytes(len(content) - at)
    return offset


def delete_the_segment(disk: FaultyDisk, log: Log) -> int:
    disk.remove(path_of(log))
    return log.closed_segments()[SECOND]


def write_behind_the_end(disk: FaultyDisk, log: Log) -> int:
    disk.content(path_of(log)).extend(b"what is this")
    return log.closed_segments()[SECOND + 1]


DAMAGES = [
    flip_a_bit_of_a_record,
    lie_about_an_offset(-1),
    lie_about_an_offset(1),
    lie_about_an_offset(1000),
    lie_about_the_last_offset,
    lie_about_a_leader_epoch,
    break_the_chain,
    cut_between_two_batches,
    cut_in_the_middle_of_a_batch,
    zero_the_last_batches,
    delete_the_segment,
    write_behind_the_end,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_scrubbing_finds_damage_at_its_offset_and_nowhere_else(damage: Callable[[FaultyDisk, Log], int]) -> None:
    disk = FaultyDisk()
    log = filled(disk)
    assert findings(log) == []
    offset = damage(disk, log)
    assert [base for base, _, _ in findings(log)] == [log.closed_segments()[SECOND]]
    scrub = scrubbed(log, SECOND)
    # A batch that claims the next batch's offset is detected only at that next batch.
    assert scrub.damage and offset <= scrub.offset <= offset + 2
    assert disk.open_files == len([segment for segment in log._segments.all if segment.is_open])


@pytest.mark.parametrize(
    "damage", [each for each in DAMAGES if each not in (cut_between_two_batches, zero_the_last_batches)]
)
def test_scrubbing_finds_damage_in_a_compacted_log(damage: Callable[[FaultyDisk, Log], int]) -> None:
    disk = FaultyDisk()
    log = filled(disk, replace(SMALL, cleanup_compact=True))
    damage(disk, log)
    assert scrubbed(log, SECOND).damage


def test_scrubbing_detects_a_segment_of_a_compacted_log_cut_while_open() -> None:
    disk = FaultyDisk()
    log = filled(disk, replace(SMALL, cleanup_compact=True))
    cut_between_two_batches(disk, log)
    assert "bytes" in scrubbed(log, SECOND).damage


def test_recovery_detects_a_segment_that_was_cut_between_two_batches() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    second = log.closed_segments()[SECOND]
    log.close()
    del disk.content(segment_path(FOLDER, second))[batches_of(disk, segment_path(FOLDER, second))[5][0] :]
    log = reopen(disk)
    # Recovery detects the gap between the segments and ends the log there.
    assert log.recovery is not None and log.recovery.is_damaged and log.is_broken
    assert log.log_end_offset < BATCHES


def test_scrubbing_reports_io_errors_as_damage_and_raises_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk()
    log = filled(disk)

    def failing(code: int) -> Callable[[FaultyFile, int, int], bytes]:
        def pread_once(file: FaultyFile, at: int, size: int) -> bytes:
            raise OSError(code, "no")

        return pread_once

    monkeypatch.setattr(FaultyFile, "pread_once", failing(errno.EMFILE))
    with pytest.raises(OSError, match="no"):
        scrubbed(log, SECOND)
    monkeypatch.setattr(FaultyFile, "pread_once", failing(errno.EIO))
    assert "cannot read" in scrubbed(log, SECOND).damage


# -- indexes -----------------------------------------------------------------------------------------------------------


def lie_about_a_position(disk: FaultyDisk, log: Log) -> None:
    content = disk.content(path_of(log, ".index"))
    (position,) = unpack_from(">i", content, 12)
    pack_into(">i", content, 12, position + 1)


def lie_about_an_indexed_offset(disk: FaultyDisk, log: Log) -> None:
    disk.content(path_of(log, ".index"))[11] ^= 1


def lie_about_a_time(disk: FaultyDisk, log: Log) -> None:
    disk.content(path_of(log, ".timeindex"))[7] ^= 1


def point_behind_the_end(disk: FaultyDisk, log: Log) -> None:
    disk.content(path_of(log, ".index")).extend(b"\x00\x0f\xff\xff\x00\x0f\xff\xff")


def cut_off_an_entry(disk: FaultyDisk, log: Log) -> None:
    del disk.content(path_of(log, ".timeindex"))[-3:]


def delete_an_index(disk: FaultyDisk, log: Log) -> None:
    disk.remove(path_of(log, ".index"))


@pytest.mark.parametrize(
    "damage",
    [
        lie_about_a_position,
        lie_about_an_indexed_offset,
        lie_about_a_time,
        point_behind_the_end,
        cut_off_an_entry,
        delete_an_index,
    ],
)
def test_scrubbing_finds_a_wrong_index_and_rebuilding_restores_it(damage: Callable[[FaultyDisk, Log], None]) -> None:
    disk = FaultyDisk()
    log = filled(disk)
    before = [bytes(disk.content(path_of(log, suffix))) for suffix in (".index", ".timeindex")]
    damage(disk, log)
    scrub = scrubbed(log, SECOND)
    assert not scrub.damage and scrub.has_bad_index
    log.indexes_rebuilt(scrub, log.rebuild_indexes_job(scrub)())
    assert findings(log) == []
    assert [bytes(disk.content(path_of(log, suffix))) for suffix in (".index", ".timeindex")] == before
    assert offsets(log) == list(range(BATCHES))


# -- intact segments ---------------------------------------------------------------------------------------------------


def test_scrubbing_accepts_offset_gaps_of_a_compacted_log() -> None:
    disk = FaultyDisk()
    log = reopen(disk, COMPACTED)
    for i in range(200):
        put(log, b"k%d" % (i % 7 if i < 100 else i), b"%d" % i)
    log.roll(NOW_MS)
    assert compact(log)
    append_many(log, 30)
    assert len(log.closed_segments()) > 1 and findings(log) == []
    log.configure(SMALL)
    assert findings(log) == []
    log.close()
    assert findings(reopen(disk)) == []


def test_scrubbing_finds_no_damage_on_a_follower_of_a_compacted_leader() -> None:
    leader = reopen(FaultyDisk(), COMPACTED)
    for i in range(200):
        put(leader, b"k%d" % (i % 7 if i < 100 else i), b"%d" % i)
    leader.roll(NOW_MS)
    assert compact(leader)
    follower = reopen(FaultyDisk())
    offset = 0
    while offset < leader.log_end_offset:
        data = bytes(leader.read_job(offset, 300, leader.log_end_offset)())
        follower.append_as_follower(data, headers(data), NOW_MS)
        offset = follower.log_end_offset
    assert len(follower.closed_segments()) > 1 and findings(follower) == []


def test_scrubbing_finds_no_damage_in_a_truncated_log_with_new_records() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    log.truncate_to(47)
    for _ in range(50):
        append(log, batch(), epoch=7)
    assert findings(log) == []
    disk.kill()
    log = reopen(disk, recovery_point=40)
    for _ in range(50):
        append(log, batch(), epoch=7)
    assert findings(log) == []


def test_scrubbing_accepts_a_segment_that_kept_its_preallocated_space() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 5)
    disk.fail = lambda operation, path: errno.EIO if operation == "truncate" and path.endswith("0.log") else None
    log.roll(NOW_MS)
    disk.fail = lambda operation, path: None
    append_many(log, 5)
    assert disk.size(path_of(log, segment=0)) > log._segments.all[0].size_bytes
    assert findings(log) == []


def test_a_scrub_of_a_removed_or_reopened_segment_is_discarded() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    first, second = (log.scrub(base) for base in log.closed_segments()[:2])
    assert first is not None and second is not None
    log.increment_log_start(second.segment.base_offset).run()
    assert not log.still_has(first) and log.still_has(second)
    assert log.scrub(first.segment.base_offset) is None
    log.truncate_to(second.segment.base_offset + 1)
    assert not log.still_has(second), "it is the active one now"
    assert log.scrub(second.segment.base_offset) is None


# -- reads -------------------------------------------------------------------------------------------------------------


def test_scrubbing_reads_a_large_segment_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubbing, "PIECE_BYTES", 300)
    disk = FaultyDisk()
    log = filled(disk)
    scrub = log.scrub(log.closed_segments()[SECOND])
    assert scrub is not None
    positions = [0]
    while not scrub.is_done:
        scrub.step()
        positions.append(scrub.position)
    assert len(positions) > 5 and positions == sorted(positions)
    assert positions[-1] == scrub.segment.size_bytes and is_whole(scrub)
