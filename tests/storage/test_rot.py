"""A disk may corrupt data at any time, so reads verify checksums, except of what was just appended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.storage.helpers import NOW_MS, SMALL, append_many, headers

from chronik.storage import segments
from chronik.storage.disk import RealDisk
from chronik.storage.log import Log
from chronik.wire.batch import HEADER_BYTES
from chronik.wire.errors import ErrorCode, KafkaError

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


def test_batches_of_closed_segments_are_checked_at_every_read(folder: str) -> None:
    log = Log.open(RealDisk(), f"{folder}-new", SMALL, NOW_MS)
    append_many(log, BATCHES)
    _, offset, _ = read_on(log, 0)
    assert log.read(0, 10_000, BATCHES) is not None, "a second read at the same position needs no search"
    bad = flip(log.folder, segment=0, batch=0)
    assert bad == 0 and log.read(0, 10_000, BATCHES) is None
    assert read_on(log, 0)[2] == 0
    assert read_on(log, offset)[2] is None
    log.close()


def test_a_thread_checks_many_small_batches(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(folder)
    read_on(log, 0)
    assert log.read(0, 10_000, BATCHES) is not None
    monkeypatch.setattr(segments, "CHECKED_ON_LOOP_MAX", 2)
    assert log.read(0, 10_000, BATCHES) is None
    log.close()


def test_a_batch_with_a_wrong_offset_ends_the_read(folder: str) -> None:
    """The CRC does not cover the offset: only the next batch shows that it is wrong."""
    path = min(Path(folder).glob("*.log"))
    data = bytearray(path.read_bytes())
    at, header = headers(bytes(data))[2]
    data[at + 7] ^= 4
    path.write_bytes(data)
    log = opened(folder)
    assert read_on(log, 0)[1:] == (header.base_offset, None)
    assert read_on(log, header.base_offset)[2] == header.base_offset + 4
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


def test_a_read_does_not_continue_after_a_segment_that_was_cut_at_a_batch_border(folder: str) -> None:
    log = opened(folder)
    first, second = log._segments.all[:2]
    *_, (position, last) = headers(Path(first.path).read_bytes())
    os.truncate(first.path, position)
    offset = 0
    while offset < last.base_offset:
        _, offset, damaged_at = read_on(log, offset)
        assert damaged_at is None
    with pytest.raises(KafkaError, match="ends before offset") as error:
        read_on(log, last.base_offset)
    assert error.value.code == ErrorCode.corrupt_message
    assert read_on(log, second.base_offset)[2] is None
    log.close()


def test_what_was_just_appended_is_not_checked(folder: str) -> None:
    log = opened(folder)
    active = log._segments.all[-1]
    assert active.trusted_from == active.size_bytes
    append_many(log, BATCHES)
    *closed, active = log._segments.all
    assert all(segment.trusted_from == segment.size_bytes for segment in closed)
    assert active.trusted_from == 0 < active.size_bytes
    log.close()
