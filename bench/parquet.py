"""The cost of a landing's Parquet files: our settings against pyarrow's defaults, one row group in memory.

.venv/bin/python bench/parquet.py
"""

from __future__ import annotations

import io
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chronik.pipeline.land.schema import RECORD_SCHEMA
from chronik.pipeline.land.task import ROW_GROUP_ROWS, parquet_settings

ROUNDS = 3
START_US = 1_700_000_000_000_000


def rows(values: list[bytes]) -> Any:
    count = len(values)
    columns = [
        pa.array([b"key-%08d" % number for number in range(count)]),
        pa.array(values),
        pa.nulls(count, RECORD_SCHEMA[2].type),
        pa.array(np.ones(count, np.int32)),
        pa.array(np.arange(count)),
        pa.array(np.arange(count) * 1000 + START_US, RECORD_SCHEMA[5].type),
    ]
    return pa.table(columns, schema=RECORD_SCHEMA)


def main() -> None:
    letters = np.random.default_rng(1).integers(97, 123, ROW_GROUP_ROWS * 100, dtype=np.uint8).tobytes()
    contents = {
        "random letters": [letters[at : at + 100] for at in range(0, len(letters), 100)],
        "repeating": [b"%0100d" % (number % 160) for number in range(ROW_GROUP_ROWS)],
    }
    for name, values in contents.items():
        table = rows(values)
        for label, settings in (("pyarrow's", {"compression": "zstd"}), ("ours", parquet_settings(table.schema))):
            best_s, size_bytes = float("inf"), 0
            for _ in range(ROUNDS):
                started_s, file = time.process_time(), io.BytesIO()
                with pq.ParquetWriter(file, table.schema, **settings) as writer:
                    writer.write_table(table)
                best_s, size_bytes = min(best_s, time.process_time() - started_s), file.tell()
            print(
                f"values of 100 B, {name:14} {label:9}: {ROW_GROUP_ROWS / best_s / 1e6:5.2f} M rows/s of CPU, "
                f"{size_bytes / ROW_GROUP_ROWS:5.1f} B/row"
            )


if __name__ == "__main__":
    main()
