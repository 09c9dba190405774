"""Record batches into Arrow: the compiled loop against the plain one, and against the original records."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from chronik.pipeline.source.columns import Chunk, arrow_schema
from chronik.pipeline.source.decoder import ArrowDecoder, PythonChunk
from chronik.pipeline.source.numba_chunk import NumbaChunk
from chronik.pipeline.source.ranges import RecordRange
from chronik.wire.batch import HEADER_BYTES, encode_batch, encode_marker, stamp
from chronik.wire.compression import CODECS
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.records import INT64_MIN, NewRecord, put_varint

NOW_MS = 1_700_000_000_000

# Some are longer than a chunk, so that rows are cut between and before them.
some_bytes = st.none() | st.binary(max_size=20) | st.integers(60, 300).map(lambda size: b"x" * size)
header = st.tuples(st.text(max_size=5) | st.sampled_from(["\udcff\udc80", "trace-id"]), some_bytes)
record = st.tuples(
    some_bytes,
    some_bytes,
    st.lists(header, max_size=4),
    st.integers(NOW_MS - 10**9, NOW_MS + 10**9) | st.sampled_from([-1, 0, 2**53, -(2**62)]),
)


def decode(
    raw: bytes,
    *,
    start: int = 0,
    stop: int = 2**62,
    chunk: type[Chunk] = NumbaChunk,
    with_headers: bool = True,
    rows_max: int = 7,
    bytes_max: int = 64,
    aborted: Sequence[tuple[int, int]] = (),
    feeds: int = 1,
) -> list[Any]:
    decoder = ArrowDecoder(
        RecordRange("orders", 3, start, stop),
        with_headers=with_headers,
        rows_max=rows_max,
        bytes_max=bytes_max,
        chunk=chunk,
    )
    made: list[Any] = []
    for _ in range(feeds):
        made += decoder.feed(memoryview(raw), aborted)
    made += decoder.finish()
    for batch in made:
        batch.validate(full=True)
        assert batch.schema == arrow_schema(with_headers)
        assert 0 < batch.num_rows <= rows_max
    return made


def rows(raw: bytes, **options: Any) -> list[dict[str, Any]]:
    """Return each row with its time in microseconds: Python's datetime ends with the year 9999."""
    found = []
    for batch in decode(raw, **options):
        at = batch.schema.get_field_index("timestamp")
        found += batch.set_column(at, "timestamp", batch["timestamp"].cast(pa.int64())).to_pylist()
    return found


def offsets(raw: bytes, **options: Any) -> list[int]:
    return [row["offset"] for row in rows(raw, **options)]


