"""A day of steady trickle into one table, in bytes: `python -m bench.trickle --format iceberg`.

Every 10 s of a simulated day a micro-batch lands, and every 16th wakes the maintenance, as in a landing. The files, the
commits and the maintenance are real; Spark and the brokers are left out, and the time of Iceberg's snapshots is
simulated. Prints JSON: the bytes of data and metadata, bytes written per landed byte, and the CPU time of commits in
the first and the last tenth.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa
import pyiceberg.table.snapshots

from chronik.pipeline.catalog import open_catalog
from chronik.pipeline.land import iceberg_maintenance
from chronik.pipeline.land.delta import BatchLander, LandingTable
from chronik.pipeline.land.iceberg import BOUNDED, IcebergTable
from chronik.pipeline.land.iceberg_maintenance import KEEP_ALL
from chronik.pipeline.land.landed_offsets import LandedOffsets
from chronik.pipeline.land.maintenance import VACUUM_EVERY_S, Maintained, maintain
from chronik.pipeline.land.schema import table_schema
from chronik.pipeline.land.task import WriteTask
from chronik.pipeline.land.topic_landing import MAINTAIN_EVERY_BATCHES
from chronik.pipeline.source.columns import HEADERS

TRIGGER_S = 10
START_MS = 1_800_000_000_000
"""The simulated day begins at 08:00 UTC, so it has two dates."""


def batch(offset: int, rows: int, now_ms: int, chance: random.Random) -> Any:
    numbers = range(offset, offset + rows)
    return pa.record_batch(
        {
            "key": pa.array([b"k%d" % number for number in numbers], pa.binary()),
            "value": pa.array([chance.randbytes(100) for _ in numbers], pa.binary()),
            "topic": pa.array(["t"] * rows),
            "partition": pa.array([0] * rows, pa.int32()),
            "offset": pa.array(list(numbers), pa.int64()),
            "timestamp": pa.array([now_ms * 1000] * rows, pa.timestamp("us", tz="UTC")),
            "headers": pa.array([[]] * rows, HEADERS),
        }
    )


class Metadata:
    """The bytes of metadata files that were written: all files that each look finds for the first time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, float] = {}
        self.written = 0

    def look(self) -> int:
        """Return the bytes that are there now."""
        there = 0
        for path in self._folder.iterdir():
            status = path.stat()
            there += status.st_size
            if self._seen.get(path.name) != status.st_mtime:
                self._seen[path.name] = status.st_mtime
                self.written += status.st_size
        return there


def run(form: str, commits: int, rows: int, *, bounded: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="trickle"))
    try:
        return _run(folder, form, commits, rows, bounded=bounded)
    finally:
        shutil.rmtree(folder)


def _run(folder: Path, form: str, commits: int, rows: int, *, bounded: bool) -> dict[str, Any]:
    uri, chance = str(folder / "t"), random.Random(1)
    now_ms = START_MS
    keep = None if bounded else 10**6
    if form == "delta":
        table: Any = LandingTable.open(uri, table_schema(None), "t", "id")

        def maintained(number: int, vacuum: bool) -> Maintained:
            return maintain(uri, f"m{number}", now_ms, vacuum=vacuum)
    else:
        catalog = open_catalog(str(folder), {})
        table = IcebergTable.open(catalog, uri, table_schema(None), "t", "id")
        if not bounded:
            with catalog.load_table(("chronik", "t")).transaction() as transaction:
                transaction.set_properties({KEEP_ALL: str(10**9)})
                transaction.remove_properties(*BOUNDED)

        def maintained(number: int, vacuum: bool) -> Maintained:
            name = ("chronik", "t")
            return iceberg_maintenance.maintain_iceberg(catalog, name, f"m{number}", now_ms, expire=vacuum, keep_d=keep)

    lander = BatchLander(table)
    metadata = Metadata(folder / "t" / ("_delta_log" if form == "delta" else "metadata"))
    landed = merged = on_disk = 0
    commit_s: list[float] = []
    maintain_s = 0.0
    vacuumed_ms = now_ms
    with mock.patch.object(pyiceberg.table.snapshots, "time", SimpleNamespace(time=lambda: now_ms / 1000)):
        for number in range(commits):
            files = WriteTask(uri, "", "x", None, LandedOffsets()).write(
                iter([batch(number * rows, rows, now_ms, chance)]), f"x-{number}"
            )
            landed += sum(file.size_bytes for file in files)
            before_s = time.process_time()
            lander.land("q", number, lambda _, files=files: files)  # type: ignore[misc]
            commit_s.append(time.process_time() - before_s)
            on_disk = metadata.look()
            if (number + 1) % MAINTAIN_EVERY_BATCHES == 0:
                is_due = now_ms - vacuumed_ms >= VACUUM_EVERY_S * 1000
                before_s = time.process_time()
                merged += maintained(number, is_due).rewritten_bytes
                maintain_s += time.process_time() - before_s
                vacuumed_ms = now_ms if is_due else vacuumed_ms
            now_ms += TRIGGER_S * 1000
    merged += maintained(commits, True).rewritten_bytes
    on_disk = metadata.look()
    part = max(1, commits // 10)
    mean_ms: Callable[[list[float]], float] = lambda each: round(1000 * sum(each) / len(each), 1)  # noqa: E731
    return {
        "format": form,
        "bounded": bounded,
        "commits": commits,
        "landed_bytes": landed,
        "merged_bytes": merged,
        "metadata_bytes_written": metadata.written,
        "metadata_bytes_on_disk": on_disk,
        "data_write_amplification": round((landed + merged) / landed, 3),
        "write_amplification": round((landed + merged + metadata.written) / landed, 3),
        "commit_cpu_ms": {"first_tenth": mean_ms(commit_s[:part]), "last_tenth": mean_ms(commit_s[-part:])},
        "maintenance_cpu_s": round(maintain_s, 1),
        "snapshots": None if form == "delta" else len(catalog.load_table(("chronik", "t")).metadata.snapshots),
        "files": len(list((folder / "t").glob("date=*/*.parquet"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=("delta", "iceberg"), default="delta")
    parser.add_argument("--commits", type=int, default=24 * 3600 // TRIGGER_S)
    parser.add_argument("--rows", type=int, default=1000, help="records of 100 B in each micro-batch")
    parser.add_argument("--unbounded", action="store_true", help="keep all snapshots and all versions of the metadata")
    given = parser.parse_args()
    print(json.dumps(run(given.format, given.commits, given.rows, bounded=not given.unbounded), indent=1))


if __name__ == "__main__":
    main()
