"""Iceberg tables of a REST catalog, through HTTP: landed, widened, merged, audited; commits without a clear answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.pipeline.test_schema_changes import IcebergTopic
from tests.pipeline.test_typed_landing import nullable
from tests.support.landing import records, writer
from tests.support.rest_catalog import RestCatalog, rest_catalog

from chronik.pipeline.audit.table import find_tables, read_table, table_ranges
from chronik.pipeline.catalog import open_catalog
from chronik.pipeline.errors import PipelineError, Unavailable
from chronik.pipeline.land.delta import BatchLander, LandedBatch
from chronik.pipeline.land.iceberg import IcebergTable
from chronik.pipeline.land.iceberg_maintenance import maintain_at
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.schema import table_schema
from chronik.pipeline.land.task import NewFile


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[RestCatalog]:
    with rest_catalog(tmp_path) as server:
        yield server


def table(folder: Path, server: RestCatalog) -> IcebergTable:
    opened = open_catalog(str(folder), server.options)
    return IcebergTable.open(opened, str(folder / "t"), table_schema(None), "t", "id-1", namespace="sales")


def lander(folder: Path, server: RestCatalog) -> BatchLander:
    return BatchLander(table(folder, server))


def landed(folder: Path, server: RestCatalog) -> list[int]:
    rows = open_catalog(str(folder), server.options).load_table(("sales", "t")).scan().to_arrow()
    offsets: list[int] = sorted(rows.column("offset").to_pylist())
    return offsets


def test_a_table_is_landed_merged_and_audited(
    tmp_path: Path, catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chronik.pipeline.land.maintenance.MERGE_FILES", 4)
    same = lander(tmp_path, catalog)
    for batch in range(4):
        rows = records(0, range(batch * 5, batch * 5 + 5))
        assert same.land("q", batch, writer(tmp_path, rows)) == LandedBatch(5, 0)
    assert not (tmp_path / "iceberg.db").exists(), "without --catalog, this would be the catalog"
    done = maintain_at(str(tmp_path / "t"), catalog.options, "m", 4_000_000_000_000)
    assert (done.merged_files, done.new_files) == (4, 1) and done.removed_files >= 4
    lost_checkpoint = lander(tmp_path, catalog)
    assert lost_checkpoint.land("new", 0, writer(tmp_path, records(0, range(25)))) == LandedBatch(5, 0)
    assert landed(tmp_path, catalog) == list(range(25))
    for address in (str(tmp_path), str(tmp_path / "t")):
        (found,) = find_tables(address, "t", catalog.options)
        rows = pa.Table.from_batches(batch for task in table_ranges([found], 16, 2) for batch in read_table(task))
        assert sorted(rows.column("start").to_pylist()) == list(range(25))


def test_a_landing_that_another_one_overtakes_checks_again(tmp_path: Path, catalog: RestCatalog) -> None:
    ours, raced = writer(tmp_path, records(0, range(80))), list[LandedBatch]()

    def write(known: LandedOffsets) -> Sequence[NewFile]:
        files = ours(known)
        if not raced:
            other = writer(tmp_path, records(0, range(50)))
            raced.append(lander(tmp_path, catalog).land("other", 0, other))
        return files

    assert lander(tmp_path, catalog).land("q", 0, write) == LandedBatch(30, 0)
    assert raced == [LandedBatch(50, 0)] and landed(tmp_path, catalog) == list(range(80))


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "not applied"])
@pytest.mark.parametrize("status", [409, 500, 502, 503, 504])
def test_a_commit_without_a_clear_answer_lands_once(
    tmp_path: Path, catalog: RestCatalog, status: int, applied: bool
) -> None:
    """409 after a commit that was applied: a proxy has repeated the request."""
    same = lander(tmp_path, catalog)
    same.land("q", 0, writer(tmp_path, records(0, range(5))))
    write = writer(tmp_path, records(0, range(5, 10)))
    catalog.fail_next(status, applied=applied)
    if status == 409:
        assert same.land("q", 1, write) == LandedBatch(5, 0)
    else:
        with pytest.raises(Unavailable, match="cannot commit to the table"):
            same.land("q", 1, write)
        assert same.land("q", 1, write) == LandedBatch(0 if applied else 5, 0)
    assert landed(tmp_path, catalog) == list(range(10))


def test_a_table_that_two_landings_create_at_once_is_that_of_both(
    tmp_path: Path, catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no table, and the catalog takes one of the two commits that create it."""
    opened = open_catalog(str(tmp_path), catalog.options)
    create = type(opened).create_table_transaction

    def overtaken(*given: Any, **more: Any) -> Any:
        transaction = create(*given, **more)
        monkeypatch.undo()
        lander(tmp_path, catalog).land("other", 0, writer(tmp_path, records(0, range(5))))
        return transaction

    monkeypatch.setattr(type(opened), "create_table_transaction", overtaken)
    ours = lander(tmp_path, catalog)
    assert ours.land("q", 0, writer(tmp_path, records(0, range(8)))) == LandedBatch(3, 0)
    assert landed(tmp_path, catalog) == list(range(8))


def test_columns_follow_the_schema(tmp_path: Path, catalog: RestCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IcebergTopic, "options", catalog.options)
    topic = IcebergTopic(tmp_path)
    topic.land(topic.value(topic.register(("id", "int")), id=1))
    topic.land(topic.value(topic.register(("id", "long"), nullable("x", "string")), id=2**40, x="y"))
    topic.start()
    assert topic.land(topic.value(topic.register(("id", "string")), id="z")) == LandedBatch(0, 1)
    rows = topic.arrow().sort_by("offset").select(["id", "x"]).to_pylist()
    assert rows == [{"id": 1, "x": None}, {"id": 2**40, "x": "y"}]
    assert topic.arrow("t_dead_letters").column("offset").to_pylist() == [2]


def test_a_catalog_that_refuses_or_does_not_answer_is_a_one_line_error(tmp_path: Path) -> None:
    with rest_catalog(tmp_path) as server:
        with pytest.raises(PipelineError, match=r"cannot open the catalog: .*not authorized") as refused:
            open_catalog(str(tmp_path), {**server.options, "token": "wrong"})
        assert not isinstance(refused.value, Unavailable)
        landing, options = lander(tmp_path, server), server.options
    with pytest.raises(Unavailable, match="no record lands twice") as silent:
        landing.land("q", 0, writer(tmp_path, records(0, range(5))))
    with pytest.raises(Unavailable, match="cannot open the catalog"):
        open_catalog(str(tmp_path), options)
    assert "\n" not in str(silent.value)
