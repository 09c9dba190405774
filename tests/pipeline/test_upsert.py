"""Tables with one row per key, with the executors' work done in this process: order, deletions, crashes and races."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable
from pyspark.sql.types import LongType, StringType, StructField, StructType
from tests.support.landing import landed, sql
from tests.support.upsert import Record, expected, lander, merge, state, writer

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.delta import LandingTable
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.maintenance import maintain, write_amplification
from chronik.pipeline.land.schema import table_schema
from chronik.pipeline.land.state_task import MergedBucket, MergeTask
from chronik.pipeline.land.task import NewFile

ORDERS = StructType([StructField("id", LongType(), nullable=False), StructField("status", StringType())])


def puts(keys: str, first: int = 0, partition: int = 0, value: bytes = b"v") -> list[Record]:
    return [
        Record(partition, first + number, key.encode(), value + b"%d" % (first + number), first + number)
        for number, key in enumerate(keys)
    ]


def test_a_key_has_one_row_and_a_tombstone_deletes_it(tmp_path: Path) -> None:
    same = lander(tmp_path)
    assert same.land("q", 0, writer(tmp_path, puts("abcab"))).rows == 3
    assert state(tmp_path) == {b"a": b"v3", b"b": b"v4", b"c": b"v2"}
    same.land("q", 1, writer(tmp_path, [Record(0, 5, b"a", None, 5), *puts("bd", 6)]))
    assert state(tmp_path) == {b"b": b"v6", b"c": b"v2", b"d": b"v7"}
    same.land("q", 2, writer(tmp_path, puts("a", 8)))
    assert state(tmp_path)[b"a"] == b"v8"


@pytest.mark.parametrize("seed", range(4))
def test_any_batches_of_any_partitions_give_the_documented_state(tmp_path: Path, seed: int) -> None:
    """Also after lost checkpoints, which deliver landed records again."""
    chance = random.Random(seed)
    logs = [
        [
            Record(
                partition,
                offset,
                b"k%d" % chance.randrange(30),
                None if chance.random() < 0.3 else b"%d-%d" % (partition, offset),
                chance.choice([None, offset // 3 + chance.randrange(20)]),
            )
            for offset in range(120)
        ]
        for partition in range(3)
    ]
    read, done, batch, query = [0, 0, 0], [0, 0, 0], 0, "q0"
    same = lander(tmp_path)
    while min(done) < 120:
        stops = [min(120, begin + chance.randrange(40)) for begin in read]
        parts = [log[begin:stop] for log, begin, stop in zip(logs, read, stops, strict=True)]
        same.land(query, batch, writer(tmp_path, *(part for part in parts if part)))
        read, batch = stops, batch + 1
        done = [max(before, now) for before, now in zip(done, read, strict=True)]
        known = [each for log, stop in zip(logs, done, strict=True) for each in log[:stop]]
        assert state(tmp_path) == expected(known)
        if chance.random() < 0.2:
            same, query, batch = lander(tmp_path), f"q{batch}-{query}", 0
            read = [chance.randrange(each + 1) for each in done]


def test_a_record_of_another_partition_wins_by_its_timestamp_in_any_order(tmp_path: Path) -> None:
    """The partition count was raised, and the new partition is read first."""
    same = lander(tmp_path)
    same.land("q", 0, writer(tmp_path, [Record(3, 0, b"moved", b"new", 50), Record(3, 1, b"gone", None, 50)]))
    old = [Record(0, 0, b"moved", b"old", 40), Record(0, 1, b"gone", b"old", 40), Record(0, 2, b"late", b"old", 10)]
    same.land("q", 1, writer(tmp_path, old))
    assert state(tmp_path) == {b"moved": b"new", b"late": b"old"}
    same.land("q", 2, writer(tmp_path, [Record(0, 3, b"gone", b"again", 60)]))
    assert state(tmp_path)[b"gone"] == b"again"


def test_a_merge_that_another_landing_overtakes_starts_again(tmp_path: Path) -> None:
    raced: list[int] = []

    def overtaken(task: MergeTask) -> list[MergedBucket]:
        found = merge(task)
        if not raced:
            raced.append(lander(tmp_path).land("other", 0, writer(tmp_path, puts("abc"))).rows)
        return found

    done = lander(tmp_path, do_merge=overtaken).land("q", 0, writer(tmp_path, puts("abcde")))
    assert (raced, done.rows) == ([3], 2)
    assert state(tmp_path) == {b"a": b"v0", b"b": b"v1", b"c": b"v2", b"d": b"v3", b"e": b"v4"}
    files = {str(file) for file in (tmp_path / "t").rglob("bucket=*/*.parquet")}
    assert files == set(DeltaTable(str(tmp_path / "t")).file_uris())
    assert not list((tmp_path / "t" / "_chronik" / "staged").iterdir())


def test_the_same_query_in_two_processes_merges_each_batch_once(tmp_path: Path) -> None:
    write = writer(tmp_path, puts("ab"))

    def late(known: LandedOffsets) -> Sequence[NewFile]:
        files = write(known)
        lander(tmp_path).land("q", 0, write)
        lander(tmp_path).land("q", 1, writer(tmp_path, [Record(0, 2, b"a", None, 2)]))
        return files

    assert lander(tmp_path).land("q", 0, late).rows == 0
    assert state(tmp_path) == {b"b": b"v1"}


def test_the_bytes_of_an_upsert_are_those_of_the_changes_and_the_rewritten_ones_are_reported(tmp_path: Path) -> None:
    same = lander(tmp_path, buckets=1)
    noise = random.Random(1)
    first = [Record(0, number, b"k%d" % number, noise.randbytes(1000), number) for number in range(200)]
    assert same.land("q", 0, writer(tmp_path, first, buckets=1)).size_bytes > 200_000
    change = same.land("q", 1, writer(tmp_path, [Record(0, 200, b"k7", b"v", 200)], buckets=1))
    assert 0 < change.size_bytes < 10_000
    table = DeltaTable(str(tmp_path / "t"))
    own = next(commit["chronik"] for commit in table.history() if commit.get("chronik", {}).get("batch") == 1)
    assert own["bytes"] == change.size_bytes and own["rewritten"] > 200_000
    amplification = write_amplification(table)
    assert amplification is not None and 2.5 < amplification < 3.5  # staged, merged, and rewritten for one change


def test_a_batch_that_would_skip_records_is_refused(tmp_path: Path) -> None:
    lander(tmp_path).land("q", 0, writer(tmp_path, puts("ab", first=7)))
    with pytest.raises(PipelineError, match="up to offset 9 of partition 0, and this landing begins at 12"):
        lander(tmp_path).land("late", 0, writer(tmp_path, puts("a", first=12)))
    lander(tmp_path).land("late", 0, writer(tmp_path, puts("cab", first=9)))
    assert state(tmp_path) == {b"a": b"v10", b"b": b"v11", b"c": b"v9"}


def test_a_crash_after_the_dead_letters_leaves_each_once(tmp_path: Path) -> None:
    batch = [*puts("ab"), Record(0, 2, None, b"keyless", 2)]

    def killed(_: MergeTask) -> list[MergedBucket]:
        raise PipelineError("killed")

    with pytest.raises(PipelineError, match="killed"):
        lander(tmp_path, do_merge=killed).land("q", 0, writer(tmp_path, batch))
    lander(tmp_path).land("new", 0, writer(tmp_path, batch))
    assert landed(tmp_path / "t_dead_letters") == [(0, 2)]
    assert state(tmp_path) == {b"a": b"v0", b"b": b"v1"}


def test_only_files_with_superseded_rows_are_rewritten(tmp_path: Path) -> None:
    same = lander(tmp_path, buckets=1)
    many = [Record(0, number, b"k%d" % number, random.Random(number).randbytes(500), number) for number in range(4000)]
    same.land("q", 0, writer(tmp_path, many, buckets=1))
    (large,) = DeltaTable(str(tmp_path / "t")).file_uris()
    for number in range(6):
        same.land("q", 1 + number, writer(tmp_path, [Record(0, 4000 + number, b"new%d" % number, b"v", 0)], buckets=1))
    files = DeltaTable(str(tmp_path / "t")).file_uris()
    assert large in files and len(files) == 2  # new rows join the small file, not the large one
    same.land("q", 7, writer(tmp_path, [Record(0, 4006, b"k7", None, 9)], buckets=1))
    assert large not in DeltaTable(str(tmp_path / "t")).file_uris()
    assert len(state(tmp_path)) == 4005


def test_fields_of_the_value_can_be_the_key(tmp_path: Path) -> None:
    rows = [
        Record(0, 0, b"x", b'{"id": 1, "status": "new"}'),
        Record(0, 1, b"y", b'{"id": 1, "status": "paid"}'),
        Record(0, 2, None, b'{"id": 2, "status": "new"}'),
        Record(0, 3, b"x", None),
        Record(0, 4, b"x", b"junk"),
    ]
    write = writer(tmp_path, rows, fields=ORDERS, key=("id",))
    assert lander(tmp_path, ORDERS, ("id",)).land("q", 0, write).dead_letters == 2
    table = DeltaTable(str(tmp_path / "t")).to_pyarrow_table(columns=["id", "status"]).sort_by("id")
    assert table.to_pylist() == [{"id": 1, "status": "paid"}, {"id": 2, "status": "new"}]
    reasons = DeltaTable(str(tmp_path / "t_dead_letters")).to_pyarrow_table().sort_by("offset").column("reason")
    assert reasons[0].as_py() == "no value, and id is required"


def test_records_whose_schema_lacks_the_key_are_dead_letters(tmp_path: Path) -> None:
    write = writer(tmp_path, puts("ab"), key=("unknown",))
    assert lander(tmp_path, key=("unknown",)).land("q", 0, write).dead_letters == 2
    assert landed(tmp_path / "t") == []


def test_a_restored_table_is_refused_for_new_queries_too(tmp_path: Path) -> None:
    """It keeps the end of each partition: a new query would skip the records whose changes the restore took back."""
    same = lander(tmp_path)
    for batch in range(3):
        same.land("q", batch, writer(tmp_path, puts("abc", batch * 3)))
    DeltaTable(str(tmp_path / "t")).restore(1)
    for each, query, batch in ((same, "q", 3), (lander(tmp_path), "q", 3), (lander(tmp_path), "new", 0)):
        with pytest.raises(
            PipelineError, match=r"was restored to an earlier version .*: land the topic in another --to"
        ):
            each.land(query, batch, writer(tmp_path, puts("abcabcabcd")))
    assert state(tmp_path) == {b"a": b"v0", b"b": b"v1", b"c": b"v2"}


def test_wrong_keys_and_modes_of_an_existing_table_are_refused(tmp_path: Path) -> None:
    lander(tmp_path)
    with pytest.raises(PipelineError, match="was created with the key of the record"):
        lander(tmp_path, key=("id",))
    with pytest.raises(PipelineError, match="was created with --mode upsert"):
        LandingTable.open(str(tmp_path / "t"), table_schema(None), "t", "id-1", may_have_more=True)


def test_maintenance_keeps_what_the_table_needs(tmp_path: Path) -> None:
    same = lander(tmp_path)
    for number in range(8):
        same.land("q", number, writer(tmp_path, [*puts("ab", 2 * number), Record(1, number, b"gone", None, 99)]))
    assert maintain(str(tmp_path / "t"), "m", 1_800_000_000_000).new_files == 0
    same.land("q", 8, writer(tmp_path, [Record(0, 16, b"gone", b"older", 50)]))
    assert state(tmp_path) == {b"a": b"v14", b"b": b"v15"}


def test_other_engines_read_the_current_state(tmp_path: Path) -> None:
    lander(tmp_path).land("q", 0, writer(tmp_path, [*puts("abcab"), Record(0, 5, b"c", None, 5)]))
    where = str(tmp_path / "t")
    frame = pl.read_delta(where).sort("key")
    assert frame.select("key", "value", "offset").rows() == [(b"a", b"v3", 3), (b"b", b"v4", 4)]
    assert sql(tmp_path / "t", "select key, value from landed order by key") == [(b"a", b"v3"), (b"b", b"v4")]
