"""Damaged requests for a real node: mutated samples of every API and version, each sent on its own connection.

Some mutations yield a request that is valid but expensive (create 9,000 partitions, wait five minutes). Such requests
prove nothing about bad input, and `is_tame` excludes them. The coverage-guided fuzzer, which runs the node in its own
process, is in chronik.testing.fuzz.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from datetime import timedelta

from chronik.testing.fuzz.damage import damage
from chronik.testing.fuzz.samples import Sample
from chronik.wire import frames, messages
from chronik.wire.api import ApiKey
from chronik.wire.errors import MalformedRequest
from chronik.wire.fetch import read_fetch_request

PARTITIONS_TAME_MAX = 3
WAIT_TAME = timedelta(seconds=1)


def mutant(random_: random.Random, sample: Sample) -> bytes:
    """Return the sample with one to four mutations. The size prefix usually stays correct."""
    data = bytearray(sample.frame[4:])
    for _ in range(random_.choice((1, 1, 1, 2, 2, 3, 4))):
        # The first eight bytes (key, version, correlation id) are mutated less often: most such requests fail at once.
        damage(random_, data, 0 if random_.random() < 0.1 else 8)
    size = len(data)
    if random_.random() < 0.03:
        size = random_.choice((0, 1, 7, -1, -(2**31), 2**31 - 1, size + 1, size - 1, size + 1000, 101 * 1024 * 1024))
    return struct.pack(">i", size) + bytes(data)


def is_tame(frame: bytes) -> bool:
    """Return whether the frame, if it is valid, needs little work and gets its answer without a long wait."""
    data = memoryview(frame)[4:]
    if struct.unpack_from(">i", frame)[0] != len(data):
        return True
    try:
        header = frames.read_request_header(data)
        if header.api_key == ApiKey.FETCH:
            fetch = read_fetch_request(header.api_version, data, header.body_at)
            return fetch.max_wait_ms <= WAIT_TAME / timedelta(milliseconds=1) or fetch.min_bytes <= 0
        message = messages.read_request(header.api_key, header.api_version, bytes(data[header.body_at :]))
    except (MalformedRequest, ValueError, KeyError):
        return True
    if header.api_key == ApiKey.CREATE_TOPICS:
        return all(max(topic.num_partitions, len(topic.assignments)) <= PARTITIONS_TAME_MAX for topic in message.topics)
    if header.api_key == ApiKey.CREATE_PARTITIONS:
        return all(topic.count <= PARTITIONS_TAME_MAX for topic in message.topics)
    if header.api_key == ApiKey.JOIN_GROUP:
        # A second member of a group waits for the first one, which never rejoins.
        return bool(message.session_timeout <= timedelta(seconds=10))
    return True


def every_place(sample: Sample, bad: bytes) -> Iterator[bytes]:
    """Return the sample with `bad` written over each position of its body in turn; the size prefix stays correct."""
    data = sample.frame[4:]
    for at in range(14, len(data)):
        spoilt = data[:at] + bad + data[at + len(bad) :]
        yield struct.pack(">i", len(spoilt)) + spoilt
