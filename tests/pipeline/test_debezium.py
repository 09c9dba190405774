"""Debezium's events in the formats of a registry: JSON Schema as Kafka Connect writes it, and Protobuf."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.pipeline.test_protobuf import message_class

from chronik.pipeline.typed.debezium import EnvelopeSchema
from chronik.pipeline.typed.json_schema import JsonSchema
from chronik.pipeline.typed.protobuf import protobuf_router
from chronik.pipeline.typed.writer_schema import SchemaError, WriterSchema

EVENTS: list[dict[str, Any]] = [
    {"after": {"id": 1, "note": "created"}, "op": "c", "ts_ms": 1},
    {"before": {"id": 1}, "after": {"id": 2}, "op": "u"},
    {"before": {"id": 2}, "op": "d"},
    {"op": "t"},
]
ROW = {
    "type": "object",
    "title": "shop.Value",
    "properties": {
        "id": {"type": "integer", "connect.index": 0, "connect.type": "int64"},
        "note": {"oneOf": [{"type": "null"}, {"type": "string"}], "connect.index": 1},
    },
}
STATE = {"oneOf": [{"type": "null"}, ROW]}
ENVELOPE = {
    "type": "object",
    "title": "shop.Envelope",
    "properties": {
        "before": {**STATE, "connect.index": 0},
        "after": {**STATE, "connect.index": 1},
        "source": {"type": "object", "properties": {"db": {"type": "string"}}},
        "op": {"type": "string"},
        "ts_ms": {"oneOf": [{"type": "null"}, {"type": "integer"}]},
    },
}
PROTOBUF = """
syntax = "proto3";
message Envelope {
  Value before = 1;
  Value after = 2;
  string op = 4;
  optional int64 ts_ms = 5;
  message Value { int64 id = 1; optional string note = 2; }
}
"""


def of_json() -> tuple[WriterSchema, list[bytes]]:
    texts = [json.dumps({"before": None, "after": None, **event}).encode() for event in EVENTS]
    return JsonSchema(json.dumps(ENVELOPE), {}), texts


def of_protobuf() -> tuple[WriterSchema, list[bytes]]:
    router = protobuf_router(PROTOBUF, {})
    schema = router.schema(0)
    message = message_class(schema, router.files)
    return schema, [message(**event).SerializeToString() for event in EVENTS]


@pytest.mark.parametrize("events", [of_json, of_protobuf])
def test_events_are_states_and_deletions_of_rows(events: Any) -> None:
    inner, values = events()
    schema = EnvelopeSchema(inner, ("id",))
    data = np.frombuffer(b"".join(values) + b"\0", np.uint8)
    stops = np.cumsum([len(value) for value in values], dtype=np.int64)
    decoded = schema.decode(data, stops - np.array([len(value) for value in values], np.int64), stops)
    names = [field.name for field in schema.fields]
    assert pa.RecordBatch.from_arrays(list(decoded.columns), names).to_pylist() == [
        {"id": 1, "note": "created", "chronik_op": "c", "chronik_old": None},
        {"id": 2, "note": None, "chronik_op": "u", "chronik_old": b"1"},
        {"id": 2, "note": None, "chronik_op": "d", "chronik_old": b"2"},
    ]
    assert (decoded.good.tolist(), decoded.bad.tolist()) == ([0, 1, 2], [3])
    assert decoded.reasons == ["an event of Debezium with op t and no row: it is about no single row"]


def test_a_schema_whose_state_is_no_record_is_refused() -> None:
    properties = {"op": {"type": "string"}, "after": {"type": "string"}}
    with pytest.raises(SchemaError, match="after is no record"):
        EnvelopeSchema(JsonSchema(json.dumps({"type": "object", "properties": properties}), {}), ())
