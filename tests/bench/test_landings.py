"""Rates of landings, from the log of a table."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from bench.landings import MICRO_BATCHES, rate_of


def landed(folder: Path, rows: int, millis: int) -> Path:
    """Return a table with so many rows in each micro-batch, which end at equal intervals; they are far from now."""
    table = folder / "t"
    for number in range(MICRO_BATCHES):
        write_deltalake(str(table), pa.table({"offset": pa.array(range(rows), pa.int64())}), mode="append")
        entry = table / "_delta_log" / f"{number:020}.json"
        actions = [json.loads(line) for line in entry.read_text().splitlines()]
        for action in actions:
            if "commitInfo" in action:
                action["commitInfo"]["timestamp"] = 1_700_000_000_000 + number * millis
        entry.write_text("\n".join(map(json.dumps, actions)))
    return table


def test_a_rate_excludes_the_first_micro_batch(tmp_path: Path) -> None:
    assert rate_of(landed(tmp_path, 100, 500), 100 * MICRO_BATCHES) == pytest.approx(200.0)


def test_a_table_with_missing_or_repeated_rows_has_no_rate(tmp_path: Path) -> None:
    table = landed(tmp_path, 100, 500)
    for records in (100 * MICRO_BATCHES - 1, 100 * MICRO_BATCHES + 1):
        with pytest.raises(RuntimeError, match="500 rows in 5 commits"):
            rate_of(table, records)
