"""The state of a log after an unclean shutdown or damage to its files."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import (
    FOLDER,
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

from chronik.storage.disk import RealDisk
from chronik.storage.log import Log
from chronik.storage.syncing import SYNCED_END_NAME
from chronik.wire.errors import KafkaError

ONE_SEGMENT = replace(SMALL, segment_bytes=1 << 20, checkpoint_bytes=1 << 20)
FIRST = f"{FOLDER}/{0:020d}.log"


def filled(disk: FaultyDisk, count: int = 10) -> Log:
    """Write `count` batches of one record to one segment, then kill the process."""
    log = reopen(disk, ONE_SEGMENT)
    append_many(log, count)
    sync(log)
    disk.kill()
    return log


def test_a_clean_shutdown_leaves_nothing_to_scan() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 50)
    assert log.close()
    log = reopen(disk)
    assert log.recovery is None
    assert log.synced_end_offset == log.log_end_offset == 50
    assert offsets(log) == list(range(50))


def test_a_clean_shutdown_releases_preallocated_space() -> None:
    disk = FaultyDisk()
    log = reopen(disk, ONE_SEGMENT)
    append_many(log, 3)
    assert disk.size(FIRST) > log.size_bytes
    log.close()
    assert disk.size(FIRST) == log.size_bytes


def test_recovery_finds_the_log_end_before_preallocated_zeros() -> None:
    disk = FaultyDisk()
    filled(disk)
    log = reopen(disk, ONE_SEGMENT)
    assert log.log_end_offset == 10
    assert log.recovery is not None
    assert (log.recovery.scanned_batches, log.recovery.truncated_bytes) == (10, 0)
    assert append(log, batch()).base_offset == 10
    assert offsets(log) == list(range(11))


@pytest.mark.parametrize("kept_bytes", [1, 11, 12, 60, 61, 90])
def test_recovery_truncates_a_torn_tail(kept_bytes: int) -> None:
    disk = FaultyDisk()
    log = filled(disk)
    torn = batch()[:kept_bytes]
    disk.content(FIRST)[log.size_bytes : log.size_bytes + len(torn)] = b"\x01" + torn[1:]
    log = reopen(disk, ONE_SEGMENT)
    assert log.log_end_offset == 10
    assert log.recovery is not None
    assert log.recovery.truncated_at_offset == 10
    assert 0 < log.recovery.truncated_bytes <= kept_bytes
    assert not log.recovery.is_damaged
    append(log, batch())
    assert offsets(log) == list(range(11))


@pytest.mark.parametrize("at", [0, 8, 11, 16, 17, 22, 26, 60, 70])
def test_recovery_truncates_at_a_flipped_bit_above_the_recovery_point(at: int) -> None:
    disk = FaultyDisk()
    log = filled(disk)
    batch_bytes = log.size_bytes // 10
    disk.content(FIRST)[7 * batch_bytes + at] ^= 0x40
    disk.remove(f"{FOLDER}/{SYNCED_END_NAME}")
    log = reopen(disk, ONE_SEGMENT, recovery_point=7)
    assert log.log_end_offset == 7
    assert log.recovery is not None
    assert log.recovery.truncated_at_offset == 7
    assert log.recovery.truncated_bytes > 2 * batch_bytes
    assert offsets(log) == list(range(7))
    assert append(log, batch()).base_offset == 7


@pytest.mark.parametrize("at", [0, 8, 11, 16, 17, 22, 26, 60, 70])
def test_recovery_reports_a_flipped_bit_below_the_synced_end_as_damage(at: int) -> None:
    """The recovery point is a few seconds old; the synced end proves that the batch was durable."""
    disk = FaultyDisk()
    log = filled(disk)
    batch_bytes = log.size_bytes // 10
    disk.content(FIRST)[9 * batch_bytes + at] ^= 0x40
    log = reopen(disk, ONE_SEGMENT, recovery_point=0)
    assert log.recovery is not None
    assert log.recovery.is_damaged
    assert log.recovery.recovery_point == 10


def test_recovery_reports_a_log_that_ends_below_its_synced_end() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    del disk.content(FIRST)[9 * (log.size_bytes // 10) :]
    log = reopen(disk, ONE_SEGMENT, recovery_point=0)
    assert log.recovery is not None
    assert (log.log_end_offset, log.recovery.ends_below_recovery_point) == (9, True)


def test_recovery_reports_no_damage_after_a_deliberate_truncation() -> None:
    disk = FaultyDisk()
    filled(disk)
    log = reopen(disk, ONE_SEGMENT)
    log.truncate_to(6)
    log.close()
    log = reopen(disk, ONE_SEGMENT, recovery_point=0)
    assert log.recovery is None or not log.recovery.is_damaged
    assert log.log_end_offset == 6


def test_recovery_keeps_and_reports_a_corrupt_batch_below_the_recovery_point() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    batch_bytes = log.size_bytes // 10
    disk.content(FIRST)[5 * batch_bytes + 80] ^= 0x01
    log = reopen(disk, ONE_SEGMENT, recovery_point=10)
    assert log.recovery is not None
    assert log.recovery.is_damaged
    assert [(damage.offset, damage.chain_is_broken) for damage in log.recovery.damages] == [(5, False)]
    assert log.log_end_offset == 10
    assert not log.read_only
    assert log.read(4, 10, 10) is None
    assert len(log.read_job(6, 1 << 20, 10)()) == 4 * batch_bytes


def test_a_broken_chain_below_the_recovery_point_keeps_files_and_refuses_appends() -> None:
    disk = FaultyDisk()
    log = filled(disk)
    batch_bytes = log.size_bytes // 10
    disk.content(FIRST)[5 * batch_bytes + 9] ^= 0x7F
    before = bytes(disk.content(FIRST))
    log = reopen(disk, ONE_SEGMENT, recovery_point=10)
    assert log.recovery is not None
    assert [(damage.offset, damage.chain_is_broken) for damage in log.recovery.damages] == [(5, True)]
    assert log.read_only_forever
    with pytest.raises(KafkaError, match="damaged"):
        append(log, batch())
    assert offsets(log) == list(range(5))
    assert not log.close()
    assert bytes(disk.content(FIRST)) == before


def test_recovery_reports_a_log_that_ends_below_its_recovery_point() -> None:
    disk = FaultyDisk()
    filled(disk)
    log = reopen(disk, ONE_SEGMENT, recovery_point=12)
    assert log.recovery is not None
    assert log.recovery.ends_below_recovery_point
    assert log.recovery.is_damaged
    assert log.log_end_offset == 10


def test_recovery_removes_segments_after_a_corrupt_batch() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(SMALL, checkpoint_bytes=1 << 30))
    append_many(log, 80)
    assert log.segment_count == 4
    disk.kill()
    disk.content(FIRST)[500] ^= 1
    log = reopen(disk)
    assert log.recovery is not None
    assert log.recovery.removed_segments == 3
    assert log.segment_count == 1
    assert offsets(log) == list(range(log.log_end_offset))
    assert log.log_end_offset < 10


def test_recovery_starts_at_the_last_snapshot() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(ONE_SEGMENT, checkpoint_bytes=3000))
    append_many(log, 100)
    sync(log)
    append_many(log, 5)
    disk.kill()
    log = reopen(disk)
    assert log.recovery is not None
    assert (log.recovery.snapshot_offset, log.recovery.scanned_batches) == (100, 5)
    assert offsets(log) == list(range(105))


def test_recovery_skips_a_damaged_snapshot() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(ONE_SEGMENT, checkpoint_bytes=100))
    for _ in range(3):
        append_many(log, 10)
        sync(log)
    disk.kill()
    disk.content(f"{FOLDER}/{30:020d}.snapshot")[20] ^= 1
    log = reopen(disk)
    assert log.recovery is not None
    assert log.recovery.snapshot_offset == 20
    assert offsets(log) == list(range(30))


def test_at_most_two_snapshots_are_kept() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    for _ in range(10):
        append_many(log, 20)
        sync(log)
    log.close()
    assert len([name for name in disk.listdir(FOLDER) if name.endswith(".snapshot")]) <= 2


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize("harm", ["missing", "short", "zeros", "garbage"])
def test_a_damaged_index_is_rebuilt_or_ignored(suffix: str, harm: str) -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    for i in range(120):
        append(log, batch(timestamp_ms=NOW_MS + i))
    log.close()
    path = f"{FOLDER}/{0:020d}{suffix}"
    good = bytes(disk.content(path))
    assert good
    if harm == "missing":
        disk.remove(path)
    elif harm == "short":
        del disk.content(path)[5:]
    elif harm == "zeros":
        disk.content(path)[:] = bytes(len(good))
    else:
        disk.content(path)[:] = bytes(i * 37 % 256 for i in range(len(good)))
    log = reopen(disk)
    for offset in range(120):
        data = log.read_job(offset, 1, 120)()
        assert int.from_bytes(data[:8], "big") == offset
        found = log.offset_for_timestamp_job(NOW_MS + offset)()
        assert found is not None
        assert found.offset == offset
    if harm in ("missing", "short"):
        assert log.recovery is not None
        assert log.recovery.rebuilt_indexes == 1
        assert bytes(disk.content(path)) == good


def test_producers_and_epochs_survive_a_crash_without_a_snapshot() -> None:
    disk = FaultyDisk()
    log = reopen(disk, ONE_SEGMENT)
    append(log, batch(2, producer_id=7, producer_epoch=1, base_sequence=0), epoch=3)
    append(log, batch(2, producer_id=7, producer_epoch=1, base_sequence=2), epoch=5)
    disk.kill()
    log = reopen(disk, ONE_SEGMENT)
    state = log.producers.get(7)
    assert state is not None
    assert [sent.last_sequence for sent in state.batches] == [1, 3]
    assert log.epochs.entries() == [(3, 0), (5, 2)]


def test_the_log_start_survives_the_loss_of_the_tail_after_it() -> None:
    disk = FaultyDisk()
    log = reopen(disk, ONE_SEGMENT)
    append_many(log, 10)
    log.increment_log_start(8).run()
    disk.kill()
    del disk.content(FIRST)[300:]
    log = reopen(disk, ONE_SEGMENT)
    assert (log.log_start_offset, log.log_end_offset) == (8, 8)
    append(log, batch())
    log.close()
    assert offsets(reopen(disk, ONE_SEGMENT)) == [8]


def test_a_log_recovers_on_a_real_disk(tmp_path: object) -> None:
    disk = RealDisk()
    folder = f"{tmp_path}/topic-0"
    log = Log.open(disk, folder, SMALL, NOW_MS)
    append_many(log, 100)
    sync(log)
    append_many(log, 5)
    log = Log.open(disk, folder, SMALL, NOW_MS)
    assert [record.offset for record in read_all(log)] == list(range(105))
    assert log.close()
    log = Log.open(disk, folder, SMALL, NOW_MS, clean=True)
    assert log.recovery is None
    assert len(read_all(log)) == 105
    log.close()


# -- found by fuzzing (chronik.testing.fuzz.log_files) -----------------------------------------------------------------


def of_segments(disk: FaultyDisk, count: int = 60) -> list[str]:
    """Write several segments, the last ones with a snapshot, then kill the process; return the segments' names."""
    log = reopen(disk)
    for _ in range(count):
        append(log, batch(value_bytes=60))
        sync(log)
    disk.kill()
    names = [f"{FOLDER}/{name}" for name in disk.listdir(FOLDER) if name.endswith(".log")]
    assert len(names) > 3
    return names


