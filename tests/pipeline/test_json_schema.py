"""JSON Schema: its types as columns, and which texts fit them."""

from __future__ import annotations

import datetime
import json
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from chronik.pipeline.typed.json_schema import JsonSchema
from chronik.pipeline.typed.writer_schema import Decoded, SchemaError


def columns(schema: Any, **references: Any) -> dict[str, str]:
    parsed = JsonSchema(json.dumps(schema), {name: json.dumps(text) for name, text in references.items()})
    return {field.name: str(field.kind) + ("!" if field.is_required else "") for field in parsed.fields}


def decode(schema: Any, *texts: bytes) -> Decoded:
    """Decode through a copy, as an executor gets it, with other bytes around the texts."""
    parsed = pickle.loads(pickle.dumps(JsonSchema(json.dumps(schema))))
    data = np.frombuffer(b"##" + b"#".join(texts) + b"##", np.uint8)
    ends = np.cumsum([len(text) + 1 for text in texts]).astype(np.int64) + 1
    starts = ends - np.array([len(text) for text in texts], np.int64)
    decoded: Decoded = parsed.decode(data, starts, ends)
    return decoded


def rows(decoded: Decoded) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in decoded.columns), strict=True))


def test_types_become_columns() -> None:
    schema = {
        "type": "object",
        "required": ["id", "note"],
        "properties": {
            "id": {"type": "integer"},
            "note": {"type": ["null", "string"]},
            "price": {"oneOf": [{"type": "null"}, {"type": "number"}]},
            "is_paid": {"type": "boolean"},
            "day": {"type": "string", "format": "date"},
            "at": {"type": "string", "format": "date-time"},
            "state": {"enum": ["new", "paid"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
            "address": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
            "any": True,
        },
    }
    assert columns(schema) == {
        "id": "int64!",
        "note": "string",
        "price": "double",
        "is_paid": "bool",
        "day": "date32[day]",
        "at": "timestamp[us, tz=UTC]",
        "state": "string",
        "tags": "list<element: string>",
        "counts": "map<string, int64>",
        "address": "struct<city: string>",
        "either": "string",
        "any": "string",
    }


def test_references_are_followed_and_a_type_that_contains_itself_is_text() -> None:
    schema = {
        "properties": {
            "home": {"$ref": "#/definitions/Place"},
            "item": {"$ref": "item.json"},
            "part": {"$ref": "item.json#/properties/size"},
            "tree": {"$ref": "#/$defs/Tree"},
        },
        "definitions": {"Place": {"type": "object", "properties": {"city": {"type": "string"}}}},
        "$defs": {"Tree": {"type": "object", "properties": {"below": {"$ref": "#/$defs/Tree"}}}},
    }
    item = {"type": "object", "properties": {"size": {"type": "integer"}}}
    assert columns(schema, **{"item.json": item}) == {
        "home": "struct<city: string>",
        "item": "struct<size: int64>",
        "part": "int64",
        "tree": "struct<below: string>",
    }


def test_a_schema_that_is_no_object_is_one_column() -> None:
    assert columns({"type": "array", "items": {"type": "number"}}) == {"typed": "list<element: double>!"}
    decoded = decode({"type": "integer"}, b"7", b'8,"typed":9', b"null")
    assert rows(decoded) == [(7,)] and decoded.bad.tolist() == [1, 2]


def test_texts_that_do_not_fit_have_their_reasons() -> None:
    schema = {
        "type": "object",
        "required": ["id"],
        "properties": {
            "id": {"type": "integer"},
            "at": {"type": "string", "format": "date-time"},
            "inner": {"type": "object", "properties": {"raw": {}, "list": {"type": "array", "items": {}}}},
        },
    }
    decoded = decode(
        schema,
        b'{"id": 1, "at": "2026-01-02T03:04:05", "more": [1]}',
        b'{"id": "1"}',
        b"{}",
        b'{"id": 9223372036854775808}',
        b'{"id": 2, "at": "yesterday"}',
        b'{"id": 3',
        b'{"id": 4, "inner": {"raw": {"b": [1, null]}, "list": [1, "x", null]}}',
        b"",
    )
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    inner = {"raw": '{"b":[1,null]}', "list": ["1", '"x"', None]}
    assert rows(decoded) == [(1, at, None), (4, None, inner)]
    assert decoded.good.tolist() == [0, 6] and decoded.bad.tolist() == [1, 2, 3, 4, 5, 7]
    assert "Expected `int`, got `str` - at `$.id`" in decoded.reasons[0]
    assert "missing required field `id`" in decoded.reasons[1]
    assert len(decoded.reasons) == 6 and all(decoded.reasons)


def test_whole_numbers_may_be_written_with_a_fraction_of_zero_or_an_exponent() -> None:
    whole = {"type": "integer"}
    schema = {
        "properties": {
            "a": whole,
            "list": {"type": "array", "items": {"type": ["integer", "null"]}},
            "map": {"type": "object", "additionalProperties": whole},
            "inner": {"type": "object", "properties": {"b": {"oneOf": [whole, {"type": "null"}]}}},
            "price": {"type": "number"},
            "any": {},
        },
        "required": ["a"],
    }
    decoded = decode(
        schema,
        b'{"a":1.0,"list":[2.0,null,-3e0,4],"map":{"k":5.00},"inner":{"b":6E0},"price":7.0,"any":8.0}',
        b'{"a":9,"list":[],"inner":{"b":-0.0},"any":[1.5]}',
        b'{"a":9007199254740991.0,"inner":{"b":9223372036854775807}}',
        b'{"a":1.5}',
        b'{"a":9007199254740993.0}',
        b'{"a":1.0,"inner":{"b":"2"}}',
        b'{"a":1.0,"price":"x"}',
        b'{"a":"1.0"}',
        b'{"a":1e400}',
        b'{"list":[1.0]}',
    )
    assert rows(decoded) == [
        (1, [2, None, -3, 4], [("k", 5)], {"b": 6}, 7.0, "8.0"),
        (9, [], None, {"b": 0}, None, "[1.5]"),
        (9007199254740991, None, None, {"b": 9223372036854775807}, None, None),
    ]
    assert decoded.bad.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert decoded.reasons[0] == "1.5 is no whole number, or too large to be exact in this form - at `$.a`"
    assert decoded.reasons[1].startswith("9007199254740992.0 is no whole number")
    assert rows(decode(whole, b"3.0", b"4")) == [(3,), (4,)]


def test_times_that_their_offset_puts_outside_the_calendar_do_not_fit() -> None:
    time = {"type": "string", "format": "date-time"}
    decoded = decode(
        {"properties": {"at": time, "times": {"type": "array", "items": time}}},
        b'{"at": "0001-01-01T00:00:00+02:00"}',
        b'{"at": "9999-12-31T23:59:59.999999Z"}',
        b'{"times": ["9999-12-31T23:59:59-01:00"]}',
    )
    assert rows(decoded) == [(datetime.datetime.max.replace(tzinfo=datetime.UTC), None)]
    assert decoded.reasons == [
        "a time is outside the years 1 to 9999 - at `$.at`",
        "a time is outside the years 1 to 9999 - at `$.times`",
    ]


def test_all_bad_texts_give_empty_columns() -> None:
    decoded = decode({"properties": {"id": {"type": "integer"}}}, b"[]")
    assert [column.type for column in decoded.columns] == [pa.int64()] and rows(decoded) == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"$ref": "other.json"}}}, "refers to other.json, which is not among"),
        ({"properties": {"a": {"$ref": "#/definitions/None"}}}, "which does not exist"),
        ({"properties": {"a": {"$ref": "#name"}}}, "the anchor #name"),
        ({"properties": {"id": {}, "ID": {}}}, "differ only in case"),
        ({"properties": {'a"b': {}}}, "no column can have the name"),
        ({"properties": {"in": {"properties": {"a\nb": {}}}}}, "no column can have the name"),
    ],
)
def test_a_schema_that_cannot_become_columns_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        JsonSchema(json.dumps(schema))


def test_a_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(SchemaError, match="not JSON"):
        JsonSchema("{")


def test_a_schema_with_too_many_types_is_refused() -> None:
    definitions: dict[str, Any] = {
        f"D{number}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/definitions/D{number + 1}"} for name in ("a", "b")},
        }
        for number in range(40)
    }
    schema = {"definitions": {**definitions, "D40": {"type": "string"}}, "$ref": "#/definitions/D0"}
    with pytest.raises(SchemaError, match="more than 20,000 types"):
        columns(schema)


def test_a_reference_that_is_no_text_is_refused() -> None:
    with pytest.raises(SchemaError):
        columns({"type": "object", "$ref": 1, "properties": {"a": {}}})
