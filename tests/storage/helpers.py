"""Helpers that create batches and read logs, for the storage tests."""

from collections.abc import Sequence

from chronik.storage.config import LogConfig
from chronik.storage.disk import Disk
from chronik.storage.log import Log
from chronik.storage.producers import AppendResult
from chronik.wire.batch import BatchHeader, check_batches, decode_batch, encode_batch, encode_marker
from chronik.wire.records import NewRecord, Record

FOLDER = "/data/logs/topic-0"
NOW_MS = 1_700_000_000_000

SMALL = LogConfig(
    segment_bytes=2000,
    index_interval_bytes=200,
    preallocate_bytes_min=256,
    preallocate_bytes_max=1024,
    checkpoint_bytes=1500,
)
"""Limits so small that a few records reach all of them."""


def batch(
    count: int = 1,
    *,
    value_bytes: int = 20,
    timestamp_ms: int = NOW_MS,
    keys: Sequence[bytes | None] | None = None,
    values: Sequence[bytes | None] | None = None,
    codec: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    is_transactional: bool = False,
) -> bytes:
    """Encode a batch of `count` records a millisecond apart."""
    records: list[NewRecord] = [
        (
            keys[i] if keys is not None else b"key",
            values[i] if values is not None else b"v" * value_bytes,
            [],
            timestamp_ms + i,
        )
        for i in range(count)
    ]
    return encode_batch(
        records,
        codec=codec,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        is_transactional=is_transactional,
    )


class TransactionalProducer:
    """Appends transactional batches and markers to a log, with the right sequences."""

    def __init__(self, log: Log, producer_id: int) -> None:
        self.log = log
        self.producer_id = producer_id
        self.epoch = 0
        self.sequence = 0

    def batch(self, count: int = 1, *, value_bytes: int = 20, keys: Sequence[bytes | None] | None = None) -> bytes:
        encoded = batch(
            count,
            value_bytes=value_bytes,
            keys=keys,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self.sequence,
            is_transactional=True,
        )
        self.sequence += count
        return encoded

    def send(self, count: int = 1, *, value_bytes: int = 20, keys: Sequence[bytes | None] | None = None) -> int:
        """Return the base offset."""
        return append(self.log, self.batch(count, value_bytes=value_bytes, keys=keys)).base_offset

    def end(self, is_commit: bool, *, coordinator_epoch: int = 0, leader_epoch: int = 0) -> int:
        """Return the offset of the marker."""
        marker = encode_marker(self.producer_id, self.epoch, is_commit, coordinator_epoch, NOW_MS)
        return self.log.append_marker(marker, leader_epoch, NOW_MS).base_offset

    def commit(self) -> int:
        return self.end(True)

    def abort(self) -> int:
        return self.end(False)


def aborted(log: Log, offset: int = 0, upto_offset: int | None = None) -> list[tuple[int, int]]:
    """Return producer and first offset of the aborted transactions in the range, as the node does."""
    job = log.aborted_job(offset, log.log_end_offset if upto_offset is None else upto_offset)
    return [] if job is None else [(each.producer_id, each.first_offset) for each in job()]


def open_transactions(log: Log) -> dict[int, int | None]:
    return {producer_id: state.first_offset for producer_id, state in log.open_transactions()}


def headers(records: bytes) -> list[tuple[int, BatchHeader]]:
    return check_batches(memoryview(records), 1 << 30, from_producer=False) if records else []


def append(log: Log, records: bytes, *, epoch: int = 0, now_ms: int = NOW_MS) -> AppendResult:
    buffer = memoryview(bytearray(records))
    return log.append(buffer, check_batches(buffer, 1 << 30), epoch, now_ms)


def append_many(log: Log, batches: int, *, records: int = 1, value_bytes: int = 20) -> None:
    for _ in range(batches):
        append(log, batch(records, value_bytes=value_bytes))


def sync(log: Log) -> None:
    """Sync the log as the node's syncer does."""
    job = log.sync_job()
    if job is not None:
        job.run()
        log.synced(job)


def read(log: Log, offset: int, max_bytes: int = 1 << 20, upto_offset: int | None = None) -> bytes:
    """Read as the node does: on the loop if possible, otherwise by a job."""
    upto = log.log_end_offset if upto_offset is None else upto_offset
    result = log.read(offset, max_bytes, upto)
    if result is not None:
        return bytes(result.data)
    return bytes(log.read_job(offset, max_bytes, upto)())


def read_all(log: Log, max_bytes: int = 1 << 20) -> list[Record]:
    """Return every record, by consecutive reads as a consumer does."""
    records: list[Record] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        data = read(log, offset, max_bytes)
        if not data:
            break
        for start, header in headers(data):
            records += [record for record in decode_batch(data, start) if record.offset >= offset]
            next_offset = header.next_offset
        offset = next_offset
    return records


def offsets(log: Log) -> list[int]:
    return [record.offset for record in read_all(log)]


def reopen(disk: Disk, config: LogConfig = SMALL, recovery_point: int | None = None, now_ms: int = NOW_MS) -> Log:
    return Log.open(disk, FOLDER, config, now_ms, recovery_point)