def contents(disk: FaultyDisk, path: str) -> bytes:
    return bytes(disk.content(path))


def overwrite(disk: FaultyDisk, path: str, data: bytes) -> None:
    disk.content(path)[:] = data


@pytest.mark.parametrize("how", ["removed", "empty"])
def test_recovery_reports_a_missing_closed_segment_and_ends_the_log_before_it(how: str) -> None:
    disk = FaultyDisk()
    second = of_segments(disk)[1]
    if how == "removed":
        disk.remove(second)
    else:
        overwrite(disk, second, b"")
    log = reopen(disk, recovery_point=60)
    assert log.recovery is not None and log.recovery.is_damaged
    assert offsets(log) == list(range(int(second[-24:-4])))
    with pytest.raises(KafkaError):
        append(log, batch())


def test_recovery_keeps_swapped_segments_below_the_recovery_point() -> None:
    disk = FaultyDisk()
    names = of_segments(disk)
    first, second = contents(disk, names[-2]), contents(disk, names[-1])
    overwrite(disk, names[-2], second)
    overwrite(disk, names[-1], first)
    log = reopen(disk, recovery_point=60)
    assert log.recovery is not None and log.recovery.is_damaged
    assert (contents(disk, names[-2]), contents(disk, names[-1])) == (second, first)


