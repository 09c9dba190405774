"""Ten changes of a schema in a row, compatible and not, of Protobuf and JSON Schema: the table after each of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from tests.pipeline.test_protobuf import message_class
from tests.pipeline.test_schema_changes import DeltaTopic, IcebergTopic

from chronik.client.schema_registry import Schema
from chronik.pipeline.land.delta import LandedBatch
from chronik.pipeline.typed.protobuf import protobuf_router


class Change(NamedTuple):
    """A schema, a record of it, a column with its type after it, and the row; or the reason of a dead letter."""

    schema: Any
    record: dict[str, Any]
    column: str
    kind: Any
    row: dict[str, Any] | str


def order(*fields: str) -> str:
    line = next((field for field in fields if field.startswith("Line")), "")
    members = "int64 x = 1; optional string y = 2;" if line.endswith("/* wide */") else "int32 x = 1;"
    body = "".join(f" {field};" for field in fields)
    return f'syntax = "proto3"; message Order {{{body} }} message Line {{ {members} }}'


NOTE = "optional string note = 3"
NARROW = pa.struct([("x", pa.int32())])
WIDE = pa.struct([("x", pa.int64()), ("y", pa.string())])
PROTOBUF = [
    Change(order("int32 id = 1", "float n = 2"), {"id": 1, "n": 0.5}, "id", pa.int32(), {"id": 1, "n": 0.5}),
    Change(
        order("int32 id = 1", "float n = 2", NOTE),
        {"id": 2, "n": 0.5, "note": "a"},
        "note",
        pa.string(),
        {"id": 2, "n": 0.5, "note": "a"},
    ),
    Change(order("int64 id = 1", "float n = 2", NOTE), {"id": 2**40}, "id", pa.int64(), {"id": 2**40, "n": 0.0}),
    Change(order("int64 id = 1", "float n = 2"), {"id": 4}, "note", pa.string(), {"id": 4, "n": 0.0}),
    Change(
        order("int64 id = 1", "float n = 2", "Line line = 4"),
        {"id": 5, "line": {"x": 1}},
        "line",
        NARROW,
        {"id": 5, "n": 0.0, "line": {"x": 1}},
    ),
    Change(order("string id = 1", "float n = 2"), {"id": "6"}, "id", pa.int64(), "the type of id changes from int64"),
    Change(order("int64 id = 1", "float number = 2"), {"id": 7}, "n", pa.float32(), "the field n is renamed to number"),
    Change(order("int64 id = 1", "double n = 2"), {"id": 8, "n": 0.1}, "n", pa.float64(), {"id": 8, "n": 0.1}),
    Change(
        order("int64 id = 1", "double n = 2", "Line line = 4 /* wide */"),
        {"id": 9, "line": {"x": 2**40, "y": "z"}},
        "line",
        WIDE,
        {"id": 9, "n": 0.0, "line": {"x": 2**40, "y": "z"}},
    ),
    Change(order("int64 id = 1", "bytes n = 2"), {"id": 10}, "n", pa.float64(), "the type of n changes from double"),
    Change(
        order("int64 id = 1", "double n = 2", NOTE),
        {"id": 11, "note": "back"},
        "note",
        pa.string(),
        {"id": 11, "n": 0.0, "note": "back"},
    ),
]


def json_order(*required: str, **properties: Any) -> dict[str, Any]:
    return {"title": "Order", "type": "object", "required": list(required), "properties": properties}


INTEGER, NUMBER, STRING = {"type": "integer"}, {"type": "number"}, {"type": "string"}
LINE = {"type": "object", "properties": {"x": INTEGER}}
LONG_LINE = {"type": "object", "properties": {"x": INTEGER, "y": STRING}}
LINE_TYPE = pa.struct([("x", pa.int64())])
LONG_LINE_TYPE = pa.struct([("x", pa.int64()), ("y", pa.string())])
BASE: dict[str, Any] = {"id": INTEGER, "n": NUMBER}
JSON_SCHEMA = [
    Change(json_order("id", "n", **BASE), {"id": 1, "n": 0.5}, "id", pa.int64(), {"id": 1, "n": 0.5}),
    Change(
        json_order("id", "n", **BASE, note=STRING),
        {"id": 2, "n": 1, "note": "a"},
        "note",
        pa.string(),
        {"id": 2, "n": 1.0, "note": "a"},
    ),
    Change(json_order("id", **BASE), {"id": 3}, "n", pa.float64(), {"id": 3}),
    Change(
        json_order("id", **BASE, line=LINE), {"id": 4, "line": {"x": 1}}, "line", LINE_TYPE, {"id": 4, "line": {"x": 1}}
    ),
    Change(json_order("id", id=STRING), {"id": "5"}, "id", pa.int64(), "the type of id changes from int64 to string"),
    Change(json_order("number", number=INTEGER), {"number": 6}, "id", pa.int64(), "the field id is renamed to number"),
    Change(
        json_order("id", **BASE, line=LONG_LINE),
        {"id": 7, "line": {"y": "z"}},
        "line",
        LONG_LINE_TYPE,
        {"id": 7, "line": {"x": None, "y": "z"}},
    ),
    Change(json_order("id", id=INTEGER, n=STRING), {"id": 8, "n": "x"}, "n", pa.float64(), "the type of n changes"),
    Change(
        json_order("id", id=INTEGER, Note=STRING),
        {"id": 9, "Note": "x"},
        "note",
        pa.string(),
        "differs from the column note",
    ),
    Change(
        json_order("id", **BASE, tags={"type": "array", "items": STRING}),
        {"id": 10, "tags": ["a"]},
        "tags",
        pa.list_(pa.field("element", pa.string())),
        {"id": 10, "tags": ["a"]},
    ),
    Change(
        json_order("id", **BASE, note=STRING), {"id": 11, "note": "b"}, "note", pa.string(), {"id": 11, "note": "b"}
    ),
]


def encoded(kind: str, schema_id: int, change: Change) -> bytes:
    prefix = struct.pack(">bi", 0, schema_id)
    if kind == "JSON":
        return prefix + json.dumps(change.record).encode()
    router = protobuf_router(change.schema, {})
    message = message_class(router.schema(0), router.files)(**change.record)
    return prefix + b"\0" + bytes(message.SerializeToString())


@pytest.mark.parametrize("table", [DeltaTopic, IcebergTopic])
@pytest.mark.parametrize(("kind", "changes"), [("PROTOBUF", PROTOBUF), ("JSON", JSON_SCHEMA)])
def test_ten_schema_changes_give_the_expected_table_after_each(
    kind: str, changes: list[Change], table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    texts = [each.schema if kind == "PROTOBUF" else json.dumps(each.schema) for each in changes]

    class Topic(table):  # type: ignore[misc]
        def _lookup(self, schema_id: int, subject: str) -> Schema:
            return Schema(kind, texts[schema_id - 1])

    topic = Topic(tmp_path, formats={"value": "auto"})
    expected: list[dict[str, Any]] = []
    reasons: list[str] = []
    for number, change in enumerate(changes, 1):
        is_row = isinstance(change.row, dict)
        assert topic.land(encoded(kind, number, change)) == LandedBatch(int(is_row), int(not is_row)), change
        if isinstance(change.row, dict):
            expected.append(change.row)
        else:
            reasons.append(change.row)
        assert topic.types()[change.column] == change.kind, change
        names = list(topic.types())
        wanted = [{name: row.get(name) for name in names} for row in expected]
        for row in wanted:
            line: Any = row.get("line")
            if line is not None:
                row["line"] = {member.name: line.get(member.name) for member in topic.types()["line"]}
        for engine, found in topic.engines():
            assert found.sort_by("offset").select(names).to_pylist() == wanted, (engine, change)
        if number % 4 == 0:
            topic.start()
    letters = topic.arrow("t_dead_letters").sort_by("offset").column("reason").to_pylist()
    assert len(letters) == len(reasons)
    assert all(reason in letter for reason, letter in zip(reasons, letters, strict=True)), letters
