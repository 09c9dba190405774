"""Typed landing with the executors' work done in this process: decoding, schema changes, and crashes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType
from tests.pipeline.test_avro import encode
from tests.support.landing import records

from chronik.client.schema_registry import RegistryError, Schema
from chronik.pipeline.errors import PipelineError, Unavailable
from chronik.pipeline.land.delta import BatchLander, LandedBatch, LandingTable
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.schema import RECORD_COLUMNS, dead_letter_schema, table_schema
from chronik.pipeline.land.task import NewFile, WriteTask
from chronik.pipeline.typed.decoding import MissingSchemas
from chronik.pipeline.typed.topic_schemas import TopicSchemas

_names = count()


class Topic:
    """A topic, its registry, and a landing of it that any number of runs continue."""

    def __init__(self, folder: Path, policy: str = "evolve", formats: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.schemas: dict[int, Any] = {}
        self.batch = self.offset = self.lookups = 0
        self._policy = policy
        self._formats = formats or {"value": "avro"}
        self.start()

    def start(self) -> None:
        """Start a new run of the landing, which remembers nothing."""
        rows = LandingTable.open(str(self.folder / "t"), table_schema(None), "t", "id-1", may_have_more=True)
        dead = LandingTable.open(str(self.folder / "t_dead_letters"), dead_letter_schema(), "t", "id-1")
        self.rows, self.dead_letters = rows, dead
        self._lander = BatchLander(rows, dead)
        self._topic = TopicSchemas("t", self._formats, self._policy, self._lookup)

    def _lookup(self, schema_id: int, subject: str) -> Schema:
        self.lookups += 1
        if schema_id not in self.schemas:
            raise RegistryError("Schema not found", 404, 40403)
        return Schema("AVRO", json.dumps(self.schemas[schema_id]))

    def register(self, *fields: Any, name: str = "Order") -> int:
        members = [field if isinstance(field, dict) else {"name": field[0], "type": field[1]} for field in fields]
        self.schemas[len(self.schemas) + 1] = {"type": "record", "name": name, "fields": members}
        return len(self.schemas)

    def value(self, schema_id: int, **fields: Any) -> bytes:
        return struct.pack(">bi", 0, schema_id) + encode(self.schemas[schema_id], fields)

    def land(self, *values: bytes | None, after_write: Callable[[], None] = lambda: None) -> LandedBatch:
        batch = records(0, range(self.offset, self.offset + len(values)), values)
        return self.land_batch(batch, after_write)

    def land_batch(self, batch: Any, after_write: Callable[[], None] = lambda: None) -> LandedBatch:
        uris = str(self.folder / "t"), str(self.folder / "t_dead_letters")

        def write(landed: LandedOffsets) -> list[NewFile]:
            while True:
                decoding = self._topic.plan(self.rows.more_columns(), RECORD_COLUMNS)
                self.rows.require(decoding.columns)
                task = WriteTask(*uris, "x", None, landed, None, decoding)
                try:
                    files = task.write(iter([batch]), f"part-{next(_names)}")
                except MissingSchemas as found:
                    self._topic.learn(found.missing)
                    continue
                after_write()
                return files

        outcome = self._lander.land("q", self.batch, write)
        self.batch += 1
        self.offset += batch.num_rows
        return outcome

    def table(self, *columns: str) -> list[tuple[Any, ...]]:
        table = DeltaTable(str(self.folder / "t")).to_pyarrow_table().sort_by("offset")
        return list(zip(*(table.column(name).to_pylist() for name in columns), strict=True))

    def reasons(self) -> list[tuple[int, str]]:
        table = DeltaTable(str(self.folder / "t_dead_letters")).to_pyarrow_table().sort_by("offset")
        return list(zip(table.column("offset").to_pylist(), table.column("reason").to_pylist(), strict=True))

    def types(self) -> dict[str, Any]:
        return {column.name: column.type for column in self.rows.more_columns()}


def nullable(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": ["null", kind], "default": None}


def test_records_land_as_columns_and_unreadable_ones_as_dead_letters(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    one = topic.register(("id", "long"), ("timestamp", "string"))
    good = topic.value(one, id=1, timestamp="x")
    outcome = topic.land(good, b"no id", None, good[:-1], struct.pack(">bi", 0, 77) + b"ab", good)
    assert outcome == LandedBatch(3, 3)
    # A field with the name of a record's column gets a prefix; a tombstone is a row of nulls.
    assert topic.table("offset", "id", "value_timestamp") == [(0, 1, "x"), (2, None, None), (5, 1, "x")]
    (first, second, third) = topic.reasons()
    assert first[0] == 1 and "the value has no schema id" in first[1]
    assert second[0] == 3 and "does not fit its schema 1: a length is negative" in second[1]
    assert third == (4, "the value has the schema 77: the registry has no schema with this id")
    assert topic.lookups == 2


def test_ten_schema_changes_in_a_row_land_or_become_dead_letters(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    item = {"type": "record", "name": "Item", "fields": [{"name": "n", "type": "int"}]}
    wide_item = {"type": "record", "name": "Item", "fields": [{"name": "n", "type": "long"}, nullable("s", "string")]}
    base = ("id", "int"), ("name", "string")
    ids = [
        topic.register(*base),
        topic.register(*base, nullable("note", "string")),  # 1: a new nullable field
        topic.register(("id", "long"), ("name", "string"), nullable("note", "string")),  # 2: int becomes long
        topic.register(("id", "long"), ("name", "string")),  # 3: a field is gone
        topic.register(("id", "string"), ("name", "string")),  # 4: long becomes string
        topic.register(("id", "long"), ("title", "string")),  # 5: a rename of a required field
        topic.register(("id", "long"), {"name": "label", "type": ["null", "string"], "aliases": ["name"]}),  # 6: alias
        topic.register(("id", "long"), ("name", "string"), ("item", item)),  # 7: a new struct
        topic.register(("id", "long"), ("name", "string"), ("item", wide_item)),  # 8: the struct grows and widens
        topic.register(("id", "long"), ("name", "string"), nullable("Note", "string")),  # 9: differs only in case
        topic.register(("id", "int"), ("name", "string"), ("price", "float")),  # 10: narrower id, one more field
    ]
    others = {"note": "n", "label": None, "Note": None, "price": 0.5}
    for number, schema_id in enumerate(ids):
        names = [member["name"] for member in topic.schemas[schema_id]["fields"]]
        row: dict[str, Any] = {name: others.get(name, f"{name}-{number}") for name in names}
        row["id"] = str(number) if number == 4 else number
        row |= {"item": {"n": number} | ({"s": "x"} if number == 8 else {})} if "item" in names else {}
        topic.land(topic.value(schema_id, **row))
    assert topic.table("offset", "id", "name", "note", "item", "price") == [
        (0, 0, "name-0", None, None, None),
        (1, 1, "name-1", "n", None, None),
        (2, 2, "name-2", "n", None, None),
        (3, 3, "name-3", None, None, None),
        (7, 7, "name-7", None, {"n": 7, "s": None}, None),
        (8, 8, "name-8", None, {"n": 8, "s": "x"}, None),
        (10, 10, "name-10", None, None, 0.5),
    ]
    said = dict(topic.reasons())
    assert sorted(said) == [4, 5, 6, 9]
    assert "the type of id changes from int64 to string" in said[4]
    assert "the field name is renamed to title: if it is a new field, add the column title" in said[5]
    assert "the field name is renamed to label" in said[6]
    assert "differs from the column note only in case" in said[9]
    assert topic.types()["id"] == pa.int64()
    # Other engines read files of all schemas, and old versions have their old columns.
    frame = pl.read_delta(str(tmp_path / "t")).sort("offset")
    assert frame["id"].to_list() == [0, 1, 2, 3, 7, 8, 10] and frame["item"][4] == {"n": 7, "s": None}
    old = DeltaTable(str(tmp_path / "t"), version=1)
    assert old.to_pyarrow_table().column("id").to_pylist() == [0]
    assert "note" not in [field.name for field in old.schema().fields]


def test_old_and_new_schemas_in_one_batch_keep_the_order_of_the_log(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    old = topic.register(("id", "int"), ("tags", {"type": "array", "items": "int"}))
    new = topic.register(("id", "long"), ("tags", {"type": "array", "items": "long"}), nullable("x", "int"))
    values = [topic.value(new if n % 3 else old, id=n, tags=[n], **({"x": n} if n % 3 else {})) for n in range(9)]
    assert topic.land(*values) == LandedBatch(9, 0)
    assert topic.table("id", "tags", "x") == [(n, [n], n if n % 3 else None) for n in range(9)]
    topic.start()
    topic.land(topic.value(old, id=9, tags=[]))
    assert topic.table("offset", "id", "x")[-1] == (9, 9, None)


def test_keys_become_columns_with_a_prefix(tmp_path: Path) -> None:
    topic = Topic(tmp_path, formats={"key": "avro", "value": "auto"})
    topic.schemas[1] = "string"
    value = topic.register(("id", "long"))
    batch = records(0, range(2), [topic.value(value, id=5), topic.value(value, id=6)])
    keys = pa.array([b"\0\0\0\0\1\x04ab", b"bad"], pa.binary())
    topic.land_batch(batch.set_column(0, "key", keys))
    assert topic.table("key_typed", "id") == [("ab", 5)]
    assert "the key has no schema id" in topic.reasons()[0][1]


@pytest.mark.parametrize("policy", ["dead-letter", "stop"])
def test_other_policies_do_not_change_the_table(tmp_path: Path, policy: str) -> None:
    topic = Topic(tmp_path, policy)
    one = topic.register(("id", "int"))
    two = topic.register(("id", "long"), nullable("x", "int"))
    topic.land(topic.value(one, id=1))
    value = topic.value(two, id=2, x=None)
    if policy == "stop":
        with pytest.raises(
            PipelineError, match=r"new schema \(id 2\): it adds x and widens id, and --on-change is stop"
        ):
            topic.land(value)
        assert topic.table("offset") == [(0,)]
    else:
        topic.land(value)
        assert "it adds x and widens id, and --on-change is dead-letter" in topic.reasons()[0][1]
    assert topic.types() == {"id": pa.int32()}


def test_columns_that_others_added_are_left_alone(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    one = topic.register(("id", "int"))
    topic.land(topic.value(one, id=1))
    DeltaTable(str(tmp_path / "t")).alter.add_columns([Field("score", PrimitiveType("double"))])
    two = topic.register(("id", "int"), nullable("x", "int"))
    topic.land(topic.value(two, id=2, x=3))
    topic.start()
    three = topic.register(("id", "int"), nullable("score", "string"))
    topic.land(topic.value(three, id=3, score="high"))
    assert topic.table("id", "score", "x") == [(1, None, None), (2, None, 3)]
    assert "the type of score changes from double to string" in topic.reasons()[0][1]


def test_a_renamed_field_lands_after_the_column_was_added_by_hand(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    topic.land(topic.value(topic.register(("name", "string")), name="a"))
    renamed = topic.register(("title", "string"))
    DeltaTable(str(tmp_path / "t")).alter.add_columns([Field("title", PrimitiveType("string"))])
    topic.land(topic.value(renamed, title="b"))
    assert topic.table("name", "title") == [("a", None), (None, "b")]


def test_a_required_field_of_another_record_type_is_no_rename(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    created = topic.register(("id", "int"), ("amount", "double"), name="Created")
    paid = topic.register(("id", "int"), ("fee", "double"), name="Paid")
    topic.land(topic.value(created, id=1, amount=2.5), topic.value(paid, id=1, fee=0.5))
    assert topic.table("id", "amount", "fee") == [(1, 2.5, None), (1, None, 0.5)]


def test_a_crash_before_the_commit_of_a_schema_change_lands_each_record_once(tmp_path: Path) -> None:
    """The dead letters are committed, the rows and the change of the schema are not: both are one commit."""
    topic = Topic(tmp_path)
    topic.land(topic.value(topic.register(("id", "int")), id=1))
    two = topic.register(("id", "long"), nullable("x", "int"))
    values = [topic.value(two, id=2, x=5), b"junk", topic.value(two, id=3, x=None)]

    class Killed(Exception):
        pass

    def die(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(topic.rows, "commit", die)
        topic.land(*values)
    assert [offset for offset, _ in topic.reasons()] == [2]
    assert topic.types() == {"id": pa.int32()}
    topic.start()
    assert topic.land(*values) == LandedBatch(2, 0)
    assert topic.table("offset", "id", "x") == [(0, 1, None), (1, 2, 5), (3, 3, None)]
    assert [offset for offset, _ in topic.reasons()] == [2]


def test_a_schema_change_of_another_landing_between_write_and_commit_is_kept(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    topic.land(topic.value(topic.register(("id", "int")), id=1))
    two = topic.register(("id", "int"), nullable("x", "int"))
    raced: list[int] = []

    def race() -> None:
        if not raced:
            raced.append(1)
            DeltaTable(str(tmp_path / "t")).alter.add_columns([Field("theirs", PrimitiveType("string"))])

    topic.land(topic.value(two, id=2, x=5), after_write=race)
    assert topic.table("id", "theirs", "x") == [(1, None, None), (2, None, 5)]


def test_an_unreachable_registry_is_tried_again_and_a_refusing_one_is_not() -> None:
    def fails(status: int) -> TopicSchemas:
        def lookup(schema_id: int, subject: str) -> Schema:
            raise RegistryError("it failed", status)

        return TopicSchemas("t", {"value": "avro"}, "evolve", lookup)

    for status in (0, 503):
        with pytest.raises(Unavailable, match="cannot look up the schema 1 of t"):
            fails(status).learn([("value", 1)])
    with pytest.raises(PipelineError, match="check --registry") as refused:
        fails(401).learn([("value", 1)])
    assert not isinstance(refused.value, Unavailable)
