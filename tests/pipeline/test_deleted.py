"""Keys that were deleted on purpose: their records never land, and an audit does not miss them."""

from __future__ import annotations

import base64
import json
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from tests.support.landing import TIME, landed, records, writer

from chronik.pipeline.deleted import DeletedKeys, DeletedList
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.delta import BatchLander, LandingTable
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.schema import table_schema
from chronik.pipeline.land.task import WriteTask


def offsets(keys: DeletedKeys, count: int = 6) -> list[int]:
    """Return the offsets that are left of records with the keys k0, k1, ..."""
    left: list[int] = keys.without(records(0, range(count))).column("offset").to_pylist()
    return left


def test_a_list_is_text_or_json_lines_or_a_table(tmp_path: Path) -> None:
    text = tmp_path / "keys.txt"
    text.write_bytes(b"k1\r\n\nk3")
    assert offsets(DeletedList(str(text)).current()) == [0, 2, 4, 5]
    lines = tmp_path / "keys.jsonl"
    before = "2023-11-14T22:13:20.000003Z"  # the timestamp of offset 3
    entries = [
        {"key": base64.b64encode(b"k0").decode()},
        {"text": "k2", "before": before},
        {"text": "k3", "before": before},
        {"text": "k4", "before": TIME // 1000 + 1},
    ]
    lines.write_text("\n".join(map(json.dumps, entries)))
    assert offsets(DeletedList(str(lines)).current()) == [1, 3, 5]
    table = tmp_path / "keys"
    write_deltalake(str(table), pa.table({"key": ["k1", "k5"], "who": ["a", "b"]}))
    deleted = DeletedList(str(table))
    assert offsets(deleted.current()) == [0, 2, 3, 4]
    write_deltalake(str(table), pa.table({"key": ["k0"], "who": ["c"]}), mode="append")
    assert offsets(pickle.loads(pickle.dumps(deleted.current()))) == [2, 3, 4]


def test_a_list_from_windows_has_the_same_keys(tmp_path: Path) -> None:
    """A byte order mark is no part of the first key. As UTF-16, no key would match, and all records would land."""
    text = tmp_path / "keys.txt"
    text.write_text("k1\r\nk3\r\n", "utf-8-sig")
    assert offsets(DeletedList(str(text)).current()) == [0, 2, 4, 5]
    lines = tmp_path / "keys.ndjson"
    lines.write_text('{"text": "k2"}\n', "utf-8-sig")
    assert offsets(DeletedList(str(lines)).current()) == [0, 1, 3, 4, 5]
    text.write_text("k1\n", "utf-16")
    with pytest.raises(PipelineError, match="is UTF-16"):
        DeletedList(str(text)).current()


def test_a_list_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    text = tmp_path / "keys.txt"
    text.write_text("k1\n")
    deleted = DeletedList(str(text))
    assert deleted.current() is deleted.current()
    with text.open("a") as more:
        more.write("k2\n")
    assert offsets(deleted.current()) == [0, 3, 4, 5]
    os.unlink(text)
    with pytest.raises(PipelineError, match=r"keys.txt: No such file or directory; nothing lands without it"):
        deleted.current()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{}", "give either key or text"),
        ('{"key": "#"}', "Only base64"),
        ('{"text": "a", "befor": 1}', "unknown field `befor`"),
        ('{"text": "a", "before": "soon"}', "Invalid isoformat string"),
        ("k1", "malformed"),
    ],
)
def test_a_line_that_cannot_be_read_is_an_error_with_its_number(tmp_path: Path, line: str, fault: str) -> None:
    lines = tmp_path / "keys.jsonl"
    lines.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(PipelineError, match=rf"keys.jsonl, line 2: .*{fault}|{fault}.*keys.jsonl, line 2"):
        DeletedList(str(lines)).current()


def test_records_without_a_timestamp_or_a_key_are_told_apart() -> None:
    batch = records(0, range(3), times=[None, TIME, None])
    assert DeletedKeys.of({b"k0": TIME, b"k1": TIME}).without(batch).column("offset").to_pylist() == [1, 2]
    no_key = batch.set_column(0, "key", pa.array([None, b"k1", b""], pa.binary()))
    assert DeletedKeys.of({b"": TIME * 2}).without(no_key).column("offset").to_pylist() == [0, 1]


def test_deleted_records_never_land_again_after_a_lost_checkpoint(tmp_path: Path) -> None:
    def lander() -> BatchLander:
        return BatchLander(LandingTable.open(str(tmp_path / "t"), table_schema(None), "t", "id-1"))

    lander().land("q", 0, writer(tmp_path, records(0, range(5))))
    table = LandingTable.open(str(tmp_path / "t"), table_schema(None), "t", "id-1")
    table._table.delete("key = X'6B32'")  # k2, by a query engine
    keys = DeletedKeys.of({b"k2": 2**63 - 1, b"k6": 2**63 - 1})

    def write(known: LandedOffsets) -> list[object]:
        task = WriteTask(str(tmp_path / "t"), "", "again", None, known, deleted=keys)
        return list(task.write(iter([records(0, range(8))]), f"again-{bool(known)}"))

    lander().land("new", 0, write)  # type: ignore[arg-type]
    assert landed(tmp_path / "t") == [(0, offset) for offset in (0, 1, 3, 4, 5, 7)]
