"""Tables that maintain themselves: small files are merged, each byte at most twice, beside landings that continue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from tests.cli.run_chronik import chronik
from tests.support.landing import TIME, landed, records, sql, writer

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land import maintenance
from chronik.pipeline.land.delta import BatchLander, LandedBatch, LandingTable
from chronik.pipeline.land.maintenance import (
    MERGE_FILES,
    MERGE_OLD_FILES,
    SMALL_BYTES,
    Maintained,
    Maintainer,
    TableFile,
    maintain,
    merges,
)
from chronik.pipeline.land.schema import table_schema

NOW_MS = 1_800_000_000_000
DAY_US = 24 * 3600 * 1_000_000


def lander(folder: Path) -> BatchLander:
    return BatchLander(LandingTable.open(str(folder / "t"), table_schema(None), "t", "id-1"))


def land(folder: Path, batches: int, first: int = 0, times: Any = None) -> None:
    landing = lander(folder)
    for batch in range(first, first + batches):
        rows = records(0, range(batch * 10, batch * 10 + 10), times=times)
        landing.land("q", batch, writer(folder, rows))


def run(folder: Path, **settings: Any) -> Maintained:
    return maintain(str(folder / "t"), f"m{len(list(folder.rglob('*')))}", NOW_MS, **settings)


def each(number: int) -> list[tuple[int, int]]:
    return [(0, offset) for offset in range(number)]


@pytest.mark.parametrize("size_bytes", [3_000, 300_000, 20_000_000], ids=["3 kB", "300 kB", "20 MB"])
def test_a_day_of_trickle_is_written_at_most_three_times(size_bytes: int) -> None:
    """A file every 10 s, and late files for older dates. Merged files are as large as their parts, the worst case."""
    files: dict[str, TableFile] = {}
    landed_bytes = rewritten_bytes = most = 0
    for number in range(8640):
        day = "2026-01-31" if number % 50 else f"2026-01-{1 + number // 50 % 20:02}"
        files[f"f{number}"] = TableFile(f"{day}/f{number}", size_bytes, day, number)
        landed_bytes += size_bytes
        if number % 16 == 0:
            for merge in list(merges(list(files.values()))):
                path = f"{merge.date}/merged{merge.generation}-{number}-{merge.files[0].first_offset}"
                total = sum(file.size_bytes for file in merge.files)
                for file in merge.files:
                    del files[file.path.rpartition("/")[2]]
                files[path.rpartition("/")[2]] = TableFile(path, total, merge.date, merge.files[0].first_offset)
                rewritten_bytes += total
        most = max(most, sum(file.size_bytes < SMALL_BYTES for file in files.values() if file.date == "2026-01-31"))
    assert (landed_bytes + rewritten_bytes) / landed_bytes <= 3
    assert most < 3 * MERGE_FILES


def test_late_data_and_large_files_cause_no_rewrite() -> None:
    """16 dates with one large file, and one small late file for each."""
    days = [f"2026-01-{day:02}" for day in range(1, 17)]
    large = [TableFile(f"{day}/large", SMALL_BYTES, day, 0) for day in days]
    late = [TableFile(f"{day}/late", 3_000, day, 1) for day in days]
    assert list(merges(large + late)) == []
    many = [TableFile(f"{days[0]}/late{number}", 3_000, days[0], number) for number in range(MERGE_OLD_FILES)]
    (merge,) = merges(large + late[1:] + many)
    assert set(merge.files) == set(many)


def test_merging_keeps_every_row_and_what_the_landing_knows(tmp_path: Path) -> None:
    land(tmp_path, 70)
    done = run(tmp_path)
    assert (done.merged_files, done.new_files) == (70, 1)
    assert done.write_amplification is not None and 1 < done.write_amplification <= 3
    table = DeltaTable(str(tmp_path / "t"))
    assert len(table.file_uris()) == 1
    assert landed(tmp_path / "t") == each(700)
    assert pl.read_delta(str(tmp_path / "t")).height == 700
    assert sql(tmp_path / "t", "select count(*) from landed where key = 'k7'::blob and headers[1].key = 'h'") == [(1,)]
    assert run(tmp_path).new_files == 0
    assert lander(tmp_path).land("q", 69, writer(tmp_path)) == LandedBatch(0, 0)
    assert lander(tmp_path).land("new", 0, writer(tmp_path, records(0, range(710)))) == LandedBatch(10, 0)
    assert DeltaTable(str(tmp_path / "t"), version=70).to_pyarrow_table().num_rows == 700


def test_records_without_a_timestamp_are_merged_too(tmp_path: Path) -> None:
    land(tmp_path, MERGE_OLD_FILES, times=[None] * 10)
    land(tmp_path, MERGE_OLD_FILES, MERGE_OLD_FILES, times=[TIME + 9 * DAY_US] * 10)
    assert run(tmp_path).merged_files == MERGE_OLD_FILES
    dates = pl.read_delta(str(tmp_path / "t"))["date"].to_list()
    assert (dates.count(None), dates.count(date(2023, 11, 23))) == (80, 80)


def test_a_landing_continues_beside_a_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commits come between the merge's snapshot and its commit, and the other way round."""
    land(tmp_path, MERGE_FILES)
    during(monkeypatch, lambda: land(tmp_path, 3, MERGE_FILES))
    assert run(tmp_path, vacuum=False).merged_files == MERGE_FILES
    assert landed(tmp_path / "t") == each(10 * MERGE_FILES + 30)
    stale = lander(tmp_path)
    land(tmp_path, MERGE_FILES, MERGE_FILES + 3)
    assert run(tmp_path, vacuum=False).new_files == 1
    end = 2 * MERGE_FILES + 3
    stale.land("q", end, writer(tmp_path, records(0, range(end * 10, end * 10 + 10))))
    assert landed(tmp_path / "t") == each(end * 10 + 10)


