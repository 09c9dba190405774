"""Protobuf schemas: the canonical text and the descriptor keep their meaning; compatibility has Confluent's rules."""

from __future__ import annotations

import base64
import contextlib
from time import process_time
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, duration_pb2
from hypothesis import example, given
from hypothesis import strategies as st
from tests.schemas.test_commands import Registry

from chronik.schemas.errors import Code, InvalidSchema
from chronik.schemas.protobuf import ProtobufSchema

ORDER = """
syntax = "proto3"; // a comment
package shop.v1;
import "google/protobuf/timestamp.proto";
import 'google/protobuf/descriptor.proto';
option java_package = "com.shop";
extend google.protobuf.FieldOptions { string unit = 50001; }
/* another
   comment */
message Order {
  message Line { int32 count = 1 [deprecated=true, json_name="n"]; }
  map<string, Line> lines = 1;
  optional int64 id = 2;
  oneof payer { string card = 3; Line line = 4 [(unit) = "EUR"]; }
  reserved 9 to 11, 20; reserved "old";
  google.protobuf.Timestamp at = 5;
  State state = 6;
}
enum State { option allow_alias = true; OPEN = 0; PAID = 0x1; SETTLED = 1; }
service Shop { rpc Get (Order) returns (stream Order.Line); }
"""
CANONICAL = """syntax = "proto3";
package shop.v1;

import "google/protobuf/timestamp.proto";
import "google/protobuf/descriptor.proto";

option java_package = "com.shop";

message Order {
  reserved 9 to 11, 20;
  reserved "old";

  map<string, Line> lines = 1;
  optional int64 id = 2;
  google.protobuf.Timestamp at = 5;
  State state = 6;

  oneof payer {
    string card = 3;
    Line line = 4 [(unit) = "EUR"];
  }

  message Line {
    int32 count = 1 [
      deprecated = true,
      json_name = "n"
    ];
  }
}
enum State {
  option allow_alias = true;
  OPEN = 0;
  PAID = 1;
  SETTLED = 1;
}

extend google.protobuf.FieldOptions {
  string unit = 50001;
}

service Shop {
  rpc Get (Order) returns (stream Order.Line);
}
"""


def parsed(text: str, **references: str) -> ProtobufSchema:
    named = {f"{name}.proto": body for name, body in references.items()}
    return ProtobufSchema(text, named)


def test_the_canonical_text_is_that_of_other_registries() -> None:
    schema = parsed(ORDER)
    assert schema.canonical() == CANONICAL
    assert parsed(CANONICAL).canonical() == CANONICAL


def test_the_normal_form_does_not_depend_on_how_types_and_fields_are_written() -> None:
    first = 'syntax="proto3"; package p; message A { int32 x = 1; B b = 2; message B {} map<string, B> m = 3; }'
    second = (
        'syntax = "proto3";\npackage p;\nmessage A { .p.A.B b = 2; int32 x = 1; repeated MEntry m = 3;'
        " message B {} message MEntry { option map_entry = true; string key = 1; A.B value = 2; } }"
    )
    assert parsed(first).canonical() != parsed(second).canonical()
    assert parsed(first).normalized() == parsed(second).normalized()
    assert "map<string, .p.A.B> m = 3;" in parsed(first).normalized()


def test_a_serialized_descriptor_is_the_same_schema() -> None:
    schema = parsed(ORDER)
    again = parsed(str(schema.formatted("serialized")))
    assert again.formatted("serialized") == schema.formatted("serialized")
    assert again.problems_reading(schema) == schema.problems_reading(again) == []
    proto: Any = descriptor_pb2
    file = proto.FileDescriptorProto.FromString(base64.b64decode(str(schema.formatted("serialized"))))
    assert [each.type_name for each in file.message_type[0].field if each.type_name][1:] == [
        ".google.protobuf.Timestamp",
        ".shop.v1.State",
        ".shop.v1.Order.Line",
    ]
    assert schema.formatted("other") is None


