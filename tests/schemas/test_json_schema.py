"""JSON Schema: a new version is compatible if it accepts everything that the old one accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.schemas.errors import InvalidSchema
from chronik.schemas.json_schema import JsonSchema


def schema(tree: Any, **references: Any) -> JsonSchema:
    return JsonSchema(json.dumps(tree), {name: json.dumps(each) for name, each in references.items()})


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


STRING, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("new", "old", "is_compatible"),
    [
        (closed(a=STRING, b=STRING), closed(a=STRING), True),
        (closed(("b",), a=STRING, b=STRING), closed(a=STRING), False),
        (closed(("b",), a=STRING, b={**STRING, "default": ""}), closed(a=STRING), True),
        (closed(a=STRING), closed(a=STRING, b=STRING), False),
        ({"type": "object", "properties": {"b": STRING}}, {"type": "object"}, False),
        ({"type": "object"}, {"type": "object", "properties": {"b": STRING}}, True),
        (closed(("a",), a=STRING), closed(a=STRING), False),
        (closed(a=NUMBER), closed(a=INTEGER), True),
        (closed(a=INTEGER), closed(a=NUMBER), False),
        ({"type": ["string", "null"]}, STRING, True),
        (STRING, {"type": ["string", "null"]}, False),
        ({"oneOf": [STRING, NUMBER]}, {"oneOf": [STRING]}, True),
        ({"oneOf": [STRING]}, {"oneOf": [STRING, NUMBER]}, False),
        ({**STRING, "maxLength": 5}, {**STRING, "maxLength": 9}, False),
        ({**STRING, "maxLength": 9}, {**STRING, "maxLength": 5}, True),
        ({"enum": ["a", "b"]}, {"enum": ["a"]}, True),
        ({"enum": ["a"]}, {"enum": ["a", "b"]}, False),
        ({"type": "array", "items": NUMBER}, {"type": "array", "items": INTEGER}, True),
        ({"type": "array", "items": INTEGER}, {"type": "array", "items": NUMBER}, False),
        ({"not": STRING}, {"not": {"type": ["string", "null"]}}, True),
        (True, closed(a=STRING), True),
        (closed(a=STRING), True, False),
    ],
)
def test_compatible_schemas_accept_old_data(new: Any, old: Any, is_compatible: bool) -> None:
    assert (schema(new).problems_reading(schema(old)) == []) is is_compatible


def test_references_and_definitions_are_resolved() -> None:
    tree = {"type": "object", "properties": {"a": {"$ref": "other.json"}, "b": {"$ref": "#/definitions/d"}}}
    tree["definitions"] = {"d": STRING}
    old = schema(tree, **{"other.json": NUMBER})
    assert schema(tree, **{"other.json": NUMBER}).problems_reading(old) == []
    assert schema(tree, **{"other.json": INTEGER}).problems_reading(old)
    with pytest.raises(InvalidSchema, match=r"other\.json"):
        schema(tree)


def test_a_schema_that_refers_to_itself_is_compared_once() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    assert schema(tree).problems_reading(schema(tree)) == []


@pytest.mark.parametrize("text", ["{", "17", '{"type": "strin"}', '{"$ref": "#/nowhere"}'])
def test_an_invalid_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidSchema):
        JsonSchema(text, {})


SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([STRING, NUMBER, INTEGER, {"type": "null"}, True, {"enum": [1, 2]}]),
    lambda inner: (
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(lambda each: closed(**each))
        | st.builds(lambda each: {"type": "array", "items": each}, inner)
        | st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each})
    ),
    max_leaves=6,
)


@given(SCHEMAS)
def test_every_schema_is_compatible_with_itself(tree: Any) -> None:
    assert schema(tree).problems_reading(schema(tree)) == []


def shared(depth: int, **more: Any) -> dict[str, Any]:
    """Each of the definitions uses the next one twice: they have 2 ** depth paths."""
    definitions: dict[str, Any] = {
        f"D{number}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/definitions/D{number + 1}"} for name in ("a", "b")},
        }
        for number in range(depth)
    }
    return {"definitions": {**definitions, f"D{depth}": {"type": "object", **more}}, "$ref": "#/definitions/D0"}


def test_shared_definitions_are_compared_once() -> None:
    assert schema(shared(60)).problems_reading(schema(shared(60))) == []
    assert schema(shared(60, minProperties=2)).problems_reading(schema(shared(60, minProperties=1)))


def test_definitions_that_use_each_other_have_the_result_of_their_differences() -> None:
    def cyclic(kind: str) -> dict[str, Any]:
        nodes: dict[str, Any] = {
            name: {"type": "object", "properties": {other: {"$ref": f"#/definitions/{other}"} for other in "xyz"}}
            for name in "xyz"
        }
        nodes["z"]["properties"]["value"] = {"type": kind}
        return {"definitions": nodes, "oneOf": [{"$ref": "#/definitions/x"}, {"type": "null"}]}

    assert schema(cyclic("string")).problems_reading(schema(cyclic("string"))) == []
    assert schema(cyclic("number")).problems_reading(schema(cyclic("string")))


def test_schemas_that_are_too_complex_to_compare_are_refused() -> None:
    many = [schema({"oneOf": [{"const": sign * number} for number in range(1, 1_000)]}) for sign in (1, -1)]
    with pytest.raises(InvalidSchema, match="too complex"):
        many[0].problems_reading(many[1])


def test_a_hostile_pattern_does_not_occupy_the_process() -> None:
    new = {"type": "object", "patternProperties": {"^(a+)+$": STRING}, "additionalProperties": False}
    assert schema(new).problems_reading(schema(closed((), **{"a" * 60 + "!": STRING})))
    assert not schema(new).problems_reading(schema(closed((), **{"a" * 60: STRING})))


@pytest.mark.parametrize(
    "tree",
    [
        {"$schema": {"type": {}}},
        {"$schema": 1.5},
        {"type": "array", "prefixItems": [""]},
        {"$id": "http://[x"},
        {"$ref": "http://[x"},
        {"$id": "http://[x", "$ref": "y"},
    ],
)
def test_a_malformed_schema_is_refused_or_compared(tree: Any) -> None:
    try:
        parsed = schema(tree)
    except InvalidSchema:
        return
    assert parsed.problems_reading(parsed) == []
