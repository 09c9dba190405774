"""Ledgers and receipts, read by byte ranges: every line once, in order, and a bad line with its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chronik.client.ledger import Ledger
from chronik.pipeline.audit import files as audit_files
from chronik.pipeline.audit.blocks import ABORTED, ACKED, EXACT_TIME
from chronik.pipeline.audit.files import TOMBSTONE, file_ranges, read_lines, snapshot
from chronik.pipeline.errors import PipelineError
from chronik.wire.checksum import record_checksum

TIME_MS = 1_700_000_000_000


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "acked.jsonl"
    with Ledger(path) as written:
        for number in range(500):
            written.record("t", number % 3, number // 3, TIME_MS + number, b"k", b"v%d" % number)
            written.record("other", 0, number, TIME_MS, None, None)
    return path


def lines_of(path: Path, parts: int, *, with_keys: bool = False) -> list[dict[str, Any]]:
    tasks = file_ranges(snapshot(str(path), "ledger"), str(path), "t", ACKED, 16, parts, with_keys=with_keys)
    assert len(tasks) == parts
    return [row for task in tasks for batch in read_lines(task) for row in batch.to_pylist()]


@pytest.mark.parametrize("parts", [1, 7, 40])
def test_every_line_is_read_once_and_in_order(ledger: Path, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    monkeypatch.setattr(audit_files, "CHUNK_BYTES", 1000)
    found = lines_of(ledger, parts)
    assert [(row["partition"], row["start"]) for row in found] == [(n % 3, n // 3) for n in range(500)]
    assert [row["checksum"] for row in found] == [record_checksum(b"k", b"v%d" % n) for n in range(500)]
    assert [row["time_ms"] for row in found] == [TIME_MS + n for n in range(500)]
    places = [row["seq"] for row in found]
    assert places == sorted(set(places))


@pytest.mark.parametrize("with_keys", [False, True])
def test_lines_of_aborted_transactions_are_a_side_of_their_own(ledger: Path, with_keys: bool) -> None:
    with Ledger(ledger) as more:
        transaction = more.transaction()
        transaction.record("t", 0, 9999, TIME_MS, b"k", b"v")
        transaction.abort()
    sides = [row["side"] for row in lines_of(ledger, 1, with_keys=with_keys)]
    assert sides == [ACKED] * 500 + [ABORTED]


def test_a_torn_last_line_is_skipped_and_reported(ledger: Path) -> None:
    whole = ledger.stat().st_size
    with ledger.open("ab") as file:
        file.write(b'{"topic":"t","parti')
    lines = snapshot(str(ledger), "ledger")
    assert (lines.size, lines.torn) == (whole, 19)
    assert len(lines_of(ledger, 1)) == 500


def test_lines_written_after_the_snapshot_are_ignored(ledger: Path) -> None:
    lines = snapshot(str(ledger), "ledger")
    with Ledger(ledger) as more:
        more.record("t", 0, 9999, TIME_MS, b"k", b"late")
    (task,) = file_ranges(lines, str(ledger), "t", ACKED, 16, 1)
    assert sum(batch.num_rows for batch in read_lines(task)) == 500


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"topic":"t","parti\n', "line 1001, is not a ledger entry"),
        (b"not json\n", "line 1001, is not a ledger entry"),
        (b'{"topic":"t","partition":0}\n', "missing required field"),
        (b'{"topic":"t","partition":"0","offset":1,"key":null,"timestamp_ms":1,"checksum":1}\n', "line 1001"),
        (b'{"topic":"t","partition":0,"offset":-1,"key":null,"timestamp_ms":1,"checksum":1}\n', "negative offset"),
    ],
    ids=["torn", "no json", "fields missing", "wrong type", "negative"],
)
def test_the_error_names_an_invalid_line(ledger: Path, line: bytes, said: str) -> None:
    with ledger.open("ab") as file:
        file.write(line)
    with Ledger(ledger) as more:
        more.record("t", 0, 9999, TIME_MS, b"k", b"behind it")
    with pytest.raises(PipelineError) as raised:
        lines_of(ledger, 1)
    assert said in str(raised.value)
    assert str(ledger) in str(raised.value)


def test_unreadable_files_are_rejected_at_once(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"cannot read the ledger .*nothing: No such file"):
        snapshot(str(tmp_path / "nothing"), "ledger")
    one_line = tmp_path / "one"
    one_line.write_bytes(b"\x00" * 100)
    with pytest.raises(PipelineError, match="no whole line"):
        snapshot(str(one_line), "receipts")


def test_an_empty_ledger_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert lines_of(path, 1) == []


def test_keys_and_tombstone_flags_are_read_if_requested(tmp_path: Path) -> None:
    path = tmp_path / "acked.jsonl"
    with Ledger(path) as written:
        written.record("t", 0, 0, TIME_MS, b"\x00k", b"v")
        written.record("t", 0, 1, TIME_MS, b"\x00k", None)
    found = lines_of(path, 1, with_keys=True)
    assert [(row["key"], row["flags"]) for row in found] == [
        (b"\x00k", EXACT_TIME),
        (b"\x00k", EXACT_TIME | TOMBSTONE),
    ]
