"""The state of a log at one offset, so that recovery need not read what comes before it.

The file `NNN.snapshot`, NNN being the offset in 20 digits; all integers big-endian:

    version               int16    3
    crc                   uint32   CRC32C of everything that follows
    offset                int64    the state is that before this offset; all data below it was durable
    segment_base          int64    the segment that `offset` is in
    position              int64    its position in that segment
    last_batch_position   int64    of the batch before `position` in that segment, -1 for none
    last_batch_crc        uint32   its CRC: identifies the log that this snapshot belongs to
    max_timestamp         int64    the segment's largest so far, -1 for none
    max_timestamp_offset  int64    last offset of the batch that has it
    offset_entries        int32    entries in the segment's offset index
    time_entries          int32    entries in its time index
    unindexed_bytes       int32    bytes since the last entry
    first_append_ms       int64    time of the segment's first append, -1 if unknown
    producer_count        int32    then for each producer:
      producer_id         int64
      epoch               int16
      last_seen_ms        int64
      first_sequence      int32    of the epoch in this log, 0 if it has had all
      batch_count         int8     then for each batch, oldest first:
        base_sequence     int32
        last_sequence     int32
        base_offset       int64
        last_offset       int64
        log_append_time   int64
      coordinator_epoch   int32    of the last marker, -1 for none
      first_offset        int64    of the open transaction, -1 for none
    ended_count           int32    then for each transaction that ended a short time ago (see `transactions`):
      first_offset        int64
      marker_offset       int64
    index_count           int32    then for each segment with aborted transactions (see `aborted`):
      segment_base        int64
      entries             int32
      crc                 uint32   CRC32C of the entries
"""

from collections.abc import Mapping, Sequence
from struct import Struct, error
from typing import Final, NamedTuple

from crc32c import crc32c

from chronik.storage.aborted import Summary
from chronik.storage.producers import ProducerState, ProducerStates, SentBatch

VERSION: Final = 3
_PREFIX: Final = Struct(">hI")
_FIXED: Final = Struct(">qqqqIqqiiiqi")
_PRODUCER: Final = Struct(">qhqib")
_BATCH: Final = Struct(">iiqqq")
_TRANSACTION: Final = Struct(">iq")
_COUNT: Final = Struct(">i")
_ENDED: Final = Struct(">qq")
_ABORTED: Final = Struct(">qiI")


class Snapshot(NamedTuple):
    offset: int
    segment_base: int
    position: int
    last_batch_position: int
    last_batch_crc: int
    max_timestamp: int
    max_timestamp_offset: int
    offset_entries: int
    time_entries: int
    unindexed_bytes: int
    first_append_ms: int
    producers: Sequence[tuple[int, ProducerState]]
    ended: Sequence[tuple[int, int]]
    aborted: Mapping[int, Summary]
    """The index of aborted transactions of each segment that has one, up to the snapshot's offset."""


def encode_snapshot(snapshot: Snapshot) -> bytes:
    parts = [_FIXED.pack(*snapshot[:11], len(snapshot.producers))]
    for producer_id, state in snapshot.producers:
        fixed = (producer_id, state.epoch, state.last_seen_ms, state.first_sequence, len(state.batches))
        parts.append(_PRODUCER.pack(*fixed))
        parts += [_BATCH.pack(*batch) for batch in state.batches]
        first_offset = -1 if state.first_offset is None else state.first_offset
        parts.append(_TRANSACTION.pack(state.coordinator_epoch, first_offset))
    parts.append(_COUNT.pack(len(snapshot.ended)))
    parts += [_ENDED.pack(*each) for each in snapshot.ended]
    parts.append(_COUNT.pack(len(snapshot.aborted)))
    parts += [_ABORTED.pack(base_offset, *summary) for base_offset, summary in snapshot.aborted.items()]
    body = b"".join(parts)
    return _PREFIX.pack(VERSION, crc32c(body)) + body


def decode_snapshot(data: bytes) -> Snapshot | None:
    """Return None if the file is damaged or of another version: recovery then starts further back."""
    try:
        version, crc = _PREFIX.unpack_from(data)
        if version != VERSION or crc32c(data[_PREFIX.size :]) != crc:
            return None
        *fixed, count = _FIXED.unpack_from(data, _PREFIX.size)
        at = _PREFIX.size + _FIXED.size
        producers: list[tuple[int, ProducerState]] = []
        for _ in range(count):
            producer_id, epoch, last_seen_ms, first_sequence, batch_count = _PRODUCER.unpack_from(data, at)
            at += _PRODUCER.size
            batches = [SentBatch(*_BATCH.unpack_from(data, at + i * _BATCH.size)) for i in range(batch_count)]
            at += batch_count * _BATCH.size
            state = ProducerState(epoch, last_seen_ms, batches, first_sequence)
            state.coordinator_epoch, first_offset = _TRANSACTION.unpack_from(data, at)
            state.first_offset = first_offset if first_offset >= 0 else None
            at += _TRANSACTION.size
            producers.append((producer_id, state))
        (ended_count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        ended = [_ENDED.unpack_from(data, at + i * _ENDED.size) for i in range(ended_count)]
        at += ended_count * _ENDED.size
        (index_count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        aborted: dict[int, Summary] = {}
        for i in range(index_count):
            base_offset, *summary = _ABORTED.unpack_from(data, at + i * _ABORTED.size)
            aborted[base_offset] = Summary(*summary)
    except error:
        return None
    return Snapshot._make([*fixed, producers, ended, aborted])


def usable_snapshot(data: bytes, cleaned_upto: int) -> Snapshot | None:
    """Return None also if compaction has gone further since: it may have removed the markers after the snapshot."""
    snapshot = decode_snapshot(data)
    return None if snapshot is None or snapshot.offset < cleaned_upto else snapshot


def restore_producers(snapshot: Snapshot | None, expiration_ms: int, first_base: int) -> ProducerStates:
    """Return the producer state of the snapshot. `first_base` is the base offset of the log's first segment.

    If the log starts at or after the snapshot, no batch of an open transaction is left, and its marker may be gone too:
    restored, it would stay open forever. Any later batch begins it again.
    """
    producers = ProducerStates(expiration_ms)
    if snapshot is not None:
        producers.restore(snapshot.producers, snapshot.ended)
        if snapshot.offset <= first_base:
            producers.forget_transactions()
    return producers
