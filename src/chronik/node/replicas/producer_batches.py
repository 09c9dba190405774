"""Checks of a producer's batch against the topic's settings, after the checks of its format."""

from __future__ import annotations

from collections.abc import Iterator

from chronik.node.topic_settings import TopicSettings
from chronik.wire.batch import TRANSACTIONAL, BatchHeader, decode_batch, encode_batch
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import Record

KEY_NEEDED = "a compacted topic takes no record without a key"
DECODED_RECORDS_MAX = 100_000
DECODED_BYTES_PER_BYTE_MAX = 16


def check_producer_batch(
    settings: TopicSettings, records: memoryview, start: int, header: BatchHeader, now_ms: int
) -> None:
    """Raise KafkaError if the topic's settings do not allow the batch at `start`."""
    if header.attributes & TRANSACTIONAL:
        raise KafkaError(ErrorCode.invalid_txn_state, "transactions are not supported by this node")
    if not settings.log_append_time and header.max_timestamp >= 0:
        if header.max_timestamp > now_ms + settings.timestamp_after_max_ms:
            raise KafkaError(
                ErrorCode.invalid_timestamp, f"timestamp {header.max_timestamp} lies too far in the future"
            )
        oldest_ms = min(header.base_timestamp, header.max_timestamp)
        if 0 <= oldest_ms < now_ms - settings.timestamp_before_max_ms:
            raise KafkaError(ErrorCode.invalid_timestamp, f"timestamp {oldest_ms} lies too far in the past")
    if settings.is_compacted:
        decoded = _decoded(settings, records, start, header)
        keyless = [(at, KEY_NEEDED) for at, record in enumerate(decoded) if record.key is None]
        if keyless:
            raise KafkaError(ErrorCode.invalid_record, KEY_NEEDED, keyless)


def recompressed(
    settings: TopicSettings, records: memoryview, start: int, header: BatchHeader, codec: int
) -> memoryview:
    """Return the same records, compressed with the topic's codec (`compression.type`)."""
    decoded = [(r.key, r.value, r.headers, r.timestamp_ms) for r in _decoded(settings, records, start, header)]
    encoded = encode_batch(
        decoded,
        codec=codec,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
    )
    return memoryview(bytearray(encoded))


def _decoded(settings: TopicSettings, records: memoryview, start: int, header: BatchHeader) -> Iterator[Record]:
    """Return the records of a batch. Their number and size are bounded, because the loop waits for the decoding."""
    if header.record_count > DECODED_RECORDS_MAX:
        raise KafkaError(
            ErrorCode.invalid_record,
            f"{header.record_count} records in a batch; this topic's settings allow {DECODED_RECORDS_MAX}",
        )
    return decode_batch(records, start, DECODED_BYTES_PER_BYTE_MAX * settings.max_message_bytes)
