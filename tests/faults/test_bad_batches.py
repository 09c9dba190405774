"""Record batches with a wrong CRC, length, format or compression, or that decompress to far more than they claim."""

from __future__ import annotations

import random
import struct
import zlib
from collections import Counter
from collections.abc import Iterator

import cramjam
import pytest
from crc32c import crc32c
from tests.cluster.support_cluster import reset_peak
from tests.conftest import StartNode
from tests.faults.support_load import MB, HealthyClient, memory_bytes, no_surprises
from tests.node.support_wire import TIMESTAMP_MS, WireClient, batch, connect
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.testing.fuzz.damage import signed_mutant
from chronik.wire.api import ApiKey
from chronik.wire.batch import HEADER_BYTES, encode_batch, read_batch_header
from chronik.wire.errors import ErrorCode

NONE, GZIP, SNAPPY, LZ4, ZSTD = 0, 1, 2, 3, 4
SHORT_RUN = 1_500
FULL_RUN = 50_000
LENGTH_AT, MAGIC_AT, CRC_AT, ATTRIBUTES_AT, COUNT_AT = 8, 16, 17, 21, 57
LAST_OFFSET_DELTA_AT, BASE_TIMESTAMP_AT = 23, 27

PEAK_GROWTH_MAX_BYTES = 400 * MB
"""Peak memory allowed for reading one batch: the bound on its records, and copies of them."""
GROWTH_MAX_BYTES = 30 * MB


@pytest.fixture
def client(shared_node: Node) -> Iterator[WireClient]:
    with connect(shared_node) as client:
        yield client


@pytest.fixture(scope="module")
def bombed(start_shared_node: StartNode) -> Node:
    """A node for this module alone, as its memory is measured; with one thread, as each thread has its own heap."""
    return start_shared_node(executor_threads=1)


def changed(data: bytes, at: int, layout: str, value: int, *, resign: bool = True) -> bytes:
    """Return the batch with one header field changed, and its CRC recomputed if `resign`."""
    out = bytearray(data)
    struct.pack_into(layout, out, at, value)
    if resign:
        struct.pack_into(">I", out, CRC_AT, crc32c(bytes(out[ATTRIBUTES_AT:])))
    return bytes(out)


def with_payload(payload: bytes, codec: int, record_count: int = 1) -> bytes:
    """Return a batch with `payload` as its records, marked as compressed by `codec`."""
    out = bytearray(batch(b"x")[:HEADER_BYTES] + payload)
    struct.pack_into(">i", out, LENGTH_AT, len(out) - 12)
    struct.pack_into(">h", out, ATTRIBUTES_AT, codec)
    struct.pack_into(">i", out, LAST_OFFSET_DELTA_AT, record_count - 1)
    struct.pack_into(">i", out, COUNT_AT, record_count)
    struct.pack_into(">I", out, CRC_AT, crc32c(bytes(out[ATTRIBUTES_AT:])))
    return bytes(out)


