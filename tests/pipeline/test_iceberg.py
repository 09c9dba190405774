"""Iceberg tables: exactly once through crashes, races and rollbacks; days, maintenance, audits, other readers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from sqlalchemy.exc import OperationalError
from tests.support.landing import TIME, records, writer

from chronik.pipeline.audit.table import find_tables, read_table, table_ranges
from chronik.pipeline.catalog import open_catalog
from chronik.pipeline.errors import PipelineError, Unavailable
from chronik.pipeline.land.delta import BatchLander, LandedBatch, LandingTable
from chronik.pipeline.land.iceberg import BOUNDED, RETRIES, IcebergTable
from chronik.pipeline.land.iceberg_maintenance import maintain_at, superfluous
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.schema import dead_letter_schema, table_schema
from chronik.pipeline.land.task import NewFile
from chronik.pipeline.service.audits import lowest_landed

DAY_US = 24 * 3600 * 1_000_000


def table(folder: Path, topic_id: str = "id-1") -> IcebergTable:
    return IcebergTable.open(open_catalog(str(folder), {}), str(folder / "t"), table_schema(None), "t", topic_id)


def lander(folder: Path) -> BatchLander:
    return BatchLander(table(folder))


def loaded(folder: Path, name: str = "t") -> Any:
    return open_catalog(str(folder), {}).load_table(("chronik", name))


def landed(folder: Path, name: str = "t") -> list[tuple[int, int]]:
    rows = loaded(folder, name).scan(selected_fields=("partition", "offset")).to_arrow()
    return sorted(tuple(row.values()) for row in rows.to_pylist())


def each(stop: int, partition: int = 0) -> list[tuple[int, int]]:
    return [(partition, offset) for offset in range(stop)]


def test_a_batch_lands_once_after_replays_and_a_lost_checkpoint(tmp_path: Path) -> None:
    write = writer(tmp_path, records(0, range(10)), records(1, range(5)))
    assert lander(tmp_path).land("q", 0, write) == LandedBatch(15, 0)
    assert lander(tmp_path).land("q", 0, write) == LandedBatch(0, 0)
    assert lander(tmp_path).land("q", 1, writer(tmp_path)) == LandedBatch(0, 0)
    assert lander(tmp_path).land("new", 0, writer(tmp_path, records(0, range(20)))) == LandedBatch(10, 0)
    assert landed(tmp_path) == each(20) + each(5, 1)
    summary = loaded(tmp_path).current_snapshot().summary
    assert (summary["chronik.query"], summary["chronik.offsets"]) == ("new", '{"0":[10,19]}')


def test_a_landing_that_another_one_overtakes_checks_again(tmp_path: Path) -> None:
    """Without that, pyiceberg would append the same files to the newer snapshot."""
    ours, raced = writer(tmp_path, records(0, range(80))), list[LandedBatch]()

    def write(known: LandedOffsets) -> Sequence[NewFile]:
        files = ours(known)
        if not raced:
            raced.append(lander(tmp_path).land("other", 0, writer(tmp_path, records(0, range(50)))))
        return files

    assert lander(tmp_path).land("q", 0, write) == LandedBatch(30, 0)
    assert raced == [LandedBatch(50, 0)] and landed(tmp_path) == each(80)


def test_the_same_query_in_two_processes_lands_each_record_once(tmp_path: Path) -> None:
    write = writer(tmp_path, records(0, range(50)))

    def late(known: LandedOffsets) -> Sequence[NewFile]:
        files = write(known)
        lander(tmp_path).land("q", 0, write)
        return files

    assert lander(tmp_path).land("q", 0, late) == LandedBatch(0, 0)
    assert landed(tmp_path) == each(50)


def test_a_table_that_would_repeat_appends_is_refused(tmp_path: Path) -> None:
    lander(tmp_path).land("q", 0, writer(tmp_path, records(0, range(5))))
    with loaded(tmp_path).transaction() as transaction:
        transaction.set_properties({RETRIES: "4"})
    with pytest.raises(PipelineError, match=r"needs the property commit.retry.num-retries = 0"):
        lander(tmp_path).land("q", 1, writer(tmp_path, records(0, range(5, 9))))


def test_a_crash_between_both_commits_leaves_each_record_in_one_table(tmp_path: Path) -> None:
    dead = IcebergTable.open(
        open_catalog(str(tmp_path), {}), str(tmp_path / "t_dead_letters"), dead_letter_schema(), "t", "id-1"
    )
    bad = records(0, range(2, 4)).append_column("reason", pa.array(["x", "y"]))
    file = _dead_file(tmp_path, bad)
    dead.commit("q", 0, [file])
    both = BatchLander(table(tmp_path), dead)
    assert both.land("new", 0, writer(tmp_path, records(0, range(4)))) == LandedBatch(2, 0)
    assert landed(tmp_path) == each(2) and landed(tmp_path, "t_dead_letters") == [(0, 2), (0, 3)]


def _dead_file(folder: Path, rows: Any) -> NewFile:
    from chronik.pipeline.land.task import DEAD_LETTERS, FileSet

    files = FileSet(DEAD_LETTERS, str(folder / "t_dead_letters"), dead_letter_schema(), "dead")
    files.add(rows.select([name for name in dead_letter_schema().names if name != "date"]))
    (file,) = files.finish()
    return file


def test_a_rolled_back_table_and_a_recreated_topic_are_refused(tmp_path: Path) -> None:
    same = lander(tmp_path)
    for batch in range(3):
        same.land("q", batch, writer(tmp_path, records(0, range(batch * 5, batch * 5 + 5))))
    first = loaded(tmp_path).metadata.snapshots[0].snapshot_id
    loaded(tmp_path).manage_snapshots().set_current_snapshot(snapshot_id=first).commit()
    with pytest.raises(PipelineError, match="was rolled back to an earlier snapshot"):
        lander(tmp_path).land("q", 3, writer(tmp_path, records(0, range(15, 20))))
    lander(tmp_path).land("new", 0, writer(tmp_path, records(0, range(20))))
    assert landed(tmp_path) == each(20)
    with pytest.raises(PipelineError, match="was deleted and recreated"):
        table(tmp_path, "id-2")


def test_days_are_partitions_and_other_engines_read_every_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    times = [TIME, None, TIME + DAY_US]
    lander(tmp_path).land("q", 0, writer(tmp_path, records(0, range(3), [b"a", None, b""], times)))
    days = loaded(tmp_path).inspect.partitions().column("partition").to_pylist()
    assert sorted(str(day["timestamp_day"]) for day in days) == ["2023-11-14", "2023-11-15", "None"]
    frame = pl.scan_iceberg(loaded(tmp_path)).sort("offset").collect()
    assert frame.select("key", "value").rows() == [(b"k0", b"a"), (b"k1", None), (b"k2", b"")]
    connection = loaded(tmp_path).scan(row_filter="offset > 0").to_duckdb("t")
    assert connection.execute('select "offset", headers from t order by all').fetchall() == [
        (1, [{"key": "h", "value": b"1"}]),
        (2, [{"key": "h", "value": b"1"}]),
    ]


def test_small_files_are_merged_and_old_snapshots_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronik.pipeline.land.maintenance.MERGE_FILES", 4)
    same = lander(tmp_path)
    for batch in range(4):
        same.land("q", batch, writer(tmp_path, records(0, range(batch * 5, batch * 5 + 5))))
    done = maintain_at(str(tmp_path / "t"), {}, "m", 4_000_000_000_000)
    assert (done.merged_files, done.new_files) == (4, 1)
    assert len(loaded(tmp_path).metadata.snapshots) == 1
    assert len(list(loaded(tmp_path).scan().plan_files())) == 1 and landed(tmp_path) == each(20)
    assert same.land("q", 4, writer(tmp_path, records(0, range(15, 25)))) == LandedBatch(5, 0)
    assert landed(tmp_path) == each(25)


DAY_MS = DAY_US // 1000


def data_files(folder: Path) -> set[str]:
    return {str(path) for path in (folder / "t").glob("date=*/*.parquet")}


def test_files_are_removed_when_no_snapshot_needs_them_and_readers_have_had_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge replaces old files: what counts is when they were replaced, not when their snapshot was made."""
    monkeypatch.setattr("chronik.pipeline.land.maintenance.MERGE_FILES", 4)
    same, uri = lander(tmp_path), str(tmp_path / "t")
    for batch in range(4):
        same.land("q", batch, writer(tmp_path, records(0, range(batch * 5, batch * 5 + 5))))
    tagged = loaded(tmp_path).metadata.snapshots[1].snapshot_id
    loaded(tmp_path).manage_snapshots().create_tag(tagged, "keep").commit()
    abandoned = writer(tmp_path, records(0, range(90, 95)))(LandedOffsets())[0].path
    foreign = [tmp_path / "t" / name for name in ("notes.txt", "data/x.parquet")]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    now_ms = loaded(tmp_path).metadata.last_updated_ms
    first = data_files(tmp_path)
    assert maintain_at(uri, {}, "m1", now_ms + 4 * DAY_MS, None, 24).removed_files == 2  # the abandoned one, and a list
    assert data_files(tmp_path) - first and first - data_files(tmp_path) == {str(tmp_path / "t" / abandoned)}
    assert len(loaded(tmp_path).metadata.snapshots) == 4
    now_ms = loaded(tmp_path).metadata.last_updated_ms
    assert maintain_at(uri, {}, "m2", now_ms + 6 * DAY_MS).removed_files == 0  # expired, and not a week old
    assert loaded(tmp_path).metadata.snapshots[0].snapshot_id == tagged
    assert len(loaded(tmp_path).metadata.snapshots) == 2
    assert maintain_at(uri, {}, "m3", now_ms + 8 * DAY_MS).removed_files > 0
    assert len(data_files(tmp_path)) == 3 and all(path.exists() for path in foreign)
    assert landed(tmp_path) == each(20)
    assert loaded(tmp_path).scan(snapshot_id=tagged).to_arrow().num_rows == 10
    assert same.land("q", 4, writer(tmp_path, records(0, range(15, 25)))) == LandedBatch(5, 0)
    assert landed(tmp_path) == each(25)


