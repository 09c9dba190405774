"""Metrics that clients push (KIP-714): OpenTelemetry's MetricsData, version 1, in protobuf.

The reader knows the fields that it needs, and skips all others:

    MetricsData       1 resource_metrics: 2 scope_metrics: 2 metrics
    Metric            1 name, and one of 5 gauge, 7 sum, 9 histogram, 10 exponential histogram, 11 summary
    each of them      1 data points, 2 temporality (1 delta, 2 cumulative), 3 is_monotonic (of a sum)
    NumberDataPoint   4 as_double, 6 as_int (both 8 bytes), 7 attributes
    other points      4 count (8 bytes), 5 sum (double); attributes are field 9, 1 or 7, in the order of the kinds above
    KeyValue          1 key, 2 value: 1 string, 2 bool, 3 int, 4 double

A field is a varint (number << 3 | wire type); wire type 0 is a varint, 1 is 8 bytes, 2 is a varint length and as many
bytes, 5 is 4 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from chronik.wire.errors import MalformedRequest

_DOUBLE: Final = Struct("<d")
_INT64: Final = Struct("<q")
_DELTA: Final = 1
_GAUGE, _SUM, _HISTOGRAM, _EXPONENTIAL, _SUMMARY = 5, 7, 9, 10, 11
_ATTRIBUTES_FIELD: Final = {_GAUGE: 7, _SUM: 7, _HISTOGRAM: 9, _EXPONENTIAL: 1, _SUMMARY: 7}
ATTRIBUTES_MAX: Final = 16
"""How many attributes of one point are read."""

Attributes = tuple[tuple[str, str], ...]


class Point(NamedTuple):
    """One value of one metric. The value of a delta is what was added since the last push."""

    name: str
    attributes: Attributes
    """Sorted by key."""
    value: float
    is_counter: bool = False
    is_delta: bool = False


def read_points(data: bytes, points_max: int) -> tuple[list[Point], int]:
    """Return the first `points_max` points, and how many more there are. MalformedRequest if the data is damaged.

    A histogram or summary becomes two counters, NAME.count and NAME.sum. A value that is not finite is omitted.
    """
    points: list[Point] = []
    dropped = 0
    try:
        for metric in _metrics(data):
            for point in _points(metric):
                if len(points) < points_max:
                    points.append(point)
                else:
                    dropped += 1
    except (IndexError, UnicodeDecodeError) as error:
        raise MalformedRequest("damaged metrics data") from error
    return points, dropped


def _metrics(data: bytes) -> Iterator[bytes]:
    for resource_metrics in _messages(data, 1):
        for scope_metrics in _messages(resource_metrics, 2):
            yield from _messages(scope_metrics, 2)


def _points(metric: bytes) -> Iterator[Point]:
    name = ""
    kinds: list[tuple[int, bytes]] = []
    for number, value in _fields(metric):
        if number == 1 and isinstance(value, bytes):
            name = value.decode()
        elif number in _ATTRIBUTES_FIELD and isinstance(value, bytes):
            kinds.append((number, value))
    for kind, body in kinds:
        points: list[bytes] = []
        temporality, is_monotonic = 0, False
        for number, value in _fields(body):
            if number == 1 and isinstance(value, bytes):
                points.append(value)
            elif number == 2 and isinstance(value, int):
                temporality = value
            elif number == 3 and isinstance(value, int):
                is_monotonic = bool(value)
        is_delta = temporality == _DELTA and kind in (_SUM, _HISTOGRAM, _EXPONENTIAL)
        for point in points:
            if kind in (_GAUGE, _SUM):
                yield from _number(name, point, kind == _SUM and is_monotonic, is_delta)
            else:
                yield from _distribution(name, point, _ATTRIBUTES_FIELD[kind], is_delta)


def _number(name: str, point: bytes, is_counter: bool, is_delta: bool) -> Iterator[Point]:
    found: float | None = None
    attributes: list[tuple[str, str]] = []
    for number, value in _fields(point):
        if number == 7 and isinstance(value, bytes):
            _add_attribute(attributes, value)
        elif number in (4, 6) and isinstance(value, _Eight):
            found = value.as_double() if number == 4 else float(value.as_int())
    if found is not None and math.isfinite(found):
        yield Point(name, tuple(sorted(attributes)), found, is_counter, is_delta)


def _distribution(name: str, point: bytes, attributes_field: int, is_delta: bool) -> Iterator[Point]:
    values: dict[str, float] = {}
    attributes: list[tuple[str, str]] = []
    for number, value in _fields(point):
        if number == attributes_field and isinstance(value, bytes):
            _add_attribute(attributes, value)
        elif number == 4 and isinstance(value, _Eight):
            values["count"] = float(value.as_int())
        elif number == 5 and isinstance(value, _Eight):
            values["sum"] = value.as_double()
    for suffix, found in values.items():
        if math.isfinite(found):
            yield Point(f"{name}.{suffix}", tuple(sorted(attributes)), found, True, is_delta)


def _add_attribute(attributes: list[tuple[str, str]], pair: bytes) -> None:
    if len(attributes) >= ATTRIBUTES_MAX:
        return
    key, text = "", ""
    for number, value in _fields(pair):
        if number == 1 and isinstance(value, bytes):
            key = value.decode()
        elif number == 2 and isinstance(value, bytes):
            text = _any_value(value)
    attributes.append((key, text))


def _any_value(data: bytes) -> str:
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            return value.decode()
        if number == 2 and isinstance(value, int):
            return str(bool(value)).lower()
        if number == 3 and isinstance(value, int):
            return str(value - (1 << 64) if value >> 63 else value)
        if number == 4 and isinstance(value, _Eight):
            return str(value.as_double())
    return ""


class _Eight:
    """A field of 8 bytes: a double or an integer, depending on the schema."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def as_double(self) -> float:
        return float(_DOUBLE.unpack(self._data)[0])

    def as_int(self) -> int:
        return int(_INT64.unpack(self._data)[0])


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    for number, value in _fields(data):
        if number == wanted and isinstance(value, bytes):
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes | _Eight]]:
    """Yield the number and value of each field, in order. Fields of 4 bytes are skipped."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire_type in (1, 2, 5):
            size, at = _varint(data, at) if wire_type == 2 else (8 if wire_type == 1 else 4, at)
            if size > end - at:
                raise MalformedRequest(f"a field of {size} bytes, {end - at} left")
            content = data[at : at + size]
            at += size
            if wire_type == 2:
                yield number, content
            elif wire_type == 1:
                yield number, _Eight(content)
        else:
            raise MalformedRequest(f"a field of wire type {wire_type}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
        if shift > 63:
            raise MalformedRequest("varint longer than ten bytes")
