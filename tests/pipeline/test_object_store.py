"""Tables in an object store, through a real HTTP server that speaks S3: land, upsert, merge, audit, lost answers.

Batches are landed in this process, with a new query for a lost checkpoint. `tests/spark/test_land_s3.py` does it with
Spark, a killed driver and the commands.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.support import upsert
from tests.support.landing import records
from tests.support.s3_server import bucket, fail_next

from chronik.pipeline.audit.blocks import LANDED
from chronik.pipeline.audit.table import LandedFile, find_tables, read_table, table_ranges
from chronik.pipeline.catalog import open_catalog
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land import delta_log
from chronik.pipeline.land.delta import BatchLander, LandedBatch, LandingTable, Write
from chronik.pipeline.land.iceberg import IcebergTable
from chronik.pipeline.land.iceberg_maintenance import maintain_at
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.maintenance import maintain
from chronik.pipeline.land.options import TableOptions
from chronik.pipeline.land.replay import Replay, ReplayedTable
from chronik.pipeline.land.schema import dead_letter_schema, table_schema
from chronik.pipeline.land.state_task import MergedBucket, MergeTask
from chronik.pipeline.land.task import DEAD_LETTERS, FileSet, NewFile, WriteTask, remove_files
from chronik.wire.checksum import record_checksum

BATCHES = 4
_names = count()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with bucket() as name:
        yield name


def lander(uri: str) -> BatchLander:
    return BatchLander(LandingTable.open(uri, table_schema(None), "t", "id-1"))


def writer(uri: str, *batches: Any) -> Write:
    def write(landed: LandedOffsets) -> list[NewFile]:
        return WriteTask(uri, "", "x", None, landed).write(iter(batches), f"part-{next(_names)}")

    return write


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_a_table_in_s3_is_landed_audited_and_merged(s3: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronik.pipeline.land.maintenance.MERGE_FILES", BATCHES)
    uri = f"{scheme}://{s3}/{scheme}/t"
    landing = lander(uri)
    for batch in range(BATCHES):
        rows = records(0, range(batch * 10, batch * 10 + 10))
        assert landing.land("q", batch, writer(uri, rows)) == LandedBatch(10, 0)
    end = BATCHES * 10
    done = maintain(uri, "m", 1_800_000_000_000)
    assert (done.merged_files, done.new_files) == (BATCHES, 1)
    assert len(DeltaTable(uri).file_uris()) == 1
    lost_checkpoint = lander(uri)
    assert lost_checkpoint.land("new", 0, writer(uri, records(0, range(end + 5)))) == LandedBatch(5, 0)
    (table,) = find_tables(uri, "t")
    rows = pa.Table.from_batches(batch for task in table_ranges([table], 16, 2) for batch in read_table(task)).sort_by(
        "start"
    )
    assert rows.column("start").to_pylist() == list(range(end + 5))
    assert set(rows.column("side").to_pylist()) == {LANDED}
    assert rows.column("checksum")[7].as_py() == record_checksum(b"k7", b"v7", [("h", b"1")])


def test_files_of_a_failed_attempt_are_removed_from_s3(s3: str) -> None:
    uri = f"s3://{s3}/attempt/t"
    landing = lander(uri)
    files = writer(uri, records(0, range(5)))(LandedOffsets())
    remove_files(uri, files[0].path.rpartition("/")[2])
    with pytest.raises(PipelineError, match=r"reading date=.* of the table"):
        table = find_tables(uri, "t")[0]
        broken = table_ranges([type(table)(table.name, (LandedFile(files[0].path, 1, None),), True)], 16, 1)
        list(read_table(broken[0]))
    assert landing.land("q", 0, writer(uri, records(0, range(5)))) == LandedBatch(5, 0)


def test_an_unknown_address_is_a_one_line_error() -> None:
    with pytest.raises(PipelineError, match="ftp://host/t"):
        find_tables("ftp://host/t", "t")
    with pytest.raises(PipelineError, match="cannot use the address ftp://host/t"):
        WriteTask("ftp://host/t", "", "x", None, LandedOffsets()).write(iter(()), "x")


def test_the_current_state_is_landed_in_s3(s3: str) -> None:
    """Also after a lost checkpoint, and beside a landing that is faster."""
    folder = f"s3://{s3}/state"
    first = [upsert.Record(0, number, b"k%d" % (number % 4), b"v%d" % number, number) for number in range(8)]
    upsert.lander(folder).land("q", 0, upsert.writer(folder, first))
    raced: list[int] = []

    def overtaken(task: MergeTask) -> list[MergedBucket]:
        if not raced:
            raced.append(1)
            upsert.lander(folder).land("q", 1, upsert.writer(folder, [upsert.Record(0, 8, b"k0", None, 8)]))
        return upsert.merge(task)

    more = [*first, upsert.Record(0, 8, b"k0", None, 8), upsert.Record(0, 9, b"k1", b"last", 9)]
    upsert.lander(folder, do_merge=overtaken).land("lost", 0, upsert.writer(folder, more))
    assert raced and upsert.state(folder) == {b"k1": b"last", b"k2": b"v6", b"k3": b"v7"}
    maintain(f"{folder}/t", "m", 1_800_000_000_000)
    assert len(upsert.state(folder)) == 3


def test_an_iceberg_table_in_s3_is_landed_audited_and_merged(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chronik.pipeline.land.maintenance.MERGE_FILES", BATCHES)
    uri = f"s3://{s3}/iceberg/t"
    settings = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"s3://{s3}/iceberg"}

    def landing() -> BatchLander:
        return BatchLander(IcebergTable.open(open_catalog(uri, settings), uri, table_schema(None), "t", "id-1"))

    for batch in range(BATCHES):
        rows = records(0, range(batch * 10, batch * 10 + 10))
        assert landing().land("q", batch, writer(uri, rows)) == LandedBatch(10, 0)
    done = maintain_at(uri, settings, "m", 4_000_000_000_000)
    assert (done.merged_files, done.new_files) == (BATCHES, 1)
    assert done.removed_files >= BATCHES  # no snapshot needs the merged ones any more
    assert landing().land("lost", 0, writer(uri, records(0, range(45)))) == LandedBatch(5, 0)
    (table,) = find_tables(uri, "t", settings)
    found = pa.Table.from_batches(batch for task in table_ranges([table], 16, 2) for batch in read_table(task))
    assert sorted(found.column("start").to_pylist()) == list(range(45))
    assert open_catalog(uri, settings).load_table(("chronik", "t")).scan().to_arrow().num_rows == 45


def test_a_merge_whose_commit_gets_no_answer_keeps_its_file(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's client repeats the request, and finds the entry that it made itself."""
    monkeypatch.setattr("chronik.pipeline.land.maintenance.MERGE_FILES", BATCHES)
    uri = f"s3://{s3}/unanswered/t"
    landing = lander(uri)
    for batch in range(BATCHES):
        landing.land("q", batch, writer(uri, records(0, range(batch * 10, batch * 10 + 10))))
    fail_next("_delta_log")
    done = maintain(uri, "m", 1_800_000_000_000, vacuum=False)
    assert (done.merged_files, done.new_files) == (BATCHES, 1)
    table = DeltaTable(uri)
    assert len(table.file_uris()) == 1 and table.to_pyarrow_table().num_rows == 10 * BATCHES