def test_a_merge_stays_readable_until_its_snapshot_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next snapshot does not have the manifest of what the merge deleted."""
    monkeypatch.setattr("chronik.pipeline.land.maintenance.MERGE_FILES", 4)
    same, uri = lander(tmp_path), str(tmp_path / "t")
    for batch in range(4):
        same.land("q", batch, writer(tmp_path, records(0, range(batch * 5, batch * 5 + 5))))
    assert maintain_at(uri, {}, "m1", loaded(tmp_path).metadata.last_updated_ms).merged_files == 4
    merge = loaded(tmp_path).metadata.current_snapshot_id
    same.land("q", 4, writer(tmp_path, records(0, range(20, 25))))
    maintain_at(uri, {}, "m2", loaded(tmp_path).metadata.last_updated_ms + 2 * DAY_MS, None, 24)
    assert loaded(tmp_path).scan(snapshot_id=merge).to_arrow().num_rows == 20
    for manifest in loaded(tmp_path).snapshot_by_id(merge).manifests(loaded(tmp_path).io):
        assert Path(manifest.manifest_path.removeprefix("file://")).exists(), manifest


@pytest.mark.parametrize("error", [CommitFailedException, CommitStateUnknownException, OperationalError])
def test_a_commit_that_is_reported_as_failed_and_took_place_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A catalog behind a proxy that repeats requests, one that loses its answer, and a database that does."""
    monkeypatch.setattr("chronik.pipeline.land.maintenance.MERGE_FILES", 4)
    same = lander(tmp_path)
    for batch in range(3):
        same.land("q", batch, writer(tmp_path, records(0, range(batch * 5, batch * 5 + 5))))
    unclear = error is not CommitFailedException
    commit = SqlCatalog.commit_table

    def unanswered(*arguments: Any) -> Any:
        monkeypatch.setattr(SqlCatalog, "commit_table", commit)
        commit(*arguments)
        raise OperationalError("UPDATE", {}, OSError("lost")) if error is OperationalError else error("answer lost")

    monkeypatch.setattr(SqlCatalog, "commit_table", unanswered)
    write = writer(tmp_path, records(0, range(15, 20)))
    if unclear:
        with pytest.raises(Unavailable, match="cannot commit to the table"):
            same.land("q", 3, write)
    assert same.land("q", 3, write) == LandedBatch(0 if unclear else 5, 0)
    assert landed(tmp_path) == each(20)
    monkeypatch.setattr(SqlCatalog, "commit_table", unanswered)
    if unclear:
        with pytest.raises(Unavailable, match="cannot maintain the table"):
            maintain_at(str(tmp_path / "t"), {}, "m", 1_800_000_000_000)
    else:
        assert maintain_at(str(tmp_path / "t"), {}, "m", 1_800_000_000_000).merged_files == 4
    assert len(list(loaded(tmp_path).scan().plan_files())) == 1 and landed(tmp_path) == each(20)


