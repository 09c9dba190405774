"""Protobuf values as Arrow columns, compared with Google's library."""

from __future__ import annotations

import datetime
import decimal
import json
import pickle
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.landing import records

from chronik.client.schema_registry import Reference, Schema
from chronik.pipeline.typed.decoding import MissingSchemas
from chronik.pipeline.typed.protobuf import ProtobufSchema, protobuf_router
from chronik.pipeline.typed.topic_schemas import TopicSchemas
from chronik.pipeline.typed.writer_schema import Decoded, SchemaError

TEXT = """
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
import "google/protobuf/struct.proto";
message Unused {}
message Order {
  enum State { OPEN = 0; PAID = 3; }
  message Line { string item = 1; repeated int32 sizes = 2; optional double price = 4; }
  sint64 number = 15;
  int32 small = 1;
  uint32 unsigned = 2;
  uint64 huge = 3;
  bool yes = 4;
  float ratio = 5;
  optional string who = 6;
  bytes raw = 7;
  State state = 8;
  Line line = 9;
  repeated Line lines = 10;
  map<string, Line> by_name = 11;
  map<int64, State> states = 12;
  repeated State packed = 13;
  repeated string names = 14;
  oneof payer { string card = 16; Line deposit = 17; }
  google.protobuf.Timestamp at = 18;
  google.protobuf.Int64Value limit = 19;
  google.protobuf.Struct more = 20;
  repeated google.protobuf.Timestamp times = 21;
  repeated sint32 loose = 22 [packed = false];
  fixed64 wide = 23;
  sfixed32 narrow = 24;
  Unused empty = 25;
}
"""
ROUTER = protobuf_router(TEXT, {})
ORDER: Any = ROUTER.schema(1)


def message_class(schema: ProtobufSchema, files: Any) -> Any:
    pool: Any = descriptor_pool.DescriptorPool()
    for _, data in files:
        pool.AddSerializedFile(data)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(schema.record))


Order: Any = message_class(ORDER, ROUTER.files)


def decode(schema: ProtobufSchema, values: list[bytes]) -> Decoded:
    data = np.frombuffer(b"".join(values) + b"\0", np.uint8)
    stops = np.cumsum([len(value) for value in values], dtype=np.int64)
    starts = stops - np.array([len(value) for value in values], np.int64)
    decoded = schema.decode(data, starts, stops)
    for column, field in zip(decoded.columns, schema.fields, strict=True):
        column.validate(full=True)
        assert (column.type, len(column)) == (field.kind, len(decoded.good))
    return decoded


def rows(decoded: Decoded, schema: ProtobufSchema = ORDER) -> list[dict[str, Any]]:
    names = [field.name for field in schema.fields]
    return pa.RecordBatch.from_arrays(list(decoded.columns), names).to_pylist() if decoded.columns else []


def line(value: Any) -> dict[str, Any]:
    price = value.price if value.HasField("price") else None
    return {"item": value.item, "sizes": list(value.sizes), "price": price}


def moment(value: Any) -> datetime.datetime:
    return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(
        seconds=value.seconds, microseconds=value.nanos // 1000
    )


def state(number: int) -> str:
    return {0: "OPEN", 3: "PAID"}.get(number, str(number))


