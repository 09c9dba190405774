"""Record batches, format 2: the unit that is produced, stored, replicated and fetched.

    base_offset             int64    assigned by the leader
    batch_length            int32    of all that follows
    partition_leader_epoch  int32    assigned by the leader
    magic                   int8     2
    crc                     uint32   CRC32C of all that follows
    attributes              int16    bits 0-2 codec, 3 log append time, 4 transactional, 5 control, 6 delete horizon
    last_offset_delta       int32
    base_timestamp          int64
    max_timestamp           int64
    producer_id             int64    -1 for none
    producer_epoch          int16
    base_sequence           int32
    record_count            int32
    records                          compressed as one block by the codec; layout in `records`

A marker is a control batch of one record. It ends the transaction of its producer in the partition:

    key     int16 version 0, int16 type: 0 abort, 1 commit
    value   int16 version 0, int32 coordinator epoch

Base offset and leader epoch precede the CRC's range, so the broker overwrites both in place in the producer's batch. It
decodes the records only if the topic's `compression.type` or `cleanup.policy` requires it.
"""

from collections.abc import Iterator, Sequence
from struct import Struct, error
from typing import Final, NamedTuple

from crc32c import crc32c

from chronik.wire.compression import CODECS, Buffer, compress, decompress
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import NewRecord, Record, decode_records, encode_record, record_prefixes

HEADER_BYTES: Final = 61
DECOMPRESSED_BYTES_MAX: Final = 128 * 1024 * 1024

HEADER: Final = Struct(">qiibIhiqqqhii")
CRC_START: Final = 21
"""The CRC covers the bytes from here, the attributes, to the end."""

LENGTH_END: Final = 12
"""batch_length counts the bytes after this position."""

CODEC_MASK: Final = 0x07
LOG_APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20

_MAGIC_AT: Final = 16
_INT32: Final = Struct(">i")
_INT64: Final = Struct(">q")
_UINT32: Final = Struct(">I")
_INT16: Final = Struct(">h")
_LENGTH_AT: Final = 8
_EPOCH_AT: Final = 12
_CRC_AT: Final = 17
_ATTRIBUTES_AT: Final = 21
_MAX_TIMESTAMP_AT: Final = 35

_MARKER_KEY: Final = Struct(">hh")
_MARKER_VALUE: Final = Struct(">hi")
_ABORT: Final = 0
_COMMIT: Final = 1


