"""Avro values as Arrow columns, compared with fastavro."""

from __future__ import annotations

import datetime
import decimal
import io
import json
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chronik.pipeline.typed.avro import AvroSchema
from chronik.pipeline.typed.writer_schema import Decoded, SchemaError

DAY = datetime.date(2026, 1, 31)
NOW = datetime.datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=datetime.UTC)


def encode(schema: Any, record: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), record)
    return out.getvalue()


def decode(schema: Any, values: list[bytes], references: tuple[str, ...] = ()) -> Decoded:
    parsed = AvroSchema(json.dumps(schema), references)
    data = np.frombuffer(b"".join(values) + b"\0", np.uint8)
    stops = np.cumsum([len(value) for value in values], dtype=np.int64)
    starts = stops - np.array([len(value) for value in values], np.int64)
    decoded = parsed.decode(data, starts, stops)
    for column, member in zip(decoded.columns, parsed.fields, strict=True):
        column.validate(full=True)
        assert (column.type, len(column)) == (member.kind, len(decoded.good))
    return decoded


def rows(schema: Any, values: list[bytes]) -> list[dict[str, Any]]:
    decoded = decode(schema, values)
    names = [member["name"] for member in schema["fields"]]
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*(column.to_pylist() for column in decoded.columns), strict=True)
    ]


def record(*fields: tuple[str, Any], name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": each, "type": kind} for each, kind in fields]}


ALL = record(
    ("b", "boolean"),
    ("i", "int"),
    ("l", ["null", "long"]),
    ("f", "float"),
    ("d", "double"),
    ("s", ["string", "null"]),
    ("y", "bytes"),
    ("e", {"type": "enum", "name": "E", "symbols": ["A", "B"]}),
    ("x", {"type": "fixed", "name": "X", "size": 3}),
    ("day", {"type": "int", "logicalType": "date"}),
    ("at", {"type": "long", "logicalType": "timestamp-micros"}),
    ("ms", ["null", {"type": "long", "logicalType": "timestamp-millis"}]),
    ("p", {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 2}),
    ("q", {"type": "fixed", "name": "Q", "size": 5, "logicalType": "decimal", "precision": 9, "scale": 3}),
    ("tags", {"type": "array", "items": ["null", "string"]}),
    ("more", {"type": "map", "values": "long"}),
    (
        "in",
        [
            "null",
            record(("n", "int"), ("deep", {"type": "array", "items": record(("z", "string"), name="Z")}), name="I"),
        ],
    ),
    ("u", ["null", "string", "long", record(("k", "int"), ("m", {"type": "map", "values": "int"}), name="U")]),
    ("fx", ["null", {"type": "fixed", "name": "F2", "size": 2}]),
)
ONE = {
    "b": True,
    "i": -5,
    "l": 2**62,
    "f": 0.5,
    "d": 0.1,
    "s": "grün",
    "y": b"\x00\xff",
    "e": "B",
    "x": b"abc",
    "day": DAY,
    "at": NOW,
    "ms": NOW.replace(microsecond=123000),
    "p": decimal.Decimal("-12345678901234567890.25"),
    "q": decimal.Decimal("-1.500"),
    "tags": ["a", None, "c"],
    "more": {"k": 1, "j": -1},
    "in": {"n": 7, "deep": [{"z": "1"}, {"z": "2"}]},
    "u": {"k": 3, "m": {"a": 1}},
    "fx": b"zz",
}
TWO = ONE | {"l": None, "s": None, "ms": None, "tags": [], "more": {}, "in": None, "u": "text", "fx": None, "e": "A"}


def as_landed(row: dict[str, Any]) -> dict[str, Any]:
    union = {"string": None, "long": None, "U": None}
    if isinstance(row["u"], dict):
        union["U"] = {"k": row["u"]["k"], "m": list(row["u"]["m"].items())}  # type: ignore[assignment]
    else:
        union["string"] = row["u"]
    return row | {"more": list(row["more"].items()), "u": union}


def test_every_type_of_avro_becomes_a_column_with_its_value() -> None:
    landed = rows(ALL, [encode(ALL, each) for each in (ONE, TWO, ONE)])
    assert landed == [as_landed(each) for each in (ONE, TWO, ONE)]


def test_a_null_union_of_several_types_is_null() -> None:
    (landed,) = rows(ALL, [encode(ALL, ONE | {"u": None})])
    assert landed["u"] is None


TYPES = st.recursive(
    st.sampled_from(["boolean", "int", "long", "double", "bytes", "string"]),
    lambda inner: st.one_of(
        inner.filter(lambda kind: not isinstance(kind, list)).map(lambda kind: ["null", kind]),
        inner.map(lambda kind: {"type": "array", "items": kind}),
        inner.map(lambda kind: {"type": "map", "values": kind}),
    ),
    max_leaves=4,
)
VALUES: dict[str, Any] = {
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "double": st.floats(allow_nan=False),
    "bytes": st.binary(max_size=20),
    "string": st.text(max_size=20),
}


def value_of(kind: Any) -> Any:
    if isinstance(kind, list):
        return st.none() | value_of(kind[1])
    if isinstance(kind, dict):
        if kind["type"] == "array":
            return st.lists(value_of(kind["items"]), max_size=4)
        return st.dictionaries(st.text(max_size=5), value_of(kind["values"]), max_size=4)
    return VALUES[kind]


def as_arrow(kind: Any, value: Any) -> Any:
    if value is None or isinstance(kind, str):
        return value
    if isinstance(kind, list):
        return as_arrow(kind[1], value)
    if kind["type"] == "array":
        return [as_arrow(kind["items"], each) for each in value]
    return [(name, as_arrow(kind["values"], each)) for name, each in value.items()]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_records_of_random_schemas_are_decoded_as_by_fastavro(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(TYPES, min_size=1, max_size=4))
    schema = record(*((f"f{number}", kind) for number, kind in enumerate(kinds)))
    records = [
        {f"f{number}": data.draw(value_of(kind)) for number, kind in enumerate(kinds)}
        for _ in range(data.draw(st.integers(0, 5)))
    ]
    expected = [
        {f"f{number}": as_arrow(kind, each[f"f{number}"]) for number, kind in enumerate(kinds)} for each in records
    ]
    assert rows(schema, [encode(schema, each) for each in records]) == expected


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 200))
def test_damaged_values_are_reported_and_leave_their_neighbours_intact(junk: bytes, cut: int) -> None:
    good = encode(ALL, ONE)
    decoded = decode(ALL, [good, good[: min(cut, len(good) - 1)], junk, good])
    assert {0, 3} <= set(decoded.good.tolist()) and 1 in decoded.bad
    assert len(decoded.reasons) == len(decoded.bad)
    for column, value in zip(decoded.columns, as_landed(ONE).values(), strict=True):
        assert (column[0].as_py(), column[-1].as_py()) == (value, value)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("string", b"\x02\xff", "not valid UTF-8"),
        ("string", b"\x06ab", "beyond the value's end"),
        ("int", b"\xff\xff\xff\xff\xff\x0f", "32 bits"),
        ("long", b"\xff" * 11, "64 bits"),
        ("long", b"\x02\x02", "bytes after the value"),
        ("boolean", b"\x05", "neither 0 nor 1"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x02", "no such symbol"),
        (["null", "int"], b"\x04", "no such branch"),
        ({"type": "array", "items": "int"}, b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f", "beyond the value's end"),
        ({"type": "long", "logicalType": "timestamp-millis"}, b"\xfe" + b"\xff" * 8 + b"\x01", "years 1 to 9999"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 2}, b"\x02\x64", "more digits"),
    ],
)
def test_a_value_that_cannot_be_decoded_has_a_reason(kind: Any, value: bytes, reason: str) -> None:
    decoded = decode(record(("f", kind)), [value])
    assert reason in decoded.reasons[0]


