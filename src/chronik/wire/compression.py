"""The four codecs of record batches, with bounded memory for decompression.

    0 none, 1 gzip, 2 snappy, 3 lz4 (frame format, independent blocks: Java reads no linked ones), 4 zstd

Snappy comes in two formats. Java writes xerial's stream: the 8 bytes 82 "SNAPPY" 00, two int32 versions, then blocks of
int32 size and raw snappy; librdkafka writes one raw block. Both are read; xerial's is written.

No size claimed in the data is trusted: the output buffer starts small and grows up to `max_bytes` as real bytes arrive.
Output that does not fit raises CORRUPT_MESSAGE, as does data that does not decompress.
"""

import zlib
from collections.abc import Callable
from struct import Struct
from typing import Final

import cramjam

from chronik.wire.errors import ErrorCode, KafkaError

Buffer = bytes | bytearray | memoryview
View = memoryview
"""For the fields of classes: mypyc does not find the built-in type by its own name there."""

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
_INT32: Final = Struct(">i")

# A three-byte element copies up to 64 bytes, so no valid block expands by more than this factor.
_SNAPPY_RATIO_MAX: Final = 64
_FIRST_OUTPUT_BYTES: Final = 64 * 1024


def compress(codec: int, data: Buffer) -> bytes:
    """Compress the records part of a batch."""
    if codec == NONE:
        return bytes(data)
    if codec == GZIP:
        gzip = zlib.compressobj(wbits=31)
        return gzip.compress(data) + gzip.flush()
    if codec == SNAPPY:
        return _compress_xerial(memoryview(data))
    if codec == LZ4:
        lz4 = cramjam.lz4.Compressor(content_checksum=False, block_linked=False)
        lz4.compress(bytes(data))
        return bytes(lz4.finish())
    if codec == ZSTD:
        return bytes(cramjam.zstd.compress(bytes(data)))
    raise KafkaError(ErrorCode.unsupported_compression_type, f"codec {codec}")


def decompress(codec: int, data: Buffer, max_bytes: int) -> bytes:
    """Decompress the records part of a batch into at most `max_bytes`."""
    if codec == NONE:
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
        return bytes(data)
    if codec == GZIP:
        return _decompress_gzip(data, max_bytes)
    if codec == SNAPPY:
        return _decompress_snappy(memoryview(data), max_bytes)
    if codec == LZ4:
        return _decompress_growing(cramjam.lz4.decompress_into, data, max_bytes)
    if codec == ZSTD:
        return _decompress_growing(cramjam.zstd.decompress_into, data, max_bytes)
    raise KafkaError(ErrorCode.unsupported_compression_type, f"codec {codec}")


def _too_large(max_bytes: int) -> KafkaError:
    return KafkaError(ErrorCode.corrupt_message, f"decompresses to more than {max_bytes} bytes")


def _corrupt(why: object) -> KafkaError:
    return KafkaError(ErrorCode.corrupt_message, f"does not decompress: {why}")


def _decompress_gzip(data: Buffer, max_bytes: int) -> bytes:
    gzip = zlib.decompressobj(wbits=31)
    try:
        # One byte more than allowed, since a limit of 0 would mean no limit.
        output = gzip.decompress(data, max_bytes + 1)
    except zlib.error as e:
        raise _corrupt(e) from e
    if len(output) > max_bytes:
        raise _too_large(max_bytes)
    # No client writes several members in a row, and thousands of empty ones would cost quadratic time.
    if not gzip.eof or gzip.unused_data:
        raise _corrupt("gzip stream cut short" if not gzip.eof else "bytes after the gzip stream")
    return output


def _decompress_growing(into: Callable[[Buffer, bytearray], int], data: Buffer, max_bytes: int) -> bytes:
    size_bytes = min(max_bytes, max(_FIRST_OUTPUT_BYTES, 4 * len(data)))
    while True:
        output = bytearray(size_bytes)
        try:
            written = into(data, output)
        except cramjam.DecompressionError as e:
            # "failed to write whole buffer" means that the output is full; any other error means corrupt data.
            if "write whole buffer" not in str(e):
                raise _corrupt(e) from e
            if size_bytes == max_bytes:
                raise _too_large(max_bytes) from e
            size_bytes = min(max_bytes, 4 * size_bytes)
        else:
            return bytes(memoryview(output)[:written])


def _compress_xerial(data: memoryview) -> bytes:
    parts = [_XERIAL_HEADER]
    for start in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(bytes(data[start : start + _XERIAL_BLOCK_BYTES])))
        parts += (_INT32.pack(len(block)), block)
    return b"".join(parts)


def _decompress_snappy(data: memoryview, max_bytes: int) -> bytes:
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _decompress_snappy_block(data, max_bytes, max_bytes)
    parts: list[bytes] = []
    left_bytes = max_bytes
    at = len(_XERIAL_HEADER)
    while at < len(data):
        if at + 4 > len(data):
            raise _corrupt("snappy block cut short")
        (size_bytes,) = _INT32.unpack_from(data, at)
        at += 4
        if size_bytes <= 0 or size_bytes > len(data) - at:
            raise _corrupt(f"snappy block of {size_bytes} bytes, {len(data) - at} left")
        part = _decompress_snappy_block(data[at : at + size_bytes], left_bytes, max_bytes)
        left_bytes -= len(part)
        parts.append(part)
        at += size_bytes
    return b"".join(parts)


def _decompress_snappy_block(data: memoryview, left_bytes: int, max_bytes: int) -> bytes:
    # A raw block starts with its length. It only sizes the buffer, and is limited by what the block could expand to.
    try:
        size_bytes = cramjam.snappy.decompress_raw_len(data)
        if size_bytes > left_bytes:
            raise _too_large(max_bytes)
        if size_bytes > _SNAPPY_RATIO_MAX * len(data):
            raise _corrupt(f"{len(data)} bytes of snappy claim to be {size_bytes}")
        output = bytearray(size_bytes)
        written = cramjam.snappy.decompress_raw_into(data, output)
    except cramjam.DecompressionError as e:
        raise _corrupt(e) from e
    if written != size_bytes:
        raise _corrupt(f"snappy block of {written} bytes claimed to be {size_bytes}")
    return bytes(output)
