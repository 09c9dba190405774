"""Make a table older: its files, and the times in its log or metadata. Libraries read the clock themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

DELTA_TIMES = {"timestamp", "deletionTimestamp", "modificationTime", "lastUpdated", "createdTime"}
ICEBERG_TIMES = {"timestamp-ms", "last-updated-ms"}


def age_delta(folder: Path, hours: float) -> None:
    """Shift everything that has happened to a Delta table into the past."""
    shift_ms = int(hours * 3_600_000)
    for entry in folder.glob("_delta_log/*.json"):
        lines = [
            json.dumps(_shifted(json.loads(line), DELTA_TIMES, shift_ms)) for line in entry.read_text().splitlines()
        ]
        _replace(entry, "\n".join(lines).encode())
    for checkpoint in folder.glob("_delta_log/*.checkpoint.parquet"):
        table = pq.read_table(checkpoint)
        place = table.schema.get_field_index("remove")
        if place >= 0:
            column = table.column(place).combine_chunks()
            fields = [field.with_nullable(True) for field in column.type]
            parts = column.flatten()
            at = column.type.get_field_index("deletionTimestamp")
            parts[at] = pc.subtract(parts[at], pa.scalar(shift_ms, parts[at].type))
            shifted = pa.StructArray.from_arrays(parts, fields=fields, mask=column.is_null())
            table = table.set_column(place, pa.field("remove", shifted.type), shifted)
        part = checkpoint.with_suffix(".aging")
        table = table.replace_schema_metadata(None)
        settings: dict[str, Any] = {"write_statistics": False, "store_schema": False, "use_dictionary": False}
        pq.write_table(table, part, compression="zstd", compression_level=15, **settings)
        _pad(part, checkpoint.stat().st_size)
        _keep_times(checkpoint, part)
    _age_files(folder, hours)


def age_iceberg(folder: Path, metadata_location: str, hours: float) -> None:
    """Shift everything that has happened to an Iceberg table into the past."""
    current = Path(metadata_location.removeprefix("file://"))
    metadata = _shifted(json.loads(current.read_bytes()), ICEBERG_TIMES, int(hours * 3_600_000))
    _replace(current, json.dumps(metadata).encode())
    _age_files(folder, hours)


def _shifted(value: Any, names: set[str], shift_ms: int) -> Any:
    if isinstance(value, dict):
        return {
            name: each - shift_ms if name in names and isinstance(each, int) else _shifted(each, names, shift_ms)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_shifted(each, names, shift_ms) for each in value]
    return value


def _replace(path: Path, content: bytes) -> None:
    part = path.with_suffix(".aging")
    part.write_bytes(content)
    _keep_times(path, part)


def _pad(path: Path, size_bytes: int) -> None:
    """Give a Parquet file the size that open tables know it to have: with zeros before its footer."""
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    assert len(content) <= size_bytes, "the compressed copy is larger"
    path.write_bytes(content[:footer] + bytes(size_bytes - len(content)) + content[footer:])


def _keep_times(path: Path, part: Path) -> None:
    status = path.stat()
    os.utime(part, ns=(status.st_atime_ns, status.st_mtime_ns))
    part.replace(path)


def _age_files(folder: Path, hours: float) -> None:
    shift_ns = int(hours * 3600 * 10**9)
    for path in folder.rglob("*"):
        if path.is_file():
            status = path.stat()
            os.utime(path, ns=(status.st_atime_ns - shift_ns, status.st_mtime_ns - shift_ns))
