"""Avro: the canonical text is that of Java's library, references resolve, and compatibility follows Avro's rules."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.schemas.avro import AvroSchema
from chronik.schemas.errors import InvalidSchema


def avro(schema: Any, **references: str) -> AvroSchema:
    return AvroSchema(json.dumps(schema), references)


def record(*fields: dict[str, Any], name: str = "R", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any = "string", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def test_canonical_text_has_the_order_of_attributes_that_java_writes() -> None:
    text = """{ "fields": [ {"type": {"type": "string"}, "doc": "d", "name": "a", "default": "x", "p": 1} ],
                "aliases": ["S"], "q": 2, "doc": "r", "namespace": "n", "name": "R", "type": "record"}"""
    assert AvroSchema(text, {}).canonical() == (
        '{"type":"record","name":"R","namespace":"n","doc":"r","fields":'
        '[{"name":"a","type":"string","doc":"d","default":"x","p":1}],"q":2,"aliases":["S"]}'
    )


def test_a_name_in_the_namespace_of_its_record_is_written_without_it() -> None:
    inner = {"type": "enum", "name": "n.E", "symbols": ["A"]}
    schema = avro(record(field("a", inner), field("b", "n.E"), name="n.R"))
    assert json.loads(schema.canonical())["fields"] == [
        field("a", {"type": "enum", "name": "E", "symbols": ["A"]}),
        field("b", "E"),
    ]


def test_a_primitive_may_be_a_bare_word() -> None:
    assert AvroSchema("string", {}).canonical() == '"string"'
    assert AvroSchema('{"type": "string"}', {}).canonical() == '"string"'


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "record", "name": "R"},
        record(field("a", "Missing")),
        record(field("a"), field("a")),
        record(field("a", "int", default="x")),
        {"type": "enum", "name": "E", "symbols": ["A", "A"]},
        {"type": "fixed", "name": "F"},
        ["string", "string"],
        [["string"]],
        {"name": "R"},
        17,
    ],
)
def test_an_invalid_schema_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidSchema):
        avro(schema).check_new()


def test_a_reference_defines_the_type_that_a_field_uses() -> None:
    other = json.dumps(record(field("x"), name="n.Other"))
    schema = avro(record(field("o", "n.Other"), field("p", "n.Other")), **{"n.Other": other})
    assert schema.problems_reading(schema) == []
    changed = json.dumps(record(field("x", "int"), name="n.Other"))
    assert avro(record(field("o", "n.Other")), **{"n.Other": changed}).problems_reading(schema)


@pytest.mark.parametrize(
    ("reader", "writer", "is_readable"),
    [
        (record(field("a"), field("b", default="")), record(field("a")), True),
        (record(field("a"), field("b")), record(field("a")), False),
        (record(field("a")), record(field("a"), field("b")), True),
        (record(field("a", "long")), record(field("a", "int")), True),
        (record(field("a", "int")), record(field("a", "long")), False),
        (record(field("a", ["null", "string"])), record(field("a")), True),
        (record(field("a")), record(field("a", ["null", "string"])), False),
        (record(field("new", aliases=["old"])), record(field("old")), True),
        ({"type": "array", "items": "long"}, {"type": "array", "items": "int"}, True),
        ({"type": "map", "values": "int"}, {"type": "map", "values": "string"}, False),
        ({"type": "fixed", "name": "F", "size": 4}, {"type": "fixed", "name": "F", "size": 8}, False),
    ],
)
def test_readers_resolve_what_writers_wrote(reader: Any, writer: Any, is_readable: bool) -> None:
    assert (avro(reader).problems_reading(avro(writer)) == []) is is_readable


def test_an_enum_may_lose_a_symbol_only_with_a_default() -> None:
    wide = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
    assert avro({**wide, "symbols": ["A"]}).problems_reading(avro(wide))
    assert avro({**wide, "symbols": ["A"], "default": "A"}).problems_reading(avro(wide)) == []


NAMES = st.sampled_from("abcdef")
TYPES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(["null", "boolean", "int", "long", "float", "double", "bytes", "string"]),
    lambda inner: (
        st.builds(lambda each: {"type": "array", "items": each}, inner)
        | st.builds(lambda each: {"values": each, "type": "map"}, inner)
    ),
    max_leaves=4,
)


@given(st.dictionaries(NAMES, TYPES, max_size=5))
def test_every_schema_reads_itself_and_its_canonical_text_is_stable(fields: dict[str, Any]) -> None:
    schema = avro(record(*(field(name, kind) for name, kind in fields.items())))
    again = AvroSchema(schema.canonical(), {})
    assert again.canonical() == schema.canonical()
    assert AvroSchema(schema.normalized(), {}).normalized() == schema.normalized()
    assert again.problems_reading(schema) == []


@pytest.mark.parametrize(
    "schema",
    [
        record(field("a", "int", default=float("inf"))),
        record(field("a", "long", default=float("nan"))),
        record(field("a", aliases=3)),
        record(field("a"), aliases={"b": 1}),
        ["null", {"type": {"type": {"type": "null"}}}],
    ],
)
def test_a_malformed_schema_is_refused_without_another_exception(schema: Any) -> None:
    with pytest.raises(InvalidSchema):
        avro(schema)


@pytest.mark.parametrize(
    "schema",
    [
        ["null", {"type": {"type": "array", "items": "long"}, "items": "long"}],
        {"type": "array", "items": {"type": []}, "values": None},
        {"type": "enum", "name": "E", "symbols": ["A"], "fields": "x", "items": 7},
        {"type": "bytes", "logicalType": {"a": []}},
        {"type": "fixed", "name": "F", "size": 4, "logicalType": "unknown"},
    ],
)
@pytest.mark.filterwarnings("error")
def test_attributes_without_a_use_do_no_harm(schema: Any) -> None:
    parsed = avro(schema)
    assert avro(json.loads(parsed.canonical())).problems_reading(parsed) == []


def test_unions_that_are_too_large_to_compare_are_refused() -> None:
    def union(prefix: str, size: int) -> AvroSchema:
        return avro([{"type": "fixed", "name": f"{prefix}{number}", "size": 4} for number in range(size)])

    assert union("A", 40).problems_reading(union("B", 40))
    with pytest.raises(InvalidSchema, match="too large"):
        union("A", 1_000).problems_reading(union("B", 1_000))
