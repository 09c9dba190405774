"""Dead letters are decoded again after their schema was corrected: each lands once, however a replay ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import types as t
from pyspark.sql.types import StructField, StructType
from tests.pipeline.test_typed_landing import Topic, nullable
from tests.support.landing import landed, records, writer

from chronik.pipeline.deleted import ALWAYS, DeletedKeys
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land import delta_log, maintenance
from chronik.pipeline.land.delta import BatchLander, LandingTable
from chronik.pipeline.land.maintenance import maintain
from chronik.pipeline.land.options import TableOptions
from chronik.pipeline.land.replay import Replay, Replayed, ReplayedTable, topic_of
from chronik.pipeline.land.schema import dead_letter_schema, table_schema
from chronik.pipeline.land.task import NewFile
from chronik.pipeline.typed.topic_schemas import TopicSchemas

NUMBER = StructType([StructField("n", t.IntegerType(), nullable=False)])
OPTIONAL = StructType([StructField("n", t.IntegerType())])
_tokens = count()


class Killed(BaseException):
    """The process ends here."""


def lander(folder: Path, fields: StructType) -> BatchLander:
    rows = LandingTable.open(str(folder / "t"), table_schema(fields), "t", "id-1")
    return BatchLander(rows, LandingTable.open(str(folder / "t_dead_letters"), dead_letter_schema(), "t", "id-1"))


def land(folder: Path, query: str, values: Sequence[bytes], fields: StructType = NUMBER, batch: int = 0) -> None:
    first = batch * len(values)
    rows = records(0, range(first, first + len(values)), values)
    lander(folder, fields).land(query, batch, writer(folder, rows, fields=fields))


def replay(folder: Path, fields: StructType = OPTIONAL, deleted: DeletedKeys | None = None) -> Replayed:
    return Replay(opened(folder, fields), f"r{next(_tokens)}", 1_700_000_000_000, fields, deleted=deleted).run()


def opened(folder: Path, fields: StructType | None) -> ReplayedTable:
    return ReplayedTable.open(str(folder / "t"), TableOptions(), fields)


def offsets(folder: Path) -> tuple[list[int], list[int]]:
    """Return the offsets of both tables; one that is there twice is listed twice."""
    rows, dead = ([offset for _, offset in landed(folder / name)] for name in ("t", "t_dead_letters"))
    return rows, dead


VALUES = [b'{"n": 1}', b"{}", b'{"n": "x"}', b"{}", b'{"n": 4}']


def test_dead_letters_land_once_and_a_report_says_what_still_fails(tmp_path: Path) -> None:
    land(tmp_path, "q", VALUES)
    land(tmp_path, "q", VALUES, batch=1)
    assert offsets(tmp_path) == ([0, 4, 5, 9], [1, 2, 3, 6, 7, 8])
    done = replay(tmp_path)
    assert offsets(tmp_path) == ([0, 1, 3, 4, 5, 6, 8, 9], [2, 7])
    assert (done.replayed, done.failing, done.landed_before) == (4, 2, 0)
    ((reason, number),) = done.reasons.items()
    assert "Expected `int | null`, got `str`" in reason and number == 2
    assert done.to_json()["reasons"][0]["places"] == ["partition 0, offset 2", "partition 0, offset 7"]
    versions = [DeltaTable(str(tmp_path / name)).version() for name in ("t", "t_dead_letters")]
    assert replay(tmp_path).to_json() == {**done.to_json(), "replayed": 0}
    assert [DeltaTable(str(tmp_path / name)).version() for name in ("t", "t_dead_letters")] == versions
    # The offsets have landed: a lost checkpoint brings none of them again.
    rows = records(0, range(10), VALUES * 2)
    lander(tmp_path, OPTIONAL).land("new", 0, writer(tmp_path, rows, fields=OPTIONAL))
    assert offsets(tmp_path) == ([0, 1, 3, 4, 5, 6, 8, 9], [2, 7])


@pytest.mark.parametrize("step", ["before the rows", "after the rows", "after both"])
def test_a_replay_that_is_killed_neither_loses_nor_doubles_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    land(tmp_path, "q", VALUES)
    commit, put = LandingTable.commit, delta_log.put_entry

    def killed_commit(table: LandingTable, *given: Any) -> None:
        if step == "before the rows":
            raise Killed
        commit(table, *given)
        if step == "after the rows":
            raise Killed

    def killed_put(*given: Any) -> None:
        put(*given)
        raise Killed

    monkeypatch.setattr(LandingTable, "commit", killed_commit)
    monkeypatch.setattr("chronik.pipeline.land.dead_letters.put_entry", killed_put)
    with pytest.raises(Killed):
        replay(tmp_path)
    monkeypatch.undo()
    done = replay(tmp_path)
    assert offsets(tmp_path) == ([0, 1, 3, 4], [2])
    again = {"before the rows": (2, 0), "after the rows": (0, 2), "after both": (0, 0)}
    assert (done.replayed, done.landed_before) == again[step]


def test_a_landing_during_a_replay_sees_each_record_in_one_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lost checkpoint, the landing reads the same records while they move."""
    land(tmp_path, "q", VALUES)
    other = lander(tmp_path, OPTIONAL)
    refresh, refreshed = LandingTable.refresh, list[str]()

    def slow_refresh(table: LandingTable) -> None:
        refresh(table)
        refreshed.append(table.uri)
        if len(refreshed) == 1:
            replay(tmp_path)

    monkeypatch.setattr(LandingTable, "refresh", slow_refresh)
    rows = records(0, range(5), VALUES)
    other.land("new", 0, writer(tmp_path, rows, fields=OPTIONAL))
    assert offsets(tmp_path) == ([0, 1, 3, 4], [2])


