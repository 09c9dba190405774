"""Rows of an audit are packed by block on their way through Spark, and none of them changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st

from chronik.pipeline.audit.rows import PACKED_SCHEMA, ROW_SCHEMA, packed, rows_of, rows_table

SIDES, NUMBERS = st.integers(0, 6), st.integers(-(2**63), 2**63 - 1)
ENTRIES = st.tuples(st.integers(0, 2), st.integers(0, 900), st.integers(1, 70), SIDES, NUMBERS, NUMBERS)


def rows(table: Any) -> list[tuple[int, ...]]:
    return sorted(zip(*(column.tolist() for column in rows_of(table)), strict=True))


@given(st.lists(st.lists(ENTRIES, max_size=30), max_size=3))
def test_packed_rows_are_the_rows_of_their_blocks(parts: list[list[tuple[int, ...]]]) -> None:
    batches = []
    for entries in parts:
        partition, start, length, side, time_ms, checksum = (
            np.array([entry[place] for entry in entries], np.int64) for place in range(6)
        )
        stop = start + length
        given_columns = (side, partition, start, stop, time_ms)
        batches.append(rows_table(*given_columns, checksum=checksum, seq=np.arange(len(entries)), block_bits=6))
    whole = pa.Table.from_batches(batches, ROW_SCHEMA)
    small = pa.Table.from_batches([packed(batch) for batch in batches], PACKED_SCHEMA)
    blocks = set(zip(whole.column("partition").to_pylist(), whole.column("block").to_pylist(), strict=True))
    assert blocks == set(zip(small.column("partition").to_pylist(), small.column("block").to_pylist(), strict=True))
    for partition_number, block in blocks:
        chosen = (pc.field("partition") == partition_number) & (pc.field("block") == block)
        assert rows(small.filter(chosen)) == rows(whole.filter(chosen))
