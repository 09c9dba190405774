"""Typed landing on a real Spark session, with Confluent's own serializers and the registry of the node."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from deltalake import DeltaTable
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from tests.cli.run_chronik import Outcome
from tests.support import topics
from tests.support.node import Node
from tests.support.readers import delta_readers, iceberg_readers, values

pytestmark = pytest.mark.timeout(600)  # the first test starts Spark and compiles the decoder


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


def _order_message() -> Any:
    """Return the class of a Protobuf message, as protoc generates it."""
    pool: Any = descriptor_pool.Default()
    file: Any = descriptor_pb2.FileDescriptorProto(name="chronik_typed/order.proto", package="typed", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    timestamp_pb2.Timestamp()
    file.message_type.add(name="Who").field.add(name="name", number=1, label=1, type=9)
    order = file.message_type.add(name="Order")
    order.field.add(name="id", number=1, label=1, type=3)
    order.field.add(name="at", number=2, label=1, type=11, type_name=".google.protobuf.Timestamp")
    order.field.add(name="tags", number=3, label=3, type=9)
    order.field.add(name="who", number=4, label=1, type=11, type_name=".typed.Who")
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("typed.Order"))


AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ORDERS = [(2**40, AT, ["a", "b"], "Ada"), (2, AT + timedelta(seconds=1), [], None)]


def _serialized(client: SchemaRegistryClient, topic: str) -> dict[str, list[bytes | None]]:
    """Return the orders as each of Confluent's serializers writes them, by topic."""
    who = {"type": "record", "name": "Who", "fields": [{"name": "name", "type": "string"}]}
    at = {"type": "long", "logicalType": "timestamp-micros"}
    tags = {"type": "array", "items": "string"}
    avro = AvroSerializer(client, schema(("id", "long"), ("at", at), ("tags", tags), ("who", ["null", who])))
    properties = {
        "id": {"type": "integer"},
        "at": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "who": {"type": "object", "properties": {"name": {"type": "string"}}},
    }
    text = json.dumps({"title": "Order", "type": "object", "properties": properties, "required": ["id"]})
    of_json, message = JSONSerializer(text, client), _order_message()
    of_protobuf = ProtobufSerializer(message, client)
    found: dict[str, list[bytes | None]] = {f"{topic}-{kind}": [] for kind in ("avro", "json", "protobuf")}
    for number, time, marks, name in ORDERS:
        person = None if name is None else {"name": name}
        order = {"id": number, "at": time, "tags": marks, "who": person}
        plain = {**order, "at": time.isoformat()}
        if person is None:
            del plain["who"]
        proto = message(id=number, tags=marks, who=person)
        proto.at.FromDatetime(time)
        for kind, serialize, each in (
            ("avro", avro, order),
            ("json", of_json, plain),
            ("protobuf", of_protobuf, proto),
        ):
            where = SerializationContext(f"{topic}-{kind}", MessageField.VALUE)
            found[f"{topic}-{kind}"].append(serialize(each, where))
    return found


@pytest.mark.parametrize("table_format", ["delta", "iceberg"])
def test_orders_of_all_three_serializers_have_the_right_values_in_every_engine(
    command: Callable[..., Outcome],
    shared_node: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    table_format: str,
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    at = shared_node.bootstrap
    with SchemaRegistryClient({"url": shared_node.http}) as client:
        orders = _serialized(client, f"typed-{table_format}")
    for name, records in orders.items():
        topics.create(at, name)
        topics.append(at, name, 0, [(None, value, (), topics.NOW_MS) for value in records])
    land = ("--to", str(tmp_path), "--once", "--format", "auto", "--table-format", table_format, "-b", at)
    outcome = command("pipeline", "land", *orders, *land)
    assert outcome.code == 0, outcome
    expected = [
        (number, round(time.timestamp() * 1e6), tags, None if name is None else {"name": name})
        for number, time, tags, name in ORDERS
    ]
    for name in orders:
        is_delta = table_format == "delta"
        for engine, table in delta_readers(str(tmp_path / name)) if is_delta else iceberg_readers(tmp_path, name):
            assert values(table, "id", "at", "tags", "who") == expected, (engine, name)
            assert values(table, "value") == [(value,) for value in orders[name]], (engine, name)


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
