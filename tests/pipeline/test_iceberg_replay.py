"""Dead letters of Iceberg tables are decoded again: each lands once, whatever ends the replay or runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.cli.run_chronik import chronik
from tests.pipeline.test_replay import NUMBER, OPTIONAL, VALUES, Killed
from tests.pipeline.test_schema_changes import IcebergTopic
from tests.pipeline.test_typed_landing import nullable
from tests.support.landing import records, writer

from chronik.pipeline.catalog import open_catalog
from chronik.pipeline.deleted import ALWAYS, DeletedKeys
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.dead_letters import IcebergDeadLetters
from chronik.pipeline.land.delta import BatchLander
from chronik.pipeline.land.iceberg import IcebergTable
from chronik.pipeline.land.iceberg_maintenance import maintain_at
from chronik.pipeline.land.options import TableOptions
from chronik.pipeline.land.replay import Replay, Replayed, ReplayedTable
from chronik.pipeline.land.schema import dead_letter_schema, table_schema
from chronik.pipeline.typed.topic_schemas import TopicSchemas

ICEBERG = TableOptions(table_format="iceberg")
_tokens = count()


def lander(folder: Path, fields: Any = OPTIONAL) -> BatchLander:
    tables = {"t": table_schema(fields), "t_dead_letters": dead_letter_schema()}
    catalog = open_catalog(str(folder), {})
    return BatchLander(
        *(IcebergTable.open(catalog, str(folder / name), each, "t", "id") for name, each in tables.items())
    )


def land(folder: Path, query: str, batch: int = 0, fields: Any = NUMBER) -> None:
    rows = records(0, range(batch * 5, batch * 5 + 5), VALUES)
    lander(folder, fields).land(query, batch, writer(folder, rows, fields=fields))


def replay(folder: Path, deleted: DeletedKeys | None = None) -> Replayed:
    table = ReplayedTable.open(str(folder / "t"), ICEBERG, OPTIONAL)
    return Replay(table, f"r{next(_tokens)}", 1_700_000_000_000, OPTIONAL, deleted=deleted).run()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A topic with one batch of records, of which 1 to 3 are dead letters. Another schema fits all but 2."""
    catalog = open_catalog(str(tmp_path), {})
    # Both schemas have the same columns in Iceberg, because all may be null.
    IcebergTable.open(catalog, str(tmp_path / "t"), table_schema(OPTIONAL), "t", "id")
    land(tmp_path, "q")
    assert offsets(tmp_path) == ([0, 4], [1, 2, 3])
    return tmp_path


def offsets(folder: Path) -> tuple[list[int], list[int]]:
    """Return the offsets of both tables; one that is there twice is listed twice."""
    catalog = open_catalog(str(folder), {})
    tables = [catalog.load_table(("chronik", name)) for name in ("t", "t_dead_letters")]
    rows, dead = (sorted(table.scan().to_arrow().column("offset").to_pylist()) for table in tables)
    return rows, dead


def test_dead_letters_land_once_and_a_report_says_what_still_fails(folder: Path) -> None:
    done = replay(folder)
    assert offsets(folder) == ([0, 1, 3, 4], [2])
    assert (done.replayed, done.failing, done.landed_before) == (2, 1, 0)
    assert done.to_json()["reasons"][0]["places"] == ["partition 0, offset 2"]
    assert replay(folder).replayed == 0
    # The offsets have landed: a lost checkpoint brings none of them again.
    land(folder, "new", fields=OPTIONAL)
    assert offsets(folder) == ([0, 1, 3, 4], [2])


@pytest.mark.parametrize("step", ["before the rows", "after the rows", "after both"])
def test_a_replay_that_is_killed_neither_loses_nor_doubles_a_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    commit, replace = IcebergTable.commit, IcebergDeadLetters.replace

    def killed_commit(table: IcebergTable, *given: Any) -> None:
        if step == "before the rows":
            raise Killed
        commit(table, *given)
        if step == "after the rows":
            raise Killed

    def killed_replace(*given: Any) -> None:
        replace(*given)
        raise Killed

    monkeypatch.setattr(IcebergTable, "commit", killed_commit)
    monkeypatch.setattr(IcebergDeadLetters, "replace", killed_replace)
    with pytest.raises(Killed):
        replay(folder)
    monkeypatch.undo()
    done = replay(folder)
    assert offsets(folder) == ([0, 1, 3, 4], [2])
    again = {"before the rows": (2, 0), "after the rows": (0, 2), "after both": (0, 0)}
    assert (done.replayed, done.landed_before) == again[step]