class BatchHeader(NamedTuple):
    """The fixed part of a batch. `size_bytes` is the size of the whole batch, header and records."""

    base_offset: int
    size_bytes: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def log_append_time(self) -> bool:
        return bool(self.attributes & LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        """The sequence of the last record; sequences wrap after 2^31-1. -1 if the batch has no sequence."""
        return (self.base_sequence + self.last_offset_delta) & 0x7FFFFFFF if self.base_sequence >= 0 else -1


class Marker(NamedTuple):
    """The end of a transaction, and the epoch of the coordinator that decided it."""

    is_commit: bool
    coordinator_epoch: int


def read_batch_header(buf: Buffer, at: int = 0) -> BatchHeader:
    """Read the header at `at`. The only check is that there are enough bytes."""
    try:
        fields = HEADER.unpack_from(buf, at)
    except error as e:
        raise KafkaError(ErrorCode.corrupt_message, f"batch header cut short: {len(buf) - at} bytes") from e
    # Bypass NamedTuple's constructor, which is Python code: every batch takes this path.
    return tuple.__new__(BatchHeader, (fields[0], fields[1] + LENGTH_END, *fields[2:]))


def check_batches(
    records: memoryview, max_batch_bytes: int, *, from_producer: bool = True
) -> list[tuple[int, BatchHeader]]:
    """Return the batches in `records` with their positions, after every check that needs no decoding.

    `from_producer` also checks the rules for producers: consecutive offsets, at least one record, no control batch, a
    sequence with every producer id. Batches from another replica may be compacted, empty or control batches.
    """
    batches: list[tuple[int, BatchHeader]] = []
    at = 0
    end = len(records)
    while at < end:
        if end - at <= _MAGIC_AT:
            raise KafkaError(ErrorCode.corrupt_message, f"batch cut short: {end - at} bytes")
        if records[at + _MAGIC_AT] != 2:
            raise _wrong_magic(records[at + _MAGIC_AT])
        header = read_batch_header(records, at)
        size_bytes = header[1]
        if size_bytes < HEADER_BYTES or size_bytes > end - at:
            raise KafkaError(ErrorCode.corrupt_message, f"batch of {size_bytes} bytes, {end - at} left")
        if size_bytes > max_batch_bytes:
            raise KafkaError(ErrorCode.message_too_large, f"batch of {size_bytes} bytes, at most {max_batch_bytes}")
        next_at = at + size_bytes
        if crc32c(records[at + CRC_START : next_at]) != header[4]:
            raise KafkaError(ErrorCode.corrupt_message, "CRC does not match")
        _check_counts(header, from_producer)
        batches.append((at, header))
        at = next_at
    if not batches:
        raise KafkaError(ErrorCode.invalid_record, "no record batch")
    return batches


def _check_counts(header: BatchHeader, from_producer: bool) -> None:
    attributes = header[5]
    if attributes & CODEC_MASK >= len(CODECS):
        raise KafkaError(ErrorCode.unsupported_compression_type, f"codec {attributes & CODEC_MASK}")
    last_offset_delta = header[6]
    record_count = header[12]
    if from_producer:
        if record_count <= 0 or last_offset_delta != record_count - 1:
            raise KafkaError(
                ErrorCode.invalid_record, f"{record_count} records with a last offset delta of {last_offset_delta}"
            )
        if attributes & CONTROL:
            raise KafkaError(ErrorCode.invalid_record, "control batch from a producer")
        if header[9] >= 0 and (header[11] < 0 or header[10] < 0):
            raise KafkaError(ErrorCode.invalid_record, f"producer {header[9]} without a sequence")
    elif last_offset_delta < 0 or not 0 <= record_count <= last_offset_delta + 1:
        raise KafkaError(
            ErrorCode.corrupt_message, f"{record_count} records with a last offset delta of {last_offset_delta}"
        )


def _wrong_magic(magic: int) -> KafkaError:
    if magic in (0, 1):
        return KafkaError(ErrorCode.unsupported_for_message_format, f"message format {magic} is not supported")
    return KafkaError(ErrorCode.corrupt_message, f"magic {magic}")


def stamp(buf: bytearray | memoryview, at: int, base_offset: int, leader_epoch: int) -> None:
    """Write the leader's base offset and epoch into the batch at `at`."""
    _INT64.pack_into(buf, at, base_offset)
    _INT32.pack_into(buf, at + _EPOCH_AT, leader_epoch)


def stamp_append_time(buf: bytearray | memoryview, at: int, now_ms: int) -> None:
    """Set the timestamp of every record in the batch at `at` to `now_ms`: message.timestamp.type=LogAppendTime."""
    (length,) = _INT32.unpack_from(buf, at + _LENGTH_AT)
    (attributes,) = _INT16.unpack_from(buf, at + _ATTRIBUTES_AT)
    _INT16.pack_into(buf, at + _ATTRIBUTES_AT, attributes | LOG_APPEND_TIME)
    _INT64.pack_into(buf, at + _MAX_TIMESTAMP_AT, now_ms)
    crc = crc32c(memoryview(buf)[at + CRC_START : at + LENGTH_END + length])
    _UINT32.pack_into(buf, at + _CRC_AT, crc)


def encode_batch(
    records: Sequence[NewRecord],
    *,
    codec: int = 0,
    base_offset: int = 0,
    offsets: Sequence[int] | None = None,
    last_offset: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    leader_epoch: int = -1,
    is_transactional: bool = False,
    is_control: bool = False,
    append_time_ms: int | None = None,
) -> bytes:
    """Build a batch.

    Offsets are consecutive from `base_offset` unless compaction passes them. `offsets` has one for each remaining
    record. `last_offset` keeps the offset (and the producer's sequence) of a last record that was removed.
    `append_time_ms` marks the batch as having log append time.
    """
    base_timestamp = records[0][3] if records else -1
    max_timestamp = base_timestamp
    payload = bytearray()
    offset_delta = -1
    for index, (key, value, headers, timestamp_ms) in enumerate(records):
        offset_delta = index if offsets is None else offsets[index] - base_offset
        max_timestamp = max(max_timestamp, timestamp_ms)
        encode_record(payload, key, value, headers, timestamp_ms - base_timestamp, offset_delta)
    if last_offset is not None:
        offset_delta = last_offset - base_offset
    attributes = codec | (TRANSACTIONAL if is_transactional else 0) | (CONTROL if is_control else 0)
    if append_time_ms is not None:
        attributes |= LOG_APPEND_TIME
        max_timestamp = append_time_ms
    header = BatchHeader(
        base_offset,
        0,
        leader_epoch,
        2,
        0,
        attributes,
        offset_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        len(records),
    )
    return join_batch(header, compress(codec, payload) if codec else payload)


def join_batch(header: BatchHeader, block: Buffer) -> bytes:
    """Join a header and an encoded, compressed block of records; size and CRC are set here."""
    batch = bytearray(HEADER_BYTES + len(block))
    HEADER.pack_into(batch, 0, header.base_offset, len(batch) - LENGTH_END, *header[2:])
    batch[HEADER_BYTES:] = block
    _UINT32.pack_into(batch, _CRC_AT, crc32c(memoryview(batch)[CRC_START:]))
    return bytes(batch)


def encode_marker(producer_id: int, epoch: int, is_commit: bool, coordinator_epoch: int, timestamp_ms: int) -> bytes:
    """Build the control batch that ends a transaction."""
    key = _MARKER_KEY.pack(0, _COMMIT if is_commit else _ABORT)
    value = _MARKER_VALUE.pack(0, coordinator_epoch)
    return encode_batch(
        [(key, value, [], timestamp_ms)],
        producer_id=producer_id,
        producer_epoch=epoch,
        is_transactional=True,
        is_control=True,
    )


def read_marker(batch: Buffer, at: int = 0) -> Marker:
    """Decode the control batch at `at`. Raises INVALID_RECORD if it ends no transaction.

    Later versions may add fields, as in Kafka.
    """
    record = next(decode_batch(batch, at), None)
    try:
        version, kind = _MARKER_KEY.unpack_from(record.key or b"") if record is not None else (-1, -1)
        if version < 0 or kind not in (_ABORT, _COMMIT) or record is None:
            raise KafkaError(ErrorCode.invalid_record, f"control record of version {version} and type {kind}")
        version, coordinator_epoch = _MARKER_VALUE.unpack_from(record.value or b"")
    except error:
        raise KafkaError(ErrorCode.invalid_record, "marker cut short") from None
    if version < 0:
        raise KafkaError(ErrorCode.invalid_record, f"marker of version {version}")
    return Marker(kind == _COMMIT, coordinator_epoch)


def batch_prefixes(buf: Buffer, max_bytes: int, size: int = 5) -> list[tuple[bytes | None, bytes | None]]:
    """Return the first `size` bytes of each key and value of the only batch, which `check_batches` has checked."""
    header = read_batch_header(buf)
    block = memoryview(buf)[HEADER_BYTES : header.size_bytes]
    return record_prefixes(decompress(header.codec, block, max_bytes) if len(block) else b"", header.record_count, size)


def decode_batch(buf: Buffer, at: int = 0, max_bytes: int = DECOMPRESSED_BYTES_MAX) -> Iterator[Record]:
    """Decode the records of the batch at `at`. `check_batches` checks the CRC; everything else is checked here."""
    header = read_batch_header(buf, at)
    if header.magic != 2:
        raise _wrong_magic(header.magic)
    end = at + header.size_bytes
    if header.size_bytes < HEADER_BYTES or end > len(buf):
        raise KafkaError(ErrorCode.corrupt_message, f"batch of {header.size_bytes} bytes, {len(buf) - at} left")
    block = memoryview(buf)[at + HEADER_BYTES : end]
    data = decompress(header.codec, block, max_bytes) if len(block) else b""
    append_time_ms = header.max_timestamp if header.log_append_time else None
    return decode_records(data, header.record_count, header.base_offset, header.base_timestamp, append_time_ms)
