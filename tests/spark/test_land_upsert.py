"""`chronik pipeline land --mode upsert` as a user runs it: keys, tombstones, Debezium's events, moved keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from deltalake import DeltaTable
from tests.cli.run_chronik import Outcome
from tests.support import topics
from tests.support.node import Node

Land = Callable[..., Outcome]


@pytest.fixture
def land(command: Callable[..., Outcome], shared_node: Node, tmp_path: Path) -> Land:
    def run(topic: str, *options: str) -> Outcome:
        to = ("--to", str(tmp_path), "--once", "--mode", "upsert", "-b", shared_node.bootstrap)
        outcome = command("pipeline", "land", topic, *to, *options)
        assert outcome.code == 0, outcome
        return outcome

    return run


def rows(folder: Path, topic: str, *columns: str) -> list[tuple[Any, ...]]:
    table = DeltaTable(str(folder / topic)).to_pyarrow_table(columns=list(columns))
    return sorted(tuple(row.values()) for row in table.to_pylist())


def test_keys_are_upserted_and_deleted_across_partitions(land: Land, shared_node: Node, tmp_path: Path) -> None:
    at, name, now = shared_node.bootstrap, "upsert-keys", topics.NOW_MS
    topics.create(at, name, partitions=2)
    topics.append(at, name, 0, [(b"a", b"1", (), now), (b"b", b"2", (), now), (b"a", b"3", (), now)])
    topics.append(at, name, 1, [(b"c", b"4", (), now), (None, b"no key", (), now)])
    assert "1 dead letters" in land(name).err
    assert rows(tmp_path, name, "key", "value") == [(b"a", b"3"), (b"b", b"2"), (b"c", b"4")]
    topics.append(at, name, 0, [(b"b", None, (), now + 1)])
    topics.append(at, name, 1, [(b"a", b"moved", (), now + 1), (b"b", b"older", (), now - 1)])
    land(name)
    land(name, "--checkpoint", str(tmp_path / "lost"))
    assert rows(tmp_path, name, "key", "value") == [(b"a", b"moved"), (b"c", b"4")]


def test_debezium_events_of_avro_are_understood(land: Land, shared_node: Node, tmp_path: Path) -> None:
    at, name = shared_node.bootstrap, "upsert-avro"
    topics.create(at, name)
    row = {
        "type": "record",
        "name": "Value",
        "fields": [{"name": "id", "type": "long"}, {"name": "note", "type": "string"}],
    }
    fields = [
        {"name": "before", "type": ["null", row], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"], "default": None},
    ]
    schema = json.dumps({"type": "record", "name": "Envelope", "fields": fields})
    with SchemaRegistryClient({"url": shared_node.http}) as client:
        serialize = AvroSerializer(client, schema)
        where = SerializationContext(name, MessageField.VALUE)

        def event(op: str, before: Any, after: Any) -> bytes:
            states = [None if state is None else {"id": state[0], "note": state[1]} for state in (before, after)]
            value = serialize({"before": states[0], "after": states[1], "op": op, "ts_ms": 1}, where)
            assert value is not None
            return bytes(value)

        events = [
            (b"k1", event("r", None, (1, "snapshot"))),
            (b"k2", event("c", None, (2, "created"))),
            (b"k1", event("u", (1, "snapshot"), (1, "updated"))),
            (b"k2", event("u", (2, "created"), (3, "key changed"))),
            (b"k4", event("c", None, (4, "gone"))),
            (b"k4", event("d", (4, "gone"), None)),
            (b"k4", None),
            (b"k5", event("t", None, None)),
        ]
        topics.append(at, name, 0, [(key, value, (), topics.NOW_MS) for key, value in events])
        outcome = land(name, "--format", "avro", "--envelope", "debezium", "--key", "id")
    assert "1 dead letters" in outcome.err
    assert rows(tmp_path, name, "id", "note") == [(1, "updated"), (3, "key changed")]
    names = [field.name for field in DeltaTable(str(tmp_path / name)).schema().fields]
    assert not {"op", "before", "after", "chronik_op", "chronik_old"} & set(names)


def test_debezium_events_of_json_are_understood_in_all_forms(land: Land, shared_node: Node, tmp_path: Path) -> None:
    at, name = shared_node.bootstrap, "upsert-json"
    topics.create(at, name)
    (tmp_path / "s.sql").write_text("id BIGINT NOT NULL, note STRING")
    created = {"before": None, "after": {"id": 1, "note": "a"}, "op": "c", "source": {"db": "x"}, "ts_ms": 1}
    updated = {"schema": {}, "payload": {"before": {"id": 1}, "after": {"id": 1, "note": "b"}, "op": "u"}}
    values: list[tuple[bytes, Any]] = [
        (b"1", created),
        (b"1", updated),
        (b"2", {"id": 2, "note": "flat", "__deleted": "false"}),
        (b"3", {"id": 3, "note": "flat"}),
        (b"3", {"id": 3, "note": None, "__deleted": "true"}),
        (b"4", {**created, "after": {"id": 4}}),
        (b"4", {"before": {"id": 4}, "after": None, "op": "d"}),
        (b"4", None),
        (b"5", {"op": "t", "after": None}),
        (b"5", {"op": "c", "after": {"id": "x"}}),
    ]
    records = [(key, None if each is None else json.dumps(each).encode(), (), topics.NOW_MS) for key, each in values]
    topics.append(at, name, 0, records)
    outcome = land(name, "--schema", str(tmp_path / "s.sql"), "--envelope", "debezium")
    assert "2 dead letters" in outcome.err
    assert rows(tmp_path, name, "id", "note") == [(1, "b"), (2, "flat")]


def test_options_that_contradict_upsert_are_refused(
    command_without_spark: Callable[..., Outcome], tmp_path: Path
) -> None:
    for given, said in (
        (("--key", "id"), "--key is for tables with one row per key: add --mode upsert"),
        (("--mode", "upsert", "--key", "id"), "--key names columns, and there are none"),
        (("--mode", "upsert", "--from", "0"), "--from and --until are for --mode append"),
        (("--mode", "upsert", "--source", "kafka"), "--mode upsert needs --source chronik"),
        (("--mode", "merge"), "--mode merge is unknown: use append, upsert"),
    ):
        outcome = command_without_spark("pipeline", "land", "t", "--to", str(tmp_path), *given)
        assert outcome.code == 2 and said in outcome.err, outcome