def test_an_upsert_whose_commit_gets_no_answer_keeps_its_files(s3: str) -> None:
    folder = f"s3://{s3}/unanswered-state"
    first = [upsert.Record(0, number, b"k%d" % (number % 4), b"v%d" % number, number) for number in range(8)]
    landing = upsert.lander(folder)
    fail_next("_delta_log")
    assert landing.land("q", 0, upsert.writer(folder, first)).rows == 4
    assert upsert.state(folder) == {b"k%d" % key: b"v%d" % (key + 4) for key in range(4)}


def test_an_append_whose_commit_gets_no_answer_is_landed_and_counted_once(s3: str) -> None:
    """Also the commit that creates the table."""
    uri = f"s3://{s3}/unanswered-append/t"
    fail_next("_delta_log")
    landing = lander(uri)
    fail_next("_delta_log")
    assert landing.land("q", 0, writer(uri, records(0, range(10)))) == LandedBatch(10, 0)
    assert landing.land("q", 1, writer(uri, records(0, range(5, 15)))) == LandedBatch(5, 0)
    assert DeltaTable(uri).to_pyarrow_table().num_rows == 15


def test_a_replay_whose_commits_get_no_answer_moves_each_dead_letter_once(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"s3://{s3}/unanswered-replay"
    LandingTable.open(f"{folder}/t", table_schema(None), "t", "id-1")
    dead = LandingTable.open(f"{folder}/t_dead_letters", dead_letter_schema(), "t", "id-1")
    files = FileSet(DEAD_LETTERS, f"{folder}/t_dead_letters", dead_letter_schema(), "dead")
    bad = records(0, range(6)).append_column("reason", pa.array(["x"] * 6))
    files.add(bad.select([name for name in dead_letter_schema().names if name != "date"]))
    dead.commit("q", 0, files.finish())
    fail_next("t/_delta_log")
    put = delta_log.put_entry

    def unanswered(*arguments: Any) -> bytes | None:
        fail_next("t_dead_letters/_delta_log")
        return put(*arguments)

    monkeypatch.setattr("chronik.pipeline.land.dead_letters.put_entry", unanswered)
    done = Replay(ReplayedTable.open(f"{folder}/t", TableOptions()), "r", 1_800_000_000_000).run()
    assert (done.replayed, done.landed_before, done.failing) == (6, 0, 0)
    assert DeltaTable(f"{folder}/t").to_pyarrow_table().num_rows == 6
    assert DeltaTable(f"{folder}/t_dead_letters").to_pyarrow_table().num_rows == 0


def test_a_store_that_refuses_access_or_has_no_such_bucket_ends_a_landing_at_once(s3: str) -> None:
    """A later attempt would be refused too. Other faults are repeated, and tests above show how."""
    uri, folder = f"s3://{s3}/refused/t", f"s3://{s3}/refused-state"
    landing, state = lander(uri), upsert.lander(folder)
    change = upsert.Record(0, 0, b"k", b"v", 1)
    fail_next("_delta_log", 403, applied=False)
    with pytest.raises(PipelineError, match="cannot commit to the table") as append:
        landing.land("q", 0, writer(uri, records(0, range(5))))
    with pytest.raises(PipelineError, match="cannot commit to the log") as merge:
        state.land("q", 0, upsert.writer(folder, [change]))
    fail_next("date=", 403, applied=False)
    with pytest.raises(PipelineError, match="allow access or choose another --to") as write:
        landing.land("q", 0, writer(uri, records(0, range(5))))
    fail_next("nothing")
    with pytest.raises(PipelineError, match="cannot write s3://no-such-bucket/t") as missing:
        writer("s3://no-such-bucket/t", records(0, range(5)))(LandedOffsets())
    for failure in (append, merge, write, missing):
        assert failure.type is PipelineError and "\x1b" not in str(failure.value)
    assert landing.land("q", 0, writer(uri, records(0, range(5)))) == LandedBatch(5, 0)