def test_custom_options_of_a_descriptor_are_part_of_its_text() -> None:
    proto: Any = descriptor_pb2
    file = proto.FileDescriptorProto(name="x", package="p", syntax="proto2", dependency=["confluent/meta.proto"])
    field = file.message_type.add(name="A").field.add(name="f", number=1, label=1, type=9)
    field.options.MergeFromString(bytes.fromhex("8244") + bytes([6]) + b"\x0a\x04note")
    text = parsed(base64.b64encode(file.SerializeToString()).decode()).canonical()
    assert 'optional string f = 1 [(confluent.field_meta) = {\n    doc: "note"\n  }];' in text
    assert parsed(text).canonical() == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("message A { string a = 1; }", "label"),
        ('syntax = "proto4";', "proto4"),
        ('syntax = "proto3"; message A { B b = 1; }', "B"),
        ('syntax = "proto3"; message A { int32 a = 1; int32 b = 1; }', "1"),
        ('syntax = "proto3"; message A { int32 a = 1; reserved 1; }', "reserved"),
        ('syntax = "proto3"; message A { int32 a = 19000; }', "19000"),
        ('syntax = "proto3"; message A { int32 a = 0; }', "between"),
        ('syntax = "proto3"; message A {} message A {}', "A"),
        ('syntax = "proto3"; enum E { A = 1; }', "must be 0"),
        ('syntax = "proto3"; enum E { A = 0; B = 0; }', "allow_alias"),
        ('syntax = "proto3"; import "other.proto";', "add a reference"),
        ('syntax = "proto3"; message A { required int32 a = 1; }', "required"),
        ('syntax = "proto3"; message A { map<float, int32> a = 1; }', "float"),
        ('syntax = "proto3"; message A { int32 a = 1 [packed = 7]; }', "packed"),
        ('syntax = "proto3"; message A { oneof o { } }', "no fields"),
        ('syntax = "proto3"; message A { /* never closed', "cannot be read"),
        ("message A {" * 40, "nested"),
        ("AAAA", "serialized descriptor"),
        ('{"type": "string"}', "line 1"),
        ('syntax = "proto3"; message A { int32 a = 1; ', "expected"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidSchema, match=reason):
        parsed(text)


@pytest.mark.parametrize(
    "text",
    [
        'syntax = "proto3"; ' + "".join(f"message M{number} {{}}" for number in range(10_001)),
        'syntax = "proto3"; option java_package = ' + '"x" ' * 160_000 + ";",
        'syntax = "proto3"; message A { reserved ' + ",".join(str(2 * each + 1) for each in range(9_990)) + "; "
        "int32 a = 2; int32 b = 5; }",
        "message A { optional group G = 1 " * 40_000,
    ],
)
def test_hostile_schemas_are_refused_within_a_second_of_work(text: str) -> None:
    begin_s = process_time()
    with pytest.raises(InvalidSchema, match=r"more than|reserved"):
        parsed(text)
    assert process_time() - begin_s < 5  # some 0.5 s; without the bounds, minutes


WORDS = """
message enum oneof map < > { } [ ] ( ) = ; , . 1 -1 "a" \\ optional repeated group reserved extend option
int32 A b to max syntax extensions service rpc returns stream import package default
"""


@given(st.lists(st.sampled_from(WORDS.split()), max_size=40))
def test_no_text_fails_in_another_way_than_as_an_invalid_schema(tokens: list[str]) -> None:
    text = 'syntax = "proto2"; message M { ' + " ".join(tokens)
    try:
        schema = parsed(text)
    except InvalidSchema:
        return
    assert parsed(schema.canonical()).canonical() == schema.canonical()


@example(b"\x1a\x01\x80")  # the name of an import that is not UTF-8
@given(st.binary(max_size=60))
def test_no_bytes_fail_in_another_way_than_as_an_invalid_schema(data: bytes) -> None:
    with contextlib.suppress(InvalidSchema):
        parsed(base64.b64encode(data).decode()).canonical()


