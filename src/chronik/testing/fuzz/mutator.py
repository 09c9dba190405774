"""The next input. An input is what one connection sends:

how     1 byte   see `ways`
frames  bytes    as on the wire: int32 size, request header, body; one after the other, or anything else
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random
from uuid import UUID

from chronik.testing.fuzz.damage import FRAME_SIZES, damage, odd_records
from chronik.testing.fuzz.samples import Sample, framed, produce_body
from chronik.testing.fuzz.secured import authentications, tls_bytes
from chronik.testing.fuzz.values import odd_request
from chronik.testing.fuzz.ways import ENDS_AT_ONCE, INTERNAL, PIECES, RAW, SASL, TLS, UNPROVEN
from chronik.wire.api import ApiKey

FRAMES_MAX = 6
ODD_KEPT = 4000
LYING_SIZE_SHARE = 0.03
HEADER_FIRST_BYTES = 8
"""Key, version and correlation id are damaged less often: the node rejects most such frames immediately."""

Mutate = Callable[[bytes, int], bytes]
"""The engine's own mutator: takes the input and the maximum size of the result."""


def split(stream: bytes) -> list[bytes]:
    """Return the frames of a stream without their sizes; remaining bytes at the end become one frame."""
    frames: list[bytes] = []
    at = 0
    while at + 4 <= len(stream) and len(frames) < FRAMES_MAX:
        (size,) = struct.unpack_from(">i", stream, at)
        end = at + 4 + size if 0 <= size <= len(stream) - at - 4 else len(stream)
        frames.append(stream[at + 4 : end])
        at = end
    return frames


def joined(frames: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)


class Mutator:
    """Has the valid requests of both listeners, and the topic that they refer to."""

    def __init__(
        self, samples: Sequence[Sample], internal: Sequence[Sample], topic_id: UUID, by_engine: Mutate | None = None
    ) -> None:
        # Grouped by API and version, so that each is equally likely, however many samples it has.
        self._samples = _by_kind(samples)
        self._internal = _by_kind(internal)
        self._topic_id = topic_id
        self._by_engine = by_engine
        self._authentications = authentications()
        self._tls_bytes = tls_bytes()
        self._odd: list[bytes] = []
        """Frames with odd values from earlier inputs: creating one costs more than running it."""

    def mutate(self, data: bytes, random: Random) -> bytes:
        """Return another input, derived from one that the engine kept or built from scratch."""
        how = data[0] if data else 0
        frames = split(data[1:])
        changes: tuple[int, ...] = (1, 1, 1, 2, 2, 3, 4)
        if not frames or random.random() < 0.3:
            how, frames = self._fresh(random)
            changes = (0, 0, 0, 1, 1, 2)
        for _ in range(random.choice(changes)):
            frames = self._changed(random, how, frames)
        if random.random() < 0.05:
            how ^= random.choice((ENDS_AT_ONCE, *PIECES, SASL, TLS, UNPROVEN))
        stream = bytearray(joined(frames))
        if random.random() < LYING_SIZE_SHARE and len(stream) >= 4:
            size = random.choice((*FRAME_SIZES, len(stream) - 3, len(stream) - 5, len(stream) + 1000))
            struct.pack_into(">i", stream, 0, size)
        return bytes((how,)) + bytes(stream)

    def _fresh(self, random: Random) -> tuple[int, list[bytes]]:
        chance = random.random()
        how = ENDS_AT_ONCE if random.random() < 0.3 else 0
        if chance < 0.1:
            how |= INTERNAL | (UNPROVEN if random.random() < 0.2 else 0)
        elif chance < 0.25:
            how |= SASL | (UNPROVEN if random.random() < 0.7 else 0)
        if chance > 0.1 and random.random() < 0.08:
            how |= TLS | (RAW if random.random() < 0.4 else 0)
            how |= UNPROVEN if how & RAW and random.random() < 0.7 else 0
        if random.random() < 0.04:
            how |= random.choice(PIECES)
        begun = list(random.choice(self._authentications)) if how & SASL and random.random() < 0.7 else []
        return how, begun + [self._sample(random, how) for _ in range(random.choice((1, 1, 1, 1, 2, 3)))]

    def _sample(self, random: Random, how: int) -> bytes:
        """Return one frame, valid or with odd values; for a raw TLS connection, bytes of TLS."""
        if how & TLS and how & RAW:
            return random.choice(self._tls_bytes)
        if how & SASL and how & UNPROVEN and random.random() < 0.4:
            return random.choice(random.choice(self._authentications))
        sample = random.choice(random.choice(self._internal if how & INTERNAL else self._samples))
        if how & INTERNAL or random.random() < 0.3:
            return sample.frame[4:]
        if len(self._odd) == ODD_KEPT and random.random() < 0.6:
            return random.choice(self._odd)
        if sample.key == ApiKey.PRODUCE and random.random() < 0.8:
            acks, partition = random.choice((1, -1, 0, 1, -1, 5)), random.choice((0, 0, 0, 1, -1, 2**31 - 1))
            body = produce_body(sample.version, self._topic_id, odd_records(random), acks=acks, partition=partition)
        else:
            body = odd_request(random, sample.key, sample.version, self._topic_id)
        made = framed(sample.key, sample.version, body).frame[4:]
        if len(self._odd) < ODD_KEPT:
            self._odd.append(made)
        else:
            self._odd[random.randrange(ODD_KEPT)] = made
        return made

    def _changed(self, random: Random, how: int, frames: list[bytes]) -> list[bytes]:
        kind = random.randrange(10)
        at = random.randrange(len(frames)) if frames else 0
        if not frames or kind == 0:
            return [*frames[: FRAMES_MAX - 1], self._sample(random, how)]
        if kind == 1:
            return [*frames[:at], self._sample(random, how), *frames[at + 1 :]]
        if kind == 2:
            return frames[:at] + frames[at + 1 :] if len(frames) > 1 else frames * 2
        if kind == 3:
            # Send the same bytes as another version, or as another API.
            other = random.choice(random.choice(self._internal if how & INTERNAL else self._samples)).frame[4:8]
            keep = 2 if random.random() < 0.7 else 0
            return [*frames[:at], frames[at][:keep] + other[keep:4] + frames[at][4:], *frames[at + 1 :]]
        changed = bytearray(frames[at])
        if kind <= 5 and self._by_engine is not None and changed:
            return [*frames[:at], self._by_engine(bytes(changed), len(changed) + 64), *frames[at + 1 :]]
        damage(random, changed, 0 if random.random() < 0.1 else HEADER_FIRST_BYTES)
        return [*frames[:at], bytes(changed), *frames[at + 1 :]]


def _by_kind(samples: Sequence[Sample]) -> list[list[Sample]]:
    kinds: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        kinds.setdefault((sample.key, sample.version), []).append(sample)
    return list(kinds.values())