def test_a_batch_with_a_corrupt_byte_at_any_position_fails_the_crc_check(client: WireClient) -> None:
    topic = client.new_topic()
    good = batch(b"value" * 10)
    for at in range(CRC_AT, len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x10
        assert client.produce(topic, bytes(bad)).error_code == ErrorCode.corrupt_message, f"byte {at}"
    assert client.records(topic) == []
    assert client.append(topic, b"good") == 0


@pytest.mark.parametrize(("magic", "expected"), [(0, 43), (1, 43), (7, 2), (-1, 2)])
def test_a_batch_with_an_unsupported_magic_is_refused(client: WireClient, magic: int, expected: int) -> None:
    topic = client.new_topic()
    bad = changed(batch(b"x"), MAGIC_AT, ">b", magic)
    assert client.produce(topic, bad).error_code == expected
    assert client.records(topic) == []


def test_a_message_of_format_0_or_1_is_refused(client: WireClient) -> None:
    topic = client.new_topic()
    for magic, time_ms in ((0, b""), (1, struct.pack(">q", 1_700_000_000_000))):
        message = struct.pack(">bb", magic, 0) + time_ms + struct.pack(">i", -1) + struct.pack(">i", 5) + b"value"
        message = struct.pack(">I", zlib.crc32(message)) + message
        old = struct.pack(">qi", 0, len(message)) + message
        assert client.produce(topic, old).error_code == ErrorCode.unsupported_for_message_format
    assert client.records(topic) == []


@pytest.mark.parametrize("length", [0, 1, 48, -1, -(2**31), 2**31 - 1, 10_000])
def test_a_batch_with_a_wrong_length_is_refused(client: WireClient, length: int) -> None:
    topic = client.new_topic()
    bad = changed(batch(b"x" * 100), LENGTH_AT, ">i", length)
    assert client.produce(topic, bad).error_code in (ErrorCode.corrupt_message, ErrorCode.message_too_large)
    assert client.records(topic) == []


@pytest.mark.parametrize("count", [0, -1, 2, 2**31 - 1, -(2**31)])
def test_a_batch_with_a_wrong_record_count_is_refused(client: WireClient, count: int) -> None:
    topic = client.new_topic()
    bad = changed(batch(b"x"), COUNT_AT, ">i", count)
    assert client.produce(topic, bad).error_code == ErrorCode.invalid_record
    assert client.records(topic) == []


def test_a_batch_truncated_at_any_byte_is_refused(client: WireClient) -> None:
    topic = client.new_topic()
    good = batch(b"x" * 20)
    for end in range(len(good)):
        assert client.produce(topic, good[:end]).error_code != 0, f"{end} of {len(good)} bytes"
    assert client.records(topic) == []


def test_a_control_batch_from_a_producer_is_refused(client: WireClient) -> None:
    topic = client.new_topic()
    control = encode_batch([(b"\x00\x00\x00\x01", b"\x00" * 6, (), 1)], is_control=True)
    assert client.produce(topic, control).error_code == ErrorCode.invalid_record
    assert client.records(topic) == []


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_a_batch_with_an_unknown_codec_is_refused(client: WireClient, codec: int) -> None:
    topic = client.new_topic()
    assert client.produce(topic, with_payload(b"payload", codec)).error_code == ErrorCode.unsupported_compression_type
    assert client.records(topic) == []


@pytest.mark.parametrize("codec", range(5), ids=["none", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("payload", [b"", b"\xff" * 200, bytes(200)], ids=["empty", "ones", "zeros"])
def test_records_that_do_not_decode_are_refused_or_harmless(
    client: WireClient, shared_node: Node, codec: int, payload: bytes
) -> None:
    for topic in (client.new_topic(cleanup_policy="compact"), client.new_topic(compression_type="zstd")):
        answer = client.produce(topic, with_payload(payload, codec))
        if codec == ZSTD and "zstd" in topic:
            continue
        assert answer.error_code in (ErrorCode.corrupt_message, ErrorCode.invalid_record, 0), answer
    no_surprises(shared_node)


def test_a_timestamp_beyond_64_bits_is_refused_if_the_node_recompresses_the_batch(
    client: WireClient, shared_node: Node
) -> None:
    for topic in (client.new_topic(compression_type="zstd"), client.new_topic(compression_type="uncompressed")):
        for base_timestamp in (2**63 - 1, -(2**63) + 1):
            gzipped = encode_batch([(b"k", b"x", (), 10), (b"k", b"y", (), 15), (b"k", b"z", (), 5)], codec=GZIP)
            answer = client.produce(topic, changed(gzipped, BASE_TIMESTAMP_AT, ">q", base_timestamp))
            assert answer.error_code in (
                ErrorCode.corrupt_message,
                ErrorCode.invalid_record,
                ErrorCode.invalid_timestamp,
            )
    no_surprises(shared_node)


def test_malformed_batches_with_a_valid_crc_are_refused_or_harmless(bombed: Node) -> None:
    run_batch_fuzzer(bombed, SHORT_RUN)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_thousand_malformed_batches_with_a_valid_crc_are_harmless(bombed: Node) -> None:
    run_batch_fuzzer(bombed, FULL_RUN)


def run_batch_fuzzer(node: Node, count: int) -> None:
    random_ = random.Random(3)
    good = [batch(b"value" * 20, b"another", b"third", codec=codec) for codec in range(5)]
    good += [batch(b"value", producer_id=5, producer_epoch=0, base_sequence=0)]
    answers: Counter[int] = Counter()
    with connect(node) as client, HealthyClient(node):
        topics = [
            client.new_topic(),
            client.new_topic(cleanup_policy="compact"),
            client.new_topic(compression_type="zstd"),
            client.new_topic(message_timestamp_type="LogAppendTime"),
        ]
        for _ in range(count):
            answers[
                client.produce(random_.choice(topics), signed_mutant(random_, random_.choice(good))).error_code
            ] += 1
        # Every accepted batch can be fetched, and found by timestamp, before and after a crash.
        ends = [served(client, topic) for topic in topics]
    assert len(answers) >= 3, answers
    assert ErrorCode.unknown_server_error not in answers
    no_surprises(node)
    node.kill()
    node.start()
    with connect(node) as client:
        assert [served(client, topic) for topic in topics] == ends
        assert [client.append(topic, b"next") for topic in topics] == ends
    no_surprises(node)


def test_compaction_keeps_batches_that_it_cannot_read_and_continues(start_node: StartNode) -> None:
    node = start_node(compaction_check_interval_ms=100)
    with connect(node) as client:
        topic = client.new_topic(segment_bytes=str(MB), min_cleanable_dirty_ratio="0.01")
        unreadable = [with_payload(b"\xff" * 300_000, NONE), with_payload(b"\xff" * 300_000, SNAPPY)]
        assert [client.produce(topic, spoilt).error_code for spoilt in unreadable] == [0, 0]
        for _ in range(8):
            client.append(topic, bytes(300_000))
        change = {"name": "cleanup.policy", "config_operation": 0, "value": "compact"}
        resource = {"resource_type": 2, "resource_name": topic, "configs": [change]}
        client.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]})
        eventually(lambda: "log_compacted" in node.log_text(), what="the log is compacted")
        stored = bytes(client.fetch_one(topic).records)
        assert stored[16 : len(unreadable[0])] == unreadable[0][16:]
        assert client.append(topic, b"next") == 10
    no_surprises(node)