def fields(text: str, package: str = "p", more: str = "") -> ProtobufSchema:
    return parsed(f'syntax = "proto2"; package {package}; message A {{ {text} }} {more}')


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("optional int32 a = 1;", "optional int64 renamed = 1; optional string b = 2;", []),
        ("optional int32 a = 1;", "", []),
        ("optional string a = 1;", "repeated bytes a = 1;", []),
        ("optional int32 a = 1;", "repeated int32 a = 1;", ["FIELD_NUMERIC_LABEL_CHANGED"]),
        ("optional int32 a = 1;", "optional sint32 a = 1;", ["FIELD_SCALAR_KIND_CHANGED"]),
        ("optional int32 a = 1;", "optional E a = 1;", []),
        ("optional int32 a = 1;", "optional B a = 1;", ["FIELD_KIND_CHANGED"]),
        ("optional B a = 1;", "optional C a = 1;", ["FIELD_NAMED_TYPE_CHANGED"]),
        ("map<string, int32> a = 1;", "map<string, double> a = 1;", ["FIELD_SCALAR_KIND_CHANGED"]),
        ("map<string, int32> a = 1;", "optional int32 a = 1;", ["FIELD_KIND_CHANGED"]),
        ("required int32 a = 1;", "", ["REQUIRED_FIELD_REMOVED"]),
        ("", "required int32 a = 1;", ["REQUIRED_FIELD_ADDED"]),
        ("message In {}", "", ["MESSAGE_REMOVED"]),
        ("enum In { X = 0; }", "", []),
        ("oneof o { int32 a = 1; int32 b = 2; }", "oneof o { int32 a = 1; }", ["ONEOF_FIELD_REMOVED"]),
        ("oneof o { int32 a = 1; }", "", []),
        ("oneof o { int32 a = 1; }", "optional int32 a = 1;", []),
        ("optional int32 a = 1;", "oneof o { int32 a = 1; int32 b = 2; }", []),
        (
            "optional int32 a = 1; optional int32 b = 2;",
            "oneof o { int32 a = 1; int32 b = 2; }",
            ["MULTIPLE_FIELDS_MOVED_TO_ONEOF"],
        ),
        (
            "optional int32 a = 1; oneof o { int32 b = 2; }",
            "oneof o { int32 a = 1; int32 b = 2; }",
            ["FIELD_MOVED_TO_EXISTING_ONEOF"],
        ),
    ],
)
def test_a_change_is_compatible_by_the_documented_rules(old: str, new: str, kinds: list[str]) -> None:
    more = "message B {} message C {} enum E { Z = 0; }"
    problems = fields(new, more=more).problems_reading(fields(old, more=more))
    assert [each.partition('"')[2].partition('"')[0] for each in problems] == kinds


def test_another_package_is_incompatible_in_both_directions() -> None:
    old, new = fields(""), fields("", "q")
    assert "PACKAGE_CHANGED" in new.problems_reading(old)[0] and "PACKAGE_CHANGED" in old.problems_reading(new)[0]


def test_a_changed_import_is_compared_as_deeply_as_the_file_itself() -> None:
    text = 'syntax = "proto3"; import "in.proto"; message A { p.In i = 1; }'
    inner = 'syntax = "proto3"; package %s; message In { %s x = 1; In again = 2; }'
    old = ProtobufSchema(text, {"in.proto": inner % ("p", "int32")})
    same = ProtobufSchema(text.replace("p.In", "q.In"), {"in.proto": inner % ("q", "int64")})
    other = ProtobufSchema(text, {"in.proto": inner % ("p", "string")})
    assert same.problems_reading(old) == []
    assert any("FIELD_NAMED_TYPE_CHANGED" in each for each in other.problems_reading(old))


def test_references_are_imports_and_each_name_is_resolved_once() -> None:
    registry = Registry()
    base = 'syntax = "proto3"; package b; message Base { int32 x = 1; }'
    middle = 'syntax = "proto3"; import public "base.proto"; message Middle { b.Base base = 1; }'
    top = 'syntax = "proto3"; import "middle.proto"; message Top { Middle m = 1; b.Base b = 2; }'
    references: list[dict[str, Any]] = []
    for name, text in (("base", base), ("middle", middle), ("top", top)):
        body = {"schema": text, "schemaType": "PROTOBUF", "references": references}
        registry.run("register", name, body=body)
        references = [{"name": f"{name}.proto", "subject": name, "version": 1}]
    assert (
        registry.fails(Code.INVALID_SCHEMA, "register", "top", body={"schema": top, "schemaType": "PROTOBUF"})
        == 'the Protobuf schema imports "middle.proto": add a reference with this name'
    )
    registry.fails(Code.REFERENCE_EXISTS, "delete_version", "middle", version=1)
    serialized = base64.b64encode(duration_pb2.DESCRIPTOR.serialized_pb).decode()
    answer = registry.run("register", "d", body={"schema": serialized, "schemaType": "PROTOBUF"})
    assert answer["schema"].startswith('syntax = "proto3";\npackage google.protobuf;\n')
    found = registry.run("lookup", "d", body={"schema": serialized, "schemaType": "PROTOBUF"}, format="serialized")
    proto: Any = descriptor_pb2
    assert proto.FileDescriptorProto.FromString(base64.b64decode(found["schema"])).package == "google.protobuf"


def test_a_normalized_lookup_finds_what_was_registered_as_it_was_written() -> None:
    registry = Registry()
    text = 'syntax = "proto3"; package p; message A { B b = 2; int32 x = 1; } message B {}'
    body = {"schema": text, "schemaType": "PROTOBUF"}
    number = registry.run("register", "s", body=body)["id"]
    serialized = {**body, "schema": str(parsed(text).formatted("serialized"))}
    registry.fails(Code.SCHEMA_NOT_FOUND, "lookup", "s", body=serialized)
    assert registry.run("lookup", "s", body=serialized, normalize=True)["id"] == number
    assert registry.run("lookup", "s", body=body)["id"] == number
