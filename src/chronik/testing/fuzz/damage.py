"""Ways to corrupt bytes: what a broken client, a broken disk or an attacker would send."""

from __future__ import annotations

import struct
import zlib
from functools import cache
from random import Random

import cramjam
from crc32c import crc32c

from chronik.testing.fuzz.samples import CODECS, valid_batch
from chronik.wire.batch import HEADER_BYTES
from chronik.wire.primitives import uvarint

INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
VARINTS = (
    b"\xff\xff\xff\xff\x07",
    b"\xff\xff\xff\xff\x0f",
    b"\x80\x80\x80\x80\x08",
    b"\xff" * 9 + b"\x01",
    b"\xff" * 11,
    b"\x80" * 4 + b"\x00",
)
"""The largest counts that varints can encode, some beyond that, and a zero that takes five bytes."""
FRAME_SIZES = (0, 1, 7, 8, -1, -(2**31), 2**31 - 1, 101 * 1024 * 1024, 300_000)
BATCH_FIELDS = ((21, ">h"), (23, ">i"), (27, ">q"), (35, ">q"), (43, ">q"), (51, ">h"), (53, ">i"), (57, ">i"))
"""All fields in a batch's header that its CRC covers."""
EXTREMES = (0, 1 << 63 - 1, -1, -(1 << 63), (1 << 63) - 1, 1 << 32, 5 << 60, 1_700_000_000_000 << 16)
LENGTH_AT, CRC_AT, CRC_START, ATTRIBUTES_AT = 8, 17, 21, 21
BOMB_BYTES = 48 * 1024 * 1024
"""The decompressed size of a bomb: far more than any input holds, but harmless if it is decompressed once."""


def damage(random: Random, data: bytearray, first: int = 0) -> None:
    """Apply one kind of damage at a position from `first` on."""
    first = min(first, len(data) - 1) if data else 0
    at = random.randrange(first, len(data)) if len(data) > first else 0
    kind = random.randrange(9)
    if not data:
        data.append(0)
    elif kind == 0:
        data[at] ^= 1 << random.randrange(8)
    elif kind == 1:
        data[at] = random.randrange(256)
    elif kind == 2:
        width = random.choice((1, 2, 4))
        value = random.choice(INTERESTING) & ((1 << 8 * width) - 1)
        data[at : at + width] = value.to_bytes(width, "big")
    elif kind == 3:
        del data[at : at + random.randrange(1, 9)]
    elif kind == 4:
        data[at:at] = random.randbytes(random.randrange(1, 9))
    elif kind == 5:
        del data[at:]
    elif kind == 6:
        data[at : at + 1] = random.choice(VARINTS)
    elif kind == 7:
        data[at:at] = data[at : at + random.randrange(1, 33)]
    else:
        # A zero byte may be an empty set of tagged fields.
        zero = data.find(0, at)
        if zero >= 0:
            data[zero : zero + 1] = tags(random)
    if not data:
        data.append(0)


def tags(random: Random) -> bytes:
    """Return tagged fields: known and unknown numbers, out of order, too many, or longer than the remaining bytes."""
    count = random.choice((1, 2, 3, 50))
    fields = b"".join(
        uvarint(random.choice((0, 1, 2, 7, 10_000, 2**31))) + uvarint(len(data)) + data
        for data in (random.randbytes(random.choice((0, 1, 4, 40))) for _ in range(count))
    )
    claimed = random.choice((count, count, count, count + 1, 0, 2**31 - 1))
    return uvarint(claimed) + fields + random.choice((b"", b"", uvarint(3) + uvarint(1 << 30)))


def signed_mutant(random: Random, good: bytes) -> bytes:
    """Return a batch damaged in the range that its CRC covers, with a new valid CRC: only its content is wrong."""
    data = bytearray(good)
    for _ in range(random.choice((1, 1, 2, 3))):
        at, layout = random.choice(BATCH_FIELDS)
        kind = random.randrange(4)
        if kind == 0:
            width = struct.calcsize(layout)
            struct.pack_into(layout, data, at, random.choice(EXTREMES) >> (64 - 8 * width))
        elif kind == 1 and len(data) > HEADER_BYTES:
            data[random.randrange(HEADER_BYTES, len(data))] = random.randrange(256)
        elif kind == 2 and len(data) > HEADER_BYTES:
            del data[random.randrange(HEADER_BYTES, len(data)) :]
        else:
            place = random.randrange(HEADER_BYTES, len(data) + 1)
            data[place:place] = random.randbytes(random.randrange(1, 40))
    return signed(data)


def signed(data: bytearray) -> bytes:
    """Return the batch with a correct length and CRC."""
    struct.pack_into(">i", data, LENGTH_AT, len(data) - 12)
    struct.pack_into(">I", data, CRC_AT, crc32c(bytes(data[CRC_START:])))
    return bytes(data)


def odd_records(random: Random) -> bytes | None:
    """Return what a Produce request may carry instead of one good batch."""
    kind = random.randrange(9)
    good = valid_batch(random.randrange(CODECS))
    if kind == 0:
        return None
    if kind == 1:
        # A bad CRC, or a bad header field that the CRC does not cover.
        spoilt = bytearray(good)
        spoilt[random.randrange(HEADER_BYTES)] ^= 1 << random.randrange(8)
        return bytes(spoilt)
    if kind == 2:
        return b"".join(signed_mutant(random, good) for _ in range(random.choice((2, 3, 20))))
    if kind == 3:
        # A batch inside another batch's records, as old clients nested message sets.
        outer = bytearray(good[:HEADER_BYTES] + good * random.choice((1, 2)))
        return signed(outer)
    if kind == 4:
        codec, payload = random.choice(bombs())
        bomb = bytearray(good[:HEADER_BYTES] + payload)
        struct.pack_into(">h", bomb, ATTRIBUTES_AT, codec)
        return signed(bomb)
    if kind == 5:
        epoch, sequence = random.choice((0, 1, -1, 32_767)), random.choice((0, 1, 2, 2**31 - 1, 2**31 - 2, -1))
        return valid_batch(producer_id=random.choice((0, 1, 7, 1000)), producer_epoch=epoch, base_sequence=sequence)
    if kind == 6:
        return random.randbytes(random.choice((1, 11, 12, 16, 17, 60, 61, 62, 200)))
    if kind == 7:
        return good[: random.randrange(len(good))]
    return signed_mutant(random, good)


@cache
def bombs() -> tuple[tuple[int, bytes], ...]:
    """Return codecs with a block that decompresses to `BOMB_BYTES`, or claims to."""
    zeros = bytes(BOMB_BYTES)
    lying = uvarint((1 << 32) - 1) + b"\x00" * 20
    return (
        (1, zlib.compress(zeros, 9, 31)),
        (2, lying),
        (3, bytes(cramjam.lz4.compress(zeros))[: 60 * 1024]),
        (4, bytes(cramjam.zstd.compress(zeros, 3))),
    )