def served(client: WireClient, topic: str) -> int:
    """Fetch the whole log batch by batch, look up some timestamps, and return the end offset."""
    end = client.offset_at(topic, -1)
    offset = 0
    while offset < end:
        response = client.fetch_one(topic, offset)
        assert response.error_code == 0
        data = bytes(response.records)
        at = 0
        while at < len(data):
            header = read_batch_header(data, at)
            assert header.base_offset == offset
            offset = header.next_offset
            at += header.size_bytes
    for timestamp in (-3, 0, TIMESTAMP_MS, (1 << 63) - 1):
        wanted = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
        values = {"replica_id": -1, "topics": [{"name": topic, "partitions": [wanted]}]}
        found = client.call(ApiKey.LIST_OFFSETS, 7, values).topics[0].partitions[0]
        assert found.error_code is not ErrorCode.unknown_server_error
        assert -1 <= found.offset < max(end, 1)
    return end


def gzip_bomb() -> bytes:
    """Return about a megabyte that decompresses to a gigabyte: one flushed block of zeros, repeated."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = deflate.compress(bytes(64 * MB)) + deflate.flush(zlib.Z_FULL_FLUSH)
    header = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"
    return header + block * (1_000_000 // len(block))


def zstd_bomb() -> bytes:
    frame = bytes(cramjam.zstd.compress(bytes(64 * MB)))
    return frame * (1_000_000 // len(frame))


def lz4_bomb() -> bytes:
    compressor = cramjam.lz4.Compressor(content_checksum=False, block_linked=False)
    compressor.compress(bytes(200 * MB))
    return bytes(compressor.finish())


BOMBS = {GZIP: gzip_bomb, LZ4: lz4_bomb, ZSTD: zstd_bomb}


@pytest.mark.parametrize("codec", BOMBS, ids=["gzip", "lz4", "zstd"])
def test_a_compression_bomb_is_refused_if_decoded_and_memory_stays_bounded(bombed: Node, codec: int) -> None:
    bomb = with_payload(BOMBS[codec](), codec)
    assert 500_000 < len(bomb) < 1_048_588
    with connect(bombed, timeout_s=30) as client:
        plain = client.new_topic()
        compacted = client.new_topic(cleanup_policy="compact")
        recompressed = client.new_topic(compression_type="snappy")

        def throw() -> None:
            # The node does not decompress it here: it stores the batch as received, for the consumer to decode.
            assert client.produce(plain, bomb).error_code == 0
            # Here the node must read the records, and rejects the batch.
            for topic in (compacted, recompressed):
                assert client.produce(topic, bomb).error_code in (ErrorCode.corrupt_message, ErrorCode.invalid_record)
            # A lookup by timestamp reads one batch: this one.
            for timestamp in (1, -3):
                wanted = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
                topics = [{"name": plain, "partitions": [wanted]}]
                client.call(ApiKey.LIST_OFFSETS, 7, {"replica_id": -1, "topics": topics})

        with HealthyClient(bombed, slowest_s_max=10.0):
            before = reset_peak(bombed.pid)
            throw()
            once = memory_bytes(bombed)
            throw()
        peak = memory_bytes(bombed, "VmHWM") - before
        assert peak < PEAK_GROWTH_MAX_BYTES, f"{peak / MB:.0f} MB more at its peak"
        grown = memory_bytes(bombed) - once
        assert grown < GROWTH_MAX_BYTES, f"{grown / MB:.0f} MB more with every bomb"
    no_surprises(bombed)


def test_a_node_with_compression_bombs_in_its_logs_recovers_from_a_crash(bombed: Node) -> None:
    with connect(bombed) as client:
        topic = client.new_topic()
        for codec, bomb in BOMBS.items():
            assert client.produce(topic, with_payload(bomb(), codec)).error_code == 0
    bombed.kill()
    bombed.start()
    with connect(bombed) as client:
        assert client.offset_at(topic, -1) == len(BOMBS)
        assert client.append(topic, b"next") == len(BOMBS)


def test_a_batch_of_millions_of_tiny_records_does_not_block_other_clients(bombed: Node) -> None:
    one = bytes.fromhex("0e 00 00 00 02 6b 00 00".replace(" ", ""))  # length 7: key "k", empty value, no headers
    count = 4_000_000
    many = with_payload(bytes(cramjam.zstd.compress(one * count)), ZSTD, count)
    assert len(many) < 1_048_588
    with connect(bombed, timeout_s=60) as client:
        compacted = client.new_topic(cleanup_policy="compact")
        with HealthyClient(bombed, slowest_s_max=2.0):
            client.produce(compacted, many)
    no_surprises(bombed)