def expected(value: Any) -> dict[str, Any]:
    def present(name: str, shown: Any) -> Any:
        return shown(getattr(value, name)) if value.HasField(name) else None

    return {
        **{name: getattr(value, name) for name in ("number", "small", "unsigned", "yes", "ratio", "raw", "narrow")},
        "huge": decimal.Decimal(value.huge),
        "wide": decimal.Decimal(value.wide),
        "who": present("who", str),
        "state": state(value.state),
        "line": present("line", line),
        "lines": [line(each) for each in value.lines],
        "by_name": sorted((name, line(each)) for name, each in value.by_name.items()),
        "states": sorted((number, state(each)) for number, each in value.states.items()),
        "packed": [state(each) for each in value.packed],
        "names": list(value.names),
        "card": present("card", str),
        "deposit": present("deposit", line),
        "at": present("at", moment),
        "limit": present("limit", lambda each: each.value),
        "more": present("more", lambda each: json.dumps(dict(each.items()), separators=(",", ":"))),
        "times": [moment(each) for each in value.times],
        "loose": list(value.loose),
        "empty": present("empty", lambda each: "{}"),
    }


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Sort what has no order in Protobuf."""
    return {**row, "by_name": sorted(row["by_name"]), "states": sorted(row["states"])}


WHOLE32 = st.integers(-(2**31), 2**31 - 1)
TEXTS = st.text(max_size=5)
LINES = st.fixed_dictionaries(
    {"item": TEXTS, "sizes": st.lists(WHOLE32, max_size=3)}, optional={"price": st.floats(allow_nan=False)}
)
TIMES = st.fixed_dictionaries(
    {"seconds": st.integers(-62135596800, 253402300799), "nanos": st.integers(0, 999_999_999)}
)
ORDERS = st.fixed_dictionaries(
    {},
    optional={
        "number": st.integers(-(2**63), 2**63 - 1),
        "small": WHOLE32,
        "unsigned": st.integers(0, 2**32 - 1),
        "huge": st.integers(0, 2**64 - 1),
        "wide": st.integers(0, 2**64 - 1),
        "narrow": WHOLE32,
        "yes": st.booleans(),
        "ratio": st.floats(width=32, allow_nan=False),
        "who": TEXTS,
        "raw": st.binary(max_size=5),
        "state": st.sampled_from([0, 3, 7, -1]),
        "line": LINES,
        "lines": st.lists(LINES, max_size=3),
        "by_name": st.dictionaries(TEXTS, LINES, max_size=2),
        "states": st.dictionaries(st.integers(-5, 5), st.sampled_from([0, 3]), max_size=2),
        "packed": st.lists(st.sampled_from([0, 3, 9]), max_size=4),
        "names": st.lists(TEXTS, max_size=3),
        "at": TIMES,
        "times": st.lists(TIMES, max_size=2),
        "limit": st.fixed_dictionaries({}, optional={"value": st.integers(-5, 5)}),
        "loose": st.lists(WHOLE32, max_size=3),
        "empty": st.just({}),
    },
)


def order(fields: dict[str, Any]) -> Any:
    plain = {name: each for name, each in fields.items() if name != "by_name"}
    value = Order(**plain)
    for name, each in fields.get("by_name", {}).items():
        for part, content in each.items():
            if part == "sizes":
                value.by_name[name].sizes.extend(content)
            else:
                setattr(value.by_name[name], part, content)
        value.by_name[name].SetInParent()
    return value


@settings(deadline=None, max_examples=60)
@given(st.lists(ORDERS, min_size=1, max_size=4), st.booleans())
def test_columns_have_the_values_that_googles_library_reads(given_orders: list[dict[str, Any]], joined: bool) -> None:
    values = [order(each) for each in given_orders]
    encoded = [each.SerializeToString() for each in values]
    if joined:
        # Two messages in a row are one message: fields repeat, and are no longer in order.
        encoded = [first + second for first, second in zip(encoded, reversed(encoded), strict=True)]
        values = [Order.FromString(each) for each in encoded]
    decoded = decode(ORDER, encoded)
    assert (list(decoded.good), list(decoded.bad)) == (list(range(len(values))), [])
    assert [shown(row) for row in rows(decoded)] == [expected(each) for each in values]


def test_oneofs_and_recursive_types_are_columns() -> None:
    value = order({"card": "4711", "small": 1})
    value.more.update({"a": [1.0, None, {"b": True}]})
    second = order({"deposit": {"item": "x"}})
    # The last member of a oneof counts.
    both = Order.FromString(value.SerializeToString() + second.SerializeToString())
    decoded = decode(ORDER, [value.SerializeToString(), second.SerializeToString(), both.SerializeToString()])
    raw = decode(ORDER, [second.SerializeToString() + order({"card": "1"}).SerializeToString()])
    assert [(row["card"], row["deposit"] and row["deposit"]["item"], row["more"]) for row in rows(decoded)] == [
        ("4711", None, '{"a":[1.0,null,{"b":true}]}'),
        (None, "x", None),
        (None, "x", '{"a":[1.0,null,{"b":true}]}'),
    ]
    assert [(row["card"], row["deposit"]) for row in rows(raw)] == [("1", None)]


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=40), ORDERS)
def test_damaged_values_are_refused_or_read_as_googles_library_does(noise: bytes, fields: dict[str, Any]) -> None:
    good = order(fields).SerializeToString()
    values = [noise, good, good[: len(good) // 2] + noise, good]
    decoded = decode(ORDER, values)
    assert {1, 3} <= set(decoded.good.tolist())
    for row, content in zip(decoded.good.tolist(), rows(decoded), strict=True):
        assert shown(content) == expected(Order.FromString(values[row]))
    assert len(decoded.reasons) == len(decoded.bad)


def test_required_fields_and_types_without_columns_are_refused() -> None:
    old = protobuf_router('syntax = "proto2"; message A { required int32 a = 1; optional string s = 2; }', {}).schema(0)
    decoded = decode(old, [b"\x08\x01", b"\x12\x01x", b"", b"\x12\x02\xff\xff\x08\x01"])
    assert rows(decoded, old) == [{"a": 1, "s": None}] and list(decoded.bad) == [1, 2, 3]
    assert decoded.reasons[0] == "a required field is missing" and old.fields[0].is_required
    for text, reason in (
        ('syntax = "proto2"; message A { optional group G = 1 { optional int32 a = 2; } }', "group"),
        ('syntax = "proto3"; message A {}', "no fields"),
        ('syntax = "proto3"; message A { int32 ab = 1; int32 aB = 2; }', "case|JSON"),
    ):
        with pytest.raises(SchemaError, match=reason):
            protobuf_router(text, {}).schema(0)


def value(schema_id: int, path: bytes, content: Any) -> bytes:
    return struct.pack(">bi", 0, schema_id) + path + bytes(content.SerializeToString())


def test_a_topic_may_have_records_of_several_messages_and_versions() -> None:
    base = Schema("PROTOBUF", 'syntax = "proto3"; package b; message Base { int32 x = 1; }')
    first = (
        'syntax = "proto3"; import "b.proto"; message A { b.Base base = 1; }'
        " message B { string t = 2; message C { bool c = 3; } }"
    )
    texts = {1: first, 2: first.replace("string t = 2;", "string t = 2; int64 more = 4;")}
    found = {number: Schema("PROTOBUF", text, (Reference("b.proto", "b", 1, base),)) for number, text in texts.items()}
    topic = TopicSchemas("t", {"value": "auto"}, "evolve", lambda schema_id, subject: found[schema_id])
    router = protobuf_router(first, {"b.proto": base.text})
    classes = {name: message_class(router.schema(code), router.files) for code, name in enumerate(("A", "B", "C"))}
    second = protobuf_router(texts[2], {"b.proto": base.text})
    newer = message_class(second.schema(1), second.files)
    batch = records(
        0,
        range(6),
        [
            value(1, b"\0", classes["A"](base={"x": 5})),
            value(1, b"\2\2", classes["B"](t="hi")),
            value(1, b"\4\2\0", classes["C"](c=True)),
            value(2, b"\2\2", newer(t="more", more=9)),
            value(1, b"\2\x0a", classes["A"]()),
            struct.pack(">bi", 0, 1),
        ],
    )
    taken = frozenset(batch.schema.names)
    while True:
        decoding = pickle.loads(pickle.dumps(topic.plan((), taken)))
        try:
            kept, bad, reasons = decoding.split(batch)
            break
        except MissingSchemas as missing:
            topic.learn(missing.missing)
    assert [(row["base"], row["t"], row["c"], row["more"]) for row in kept.to_pylist()] == [
        ({"x": 5}, None, None, None),
        (None, "hi", None, None),
        (None, None, True, None),
        (None, "more", None, 9),
    ]
    assert bad.num_rows == 2 and all("has the schema 1: the value does not begin" in each for each in reasons)
    topic.learn_main("value", 2)
    assert [column.name for column in topic.plan((), taken).columns] == ["base", "t", "more", "c"]


def test_a_field_with_another_name_and_the_same_number_is_a_rename() -> None:
    """Records of both schemas have the same bytes: the number is all that they name a field by."""
    texts = {
        1: 'syntax = "proto3"; message A { int32 id = 1; string name = 2; }',
        2: 'syntax = "proto3"; message A { int32 id = 1; string title = 2; }',
        3: 'syntax = "proto3"; message A { int32 id = 1; int64 size = 3; }',
        4: 'syntax = "proto3"; message A { int32 id = 1; bytes name = 2; }',
        5: 'syntax = "proto3"; message A { string name = 2; string id_text = 4; } message B { int32 other = 2; }',
    }
    topic = TopicSchemas("t", {"value": "auto"}, "evolve", lambda number, _: Schema("PROTOBUF", texts[number]))
    batch = records(0, range(6), [value(n, b"\0", _Empty()) for n in (1, 2, 3, 4, 5)] + [value(5, b"\2\2", _Empty())])
    columns: tuple[Any, ...] = ()
    while True:
        decoding = topic.plan(columns, frozenset(batch.schema.names))
        try:
            kept, bad, reasons = decoding.split(batch)
            break
        except MissingSchemas as missing:
            topic.learn(missing.missing)
    assert kept.column("offset").to_pylist() == [0, 2, 4, 5]
    assert [column.name for column in decoding.columns] == ["id", "name", "size", "id_text", "other"]
    assert bad.column("offset").to_pylist() == [1, 3]
    assert "the field name is renamed to title: if it is a new field, add the column title to the table" in reasons[0]
    assert "the type of name changes from string to binary" in reasons[1]


class _Empty:
    """A message of any type without fields."""

    def SerializeToString(self) -> bytes:
        return b""
