"""Codecs: what clients compress can be read, and decompression never exceeds its memory limit."""

import gzip
import resource
import struct
import subprocess
import sys
import zlib

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import codec as kafka_python

from chronik.wire.compression import CODECS, GZIP, LZ4, NONE, SNAPPY, ZSTD, compress, decompress
from chronik.wire.errors import ErrorCode, KafkaError

ALL = (NONE, GZIP, SNAPPY, LZ4, ZSTD)
payloads = st.binary(max_size=2000) | st.binary(max_size=20).map(lambda data: data * 5000)

THEIR_ENCODERS = {
    GZIP: kafka_python.gzip_encode,
    SNAPPY: kafka_python.snappy_encode,
    LZ4: kafka_python.lz4_encode,
    ZSTD: kafka_python.zstd_encode,
}
THEIR_DECODERS = {
    GZIP: kafka_python.gzip_decode,
    SNAPPY: kafka_python.snappy_decode,
    LZ4: kafka_python.lz4_decode,
    ZSTD: kafka_python.zstd_decode,
}


@given(st.sampled_from(ALL), payloads)
def test_decompression_restores_the_compressed_data(codec: int, data: bytes) -> None:
    packed = compress(codec, data)
    assert decompress(codec, packed, len(data)) == data
    assert decompress(codec, memoryview(bytearray(packed)), len(data) + 1) == data


@given(st.sampled_from(sorted(THEIR_ENCODERS)), payloads)
def test_compressed_data_is_compatible_with_kafka_python(codec: int, data: bytes) -> None:
    assert decompress(codec, bytes(THEIR_ENCODERS[codec](data)), len(data)) == data
    if data:
        assert bytes(THEIR_DECODERS[codec](compress(codec, data))) == data


@given(payloads)
def test_raw_snappy_from_librdkafka_is_decompressed(data: bytes) -> None:
    assert decompress(SNAPPY, bytes(cramjam.snappy.compress_raw(data)), len(data)) == data


def test_lz4_frames_have_independent_blocks() -> None:
    flags = compress(LZ4, b"x" * 200_000)[4]
    assert flags & 0b0010_0000, "Java reads no linked blocks"


@given(st.sampled_from(ALL), st.binary(min_size=1, max_size=20).map(lambda data: data * 500), st.data())
def test_output_above_the_size_limit_is_refused(codec: int, data: bytes, draw: st.DataObject) -> None:
    packed = compress(codec, data)
    with pytest.raises(KafkaError) as caught:
        decompress(codec, packed, draw.draw(st.integers(0, len(data) - 1)))
    assert caught.value.code is ErrorCode.corrupt_message


@given(st.sampled_from(ALL[1:]), st.binary(max_size=200))
def test_random_bytes_decompress_or_raise_corrupt_message(codec: int, data: bytes) -> None:
    try:
        decompress(codec, data, 1 << 20)
    except KafkaError as e:
        assert e.code is ErrorCode.corrupt_message


@given(st.sampled_from(ALL[1:]), payloads, st.data())
def test_truncated_or_damaged_data_decompresses_or_raises_corrupt_message(
    codec: int, data: bytes, draw: st.DataObject
) -> None:
    packed = bytearray(compress(codec, data))
    at = draw.draw(st.integers(0, len(packed) - 1))
    if draw.draw(st.booleans()):
        del packed[at:]
    else:
        packed[at] ^= draw.draw(st.integers(1, 255))
    try:
        assert len(decompress(codec, packed, 1 << 20)) <= 1 << 20
    except KafkaError as e:
        assert e.code is ErrorCode.corrupt_message


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_unknown_codecs_are_refused(codec: int) -> None:
    assert codec >= len(CODECS)
    with pytest.raises(KafkaError) as caught:
        compress(codec, b"")
    assert caught.value.code is ErrorCode.unsupported_compression_type
    with pytest.raises(KafkaError) as caught:
        decompress(codec, b"", 10)
    assert caught.value.code is ErrorCode.unsupported_compression_type


def test_snappy_with_an_impossible_size_is_corrupt() -> None:
    claim = b"\xff\xff\xff\x7f"
    for data in (claim + b"\x00a", b"\x82SNAPPY\x00" + bytes(8) + struct.pack(">i", 6) + claim + b"\x00a"):
        with pytest.raises(KafkaError):
            decompress(SNAPPY, data, 1 << 30)


@pytest.mark.parametrize("size", [-1, 0, 100, (1 << 31) - 1])
def test_hostile_xerial_block_sizes_are_corrupt(size: int) -> None:
    data = b"\x82SNAPPY\x00" + bytes(8) + struct.pack(">i", size) + b"abc"
    with pytest.raises(KafkaError):
        decompress(SNAPPY, data, 1 << 20)


def test_consecutive_gzip_members_are_refused() -> None:
    with pytest.raises(KafkaError):
        decompress(GZIP, gzip.compress(b"a") * 2, 100)


def test_decompression_bombs_are_refused_within_the_memory_limit() -> None:
    """Refuse 512 MB in each codec, in a process whose memory is limited to a few hundred megabytes."""
    gzip_bomb = zlib.compressobj(9, wbits=31)
    chunk = bytes(1 << 20)
    bomb = b"".join(gzip_bomb.compress(chunk) for _ in range(512)) + gzip_bomb.flush()
    lz4 = cramjam.lz4.Compressor(block_linked=False)
    zstd = cramjam.zstd.Compressor()
    for _ in range(512):
        lz4.compress(chunk)
        zstd.compress(chunk)
    block = bytes(cramjam.snappy.compress_raw(chunk))
    snappy = b"\x82SNAPPY\x00" + bytes(8) + (struct.pack(">i", len(block)) + block) * 512
    bombs = {GZIP: bomb, SNAPPY: snappy, LZ4: bytes(lz4.finish()), ZSTD: bytes(zstd.finish())}
    code = (
        "import sys\n"
        "from chronik.wire.compression import decompress\n"
        "from chronik.wire.errors import KafkaError\n"
        "data = sys.stdin.buffer.read()\n"
        "try:\n"
        "    decompress(int(sys.argv[1]), data, 1 << 20)\n"
        "except KafkaError as e:\n"
        "    print(e.code.name)\n"
    )
    allowance_bytes = 400 << 20
    for codec, data in bombs.items():
        done = subprocess.run(
            [sys.executable, "-c", code, str(codec)],
            input=data,
            capture_output=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (allowance_bytes, allowance_bytes)),
        )
        assert done.stdout.decode().strip() == "corrupt_message", (CODECS[codec], done.stderr.decode())
