"""Whatever a client sends as a schema is refused as one, or can be used as one: it raises nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chronik.schemas.errors import InvalidSchema
from chronik.schemas.parsing import parse

WORDS = {
    "AVRO": ("type", "name", "fields", "items", "values", "symbols", "size", "default", "aliases", "logicalType"),
    "JSON": (
        "type",
        "properties",
        "items",
        "prefixItems",
        "$ref",
        "enum",
        "anyOf",
        "not",
        "required",
        "$schema",
        "$id",
    ),
}
ATOMS: dict[str, tuple[Any, ...]] = {
    "AVRO": ("int", "string", "record", "enum", "array", "R", None, 7, float("inf"), True, ["A"], []),
    "JSON": ("object", "string", "array", "#", "#/properties/a", "http://[x", None, 7, 1.5, True, False, []),
}


def trees(kind: str) -> st.SearchStrategy[Any]:
    atoms = st.sampled_from(ATOMS[kind])
    names = st.sampled_from((*WORDS[kind], "a"))
    return st.recursive(
        atoms, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5), max_leaves=12
    )


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of sockets that earlier tests left to the garbage collector
@pytest.mark.filterwarnings("error")
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_text_raises_anything_but_invalid_schema(kind: str, data: st.DataObject) -> None:
    tree = data.draw(trees(kind))
    if kind == "AVRO":
        tree = {"type": "record", "name": "R", "fields": [{"name": "f", "type": tree}]}
    try:
        parsed = parse(kind, json.dumps(tree), {})
        canonical = parse(kind, parsed.canonical(), {})
        assert canonical.canonical() == parsed.canonical()
        parse(kind, parsed.normalized(), {}).problems_reading(canonical)
        parsed.formatted("resolved")
    except InvalidSchema:
        pass