def test_a_lost_race_leaves_no_manifests_behind(tmp_path: Path) -> None:
    ours, raced = writer(tmp_path, records(0, range(5))), list[LandedBatch]()

    def write(known: LandedOffsets) -> Sequence[NewFile]:
        files = ours(known)
        if not raced:
            raced.append(lander(tmp_path).land("other", 0, writer(tmp_path, records(1, range(5)))))
        return files

    lander(tmp_path).land("q", 0, write)
    metadata = loaded(tmp_path).metadata
    lists = {snapshot.manifest_list.rpartition("/")[2] for snapshot in metadata.snapshots}
    assert {path.name for path in tmp_path.rglob("snap-*.avro")} == lists


def test_an_audit_reads_the_table_and_its_checksums(tmp_path: Path) -> None:
    lander(tmp_path).land("q", 0, writer(tmp_path, records(0, range(7))))
    for address in (str(tmp_path), str(tmp_path / "t")):
        (found,) = find_tables(address, "t")
        rows = pa.Table.from_batches(batch for task in table_ranges([found], 16, 2) for batch in read_table(task))
        assert sorted(rows.column("start").to_pylist()) == list(range(7)) and found.has_content


def test_other_topics_and_missing_catalogs_are_refused(tmp_path: Path) -> None:
    table(tmp_path)
    catalog = open_catalog(str(tmp_path), {})
    with pytest.raises(PipelineError, match="holds the topic t, not other"):
        IcebergTable.open(catalog, str(tmp_path / "t"), table_schema(None), "other", "id-1")
    with pytest.raises(PipelineError, match="the catalog has the table"):
        IcebergTable.open(catalog, str(tmp_path / "elsewhere" / "t"), table_schema(None), "t", "id-1")
    with pytest.raises(PipelineError, match="is no folder for a catalog: pass --catalog"):
        open_catalog("s3://bucket/tables", {})


