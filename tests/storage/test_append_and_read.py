"""Appends and reads without faults."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    read,
    read_all,
    reopen,
    sync,
)

from chronik.storage.config import LogConfig
from chronik.storage.disk import RealDisk
from chronik.storage.log import Log
from chronik.storage.segments import OPEN_CLOSED_SEGMENTS_MAX
from chronik.storage.tail import BATCHES_MAX, Tail
from chronik.wire.batch import check_batches, encode_batch
from chronik.wire.errors import ErrorCode, KafkaError

ONE_SEGMENT = replace(SMALL, segment_bytes=1 << 24)


def test_append_stamps_offsets_and_epoch_into_the_callers_buffer() -> None:
    log = reopen(FaultyDisk())
    append_many(log, 2, records=3)
    buffer = memoryview(bytearray(batch(2) + batch(1)))
    result = log.append(buffer, check_batches(buffer, 1 << 20), 7, NOW_MS)
    assert (result.base_offset, result.last_offset, result.log_append_time_ms) == (6, 8, -1)
    assert [(h.base_offset, h.partition_leader_epoch) for _, h in headers(bytes(buffer))] == [(6, 7), (8, 7)]


def test_append_copies_a_read_only_buffer() -> None:
    log = reopen(FaultyDisk())
    append(log, batch())
    records = batch()
    log.append(records, headers(records), 0, NOW_MS)
    assert offsets(log) == [0, 1]
    assert headers(records)[0][1].base_offset == 0


def test_a_read_returns_the_sent_bytes_except_offset_and_epoch() -> None:
    log = reopen(FaultyDisk())
    records = batch(5, codec=4)
    append(log, records)
    assert read(log, 0)[16:] == records[16:]


def test_a_batch_stamped_with_log_append_time_has_a_valid_crc() -> None:
    log = reopen(FaultyDisk(), replace(SMALL, log_append_time=True))
    result = append(log, batch(2, timestamp_ms=5), now_ms=NOW_MS)
    assert result.log_append_time_ms == NOW_MS
    assert [record.timestamp_ms for record in read_all(log)] == [NOW_MS, NOW_MS]


def test_a_follower_keeps_the_offsets_epochs_and_gaps_of_its_leader() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    sent = b"".join(
        encode_batch([(b"k", b"v", [], NOW_MS)], base_offset=offset, leader_epoch=epoch)
        for offset, epoch in ((0, 1), (4, 1), (9, 3))
    )
    log.append_as_follower(sent, headers(sent), NOW_MS)
    assert log.log_end_offset == 10
    assert read(log, 0) == sent
    assert log.epochs.entries() == [(1, 0), (3, 9)]
    with pytest.raises(KafkaError, match="continue"):
        log.append_as_follower(sent, headers(sent), NOW_MS)
    disk.kill()
    assert read(reopen(disk), 0) == sent


def test_the_log_rolls_by_size_and_a_batch_stays_in_one_segment() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    for _ in range(50):
        append(log, batch(3, value_bytes=100))
    sizes = [disk.size(f"{FOLDER}/{name}") for name in disk.listdir(FOLDER) if name.endswith(".log")]
    assert len(sizes) > 5
    assert all(size <= SMALL.segment_bytes for size in sizes)
    assert offsets(log) == list(range(150))


def test_a_batch_larger_than_a_segment_gets_its_own_segment() -> None:
    log = reopen(FaultyDisk())
    append(log, batch())
    append(log, batch(1, value_bytes=5000))
    append(log, batch())
    assert log.segment_count == 3
    assert offsets(log) == [0, 1, 2]


def test_the_log_rolls_by_time_with_and_without_appends() -> None:
    log = reopen(FaultyDisk(), replace(ONE_SEGMENT, segment_ms=1000))
    append(log, batch(), now_ms=NOW_MS)
    append(log, batch(), now_ms=NOW_MS + 999)
    assert log.segment_count == 1
    append(log, batch(), now_ms=NOW_MS + 1000)
    assert log.segment_count == 2
    assert not log.roll_if_needed(NOW_MS + 1999)
    assert log.roll_if_needed(NOW_MS + 2000)
    assert not log.roll_if_needed(NOW_MS + 9000), "an empty segment is not rolled"
    assert log.segment_count == 3
    assert offsets(log) == [0, 1, 2]


def test_an_unused_log_has_no_files() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    assert log.read(0, 100, 0) is not None
    assert disk.listdir(FOLDER) == []
    assert disk.open_files == 0
    assert log.sync_job() is None
    assert log.close()


def test_reading_many_segments_keeps_few_files_open() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 300)
    sync(log)
    assert log.segment_count > 10
    for offset in range(0, 300, 7):
        read(log, offset)
        assert disk.open_files <= OPEN_CLOSED_SEGMENTS_MAX + 1
    log.close()
    assert disk.open_files == 0


def test_reads_out_of_range_are_refused_and_reads_at_the_end_are_empty() -> None:
    log = reopen(FaultyDisk())
    append_many(log, 3)
    log.increment_log_start(1)
    for offset in (0, 4, -1):
        with pytest.raises(KafkaError) as raised:
            log.read(offset, 100, 3)
        assert raised.value.code == ErrorCode.offset_out_of_range
        with pytest.raises(KafkaError):
            log.read_job(offset, 100, 3)
    assert read(log, 3) == b""
    assert read(log, 2, upto_offset=2) == b""


def test_a_read_starts_with_the_batch_that_holds_the_offset() -> None:
    log = reopen(FaultyDisk())
    append_many(log, 3, records=4)
    assert [h.base_offset for _, h in headers(read(log, 6))] == [4, 8]


def test_the_first_batch_is_returned_whole_above_max_bytes_unless_disabled() -> None:
    disk = FaultyDisk()
    log = reopen(disk, ONE_SEGMENT)
    append_many(log, 3, value_bytes=300)
    assert [h.base_offset for _, h in headers(read(log, 1, max_bytes=10))] == [1]
    result = log.read(1, 10, 3, min_one_batch=False)
    assert result is not None
    assert len(result.data) == 0
    log.close()
    log = reopen(disk, ONE_SEGMENT)
    assert [h.base_offset for _, h in headers(bytes(log.read_job(1, 10, 3)()))] == [1]
    assert log.read_job(1, 10, 3, min_one_batch=False)() == b""


def test_a_read_returns_no_batch_with_a_record_at_or_above_the_limit() -> None:
    disk = FaultyDisk()
    log = reopen(disk, ONE_SEGMENT)
    append_many(log, 4, records=3)
    for again in (False, True):
        if again:
            log.close()
            log = reopen(disk, ONE_SEGMENT)
        for upto in range(13):
            assert [h.base_offset for _, h in headers(read(log, 0, upto_offset=upto))] == list(range(0, upto - 2, 3))


def test_tail_reads_need_no_index_lookup_and_no_thread() -> None:
    disk = FaultyDisk()
    disk.is_warm = False
    log = reopen(disk, ONE_SEGMENT)
    for _ in range(3 * BATCHES_MAX):
        append(log, batch())
    before = disk.reads
    result = log.read(log.log_end_offset - 100, 1 << 20, log.log_end_offset)
    assert result is not None
    assert len(headers(bytes(result.data))) == 100
    assert result.next_offset == log.log_end_offset
    assert disk.reads == before + 1


def test_a_lagging_reader_needs_one_index_lookup_and_then_reads_on_the_loop() -> None:
    disk = FaultyDisk()
    log = reopen(disk, ONE_SEGMENT)
    for _ in range(3 * BATCHES_MAX):
        append(log, batch())
    assert log.read(5, 1000, log.log_end_offset) is None
    job = log.read_job(5, 1000, log.log_end_offset)
    job()
    assert job.result is not None
    offset = job.result.next_offset
    for _ in range(20):
        result = log.read(offset, 1000, log.log_end_offset)
        assert result is not None
        assert len(result.data) > 0
        offset = result.next_offset
    disk.is_warm = False
    assert log.read(offset, 1000, log.log_end_offset) is None, "pages that are not in memory are for a thread"


def test_large_reads_of_small_batches_end_at_a_batch_boundary() -> None:
    disk = FaultyDisk()
    log = reopen(disk, replace(ONE_SEGMENT, index_interval_bytes=4096))
    for _ in range(2500):
        append(log, batch())
    log.close()
    log = reopen(disk, ONE_SEGMENT)
    for max_bytes in (64 * 1024, 100_001):
        data = read(log, 17, max_bytes)
        batches = headers(data)
        assert max_bytes - 200 < len(data) <= max_bytes
        assert [h.base_offset for _, h in batches] == list(range(17, 17 + len(batches)))
        limited = headers(read(log, 17, max_bytes, upto_offset=300))
        assert [h.base_offset for _, h in limited] == list(range(17, 300))


def test_bytes_between_is_exact_at_the_tail_and_approximate_elsewhere() -> None:
    disk = FaultyDisk()
    log = reopen(disk)
    append_many(log, 100)
    size = log.size_bytes // 100
    assert log.bytes_between(97, 100) == 3 * size
    assert log.bytes_between(100, 100) == 0
    log.close()
    log = reopen(disk)
    assert abs(log.bytes_between(10, 90) - 80 * size) < 5 * size


@settings(max_examples=200)
@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=30),
    offset=st.integers(0, 200),
    max_bytes=st.integers(0, 400),
    upto=st.integers(0, 200),
    min_one=st.booleans(),
)
def test_a_tail_lookup_agrees_with_a_linear_scan(
    counts: list[int], offset: int, max_bytes: int, upto: int, min_one: bool
) -> None:
    tail = Tail()
    batches: list[tuple[int, int, int, int]] = []
    base = position = 0
    for count in counts:
        tail.append(base, position)
        batches.append((base, base + count, position, position + 10 * count))
        base += count
        position += 10 * count
    offset = min(offset, base - 1)
    upto = min(upto, base)
    expected = [b for b in batches if b[1] > offset and b[1] <= upto]
    fitting = [b for b in expected if b[3] - expected[0][2] <= max_bytes]
    if expected and not fitting and min_one:
        fitting = expected[:1]
    span = tail.span(offset, max_bytes, upto, base, position, min_one)
    assert span is not None
    if fitting:
        assert (span.start, span.end, span.next_offset) == (fitting[0][2], fitting[-1][3], fitting[-1][1])
    else:
        assert span.start == span.end


def test_five_thousand_idle_logs_keep_no_files_open(tmp_path: object) -> None:
    disk = RealDisk()
    logs = [Log.open(disk, f"{tmp_path}/t-{i}", LogConfig(), NOW_MS) for i in range(5000)]
    assert [path for path in open_files() if path.startswith(str(tmp_path))] == []
    assert all(log.log_end_offset == 0 for log in logs)


def open_files() -> Iterator[str]:
    """Yield what the descriptors of this process refer to. Other tests of the process leave some behind."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            yield os.readlink(f"/proc/self/fd/{descriptor}")
