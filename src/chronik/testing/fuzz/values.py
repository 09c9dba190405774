"""Requests of any layout with odd values: well-formed, so that they pass the codec, but absurd in content."""

from __future__ import annotations

from random import Random
from typing import Any
from uuid import UUID

from chronik.testing.fuzz.samples import FUZZED_TOPIC, usual_value
from chronik.wire import messages
from chronik.wire.schema import Field, Structure, load

USUAL_SHARE = 0.6
"""How often a field has a sane value: a request with only absurd values fails at its first check."""

BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64, "error_code": 16, "timedelta_i32": 32, "timedelta_i64": 64}
BITS |= {"datetime_i64": 64}
UNSIGNED_BITS = {"uint16": 16, "uint32": 32, "uint64": 64}
TEXTS = (
    "",
    FUZZED_TOPIC,
    "new-topic",
    "group",
    "__consumer_offsets",
    "..",
    ".",
    "a" * 249,
    "a" * 250,
    "x" * 32_000,
    "..\\../etc/passwd",
    "a/b",
    "nul\x00nul",
    "zeile\nzeile",
    "ünïcode",
    "\U0001f600",
    "retention.ms",
    "cleanup.policy",
    "compact",
    "compact,delete",
    "segment.bytes",
    "min.insync.replicas",
    "-1",
    "0",
    "1",
    "9223372036854775807",
    "1e400",
    "nan",
    "consumer",
    "range",
    "1",
)
BLOBS = (b"", b"\x00", b"bytes", b"\x00\x01\x00\x00\x00\x01\x00\x06fuzzed", b"\xff" * 40, bytes(5000))


def odd_request(random: Random, key: int, version: int, topic_id: UUID) -> bytes:
    """Return the body of a request that can be parsed, whatever its meaning."""
    return messages.write_request(key, version, _structure(random, load(key, version, "request"), topic_id))


def _structure(random: Random, structure: Structure, topic_id: UUID) -> dict[str, Any]:
    name = structure.entity.__name__
    values: dict[str, Any] = {}
    for field in structure.fields:
        if field.tag is not None and random.random() < 0.5:
            continue
        if not field.is_array:
            values[field.name] = _one(random, field, name, topic_id)
        elif field.is_nullable and random.random() < 0.1:
            values[field.name] = None
        else:
            count = random.choice((0, 1, 1, 1, 2, 3, 8))
            made = [_one(random, field, name, topic_id) for _ in range(count)]
            values[field.name] = made * 2 if made and random.random() < 0.1 else made
    return values


def _one(random: Random, field: Field, structure: str, topic_id: UUID) -> Any:
    if field.is_nullable and not field.is_array and random.random() < 0.15:
        return None
    if field.nested is not None:
        return _structure(random, field.nested, topic_id)
    if random.random() < USUAL_SHARE:
        return usual_value(field, structure, topic_id)
    if field.kind in BITS:
        top = 1 << BITS[field.kind] - 1
        return random.choice((0, 1, 2, -1, -2, top - 1, -top, random.randrange(-top, top), random.randrange(0, 100)))
    if field.kind in UNSIGNED_BITS:
        return random.choice((0, 1, (1 << UNSIGNED_BITS[field.kind]) - 1))
    if field.kind == "float64":
        return random.choice((0.0, -1.0, float("nan"), float("inf")))
    if field.kind == "bool":
        return random.random() < 0.5
    if field.kind == "uuid":
        return random.choice((topic_id, None, UUID(int=1), UUID(int=(1 << 128) - 1)))
    if field.kind == "string":
        return random.choice(TEXTS)
    return random.choice(BLOBS)
