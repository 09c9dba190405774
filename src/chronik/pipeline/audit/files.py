"""Ledgers and receipts as sides of an audit: JSON Lines, read in parallel by byte ranges.

`client.ledger` defines the format. A file is read up to its size when the audit began. So everything in it was
acknowledged before the log ends were read. A torn last line is skipped, as in every reader of the format.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.json

from chronik.client.ledger import Entry, whole_lines_bytes
from chronik.pipeline.audit.blocks import ABORTED, EXACT_TIME, NO_TIME
from chronik.pipeline.audit.checksum import checksums
from chronik.pipeline.audit.rows import KEYED_SCHEMA, rows_table
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.columns import CALENDAR_US_MAX

CHUNK_BYTES = 8 * 1024 * 1024
TASK_BYTES = 64 * 1024 * 1024
TOMBSTONE = 2
"""Row flag: a record without a value, which compaction removes in the end."""

_NUMBERS = ("partition", "offset", "timestamp_ms", "checksum")
_SCHEMA = pa.schema(
    {"topic": pa.string(), "key": pa.string(), "aborted": pa.bool_(), **dict.fromkeys(_NUMBERS, pa.int64())}
)


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A file as it was when the audit began. `size` ends after its last complete line, `torn` is the rest in bytes."""

    path: str
    size: int
    torn: int


@dataclass(frozen=True, slots=True)
class FileRange:
    """One task: the lines that begin in this byte range."""

    path: str
    name: str
    """The file's name in messages. A worker may see the file under another path."""
    start: int
    stop: int
    topic: str
    side: int
    block_bits: int
    with_keys: bool = False


def snapshot(path: str, what: str) -> JsonLines:
    """Find the end of the last complete line. Raises PipelineError if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size
            at = whole_lines_bytes(file.fileno(), end)
    except OSError as error:
        raise PipelineError(f"cannot read the {what} {path}: {error.strerror}") from None
    if end and not at:
        raise PipelineError(f"{path} is not a {what} file: it has no whole line of JSON")
    return JsonLines(path, at, end - at)


def file_ranges(
    lines: JsonLines, path: str, topic: str, side: int, block_bits: int, parts_min: int, *, with_keys: bool = False
) -> list[FileRange]:
    """Return the tasks that read a file. `path` is where workers find it."""
    parts = max(1, min(parts_min, lines.size // CHUNK_BYTES), -(-lines.size // TASK_BYTES))
    edges = [lines.size * part // parts for part in range(parts + 1)]
    return [FileRange(path, lines.path, *edge, topic, side, block_bits, with_keys) for edge in pairwise(edges)]


def read_lines(task: FileRange) -> Iterator[Any]:
    """Yield Arrow batches of the topic's lines, each with its position in the file."""
    with open(task.path, "rb") as file:
        at = task.start
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1
        file.seek(at)
        while at < task.stop:
            chunk = file.read(min(CHUNK_BYTES, task.stop - at))
            chunk += file.readline() if not chunk.endswith(b"\n") else b""
            yield _rows(task, at, chunk)
            at += len(chunk)


def _rows(task: FileRange, at: int, chunk: bytes) -> Any:
    try:
        table = pa.json.read_json(
            BytesIO(chunk),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(chunk) + 1),
            parse_options=pa.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid as error:
        raise _fault(task, at, chunk, str(error)) from None
    if any(table.column(name).null_count for name in ("topic", *_NUMBERS)):
        raise _fault(task, at, chunk, "a field is missing")
    order = np.arange(at, at + len(table), dtype=np.int64)  # unique, as every line has at least a byte
    chosen = pa.compute.equal(table.column("topic"), task.topic).to_numpy()
    table = table.filter(pa.array(chosen))
    offsets = table.column("offset").to_numpy()
    if len(offsets) and offsets.min() < 0:
        raise PipelineError(f"{task.name} names a negative offset of {task.topic}: no broker acknowledges one")
    times = table.column("timestamp_ms").to_numpy()
    sums = table.column("checksum").to_numpy()
    is_known = times >= 0
    times = np.where(is_known & (times <= CALENDAR_US_MAX // 1000), times, NO_TIME)
    flags = np.where(is_known, EXACT_TIME, 0)
    aborted = table.column("aborted").fill_null(False).to_numpy()
    rows = rows_table(
        np.where(aborted, ABORTED, task.side),
        table.column("partition").to_numpy(),
        offsets,
        offsets + 1,
        times,
        seq=order[chosen],
        checksum=sums,
        flags=flags,
        block_bits=task.block_bits,
    )
    if not task.with_keys:
        return rows
    decoded = [None if key is None else base64.b64decode(key) for key in table.column("key").to_pylist()]
    keys = pa.array(decoded, pa.binary())
    dead = sums == checksums(keys, pa.nulls(len(keys), pa.binary()))
    keyed = pa.array((np.where(dead, TOMBSTONE, 0) | flags).astype(np.int8))
    return pa.RecordBatch.from_arrays([*rows.columns[:-1], keyed, keys], schema=KEYED_SCHEMA)


def _fault(task: FileRange, at: int, chunk: bytes, otherwise: str) -> PipelineError:
    """Find the line that is invalid. This is slow, but runs at most once."""
    decode = msgspec.json.Decoder(Entry).decode
    with open(task.path, "rb") as file:
        before = sum(file.read(min(CHUNK_BYTES, at - begin)).count(b"\n") for begin in range(0, at, CHUNK_BYTES))
    for number, line in enumerate(chunk.splitlines(), before + 1):
        try:
            decode(line)
        except msgspec.MsgspecError as error:
            return PipelineError(f"{task.name}, line {number}, is not a ledger entry: {error}")
    return PipelineError(f"{task.name}, after line {before}, has entries that are not a ledger's: {otherwise}")