def before(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, act: Callable[[], object]) -> None:
    """Act once, right before a call."""
    call, acts = getattr(owner, name), iter([act])

    def late(*given: Any) -> Any:
        next(acts, lambda: None)()
        return call(*given)

    monkeypatch.setattr(owner, name, late)


@pytest.mark.parametrize(("owner", "name"), [(IcebergTable, "commit"), (IcebergDeadLetters, "_commit")])
def test_a_landing_during_a_replay_keeps_all_records(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    before(monkeypatch, owner, name, lambda: land(folder, "q", 1))
    assert replay(folder).replayed == 2
    assert offsets(folder) == ([0, 1, 3, 4, 5, 9], [2, 6, 7, 8])


def test_two_replays_at_once_land_each_record_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before(monkeypatch, IcebergTable, "commit", lambda: replay(folder))
    assert replay(folder).replayed == 0
    assert offsets(folder) == ([0, 1, 3, 4], [2])


def test_a_merge_of_the_dead_letters_during_a_replay_keeps_all_records(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chronik.pipeline.land.maintenance.MERGE_FILES", 2)
    land(folder, "q", 1)

    def merge() -> None:
        assert maintain_at(str(folder / "t_dead_letters"), {}, "m", 1_700_000_000_000).new_files == 1

    before(monkeypatch, IcebergDeadLetters, "_commit", merge)
    replay(folder)
    monkeypatch.undo()
    replay(folder)
    assert offsets(folder) == ([0, 1, 3, 4, 5, 6, 8, 9], [2, 7])
    files = {str(path) for path in (folder / "t_dead_letters").glob("date=*/*.parquet")}
    table = open_catalog(str(folder), {}).load_table(("chronik", "t_dead_letters"))
    assert {task.file.file_path for task in table.scan().plan_files()} <= files


def test_dead_letters_of_deleted_keys_are_removed(folder: Path) -> None:
    done = replay(folder, DeletedKeys.of({b"k1": ALWAYS, b"k2": ALWAYS}))
    assert (done.replayed, done.deleted, done.failing) == (1, 2, 0)
    assert offsets(folder) == ([0, 3, 4], [])


def test_records_whose_schema_was_unknown_land_typed_after_its_registration(tmp_path: Path) -> None:
    topic = IcebergTopic(tmp_path)
    one = topic.register(("id", "int"))
    two = topic.register(("id", "long"), nullable("name", "string"))
    late, good = topic.value(two, id=2**40, name="x"), topic.value(one, id=1)
    hidden = topic.schemas.pop(two)
    topic.land(good, late, b"no id")
    assert offsets(tmp_path) == ([0], [1, 2])
    topic.schemas[two] = hidden
    options = TableOptions(table_format="iceberg", format="avro")
    table = ReplayedTable.open(str(tmp_path / "t"), options)
    schemas = TopicSchemas("t", {"value": "avro"}, "evolve", topic._lookup)
    schemas.can_promote = table.can_promote
    done = Replay(table, "r", 1_700_000_000_000, schemas=schemas).run()
    assert (done.replayed, done.failing) == (1, 1) and offsets(tmp_path) == ([0, 1], [2])
    rows = topic.arrow().sort_by("offset").select(["id", "name"]).to_pylist()
    assert rows == [{"id": 1, "name": None}, {"id": 2**40, "name": "x"}]


def test_the_command_replays_iceberg_tables(folder: Path) -> None:
    (folder / "s.json").write_text(OPTIONAL.json())
    command = ("pipeline", "replay", str(folder / "t"), "--schema", str(folder / "s.json"), "--json")
    done = chronik(*command, "--table-format", "iceberg")
    assert done.json() == {**done.json(), "replayed": 2, "failing": 1}
    assert offsets(folder) == ([0, 1, 3, 4], [2])
    refused = chronik(*command)
    assert refused.code == 2 and "is not a table of chronik pipeline land" in refused.error_line


def test_tables_without_dead_letters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="is not a table of chronik pipeline land"):
        ReplayedTable.open(str(tmp_path / "t"), ICEBERG)
    assert not list(tmp_path.iterdir())
    IcebergTable.open(open_catalog(str(tmp_path), {}), str(tmp_path / "t"), table_schema(None), "t", "id")
    with pytest.raises(PipelineError, match="has no dead letters"):
        ReplayedTable.open(str(tmp_path / "t"), ICEBERG)
