"""Lookup by timestamp: exact to the record, for any order of timestamps."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import NOW_MS, SMALL, append, batch, reopen

from chronik.storage.log import Log

CONFIG = replace(SMALL, segment_bytes=1200, index_interval_bytes=150)


def put(log: Log, *timestamps: int, codec: int = 0) -> None:
    for timestamp_ms in timestamps:
        append(log, batch(timestamp_ms=timestamp_ms, codec=codec))


def test_a_lookup_finds_the_first_record_at_or_after_a_time_inside_its_batch() -> None:
    log = reopen(FaultyDisk())
    append(log, batch(10, timestamp_ms=NOW_MS, codec=3))
    found = log.offset_for_timestamp_job(NOW_MS + 7)()
    assert found is not None
    assert (found.offset, found.timestamp_ms) == (7, NOW_MS + 7)
    assert log.offset_for_timestamp_job(NOW_MS + 10)() is None


def test_max_timestamp_returns_the_first_record_that_has_it() -> None:
    log = reopen(FaultyDisk())
    put(log, 5, 9, 9, 3)
    found = log.max_timestamp_job()()
    assert found is not None
    assert (found.offset, found.timestamp_ms) == (1, 9)


def test_an_empty_log_has_no_timestamps() -> None:
    log = reopen(FaultyDisk())
    assert log.max_timestamp_job()() is None
    assert log.offset_for_timestamp_job(0)() is None


def test_log_append_time_applies_to_all_records_of_a_batch() -> None:
    log = reopen(FaultyDisk(), replace(SMALL, log_append_time=True))
    append(log, batch(3, timestamp_ms=5), now_ms=NOW_MS)
    found = log.offset_for_timestamp_job(NOW_MS)()
    assert found is not None
    assert (found.offset, found.timestamp_ms) == (0, NOW_MS)
    largest = log.max_timestamp_job()()
    assert largest is not None
    assert largest.offset == 0


def test_a_lookup_skips_removed_records_and_records_not_yet_visible() -> None:
    log = reopen(FaultyDisk())
    put(log, 1, 2, 3, 4)
    log.increment_log_start(2)
    found = log.offset_for_timestamp_job(1)()
    assert found is not None
    assert found.offset == 2
    assert log.offset_for_timestamp_job(4, upto_offset=3)() is None


@settings(max_examples=60)
@given(
    timestamps=st.lists(st.integers(0, 50), min_size=1, max_size=90),
    wanted=st.integers(0, 51),
    start=st.integers(0, 89),
    reopens=st.sampled_from(["never", "cleanly", "killed"]),
)
def test_lookups_agree_with_a_scan_of_all_records(timestamps: list[int], wanted: int, start: int, reopens: str) -> None:
    disk = FaultyDisk()
    log = reopen(disk, CONFIG)
    put(log, *timestamps)
    start = min(start, len(timestamps))
    log.increment_log_start(start).run()
    if reopens == "cleanly":
        log.close()
    if reopens != "never":
        disk.kill()
        log = reopen(disk, CONFIG)
    left = list(enumerate(timestamps))[start:]
    expected = next(((offset, at) for offset, at in left if at >= wanted), None)
    assert log.offset_for_timestamp_job(wanted)() == expected
    largest = max((at for _, at in left), default=None)
    assert log.max_timestamp_job()() == next(((offset, at) for offset, at in left if at == largest), None)
