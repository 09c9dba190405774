"""Compaction of one batch: which of its records remain.

Records are filtered as bytes (layout in `chronik.wire.records`): kept records are copied unchanged, offsets included,
and only a batch that loses a record is rebuilt. A tombstone, a record without value, tells consumers that a key is
deleted; it stays for a while after its first compaction. The batch stores the end of that time as in Kafka (KIP-534):
attribute bit 6 is set, and the base timestamp is that time.

Records of aborted transactions are removed. A marker stays at least until a pass finds no batch of its transaction.
That pass sets the marker's delete horizon, since a consumer may have read the records and not the marker. The last
batch of a producer stays, if need be without records: the log must know that producer's last sequence and epoch.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from chronik.storage.aborted import AbortedTransaction
from chronik.storage.producers import LastBatch
from chronik.wire.batch import DECOMPRESSED_BYTES_MAX, HEADER_BYTES, BatchHeader, join_batch
from chronik.wire.compression import compress, decompress
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import put_varint, read_varint

DELETE_HORIZON: Final = 0x40


class RawRecord(NamedTuple):
    """One record's position in the uncompressed block, and the fields that compaction needs."""

    start: int
    body_at: int
    """Position after the length."""
    rest_at: int
    """Position after the timestamp delta."""
    end: int
    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    is_tombstone: bool


def key_digest(key: bytes) -> bytes:
    """Return a 16-byte digest, by which keys of any size are compared."""
    return blake2b(key, digest_size=16).digest()


def raw_records(batch: memoryview, header: BatchHeader) -> tuple[bytes, list[RawRecord]]:
    """Return a batch's uncompressed records, and each one's position. Raises KafkaError if they do not parse."""
    block = batch[HEADER_BYTES : header.size_bytes]
    data = bytes(decompress(header.codec, block, DECOMPRESSED_BYTES_MAX)) if len(block) else b""
    try:
        return data, list(_raw_records(data, header.record_count))
    except IndexError:
        raise KafkaError(ErrorCode.corrupt_message, "record cut short") from None


def _raw_records(data: bytes, count: int) -> Iterator[RawRecord]:
    at = 0
    for _ in range(count):
        start = at
        length, body_at = read_varint(data, at)
        end = body_at + length
        if length < 0 or end > len(data):
            raise KafkaError(ErrorCode.corrupt_message, "record cut short")
        timestamp_delta, rest_at = read_varint(data, body_at + 1)
        offset_delta, at = read_varint(data, rest_at)
        key_bytes, at = read_varint(data, at)
        key = None
        if key_bytes >= 0:
            key = data[at : at + key_bytes]
            at += key_bytes
        value_bytes, _ = read_varint(data, at)
        yield RawRecord(start, body_at, rest_at, end, timestamp_delta, offset_delta, key, value_bytes < 0)
        at = end


def clean_batch(
    batch: memoryview,
    header: BatchHeader,
    keeps: Callable[[int, bytes | None], bool],
    now_ms: int,
    delete_retention_ms: int,
    last_batches: Mapping[int, LastBatch],
) -> bytes | memoryview | None:
    """Return what remains of a batch: the batch itself if nothing is removed, None if it can be dropped.

    `keeps` returns, for an offset and a key, whether no newer record has that key.
    """
    data, records = raw_records(batch, header)
    has_horizon = bool(header.attributes & DELETE_HORIZON)
    is_over = has_horizon and now_ms >= header.base_timestamp
    kept = [
        record
        for record in records
        if keeps(header.base_offset + record.offset_delta, record.key) and not (record.is_tombstone and is_over)
    ]
    needs_horizon = not has_horizon and any(record.is_tombstone for record in kept)
    if len(kept) == len(records) and records and not needs_horizon:
        return batch
    if kept:
        return _rebuilt(header, data, kept, now_ms + delete_retention_ms if needs_horizon else None)
    last = last_batches.get(header.producer_id)
    if last is not None and last.last_offset == header.last_offset:
        return batch if not records else _encoded(header, header.attributes, header.base_timestamp, None, 0, b"")
    return None


def clean_marker(
    batch: memoryview,
    header: BatchHeader,
    now_ms: int,
    delete_retention_ms: int,
    last_batches: Mapping[int, LastBatch],
) -> bytes | memoryview | None:
    """Return what remains of a control batch whose transaction has no batch left."""
    if not header.attributes & DELETE_HORIZON:
        data, records = raw_records(batch, header)
        return _rebuilt(header, data, records, now_ms + delete_retention_ms) if records else batch
    last = last_batches.get(header.producer_id)
    is_last = last is not None and last == (header.producer_epoch, None)
    return batch if is_last or now_ms < header.base_timestamp else None


class TransactionFilter:
    """Knows which batches belong to aborted transactions, and which markers have no batch left.

    Pass the batches in order, starting with the log's first.
    """

    __slots__ = ("_aborted", "_with_batches")

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._aborted: dict[int, list[AbortedTransaction]] = {}
        for each in aborted:
            self._aborted.setdefault(each.producer_id, []).append(each)
        self._with_batches: set[int] = set()

    def is_aborted(self, header: BatchHeader) -> bool:
        """Return whether a transaction that was aborted includes the batch; the order of calls does not matter."""
        if not header.is_transactional:
            return False
        transactions = self._aborted.get(header.producer_id, ())
        at = bisect_right(transactions, header.base_offset, key=lambda each: each.first_offset)
        return at > 0 and header.base_offset < transactions[at - 1].last_offset

    def passed(self, header: BatchHeader) -> None:
        """Note a batch that may hold records."""
        if header.is_transactional:
            self._with_batches.add(header.producer_id)

    def passed_marker(self, header: BatchHeader) -> bool:
        """Note a marker; return whether its transaction has no batch left."""
        is_empty = header.producer_id not in self._with_batches
        self._with_batches.discard(header.producer_id)
        return is_empty


def _rebuilt(header: BatchHeader, data: bytes, kept: list[RawRecord], horizon_ms: int | None) -> bytes:
    max_timestamp = header.base_timestamp + max(record.timestamp_delta for record in kept)
    if horizon_ms is None:
        block = b"".join([data[record.start : record.end] for record in kept])
        return _encoded(header, header.attributes, header.base_timestamp, max_timestamp, len(kept), block)
    # The base timestamp is now the delete horizon; the records keep their timestamps through adjusted deltas.
    moved = bytearray()
    for record in kept:
        delta = bytearray()
        put_varint(delta, header.base_timestamp + record.timestamp_delta - horizon_ms)
        put_varint(moved, 1 + len(delta) + record.end - record.rest_at)
        moved += data[record.body_at : record.body_at + 1]
        moved += delta
        moved += data[record.rest_at : record.end]
    return _encoded(header, header.attributes | DELETE_HORIZON, horizon_ms, max_timestamp, len(kept), bytes(moved))


def _encoded(
    header: BatchHeader, attributes: int, base_timestamp: int, max_timestamp: int | None, count: int, block: bytes
) -> bytes:
    """Encode the batch with other records; keep offsets, sequences and leader epoch."""
    if max_timestamp is None or header.log_append_time:
        max_timestamp = header.max_timestamp
    new = header._replace(
        attributes=attributes, base_timestamp=base_timestamp, max_timestamp=max_timestamp, record_count=count
    )
    return join_batch(new, compress(header.codec, block) if header.codec and block else block)