@pytest.mark.parametrize(
    "other",
    [
        lambda table: table.delete("offset = 3"),
        lambda table: table.restore(1),
        lambda table: table.optimize.compact(),
        lambda table: table.alter.set_table_properties({"delta.appendOnly": "false"}),
    ],
    ids=["delete", "restore", "optimize", "alter"],
)
def test_a_merge_is_discarded_if_its_files_are_taken_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Callable[[DeltaTable], object]
) -> None:
    land(tmp_path, MERGE_FILES)
    expected: list[Any] = []

    def act() -> None:
        other(DeltaTable(str(tmp_path / "t")))
        expected.extend(landed(tmp_path / "t"))

    during(monkeypatch, act)
    assert run(tmp_path, vacuum=False).new_files == 0
    assert landed(tmp_path / "t") == expected
    assert not list(tmp_path.rglob("merged*"))


@pytest.mark.parametrize("deleted", ["offset in (3, 43)", "offset = 43"], ids=["both dates", "the second date"])
def test_rows_that_are_deleted_during_merges_of_two_dates_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: str
) -> None:
    """Each merge checks all commits since the plan, also after a merge that was discarded, or wrote a checkpoint."""
    monkeypatch.setattr("chronik.pipeline.land.maintenance.MERGE_FILES", 4)
    monkeypatch.setattr("chronik.pipeline.land.delta_log.CHECKPOINT_COMMITS", 1)
    land(tmp_path, 4)
    land(tmp_path, 4, 4, times=[TIME + DAY_US] * 10)
    expected: list[Any] = []

    def act() -> None:
        DeltaTable(str(tmp_path / "t")).delete(deleted)
        expected.extend(landed(tmp_path / "t"))

    during(monkeypatch, act)
    assert run(tmp_path, vacuum=False).new_files == (0 if "3," in deleted else 1)
    assert landed(tmp_path / "t") == expected


def during(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act after a merged file is written and before it is committed, once."""
    commit, acts = maintenance._commit, iter([act])

    def late(*arguments: Any) -> bool:
        next(acts, lambda: None)()
        return commit(*arguments)

    monkeypatch.setattr(maintenance, "_commit", late)


def test_the_command_maintains_a_table_and_sets_how_long_files_are_kept(tmp_path: Path) -> None:
    land(tmp_path, MERGE_FILES)
    done = chronik("pipeline", "maintain", str(tmp_path / "t"), "--vacuum-after", "48", "--log-retention", "7")
    assert done.code == 0, done.err
    assert f"{MERGE_FILES} files merged into 1" in done.out and "write amplification" in done.out
    settings = DeltaTable(str(tmp_path / "t")).metadata().configuration
    assert settings["delta.deletedFileRetentionDuration"] == "interval 48 hours"
    assert settings["delta.logRetentionDuration"] == "interval 7 days"
    assert landed(tmp_path / "t") == each(10 * MERGE_FILES)
    missing = chronik("pipeline", "maintain", str(tmp_path / "none"))
    assert missing.code == 2 and "cannot maintain the table" in missing.error_line


def test_the_maintainer_runs_beside_its_caller_and_logs_a_failure_once(caplog: pytest.LogCaptureFixture) -> None:
    runs, may_end = threading.Semaphore(0), threading.Event()

    def fail(uri: str, vacuum: bool) -> Maintained:
        runs.release()
        may_end.wait(30)
        raise PipelineError("no disk")

    maintainer = Maintainer(fail, ["t"], lambda: 0.0)
    maintainer.wake()
    assert runs.acquire(timeout=30)
    maintainer.wake()
    may_end.set()
    assert runs.acquire(timeout=30)
    maintainer.stop()
    maintainer.run()
    assert [record.getMessage() for record in caplog.records] == ["no disk"]
