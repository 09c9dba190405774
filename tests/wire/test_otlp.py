"""OpenTelemetry's metrics as clients push them."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.wire.errors import MalformedRequest
from chronik.wire.otlp import Point, read_points

GAUGE, SUM, HISTOGRAM, EXPONENTIAL, SUMMARY = 5, 7, 9, 10, 11


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return out + bytes((value,))


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def number(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def double(number: int, value: float) -> bytes:
    return varint(number << 3 | 1) + struct.pack("<d", value)


def int64(number: int, value: int) -> bytes:
    return varint(number << 3 | 1) + struct.pack("<q", value)


def attribute(key: str, value: bytes) -> bytes:
    return field(1, key.encode()) + field(2, value)


def metrics_data(*metrics: bytes) -> bytes:
    scope = field(1, field(1, b"scope"))
    scope_metrics = scope + b"".join(field(2, metric) for metric in metrics)
    resource = field(1, field(1, attribute("service", field(1, b"x"))))
    return field(1, resource + field(2, scope_metrics) + field(3, b"https://schema"))


def metric(name: str, kind: int, *points: bytes, more: bytes = b"") -> bytes:
    body = b"".join(field(1, point) for point in points) + more
    return field(1, name.encode()) + field(2, b"description") + field(3, b"1") + field(kind, body)


def test_gauges_and_sums_are_read_with_their_attributes() -> None:
    tags = field(7, attribute("topic", field(1, "bücher".encode()))) + field(7, attribute("node", number(3, -2)))
    data = metrics_data(
        metric("a.rate", GAUGE, tags + int64(2, 1) + int64(3, 2) + double(4, 0.5)),
        metric("a.total", SUM, int64(6, -7), more=number(2, 2) + number(3, 1)),
        metric("a.delta", SUM, int64(6, 7) + number(8, 0), more=number(2, 1) + number(3, 1)),
        metric(
            "a.up",
            GAUGE,
            field(7, attribute("on", number(2, 1))) + field(7, attribute("x", double(4, 1.5))) + double(4, 1.0),
        ),
    )
    assert read_points(data, 100) == (
        [
            Point("a.rate", (("node", "-2"), ("topic", "bücher")), 0.5),
            Point("a.total", (), -7.0, is_counter=True),
            Point("a.delta", (), 7.0, is_counter=True, is_delta=True),
            Point("a.up", (("on", "true"), ("x", "1.5")), 1.0),
        ],
        0,
    )


@pytest.mark.parametrize(("kind", "attributes"), [(HISTOGRAM, 9), (EXPONENTIAL, 1), (SUMMARY, 7)])
def test_distributions_become_a_count_and_a_sum(kind: int, attributes: int) -> None:
    point = field(attributes, attribute("k", field(1, b"v"))) + int64(4, 3) + double(5, 1.5)
    points, _ = read_points(metrics_data(metric("took", kind, point)), 100)
    assert points == [
        Point("took.count", (("k", "v"),), 3.0, is_counter=True),
        Point("took.sum", (("k", "v"),), 1.5, is_counter=True),
    ]


def test_values_that_are_not_finite_are_omitted_and_further_points_counted() -> None:
    numbers = [double(4, value) for value in (float("nan"), 1.0, float("inf"), 2.0, 3.0)]
    points, dropped = read_points(metrics_data(metric("m", GAUGE, *numbers)), 2)
    assert ([point.value for point in points], dropped) == ([1.0, 2.0], 1)


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x05ab",
        b"\x0b",
        b"\xff" * 11,
        b"\x08",
        metrics_data(field(1, b"\xff\xfe") + field(5, field(1, double(4, 1)))),
    ],
    ids=["cut short", "wire type 3", "endless varint", "no value", "not UTF-8"],
)
def test_damaged_data_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read_points(data, 100)


@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_bytes_are_points_or_malformed(noise: bytes, at: int) -> None:
    good = metrics_data(metric("a.rate", GAUGE, field(7, attribute("k", field(1, b"v"))) + double(4, 0.5)))
    for data in (noise, good[:at] + noise + good[at:]):
        with suppress(MalformedRequest):
            read_points(data, 10)