def numbered(count: int, first: int = 0) -> list[NewRecord]:
    return [(b"k%d" % i, b"v%d" % i, (), NOW_MS + i) for i in range(first, first + count)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[bytes, int]:
    """Return batches of one partition as a broker stores them, some of them compacted, and their end offset."""
    raw, at = b"", draw(st.integers(0, 2**40))
    for _ in range(draw(st.integers(1, 3))):
        kept = sorted(draw(st.sets(st.integers(0, 30), max_size=12)))
        records = [draw(record) for _ in kept]
        raw += encode_batch(
            records,
            codec=draw(st.integers(0, len(CODECS) - 1)),
            base_offset=at,
            offsets=[at + delta for delta in kept],
            last_offset=at + 30,
            append_time_ms=draw(st.none() | st.just(NOW_MS)),
        )
        at += 31
    return raw, at


@settings(max_examples=150)
@given(batches(), st.data())
def test_the_compiled_decoder_returns_the_same_rows_as_the_plain_decoder(
    made: tuple[bytes, int], data: st.DataObject
) -> None:
    raw, end = made
    start = data.draw(st.integers(max(0, end - 100), end))
    stop = data.draw(st.integers(start, end + 5))
    with_headers = data.draw(st.booleans())
    compiled, plain = (
        rows(raw, start=start, stop=stop, with_headers=with_headers, chunk=chunk) for chunk in (NumbaChunk, PythonChunk)
    )
    assert compiled == plain


@pytest.mark.parametrize("chunk", [NumbaChunk, PythonChunk])
def test_a_timestamp_below_64_bits_is_an_error(chunk: Any) -> None:
    raw = bytearray(encode_batch([(None, b"", [], INT64_MIN // 2), (None, b"", [], 0)]))
    struct.pack_into(">q", raw, 27, INT64_MIN)  # the base: both deltas are as they were
    delta = bytearray()
    put_varint(delta, -(INT64_MIN // 2))
    raw[raw.index(delta)] ^= 1  # its sign
    struct.pack_into(">I", raw, 17, crc32c(raw[21:]))
    with pytest.raises(KafkaError) as refused:
        rows(bytes(raw), chunk=chunk)
    assert refused.value.code is ErrorCode.corrupt_message


@settings(max_examples=300)
@given(st.lists(record, min_size=1, max_size=5), st.data())
def test_both_decoders_read_damaged_records_alike(records: list[NewRecord], data: st.DataObject) -> None:
    """With a valid CRC, as a broken producer would send them."""
    raw = bytearray(encode_batch(records))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(HEADER_BYTES, len(raw) - 1))
        raw[place] = data.draw(st.integers(0, 255) | st.sampled_from([0x7F, 0x80, 0xFE, 0xFF]))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(HEADER_BYTES, len(raw) - 1)) :]
        struct.pack_into(">i", raw, 8, len(raw) - 12)
    struct.pack_into(">I", raw, 17, crc32c(raw[21:]))
    outcomes = []
    for chunk in (NumbaChunk, PythonChunk):
        try:
            outcomes.append(rows(bytes(raw), chunk=chunk))
        except KafkaError as error:
            outcomes.append([{"error": error.code}])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("codec", range(len(CODECS)))
def test_rows_equal_the_encoded_records(codec: int) -> None:
    headers = [("a", b"1"), ("b", None), ("ü", b"")]
    records: list[NewRecord] = [(b"k", b"v" * 300, headers, NOW_MS), (None, None, (), NOW_MS + 5), (b"", b"", (), -1)]
    found = rows(encode_batch(records, codec=codec, base_offset=40))
    assert [(row["key"], row["value"]) for row in found] == [(b"k", b"v" * 300), (None, None), (b"", b"")]
    assert [row["offset"] for row in found] == [40, 41, 42]
    assert {(row["topic"], row["partition"], row["timestampType"]) for row in found} == {("orders", 3, 0)}
    assert [row["timestamp"] // 1000 for row in found] == [NOW_MS, NOW_MS + 5, -1]
    assert found[0]["headers"] == [{"key": name, "value": value} for name, value in headers]
    assert found[1]["headers"] is None


def test_log_append_time_is_the_timestamp_of_every_record() -> None:
    found = rows(encode_batch(numbered(2), append_time_ms=NOW_MS + 99))
    assert {row["timestamp"] // 1000 for row in found} == {NOW_MS + 99}
    assert {row["timestampType"] for row in found} == {1}


def test_a_timestamp_beyond_the_range_of_tables_is_null() -> None:
    """Nanoseconds instead of milliseconds are a common mistake of producers; the record is still valid."""
    found = rows(encode_batch([(None, b"v", (), NOW_MS * 1_000_000)]))
    assert [row["timestamp"] for row in found] == [None]


def test_the_decoder_skips_control_batches() -> None:
    control = marker(7, 2, True)
    raw = encode_batch(numbered(2)) + control + encode_batch(numbered(2), base_offset=3)
    assert offsets(raw) == [0, 1, 3, 4]
    decoder = ArrowDecoder(RecordRange("orders", 3, 2, 3))
    assert list(decoder.feed(memoryview(control))) == []
    assert decoder.is_done


def transactional(producer_id: int, base_offset: int) -> bytes:
    return encode_batch(
        numbered(2), base_offset=base_offset, producer_id=producer_id, producer_epoch=0, is_transactional=True
    )


def marker(producer_id: int, base_offset: int, is_commit: bool) -> bytes:
    batch = bytearray(encode_marker(producer_id, 0, is_commit, 0, NOW_MS))
    stamp(batch, 0, base_offset, 0)
    return bytes(batch)


def test_the_decoder_skips_records_of_aborted_transactions() -> None:
    ends = marker(7, 4, False) + marker(8, 5, True)
    raw = transactional(7, 0) + transactional(8, 2) + ends + transactional(7, 6)
    assert offsets(raw, aborted=[(7, 0)]) == [2, 3, 6, 7]
    assert offsets(raw) == [0, 1, 2, 3, 6, 7]


@settings(max_examples=200)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["write", "write", "commit", "abort"])), max_size=25),
    data=st.data(),
)
def test_both_decoders_return_committed_records_only(steps: list[tuple[int, str]], data: st.DataObject) -> None:
    """Interleaved transactions, read from any offset, with any cut between two responses."""
    log: list[bytes] = []
    starts: list[int] = []
    at, visible = 0, set[int]()
    first_of: dict[int, int] = {}
    written: dict[int, list[int]] = {}
    aborted: list[tuple[int, int, int]] = []
    steps = [*steps, *((producer, "commit") for producer in range(3))]
    for producer, step in steps:
        if step != "write" and producer not in first_of:
            continue
        starts.append(at)
        if step == "write":
            first_of.setdefault(producer, at)
            written.setdefault(producer, []).extend((at, at + 1))
            log.append(transactional(producer, at))
            at += 2
            continue
        log.append(marker(producer, at, step == "commit"))
        if step == "commit":
            visible |= set(written.pop(producer))
        else:
            del written[producer]
            aborted.append((producer, first_of[producer], at))
        del first_of[producer]
        at += 1
    if not log:
        return
    begin, cut = data.draw(st.integers(0, len(log) - 1)), data.draw(st.integers(0, len(log)))
    for chunk in (NumbaChunk, PythonChunk):
        decoder = ArrowDecoder(RecordRange("orders", 3, starts[begin], at), chunk=chunk)
        made: list[Any] = []
        for part in (range(begin, max(begin, cut)), range(max(begin, cut), len(log))):
            if part:
                end = starts[part.stop] if part.stop < len(log) else at
                listed = [(who, low) for who, low, high in aborted if low < end and high >= starts[part.start]]
                made += decoder.feed(memoryview(b"".join(log[part.start : part.stop])), listed[::-1])
        made += decoder.finish()
        found = [offset for batch in made for offset in batch.column("offset").to_pylist()]
        assert found == sorted(offset for offset in visible if offset >= starts[begin])


def test_a_range_may_start_and_end_inside_a_batch() -> None:
    raw = encode_batch(numbered(10)) + encode_batch(numbered(10), base_offset=10)
    assert offsets(raw, start=7, stop=13) == list(range(7, 13))


def test_an_incomplete_batch_is_decoded_after_the_next_fetch() -> None:
    first, second = encode_batch(numbered(3)), encode_batch(numbered(3), base_offset=3)
    decoder = ArrowDecoder(RecordRange("orders", 3, 0, 6))
    list(decoder.feed(memoryview(first + second[:-1])))
    assert (decoder.next_offset, decoder.is_done) == (3, False)
    list(decoder.feed(memoryview(second)))
    assert decoder.is_done
    assert [row for batch in decoder.finish() for row in batch["offset"].to_pylist()] == list(range(6))


def test_rows_accumulate_across_fetches_until_a_chunk_is_full() -> None:
    raws = [encode_batch(numbered(3), base_offset=3 * i) for i in range(4)]
    decoder = ArrowDecoder(RecordRange("orders", 3, 0, 12), rows_max=5)
    sizes = [batch.num_rows for raw in raws for batch in decoder.feed(memoryview(raw))]
    assert sizes + [batch.num_rows for batch in decoder.finish()] == [5, 5, 2]


def test_a_record_with_more_headers_than_a_chunk_holds_is_decoded() -> None:
    many = [(f"h{i}", b"x") for i in range(500)]
    found = rows(encode_batch([(b"k", b"v", many, NOW_MS), *numbered(3)]), rows_max=2)
    assert len(found[0]["headers"]) == 500
    assert len(found) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:30] + bytes([raw[30] ^ 1]) + raw[31:],
        lambda raw: raw[:16] + b"\x01" + raw[17:],
        lambda raw: raw[:8] + b"\xff\xff\xff\xf0" + raw[12:],
        lambda raw: raw[:40],
    ],
    ids=["crc", "old format", "negative length", "cut off, and nothing else"],
)
def test_a_damaged_batch_is_an_error(damage: Any) -> None:
    with pytest.raises(KafkaError) as raised:
        rows(damage(encode_batch(numbered(3))))
    assert raised.value.code in (ErrorCode.corrupt_message, ErrorCode.unsupported_for_message_format)
    assert "\n" not in str(raised.value)


def test_the_error_names_the_partition_and_the_batch() -> None:
    raw = bytearray(encode_batch(numbered(3), base_offset=17))
    raw[HEADER_BYTES] = 0x7F
    struct.pack_into(">I", raw, 17, crc32c(raw[21:]))
    with pytest.raises(KafkaError, match="orders-3, batch at 17: record longer than its batch"):
        rows(bytes(raw))
