"""Ten changes of a schema in a row, compatible and not, with the table after each: Delta, Iceberg, one row per key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.pipeline.test_typed_landing import Topic, nullable
from tests.support.readers import delta_readers, iceberg_readers
from tests.support.upsert import merge

from chronik.pipeline.catalog import NAMESPACE, open_catalog
from chronik.pipeline.land.delta import BatchLander, LandedBatch, LandingTable
from chronik.pipeline.land.iceberg import IcebergTable, can_promote
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.schema import dead_letter_schema, table_schema
from chronik.pipeline.land.state_table import StateLander, StateTable, range_of
from chronik.pipeline.land.state_task import StageTask
from chronik.pipeline.land.task import NewFile
from chronik.pipeline.typed.decoding import MissingSchemas
from chronik.pipeline.typed.topic_schemas import TopicSchemas

_names = count()


class IcebergTopic(Topic):
    options: Mapping[str, str] = {}
    """Settings of the catalog. Empty: a file in the folder."""

    def start(self) -> None:
        catalog = open_catalog(str(self.folder), self.options)
        namespace = self.options.get("namespace", NAMESPACE)
        dead_uri = str(self.folder / "t_dead_letters")
        self.rows = IcebergTable.open(  # type: ignore[assignment]
            catalog, str(self.folder / "t"), table_schema(None), "t", "id-1", namespace=namespace, may_have_more=True
        )
        dead = IcebergTable.open(catalog, dead_uri, dead_letter_schema(), "t", "id-1", namespace=namespace)
        self._lander = BatchLander(self.rows, dead)
        self._topic = TopicSchemas("t", self._formats, self._policy, self._lookup)
        self._topic.can_promote = can_promote

    def arrow(self, name: str = "t") -> Any:
        namespace = self.options.get("namespace", NAMESPACE)
        return open_catalog(str(self.folder), self.options).load_table((namespace, name)).scan().to_arrow()

    def engines(self) -> Iterator[tuple[str, Any]]:
        return iceberg_readers(self.folder, "t")


class DeltaTopic(Topic):
    def arrow(self, name: str = "t") -> Any:
        return DeltaTable(str(self.folder / name)).to_pyarrow_table()

    def engines(self) -> Iterator[tuple[str, Any]]:
        return delta_readers(str(self.folder / "t"))


class StateTopic(DeltaTopic):
    def start(self) -> None:
        self.state = StateTable.open_state(str(self.folder / "t"), None, "t", "id-1", (), 2, may_have_more=True)
        self.rows = self.state
        dead = LandingTable.open(str(self.folder / "t_dead_letters"), dead_letter_schema(), "t", "id-1")
        self._lander = StateLander(self.state, dead, merge, 2, f"s{next(_names)}", lambda: 1_800_000_000_000)
        self._topic = TopicSchemas("t", self._formats, self._policy, self._lookup)

    def land_batch(self, batch: Any, after_write: Callable[[], None] = lambda: None) -> LandedBatch:
        uris = str(self.folder / "t"), str(self.folder / "t_dead_letters")

        def write(landed: LandedOffsets) -> list[NewFile]:
            while True:
                decoding = self._topic.plan(self.rows.more_columns(), self.state.OWN)
                self.rows.require(decoding.columns)
                task = StageTask(*uris, "x", None, landed, None, decoding, buckets=2)
                try:
                    files = task.write(iter([batch]), f"part-{next(_names)}")
                except MissingSchemas as found:
                    self._topic.learn(found.missing)
                    continue
                return [*files, range_of(0, self.offset, self.offset + batch.num_rows)]

        outcome = self._lander.land("q", self.batch, write)
        self.batch += 1
        self.offset += batch.num_rows
        return outcome


LINE = {"type": "record", "name": "Line", "fields": [{"name": "x", "type": "int"}]}
LONG_LINE = {"type": "record", "name": "Line", "fields": [{"name": "x", "type": "long"}, nullable("y", "string")]}
NOTE = nullable("note", "string")

# The fields of each schema, a record of it, the column that changes, and its type after it; no type: a dead letter.
CHANGES: list[tuple[str, list[Any], dict[str, Any], str, Any]] = [
    ("first", [("id", "int"), ("n", "float")], {"id": 0, "n": 0.5}, "id", pa.int32()),
    ("a field is added", [("id", "int"), ("n", "float"), NOTE], {"id": 1, "n": 0.5, "note": "a"}, "note", pa.string()),
    ("int to long", [("id", "long"), ("n", "float"), NOTE], {"id": 2**40, "n": 0.5, "note": "b"}, "id", pa.int64()),
    ("a field is removed", [("id", "long"), ("n", "float")], {"id": 3, "n": 0.5}, "note", pa.string()),
    (
        "a record is added",
        [("id", "long"), ("n", "float"), nullable("line", LINE)],
        {"id": 4, "n": 0.5, "line": {"x": 1}},
        "line",
        pa.struct([("x", pa.int32())]),
    ),
    ("long to string", [("id", "string"), ("n", "float")], {"id": "five", "n": 0.5}, "id", None),
    (
        "a rename",
        [("id", "long"), {"name": "number", "type": "float", "aliases": ["n"]}],
        {"id": 6, "number": 0.5},
        "number",
        None,
    ),
    ("float to double", [("id", "long"), ("n", "double")], {"id": 7, "n": 0.1}, "n", pa.float64()),
    (
        "fields of a record",
        [("id", "long"), ("n", "double"), nullable("line", LONG_LINE)],
        {"id": 8, "n": 0.5, "line": {"x": 2**40, "y": "z"}},
        "line",
        pa.struct([("x", pa.int64()), ("y", pa.string())]),
    ),
    ("double to long", [("id", "long"), ("n", "string")], {"id": 9, "n": "x"}, "n", None),
    (
        "a field returns",
        [("id", "long"), ("n", "double"), NOTE],
        {"id": 10, "n": 0.5, "note": "c"},
        "note",
        pa.string(),
    ),
]


@pytest.mark.parametrize("kind", [DeltaTopic, IcebergTopic, StateTopic])
def test_ten_schema_changes_give_the_expected_table_after_each(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected values are those that DuckDB, Polars and the format's own library read."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    topic = kind(tmp_path)
    expected: list[dict[str, Any]] = []
    dead: list[int] = []
    for offset, (change, fields, record, column, type_after) in enumerate(CHANGES):
        topic.land(topic.value(topic.register(*fields), **record))
        if type_after is None:
            dead.append(offset)
        else:
            expected.append(record)
            assert topic.types()[column] == type_after, change
        names = [name for name in ("id", "n", "note", "line") if name in topic.types()]
        wanted = [{name: each.get(name) for name in names} for each in expected]
        for each in wanted:
            line: Any = each.get("line")
            if line is not None:
                each["line"] = {member.name: line.get(member.name) for member in topic.types()["line"]}
        for engine, rows in topic.engines():
            assert rows.sort_by("offset").select(names).to_pylist() == wanted, (engine, change)
            assert "number" not in rows.column_names
        letters = topic.arrow("t_dead_letters")
        assert sorted(letters.column("offset").to_pylist()) == dead, change
        if offset % 4 == 3:
            topic.start()


def test_iceberg_sends_what_it_cannot_widen_to_the_dead_letters(tmp_path: Path) -> None:
    topic = IcebergTopic(tmp_path)
    topic.land(topic.value(topic.register(("n", "int")), n=1))
    assert topic.land(topic.value(topic.register(("n", "double")), n=0.5)) == LandedBatch(0, 1)
    (reason,) = topic.arrow("t_dead_letters").column("reason").to_pylist()
    assert "the type of n changes from int32 to double, which the table's format cannot" in reason
