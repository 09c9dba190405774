"""Typed landing on a real Spark session, with Confluent's own serializers and the registry of the node."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from deltalake import DeltaTable
from tests.cli.run_chronik import Outcome
from tests.support import topics
from tests.support.node import Node

pytestmark = pytest.mark.timeout(300)  # the first test starts Spark and compiles the decoder


def schema(*fields: tuple[str, Any]) -> str:
    members = [
        {"name": name, "type": kind, **({"default": None} if isinstance(kind, list) else {})} for name, kind in fields
    ]
    return json.dumps({"type": "record", "name": "Order", "fields": members})


def test_avro_of_the_serializer_lands_as_columns_through_a_change_of_its_schema(
    command: Callable[..., Outcome], shared_node: Node, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "land-avro"
    topics.create(at, name)
    with SchemaRegistryClient({"url": shared_node.http}) as client:
        lines = {"type": "array", "items": {"type": "map", "values": "double"}}
        first = AvroSerializer(client, schema(("id", "int"), ("lines", lines)))
        second = AvroSerializer(client, schema(("id", "long"), ("lines", lines), ("note", ["null", "string"])))
        where = SerializationContext(name, MessageField.VALUE)
        land = ("pipeline", "land", name, "--to", str(tmp_path), "--once", "--format", "avro")
        records = [first({"id": number, "lines": [{"x": 0.5}] * number}, where) for number in range(3)]
        topics.append(at, name, 0, [(None, value, (), topics.NOW_MS) for value in [*records, b"junk"]])
        outcome = command(*land, "-b", at)
        assert outcome.code == 0, outcome
        assert "3 rows of land-avro landed" in outcome.err and "1 dead letters" in outcome.err
        value = second({"id": 2**40, "lines": [], "note": "new"}, where)
        topics.append(at, name, 0, [(None, each, (), topics.NOW_MS) for each in (value, records[1])])
        assert command(*land, "-b", at).code == 0
    table = DeltaTable(str(tmp_path / name)).to_pyarrow_table().sort_by("offset")
    assert table.column("id").to_pylist() == [0, 1, 2, 2**40, 1]
    assert table.column("note").to_pylist() == [None, None, None, "new", None]
    assert table.column("lines").to_pylist()[1:4] == [[[("x", 0.5)]], [[("x", 0.5)]] * 2, []]
    dead = DeltaTable(str(tmp_path / f"{name}_dead_letters")).to_pyarrow_table()
    assert dead.column("offset").to_pylist() == [3]


def test_json_of_the_serializer_lands_as_columns(
    command: Callable[..., Outcome], shared_node: Node, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "land-typed-json"
    topics.create(at, name)
    properties = {"id": {"type": "integer"}, "at": {"type": "string", "format": "date-time"}}
    with SchemaRegistryClient({"url": shared_node.http}) as client:
        text = json.dumps({"title": "Order", "type": "object", "properties": properties, "required": ["id"]})
        serialize = JSONSerializer(text, client)
        where = SerializationContext(name, MessageField.VALUE)
        good = serialize({"id": 7, "at": "2026-01-02T03:04:05Z"}, where)
    assert good is not None
    values = (good, None, good[:5] + b'{"id": "7"}')
    topics.append(at, name, 0, [(None, value, (), topics.NOW_MS) for value in values])
    outcome = command("pipeline", "land", name, "--to", str(tmp_path), "--once", "--format", "auto", "-b", at)
    assert outcome.code == 0, outcome
    table = DeltaTable(str(tmp_path / name)).to_pyarrow_table().sort_by("offset")
    assert table.select(["offset", "id"]).to_pylist() == [{"offset": 0, "id": 7}, {"offset": 1, "id": None}]
    assert str(table.column("at")[0]) == "2026-01-02 03:04:05+00:00"
    dead = DeltaTable(str(tmp_path / f"{name}_dead_letters")).to_pyarrow_table()
    assert "Expected `int`, got `str`" in dead.column("reason")[0].as_py()


def test_wrong_options_of_typed_landing_are_refused_before_spark_starts(
    command_without_spark: Callable[..., Outcome], tmp_path: Path
) -> None:
    land = ("pipeline", "land", "t", "--to", str(tmp_path))
    for given, said in (
        (("--format", "csv"), "--format csv is unknown: use json, avro, json-schema, protobuf, auto"),
        (("--format", "json"), "--format json needs the columns: pass --schema FILE"),
        (("--format", "avro", "--registry", "ftp://x"), "ftp://x is not the address of a schema registry"),
        (("--key-format", "json"), "--key-format json is unknown: use avro, json-schema, protobuf, auto"),
        (("--format", "auto", "--schema", "s.sql"), "--schema is for JSON values"),
        (("--on-change", "ignore"), "--on-change ignore is unknown"),
    ):
        outcome = command_without_spark(*land, *given)
        assert outcome.code == 2 and said in outcome.err, outcome