def test_the_last_microsecond_of_the_year_9999_fits() -> None:
    schema = record(("f", {"type": "long", "logicalType": "timestamp-micros"}))
    last = {"f": datetime.datetime.max.replace(tzinfo=datetime.UTC)}
    assert rows(schema, [encode(schema, last)]) == [last]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "not JSON"),
        ('{"type": "record", "name": "R", "fields": []}', "has no fields"),
        ('{"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]}', "contains itself"),
        ('{"type": "array", "items": "null"}', "take no bytes"),
        ('{"type": "record", "name": "R", "fields": [{"name": "r", "type": "X"}]}', "X is not defined"),
        ('{"name": "R"}', "not valid Avro"),
    ],
)
def test_a_schema_that_cannot_become_columns_is_rejected_with_a_reason(schema: str, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        AvroSchema(schema)


def test_types_of_referenced_schemas_and_of_other_namespaces_are_found() -> None:
    item = {"type": "record", "name": "Item", "namespace": "shop", "fields": [{"name": "n", "type": "int"}]}
    order = {
        "type": "record",
        "name": "shop.Order",
        "fields": [{"name": "first", "type": "Item"}, {"name": "all", "type": {"type": "array", "items": "shop.Item"}}],
    }
    decoded = decode(order, [b"\x02\x04\x04\x06\x00"], (json.dumps(item),))
    assert [column.to_pylist() for column in decoded.columns] == [[{"n": 1}], [[{"n": 2}, {"n": 3}]]]


def test_a_schema_that_is_no_record_becomes_one_column() -> None:
    (column,) = decode("string", [b"\x04ab", b"\x00"]).columns
    assert column.equals(pa.array(["ab", ""]))