def test_a_flipped_bit_in_an_offset_below_the_recovery_point_deletes_no_record() -> None:
    """The CRC does not cover a batch's offset: the log seems to skip past the recovery point there."""
    disk = FaultyDisk()
    filled(disk)
    before = contents(disk, FIRST)
    size_bytes = len(batch())
    spoilt = bytearray(before)
    spoilt[5 * size_bytes + 6] ^= 1
    overwrite(disk, FIRST, bytes(spoilt))
    log = reopen(disk, ONE_SEGMENT, recovery_point=10)
    assert log.recovery is not None and log.recovery.is_damaged
    assert offsets(log) == list(range(5))
    assert contents(disk, FIRST) == bytes(spoilt)


@pytest.mark.parametrize("at", [6, 25], ids=["offset", "last offset delta"])
def test_a_read_of_a_batch_with_a_damaged_header_fails(at: int) -> None:
    disk = FaultyDisk()
    names = of_segments(disk)
    spoilt = bytearray(contents(disk, names[0]))
    spoilt[at] ^= 0x40
    overwrite(disk, names[0], bytes(spoilt))
    log = reopen(disk, recovery_point=60)
    with pytest.raises(KafkaError, match="is damaged at its byte 0"):
        log.read_job(0, 1 << 20, log.log_end_offset)()


