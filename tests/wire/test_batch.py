"""Record batches, compared with kafka-python's encoder and decoder."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatchBuilder

from chronik.wire.batch import (
    HEADER_BYTES,
    Marker,
    check_batches,
    decode_batch,
    encode_batch,
    encode_marker,
    read_batch_header,
    read_marker,
    stamp,
    stamp_append_time,
)
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import NewRecord, Record

MAX_BYTES = 1 << 20
CODECS = (0, 1, 2, 3, 4)

headers = st.lists(st.tuples(st.text(max_size=10), st.none() | st.binary(max_size=20)), max_size=3)
new_records: st.SearchStrategy[NewRecord] = st.tuples(
    st.none() | st.binary(max_size=100), st.none() | st.binary(max_size=300), headers, st.integers(0, 1 << 42)
)


def by_kafka_python(
    records: list[NewRecord], codec: int, producer_id: int = -1, epoch: int = -1, sequence: int = -1
) -> bytes:
    builder = DefaultRecordBatchBuilder(2, codec, False, producer_id, epoch, sequence, 1 << 30)
    for offset, (key, value, record_headers, timestamp_ms) in enumerate(records):
        assert builder.append(offset, timestamp_ms, key, value, list(record_headers)) is not None
    return bytes(builder.build())


def expected(records: list[NewRecord], base_offset: int = 0) -> list[Record]:
    return [
        Record(base_offset + delta, timestamp_ms, key, value, list(record_headers))
        for delta, (key, value, record_headers, timestamp_ms) in enumerate(records)
    ]


@given(st.lists(new_records, min_size=1, max_size=5), st.sampled_from(CODECS))
def test_batches_encoded_by_kafka_python_are_decoded(records: list[NewRecord], codec: int) -> None:
    batch = by_kafka_python(records, codec)
    ((start, header),) = check_batches(memoryview(batch), MAX_BYTES)
    assert (start, header.size_bytes, header.record_count) == (0, len(batch), len(records))
    assert list(decode_batch(batch)) == expected(records)


@given(st.lists(new_records, min_size=1, max_size=5), st.integers(-1, 1 << 40))
def test_uncompressed_batches_are_byte_identical_to_kafka_python(records: list[NewRecord], producer_id: int) -> None:
    epoch, sequence = (3, 77) if producer_id >= 0 else (-1, -1)
    ours = bytearray(
        encode_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, leader_epoch=0)
    )
    theirs = bytearray(by_kafka_python(records, 0, producer_id, epoch, sequence))
    # The broker overwrites the leader epoch that a producer writes.
    stamp(ours, 0, 0, 0)
    stamp(theirs, 0, 0, 0)
    assert ours == theirs


@given(st.lists(new_records, min_size=1, max_size=5), st.sampled_from(CODECS), st.integers(0, 1 << 50))
def test_kafka_python_decodes_encoded_batches(records: list[NewRecord], codec: int, base_offset: int) -> None:
    encoded = encode_batch(records, codec=codec, base_offset=base_offset)
    batches: Any = MemoryRecords(encoded)
    batch = batches.next_batch()
    assert batch.validate_crc()
    theirs = [Record(r.offset, r.timestamp, r.key, r.value, [tuple(h) for h in r.headers]) for r in batch]
    assert theirs == expected(records, base_offset)
    assert batches.next_batch() is None


def test_the_batch_header_returns_every_encoded_field() -> None:
    batch = encode_batch(
        [(b"k", b"v", [], 1000), (b"k", b"v", [], 900)],
        base_offset=70,
        producer_id=5,
        producer_epoch=2,
        base_sequence=(1 << 31) - 1,
        leader_epoch=9,
        is_transactional=True,
        codec=1,
    )
    header = read_batch_header(b"before" + batch, 6)
    assert header.size_bytes == len(batch)
    assert (header.base_offset, header.last_offset, header.next_offset) == (70, 71, 72)
    assert (header.partition_leader_epoch, header.magic, header.codec) == (9, 2, 1)
    assert (header.base_timestamp, header.max_timestamp) == (1000, 1000)
    assert (header.producer_id, header.producer_epoch, header.record_count) == (5, 2, 2)
    assert (header.is_transactional, header.is_control, header.log_append_time) == (True, False, False)
    assert header.last_sequence == 0, "sequences wrap behind 2^31-1"


def test_consecutive_batches_are_found_in_order() -> None:
    batches = [encode_batch([(None, b"x" * n, [], 0)]) for n in (0, 10, 200)]
    found = check_batches(memoryview(b"".join(batches)), MAX_BYTES)
    assert [start for start, _ in found] == [0, len(batches[0]), len(batches[0]) + len(batches[1])]
    assert [header.size_bytes for _, header in found] == [len(batch) for batch in batches]


def test_stamping_offset_and_epoch_leaves_the_crc_valid() -> None:
    first = encode_batch([(None, b"a", [], 0)])
    both = bytearray(first + encode_batch([(None, b"b", [], 0), (None, b"c", [], 0)]))
    stamp(both, len(first), 1000, 7)
    (_, untouched), (_, header) = check_batches(memoryview(both), MAX_BYTES)
    assert (untouched.base_offset, header.base_offset, header.partition_leader_epoch) == (0, 1000, 7)
    assert [record.offset for record in decode_batch(both, len(first))] == [1000, 1001]


@pytest.mark.parametrize("codec", CODECS)
def test_append_time_replaces_every_timestamp_and_updates_the_crc(codec: int) -> None:
    first = encode_batch([(None, b"a", [], 1)])
    both = bytearray(first + encode_batch([(None, b"b", [], 5), (None, b"c", [], 6)], codec=codec) + first)
    stamp_append_time(both, len(first), 123_456)
    (_, before), (_, header), (_, after) = check_batches(memoryview(both), MAX_BYTES)
    assert (header.log_append_time, header.max_timestamp, header.codec) == (True, 123_456, codec)
    assert (before.log_append_time, after.log_append_time) == (False, False)
    assert [record.timestamp_ms for record in decode_batch(both, len(first))] == [123_456, 123_456]


def test_compacted_batches_keep_their_offsets() -> None:
    batch = encode_batch(
        [(b"a", b"1", [], 10), (b"b", b"2", [], 20)], base_offset=100, offsets=[103, 107], last_offset=110
    )
    ((_, header),) = check_batches(memoryview(batch), MAX_BYTES, from_producer=False)
    assert (header.base_offset, header.last_offset, header.record_count) == (100, 110, 2)
    assert [record.offset for record in decode_batch(batch)] == [103, 107]
    with pytest.raises(KafkaError):
        check_batches(memoryview(batch), MAX_BYTES)


def test_an_empty_batch_keeps_the_offsets_that_it_covered() -> None:
    batch = encode_batch([], base_offset=100, last_offset=104, producer_id=1, producer_epoch=0, base_sequence=0)
    ((_, header),) = check_batches(memoryview(batch), MAX_BYTES, from_producer=False)
    assert (header.next_offset, header.last_sequence, header.record_count) == (105, 4, 0)
    assert list(decode_batch(batch)) == []


def refusal(records: bytes | bytearray, max_bytes: int = MAX_BYTES) -> ErrorCode:
    with pytest.raises(KafkaError) as caught:
        check_batches(memoryview(records), max_bytes)
    return caught.value.code


def test_invalid_producer_batches_are_refused_with_the_matching_error_code() -> None:
    batch = encode_batch([(b"k", b"v", [], 0)])
    assert refusal(b"") is ErrorCode.invalid_record
    assert refusal(batch[:-1]) is ErrorCode.corrupt_message
    assert refusal(batch[:10]) is ErrorCode.corrupt_message
    assert refusal(batch + b"\x00") is ErrorCode.corrupt_message
    assert refusal(batch, len(batch) - 1) is ErrorCode.message_too_large
    assert refusal(encode_batch([(b"k", b"v", [], 0)], is_control=True)) is ErrorCode.invalid_record
    assert refusal(encode_batch([])) is ErrorCode.invalid_record
    assert refusal(encode_batch([(b"k", b"v", [], 0)], last_offset=4)) is ErrorCode.invalid_record
    assert refusal(encode_batch([(b"k", b"v", [], 0)], producer_id=4)) is ErrorCode.invalid_record
    for magic, code in (
        (0, ErrorCode.unsupported_for_message_format),
        (1, ErrorCode.unsupported_for_message_format),
        (3, ErrorCode.corrupt_message),
    ):
        assert refusal(batch[:16] + bytes([magic]) + batch[17:]) is code


@pytest.mark.parametrize("length", [-1, -(1 << 31), 0, 48, (1 << 31) - 1])
def test_hostile_batch_lengths_are_corrupt(length: int) -> None:
    batch = bytearray(encode_batch([(b"k", b"v", [], 0)]))
    batch[8:12] = length.to_bytes(4, "big", signed=True)
    assert refusal(batch) is ErrorCode.corrupt_message
    with pytest.raises(KafkaError):
        list(decode_batch(batch))


@given(st.lists(new_records, min_size=1, max_size=3), st.data())
def test_any_flipped_bit_covered_by_the_crc_is_detected(records: list[NewRecord], data: st.DataObject) -> None:
    batch = bytearray(encode_batch(records))
    at = data.draw(st.integers(17, len(batch) - 1))
    batch[at] ^= 1 << data.draw(st.integers(0, 7))
    assert refusal(batch) is ErrorCode.corrupt_message


@given(st.lists(new_records, max_size=4), st.sampled_from(CODECS), st.data())
def test_damaged_records_decode_or_raise_corrupt_message(
    records: list[NewRecord], codec: int, data: st.DataObject
) -> None:
    batch = bytearray(encode_batch(records, codec=codec))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(HEADER_BYTES - 4, len(batch) - 1))
        batch[at] = data.draw(st.integers(0, 255))
    try:
        list(decode_batch(batch, max_bytes=1 << 16))
    except KafkaError as e:
        assert e.code is ErrorCode.corrupt_message


def test_a_batch_that_claims_more_records_than_it_has_is_corrupt() -> None:
    batch = bytearray(encode_batch([(b"k", b"v", [], 0)]))
    batch[57:61] = b"\x7f\xff\xff\xff"
    with pytest.raises(KafkaError):
        list(decode_batch(batch))
    batch[57:61] = b"\x00\x00\x00\x00"
    with pytest.raises(KafkaError):
        list(decode_batch(batch))


def test_header_keys_that_are_not_utf8_survive_a_round_trip() -> None:
    batch = bytearray(encode_batch([(b"k", b"v", [("ab", b"x")], 0)]))
    at = batch.index(b"ab")
    batch[at : at + 2] = b"\xff\xfe"
    (record,) = decode_batch(batch)
    again = encode_batch([(record.key, record.value, record.headers, record.timestamp_ms)])
    assert again[HEADER_BYTES:] == bytes(batch[HEADER_BYTES:])


# -- markers -----------------------------------------------------------------------------------------------------------


@given(st.booleans(), st.integers(0, (1 << 31) - 1), st.integers(0, 1 << 40), st.integers(0, (1 << 15) - 1))
def test_a_marker_returns_what_was_encoded(
    is_commit: bool, coordinator_epoch: int, producer_id: int, epoch: int
) -> None:
    batch = encode_marker(producer_id, epoch, is_commit, coordinator_epoch, 17)
    ((_, header),) = check_batches(memoryview(batch), MAX_BYTES, from_producer=False)
    assert header.is_control and header.is_transactional
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (producer_id, epoch, -1)
    assert (header.record_count, header.max_timestamp, header.last_sequence) == (1, 17, -1)
    assert read_marker(batch) == Marker(is_commit, coordinator_epoch)


@pytest.mark.parametrize(("is_commit", "key"), [(False, b"\0\0\0\0"), (True, b"\0\0\0\1")])
def test_a_marker_has_the_key_and_value_of_kafka(is_commit: bool, key: bytes) -> None:
    (record,) = decode_batch(encode_marker(1, 2, is_commit, 0x01020304, 17))
    assert (record.key, record.value, record.headers) == (key, b"\0\0\1\2\3\4", [])
    batches: Any = MemoryRecords(encode_marker(1, 2, is_commit, 5, 17))
    assert batches.next_batch().is_control_batch


def test_a_marker_of_a_later_version_is_read_by_its_known_fields() -> None:
    batch = encode_batch([(b"\0\1\0\1+", b"\0\1\0\0\0\7+", [], 0)], is_control=True)
    assert read_marker(batch) == Marker(True, 7)


@pytest.mark.parametrize(
    "record",
    [
        (None, b"\0\0\0\0\0\1", [], 0),
        (b"\0\0\0", b"\0\0\0\0\0\1", [], 0),
        (b"\0\0\0\2", b"\0\0\0\0\0\1", [], 0),
        (b"\xff\xff\0\1", b"\0\0\0\0\0\1", [], 0),
        (b"\0\0\0\1", b"\0\0\0\0\0", [], 0),
        (b"\0\0\0\1", b"\xff\xff\0\0\0\1", [], 0),
        (b"\0\0\0\1", None, [], 0),
    ],
)
def test_other_control_records_are_no_markers(record: NewRecord) -> None:
    with pytest.raises(KafkaError) as raised:
        read_marker(encode_batch([record], is_control=True))
    assert raised.value.code == ErrorCode.invalid_record


def test_an_empty_control_batch_is_no_marker() -> None:
    with pytest.raises(KafkaError):
        read_marker(encode_batch([], last_offset=0, is_control=True))


def test_a_producer_must_not_send_a_marker() -> None:
    with pytest.raises(KafkaError) as raised:
        check_batches(memoryview(encode_marker(1, 2, True, 3, 17)), MAX_BYTES)
    assert raised.value.code == ErrorCode.invalid_record
