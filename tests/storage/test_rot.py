"""Data on disk may have been corrupted before the log was opened, so its checksums are verified on the first read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.storage.helpers import NOW_MS, SMALL, append_many, headers

from chronik.storage.disk import RealDisk
from chronik.storage.log import Log
from chronik.wire.batch import HEADER_BYTES

BATCHES = 100


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A log of several segments, closed cleanly."""
    log = Log.open(RealDisk(), str(tmp_path / "t-0"), SMALL, NOW_MS)
    append_many(log, BATCHES)
    assert log.segment_count > 3
    log.close()
    return str(tmp_path / "t-0")


def opened(folder: str) -> Log:
    return Log.open(RealDisk(), folder, SMALL, NOW_MS, recovery_point=BATCHES, clean=True)


def flip(folder: str, segment: int, batch: int) -> int:
    """Flip a bit of a record and return the offset of its batch."""
    path = sorted(Path(folder).glob("*.log"))[segment]
    data = bytearray(path.read_bytes())
    at, header = headers(bytes(data))[batch]
    data[at + HEADER_BYTES + 5] ^= 4
    path.write_bytes(data)
    return header.base_offset


def read_on(log: Log, offset: int) -> tuple[bytes, int, int | None]:
    """Read as a thread does; return the bytes, the next offset, and the offset of the damage, if any."""
    job = log.read_job(offset, 10_000, BATCHES)
    data = bytes(job())
    assert job.result is not None
    return data, job.result.next_offset, job.damaged_at


def test_batches_on_disk_are_read_in_a_thread_once_and_then_from_memory(folder: str) -> None:
    log = opened(folder)
    offset = 0
    while offset < BATCHES:
        assert log.read(offset, 10_000, BATCHES) is None
        _, offset, damaged_at = read_on(log, offset)
        assert damaged_at is None
    offset = 0
    while offset < BATCHES:
        read_on(log, offset)  # finds the position, so that the next read needs no lookup
        found = log.read(offset, 10_000, BATCHES)
        assert found is not None
        offset = found.next_offset
    log.close()


def test_a_read_ends_before_a_corrupt_batch_and_reports_it_if_it_is_first(folder: str) -> None:
    bad = flip(folder, segment=1, batch=3)
    log = opened(folder)
    offset, damaged_at = 0, None
    while damaged_at is None:
        before = offset
        data, offset, damaged_at = read_on(log, offset)
        if damaged_at is None:
            assert [header.base_offset for _, header in headers(data)] == list(range(before, offset))
    assert (before, damaged_at, offset) == (bad, bad, bad + 1)
    # Repeated reads do not return the damaged batch from memory either.
    assert log.read(bad, 10_000, BATCHES) is None
    assert read_on(log, bad)[2] == bad
    assert read_on(log, bad + 1)[2] is None
    log.close()


def test_a_read_from_the_middle_of_a_segment_leaves_earlier_batches_unchecked(folder: str) -> None:
    bad = flip(folder, segment=1, batch=1)
    log = opened(folder)
    assert read_on(log, bad + 2)[2] is None
    assert read_on(log, bad)[2] == bad
    log.close()


def test_batches_that_this_process_wrote_are_not_checked_again(folder: str) -> None:
    log = opened(folder)
    append_many(log, BATCHES)
    segments = log._segments.all
    assert segments[-1].is_checked(0, segments[-1].size_bytes)
    own = [segment for segment in segments if segment.base_offset >= BATCHES]
    assert own and all(segment.is_checked(0, segment.size_bytes) for segment in own)
    shared = next(segment for segment in reversed(segments) if segment.base_offset < BATCHES)
    assert not shared.is_checked(0, 1) and shared.is_checked(shared.unchecked_to, shared.size_bytes)
    log.close()
