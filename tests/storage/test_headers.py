"""Headers of a range of batches equal those of the batches read whole, across segments, limits and gaps."""

from __future__ import annotations

import pytest
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import SMALL, append, append_many, batch, headers, read, reopen

from chronik.storage.log import Log
from chronik.wire.batch import BatchHeader
from chronik.wire.errors import ErrorCode, KafkaError

ALL = 1 << 62


def log_of_many_segments() -> Log:
    log = reopen(FaultyDisk(), SMALL)
    for number in range(60):
        append(log, batch(1 + number % 4))
    assert len(log._segments.all) > 4
    return log


def pages(log: Log, offset: int, to_offset: int, limit: int) -> list[BatchHeader]:
    """Return all pages of a range, concatenated."""
    found: list[BatchHeader] = []
    at: int | None = offset
    while at is not None:
        part, following = log.headers_job(at, to_offset, ALL, limit)()
        assert len(part) <= limit
        assert following is None or following > at
        found += part
        at = following
    return found


def read_headers(log: Log) -> list[BatchHeader]:
    """Return every header, by reading whole batches."""
    found: list[BatchHeader] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        found += [header for _, header in headers(read(log, offset))]
        offset = found[-1].next_offset
    return found


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_pages_list_every_batch_once(limit: int) -> None:
    log = log_of_many_segments()
    assert pages(log, 0, ALL, limit) == read_headers(log)


def test_a_range_lists_every_batch_that_overlaps_it() -> None:
    log = log_of_many_segments()
    expected = [header for header in read_headers(log) if header.last_offset >= 30 and header.base_offset < 71]
    assert expected[0].base_offset <= 30
    assert pages(log, 30, 71, 5) == expected


def test_no_batch_above_the_visible_end_is_listed() -> None:
    log = reopen(FaultyDisk(), SMALL)
    append_many(log, 3, records=2)
    found, following = log.headers_job(0, ALL, 4, 100)()
    assert [header.last_offset for header in found] == [1, 3]
    assert following is None


def test_an_offset_out_of_range_is_refused_and_an_empty_log_has_no_batches() -> None:
    log = reopen(FaultyDisk(), SMALL)
    assert log.headers_job(0, ALL, ALL, 10)() == ([], None)
    with pytest.raises(KafkaError) as refusal:
        log.headers_job(1, ALL, ALL, 10)
    assert refusal.value.code is ErrorCode.offset_out_of_range


def test_a_finished_listing_releases_its_files() -> None:
    log = log_of_many_segments()
    job = log.headers_job(0, ALL, ALL, 10)
    job()
    segment = log._segments.all[0]
    shared = segment.shared
    log.close()
    assert not segment.is_open
    assert shared is not segment._shared