def test_a_read_of_a_zeroed_page_in_a_closed_segment_fails() -> None:
    disk = FaultyDisk()
    names = of_segments(disk)
    spoilt = bytearray(contents(disk, names[0]))
    spoilt[:512] = bytes(512)
    overwrite(disk, names[0], bytes(spoilt))
    log = reopen(disk, recovery_point=60)
    with pytest.raises(KafkaError, match="is damaged at its byte 0"):
        log.read_job(0, 1 << 20, log.log_end_offset)()


def test_an_index_entry_with_a_negative_position_is_ignored(tmp_path: Path) -> None:
    log = Log.open(RealDisk(), str(tmp_path), SMALL, NOW_MS)
    append_many(log, 60)
    log.close()
    first = tmp_path / f"{0:020d}.index"
    first.write_bytes(first.read_bytes()[:-4] + b"\xff\xff\xff\xff")
    log = Log.open(RealDisk(), str(tmp_path), SMALL, NOW_MS, 60, clean=True)
    last = int(sorted(tmp_path.glob("*.log"))[1].stem) - 1
    assert headers(bytes(log.read_job(last, 1 << 20, 60)()))[0][1].base_offset == last
    log.close()


@pytest.mark.parametrize("flipped", range(8))
def test_a_flipped_bit_in_the_log_start_file_neither_hides_nor_deletes_records(flipped: int) -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 60)
    sync(log)
    log.increment_log_start(10).run()
    log.close()
    path = f"{FOLDER}/log-start-offset"
    for at in range(len(contents(disk, path))):
        spoilt = bytearray(contents(disk, path))
        spoilt[at] ^= 1 << flipped
        copy = deepcopy(disk)
        overwrite(copy, path, bytes(spoilt))
        log = reopen(copy, recovery_point=60)
        assert log.log_start_offset <= 10
        assert set(range(10, 60)) <= set(offsets(log))
        log.close()