def interrupted(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    """Run something else once, right before a replay's first commit."""
    commit, has_run = LandingTable.commit, list[bool]()

    def commit_late(table: LandingTable, query: str, batch: int, files: Sequence[NewFile]) -> None:
        if not has_run:
            has_run.append(True)
            then()
        commit(table, query, batch, files)

    monkeypatch.setattr(LandingTable, "commit", commit_late)


def test_two_replays_at_once_land_each_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    land(tmp_path, "q", VALUES)
    interrupted(monkeypatch, lambda: replay(tmp_path))
    assert replay(tmp_path).replayed == 0
    assert offsets(tmp_path) == ([0, 1, 3, 4], [2])


def test_a_merge_of_the_dead_letters_during_a_replay_keeps_all_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "MERGE_FILES", 2)
    land(tmp_path, "q", VALUES)
    land(tmp_path, "q", VALUES, batch=1)
    interrupted(monkeypatch, lambda: maintain(str(tmp_path / "t_dead_letters"), "m", 1_700_000_000_000, vacuum=False))
    replay(tmp_path)
    monkeypatch.undo()
    replay(tmp_path)
    assert offsets(tmp_path) == ([0, 1, 3, 4, 5, 6, 8, 9], [2, 7])


def test_a_dead_letter_that_lands_meanwhile_stays_in_the_table(tmp_path: Path) -> None:
    land(tmp_path, "q", VALUES)
    current = Replay(opened(tmp_path, OPTIONAL), "r", 1_700_000_000_000, OPTIONAL)
    land(tmp_path, "q", VALUES, batch=1)
    assert current.run().replayed == 2
    assert offsets(tmp_path) == ([0, 1, 3, 4, 5, 9], [2, 6, 7, 8])


def test_dead_letters_of_deleted_keys_are_removed(tmp_path: Path) -> None:
    land(tmp_path, "q", VALUES)
    done = replay(tmp_path, deleted=DeletedKeys.of({b"k1": ALWAYS, b"k2": ALWAYS}))
    assert (done.replayed, done.deleted, done.failing) == (1, 2, 0)
    assert offsets(tmp_path) == ([0, 3, 4], [])


def test_records_whose_schema_was_unknown_land_typed_after_its_registration(tmp_path: Path) -> None:
    topic = Topic(tmp_path)
    one = topic.register(("id", "long"))
    two = topic.register(("id", "long"), nullable("name", "string"))
    late, good = topic.value(two, id=2, name="x"), topic.value(one, id=1)
    hidden = topic.schemas.pop(two)
    topic.land(good, late, b"no id")
    assert [offset for offset, _ in topic.reasons()] == [1, 2]
    topic.schemas[two] = hidden
    schemas = TopicSchemas("t", {"value": "avro"}, "evolve", topic._lookup)
    table = ReplayedTable.open(str(tmp_path / "t"), TableOptions(format="avro"))
    done = Replay(table, "r", 1_700_000_000_000, schemas=schemas).run()
    assert (done.replayed, done.failing) == (1, 1)
    assert topic.table("offset", "id", "name") == [(0, 1, None), (1, 2, "x")]
    assert [offset for offset, _ in topic.reasons()] == [2]


def test_tables_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="is not a table of chronik pipeline land"):
        topic_of(str(tmp_path / "t"), TableOptions())
    LandingTable.open(str(tmp_path / "t"), table_schema(None), "t", "id-1")
    assert topic_of(str(tmp_path / "t"), TableOptions()) == ("t", "id-1")
    with pytest.raises(PipelineError, match="has no dead letters"):
        opened(tmp_path, None)
