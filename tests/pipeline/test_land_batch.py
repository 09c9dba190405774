"""Micro-batches into Delta tables, with the executors' work done in this process: the core of every crash and loss."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from pyspark.sql.types import LongType, StringType, StructField, StructType
from tests.support.landing import landed, records, sql, writer

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.delta import HISTORY_COMMITS, BatchLander, LandedBatch, LandingTable
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.schema import dead_letter_schema, table_schema
from chronik.pipeline.land.task import NewFile, WriteTask, remove_files

NUMBER = StructType([StructField("n", LongType(), nullable=False)])
TEXT = StructType([StructField("n", StringType(), nullable=False)])


def table(folder: Path, fields: StructType | None = None, topic_id: str = "id-1") -> LandingTable:
    return LandingTable.open(str(folder / "t"), table_schema(fields), "t", topic_id)


def dead_letters(folder: Path) -> LandingTable:
    return LandingTable.open(str(folder / "t_dead_letters"), dead_letter_schema(), "t", "id-1")


def lander(folder: Path) -> BatchLander:
    return BatchLander(table(folder))


def each(*ranges: range, partition: int = 0) -> list[tuple[int, int]]:
    return [(partition, offset) for numbers in ranges for offset in numbers]


def test_a_batch_lands_once_and_its_replay_is_a_no_op(tmp_path: Path) -> None:
    write = writer(tmp_path, records(0, range(10)), records(1, range(5)))
    assert lander(tmp_path).land("q", 0, write) == LandedBatch(15, 0)
    version = table(tmp_path).version
    assert lander(tmp_path).land("q", 0, write) == LandedBatch(0, 0)
    assert table(tmp_path).version == version
    assert landed(tmp_path / "t") == each(range(10)) + each(range(5), partition=1)


def test_a_batch_without_rows_is_landed(tmp_path: Path) -> None:
    """Control records are not rows, and the batch after them must still be accepted."""
    same = lander(tmp_path)
    for batch in range(3):
        same.land("q", batch, writer(tmp_path, *([records(0, range(5))] if batch == 2 else [])))
    assert landed(tmp_path / "t") == each(range(5))


def test_a_lost_checkpoint_does_not_duplicate_records(tmp_path: Path) -> None:
    lander(tmp_path).land("q", 0, writer(tmp_path, records(0, range(100, 200))))
    lander(tmp_path).land("q", 1, writer(tmp_path, records(0, range(200, 250)), records(1, range(10))))
    again = lander(tmp_path)
    assert again.land("new", 0, writer(tmp_path, records(0, range(150)))) == LandedBatch(100, 0)
    assert again.land("new", 1, writer(tmp_path, records(0, range(150, 300)))) == LandedBatch(50, 0)
    assert lander(tmp_path).land("new", 2, writer(tmp_path, records(1, range(20)))) == LandedBatch(10, 0)
    assert landed(tmp_path / "t") == each(range(300)) + each(range(20), partition=1)
    written = {str(file) for file in (tmp_path / "t").rglob("*.parquet")}
    assert written == set(DeltaTable(str(tmp_path / "t")).file_uris())


def test_records_that_another_job_lands_concurrently_are_skipped(tmp_path: Path) -> None:
    """Between our read of the table and our commit: deltalake rejects the commit, and we read the table again."""
    other = writer(tmp_path, records(0, range(50)))
    ours = writer(tmp_path, records(0, range(80)))
    raced: list[LandedBatch] = []

    def write(known: LandedOffsets) -> Sequence[NewFile]:
        files = ours(known)
        if not raced:
            raced.append(lander(tmp_path).land("other", 0, other))
        return files

    assert lander(tmp_path).land("q", 0, write) == LandedBatch(30, 0)
    assert landed(tmp_path / "t") == each(range(80))


def test_the_same_query_in_two_processes_lands_each_record_once(tmp_path: Path) -> None:
    write = writer(tmp_path, records(0, range(50)))

    def late(known: LandedOffsets) -> Sequence[NewFile]:
        files = write(known)
        lander(tmp_path).land("q", 0, write)
        return files

    assert lander(tmp_path).land("q", 0, late) == LandedBatch(0, 0)
    assert landed(tmp_path / "t") == each(range(50))


@pytest.mark.parametrize("then", [NUMBER, TEXT], ids=["same schema", "another schema"])
def test_a_crash_between_both_commits_leaves_each_record_in_one_table(tmp_path: Path, then: StructType) -> None:
    """With the other schema, the dead letters would be rows, and the rows dead letters."""
    good, bad = b'{"n": 1}', b'{"n": "x"}'
    batch = records(0, range(4), [good, bad, good, bad])
    first = writer(tmp_path, batch, fields=NUMBER)(LandedOffsets())
    dead_letters(tmp_path).commit("q", 0, [file for file in first if file.table == "dead letters"])
    again = BatchLander(table(tmp_path, then), dead_letters(tmp_path))
    again.land("q", 0, writer(tmp_path, batch, fields=then))
    rows, dead = landed(tmp_path / "t"), landed(tmp_path / "t_dead_letters")
    assert sorted(rows + dead) == each(range(4))
    assert set(each(range(1, 4, 2))) <= set(dead)


def test_a_checkpoint_ahead_of_the_table_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="has no batch of it: the checkpoint belongs to another table"):
        lander(tmp_path).land("q", 7, writer(tmp_path, records(0, range(5))))
    lander(tmp_path).land("q", 0, writer(tmp_path, records(0, range(5))))
    with pytest.raises(PipelineError, match="is at 0"):
        lander(tmp_path).land("q", 2, writer(tmp_path, records(0, range(5, 9))))
    assert landed(tmp_path / "t") == each(range(5))


def test_a_recreated_topic_and_another_schema_are_rejected(tmp_path: Path) -> None:
    table(tmp_path)
    table(tmp_path)
    with pytest.raises(PipelineError, match="was deleted and recreated"):
        table(tmp_path, topic_id="id-2")
    with pytest.raises(PipelineError, match=r"another --schema \(they differ in n\)"):
        table(tmp_path, NUMBER)
    with pytest.raises(PipelineError, match="holds the topic t, not other"):
        LandingTable.open(str(tmp_path / "t"), table_schema(None), "other", "id-1")


def test_other_engines_read_every_column_of_the_table(tmp_path: Path) -> None:
    day_us = 24 * 3600 * 1_000_000
    times = [1_700_000_000_000_001, None, 1_700_000_000_000_000 + day_us]
    lander(tmp_path).land("q", 0, writer(tmp_path, records(3, range(3), [b"a", None, b""], times)))
    where = str(tmp_path / "t")
    frame = pl.read_delta(where).sort("offset")
    assert frame.columns == ["key", "value", "headers", "partition", "offset", "timestamp", "date"]
    assert frame["value"].to_list() == [b"a", None, b""]
    assert [None if date is None else str(date) for date in frame["date"]] == ["2023-11-14", None, "2023-11-15"]
    assert frame["headers"].to_list()[0] == [{"key": "h", "value": b"1"}]
    pandas = DeltaTable(where).to_pandas().sort_values("offset")
    assert list(pandas["key"]) == [b"k0", b"k1", b"k2"]
    assert list(pandas["timestamp"].isna()) == [False, True, False]
    assert sql(tmp_path / "t", 'select count(*) from landed where "offset" > 0') == [(2,)]
    assert pl.scan_delta(where).filter(pl.col("timestamp") >= frame["timestamp"][0]).collect().height == 2


def test_a_full_disk_is_an_error_and_leaves_the_table_unchanged(tmp_path: Path) -> None:
    lander(tmp_path).land("q", 0, writer(tmp_path, records(0, range(5))))
    task = WriteTask(str(tmp_path / "t"), "", "x", None, LandedOffsets())
    full = tmp_path / "t" / "date=2023-11-14" / "full-0.parquet"
    full.symlink_to("/dev/full")

    def write(known: LandedOffsets) -> Sequence[NewFile]:
        return task.write(iter([records(0, range(5, 10))]), "full")

    with pytest.raises(PipelineError, match=r"full-0.parquet: .*No space left on device; make room"):
        lander(tmp_path).land("q", 1, write)
    remove_files(str(tmp_path / "t"), "full")
    assert not full.is_symlink()
    assert lander(tmp_path).land("q", 1, writer(tmp_path, records(0, range(5, 10)))) == LandedBatch(5, 0)
    assert landed(tmp_path / "t") == each(range(10))


def test_executors_do_not_import_deltalake() -> None:
    code = "import sys, chronik.pipeline.land.task\nassert 'deltalake' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("is_running", [True, False], ids=["while it runs", "between two runs"])
def test_a_restored_table_is_refused_and_a_new_checkpoint_lands_what_is_missing(
    tmp_path: Path, is_running: bool
) -> None:
    landing = lander(tmp_path)
    for batch in range(3):
        landing.land("q", batch, writer(tmp_path, records(0, range(batch * 10, batch * 10 + 10))))
    DeltaTable(str(tmp_path / "t")).restore(1)
    again = landing if is_running else lander(tmp_path)
    with pytest.raises(PipelineError, match=r"was restored to an earlier version \(in version 4\).* new --checkpoint"):
        again.land("q", 3, writer(tmp_path, records(0, range(30, 40))))
    assert landed(tmp_path / "t") == each(range(10))
    new = lander(tmp_path)
    assert new.land("new", 0, writer(tmp_path, records(0, range(40)))) == LandedBatch(30, 0)
    assert new.land("new", 1, writer(tmp_path, records(0, range(40, 45)))) == LandedBatch(5, 0)
    assert landed(tmp_path / "t") == each(range(45))


def test_a_restore_is_found_below_many_commits_of_others(tmp_path: Path) -> None:
    lander(tmp_path).land("q", 0, writer(tmp_path, records(0, range(10))))
    DeltaTable(str(tmp_path / "t")).restore(0)
    other = lander(tmp_path)
    for batch in range(HISTORY_COMMITS + 1):
        other.land("other", batch, writer(tmp_path))
    with pytest.raises(PipelineError, match="was restored"):
        lander(tmp_path).land("q", 1, writer(tmp_path, records(0, range(10, 20))))


def test_timestamps_outside_the_calendar_land_as_null(tmp_path: Path) -> None:
    """The year 57845 is what microseconds are when a producer sends them as milliseconds."""
    year_57845, year_9999, year_0 = 1_763_000_000_000_000_000, 253_402_300_799_999_000, -62_135_596_800_000_001
    times = [year_57845, 1_700_000_000_000_000, year_9999, year_0, None]
    lander(tmp_path).land("q", 0, writer(tmp_path, records(0, range(5), times=times)))
    frame = pl.read_delta(str(tmp_path / "t")).sort("offset")
    assert [None if time is None else time.year for time in frame["timestamp"]] == [None, 2023, 9999, None, None]
    assert [None if date is None else str(date) for date in frame["date"]] == [
        None,
        "2023-11-14",
        "9999-12-31",
        None,
        None,
    ]


def test_what_a_task_cannot_write_is_an_error_with_partition_and_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chronik.pipeline.land.task.with_calendar_times", lambda _: 1 / 0)
    with pytest.raises(PipelineError, match=r"/t, partition 3, offsets 5 to 8, failed: ZeroDivisionError.*log has the"):
        lander(tmp_path).land("q", 0, writer(tmp_path, records(3, range(5, 9))))


def test_a_restore_is_found_although_others_commit_while_the_log_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deltalake numbers commits from an old snapshot's version on, so a stale one would give them wrong numbers."""
    lander(tmp_path).land("q", 0, writer(tmp_path, records(0, range(10))))
    DeltaTable(str(tmp_path / "t")).restore(0)
    again = lander(tmp_path)
    history, batches = DeltaTable.history, iter(range(3))

    def late(table: DeltaTable, limit: int | None = None) -> list[dict[str, Any]]:
        for batch in batches:
            table_of_other = LandingTable.open(str(tmp_path / "t"), table_schema(None), "t", "id-1")
            table_of_other.commit("other", batch, [])
            break
        return history(table, limit)

    monkeypatch.setattr(DeltaTable, "history", late)
    with pytest.raises(PipelineError, match=r"was restored to an earlier version \(in version 2\)"):
        again.land("q", 1, writer(tmp_path, records(0, range(10, 20))))