def test_maintenance_of_a_table_that_is_not_there_is_an_error_and_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"there is no Iceberg table at .*/none/t"):
        maintain_at(str(tmp_path / "none" / "t"), {}, "m", 0)
    table(tmp_path)
    with pytest.raises(PipelineError, match="there is no Iceberg table"):
        maintain_at(str(tmp_path / "other"), {}, "m", 0)
    assert not (tmp_path / "none").exists()


def test_an_audit_of_a_landing_that_began_later_begins_where_it_did(tmp_path: Path) -> None:
    """With `starting = "latest"`: the offsets before are no gaps."""
    lander(tmp_path).land("q", 0, writer(tmp_path, records(0, range(7, 9)), records(1, range(3, 5))))
    assert lowest_landed(str(tmp_path / "t"), "t", {}) == {0: 7, 1: 3}
    delta = BatchLander(LandingTable.open(str(tmp_path / "delta" / "t"), table_schema(None), "t", "id-1"))
    delta.land("q", 0, writer(tmp_path / "delta", records(0, range(4, 9))))
    assert lowest_landed(str(tmp_path / "delta" / "t"), "t", {}) == {0: 4}


HOUR_MS = DAY_MS // 24


def test_few_snapshots_remain_of_months_of_commits() -> None:
    """A commit every 10 s: all of the last 10 minutes, one for each hour of the last day, one for each day before."""
    now_ms = 100 * DAY_MS + HOUR_MS // 2
    times = {number: now_ms - 10_000 * number for number in range(60 * 8640)}
    kept = sorted(times.keys() - superfluous(times, now_ms))
    assert [each for each in kept if each <= 60] == list(range(61))
    assert 24 + 4 <= len(kept) - 61 <= 25 + 6
    ages_h = [each / 360 for each in kept]
    assert max(later - before for before, later in pairwise(ages_h)) <= 25 and 4 * 24 <= ages_h[-1] <= 5 * 24


