"""The state of a log at one offset, so that recovery need not read what comes before it.

The file `NNN.snapshot`, NNN being the offset in 20 digits; all integers big-endian:

    version               int16    1
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
      batch_count         int8     then for each batch, oldest first:
        base_sequence     int32
        last_sequence     int32
        base_offset       int64
        last_offset       int64
        log_append_time   int64
"""

from collections.abc import Sequence
from struct import Struct, error
from typing import Final, NamedTuple

from crc32c import crc32c

from chronik.storage.producers import ProducerState, ProducerStates, SentBatch

VERSION: Final = 1
_PREFIX: Final = Struct(">hI")
_FIXED: Final = Struct(">qqqqIqqiiiqi")
_PRODUCER: Final = Struct(">qhqb")
_BATCH: Final = Struct(">iiqqq")


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


def encode_snapshot(snapshot: Snapshot) -> bytes:
    parts = [_FIXED.pack(*snapshot[:11], len(snapshot.producers))]
    for producer_id, state in snapshot.producers:
        parts.append(_PRODUCER.pack(producer_id, state.epoch, state.last_seen_ms, len(state.batches)))
        parts += [_BATCH.pack(*batch) for batch in state.batches]
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
            producer_id, epoch, last_seen_ms, batch_count = _PRODUCER.unpack_from(data, at)
            at += _PRODUCER.size
            batches = [SentBatch(*_BATCH.unpack_from(data, at + i * _BATCH.size)) for i in range(batch_count)]
            at += batch_count * _BATCH.size
            producers.append((producer_id, ProducerState(epoch, last_seen_ms, batches)))
    except error:
        return None
    return Snapshot._make([*fixed, producers])


def restore_producers(snapshot: Snapshot | None, expiration_ms: int) -> ProducerStates:
    """Return the producer state of the snapshot."""
    producers = ProducerStates(expiration_ms)
    if snapshot is not None:
        for producer_id, state in snapshot.producers:
            producers.restore(producer_id, state)
    return producers