def test_a_snapshot_is_kept_for_a_day_after_it_was_replaced_however_old_it_is() -> None:
    quiet, merged, newest = 50 * DAY_MS + 3 * HOUR_MS, 50 * DAY_MS + 22 * HOUR_MS, 51 * DAY_MS + 21 * HOUR_MS
    times = {1: quiet - 1000, 2: quiet, 3: merged, 4: newest}
    assert superfluous(times, newest) == set()
    assert superfluous(times, newest + 2 * HOUR_MS) == {1}
    assert superfluous(times, newest + 2 * HOUR_MS, evidence={1}) == set()
    assert superfluous({1: 0}, newest) == set()
    assert superfluous(times, newest, keep_all_min=60_000) == set()
    assert superfluous({1: 0, 2: 1, 3: newest}, newest + 6 * DAY_MS) == {1, 2}


def test_a_rollback_is_noticed_after_the_snapshots_that_show_it_have_expired(tmp_path: Path) -> None:
    same = lander(tmp_path)
    for batch in range(6):
        same.land("q", batch, writer(tmp_path, records(0, range(batch * 5, batch * 5 + 5))))
    snapshots = [each.snapshot_id for each in loaded(tmp_path).metadata.snapshots]
    loaded(tmp_path).maintenance.expire_snapshots().by_ids(snapshots[1:4]).commit()
    lander(tmp_path).land("q", 6, writer(tmp_path, records(0, range(30, 35))))
    loaded(tmp_path).manage_snapshots().set_current_snapshot(snapshot_id=snapshots[4]).commit()
    newer = [each.snapshot_id for each in loaded(tmp_path).metadata.snapshots][2:]
    loaded(tmp_path).maintenance.expire_snapshots().by_ids(newer).commit()
    with pytest.raises(PipelineError, match="was rolled back to an earlier snapshot"):
        lander(tmp_path).land("q", 7, writer(tmp_path, records(0, range(35, 40))))
    lander(tmp_path).land("new", 0, writer(tmp_path, records(0, range(40))))
    assert landed(tmp_path) == each(40)


def test_a_landing_that_was_away_for_longer_than_snapshots_are_kept_continues(tmp_path: Path) -> None:
    same, other = lander(tmp_path), lander(tmp_path)
    same.land("q", 0, writer(tmp_path, records(0, range(5))))
    for batch in range(6):
        other.land("other", batch, writer(tmp_path, records(1, range(batch * 5, batch * 5 + 5))))
    now_ms = loaded(tmp_path).metadata.last_updated_ms
    maintain_at(str(tmp_path / "t"), {}, "m", now_ms + 90 * DAY_MS)
    assert len(loaded(tmp_path).metadata.snapshots) == 1
    assert same.land("q", 0, writer(tmp_path, records(0, range(5)))) == LandedBatch(0, 0)
    assert same.land("q", 1, writer(tmp_path, records(0, range(3, 9)))) == LandedBatch(4, 0)
    assert landed(tmp_path) == each(9) + each(30, 1)


def test_metadata_does_not_grow_with_the_number_of_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of an earlier release gets the properties that bound it, and many manifests become one."""
    monkeypatch.setattr("chronik.pipeline.land.iceberg_maintenance.MANIFESTS_MAX", 4)
    with loaded_table(tmp_path).transaction() as transaction:
        transaction.remove_properties(*BOUNDED)
        transaction.set_properties({"commit.manifest.min-count-to-merge": "4"})
    same = lander(tmp_path)
    for batch in range(6):
        same.land("q", batch, writer(tmp_path, records(0, range(batch * 5, batch * 5 + 5))))
    maintain_at(str(tmp_path / "t"), {}, "m", loaded(tmp_path).metadata.last_updated_ms)
    assert {name: loaded(tmp_path).properties[name] for name in BOUNDED} == BOUNDED
    (manifest,) = loaded(tmp_path).current_snapshot().manifests(loaded(tmp_path).io)
    assert manifest.existing_files_count == 6 and landed(tmp_path) == each(30)
    same.land("q", 6, writer(tmp_path, records(0, range(30, 35))))
    for batch in range(7, 30):
        same.land("q", batch, writer(tmp_path))
    assert len(list((tmp_path / "t" / "metadata").glob("*.metadata.json"))) == 21
    assert landed(tmp_path) == each(35)


def loaded_table(folder: Path) -> Any:
    table(folder)
    return loaded(folder)
