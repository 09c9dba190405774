"""Keys whose records were deleted on purpose, for example at a person's request. They never land (again).

The list is a file or a Delta table, and may grow while a landing runs:

    keys.txt      one key per line, as text
    keys.jsonl    {"key": BASE64} or {"text": KEY} per line, both with an optional "before": ISO 8601 or milliseconds
    a table       the column `key` (string or binary), and optionally `before` (timestamp)

With `before`, only records with an earlier timestamp, or without one, are deleted; otherwise all records of the key.
"""

from __future__ import annotations

import base64
import codecs
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from chronik.pipeline.errors import PipelineError

KEYS_MAX = 2_000_000
ALWAYS = 2**63 - 1
Entry = tuple[bytes, int]
"""A key, and the time in microseconds before which its records are deleted."""


@dataclass(frozen=True)
class DeletedKeys:
    """The keys of one version of the list. Spark sends them to the tasks."""

    keys: Any
    before_us: npt.NDArray[np.int64]

    @classmethod
    def of(cls, entries: Mapping[bytes, int]) -> DeletedKeys:
        times = np.fromiter(entries.values(), np.int64, len(entries))
        return cls(pa.array(list(entries), pa.binary()), times)

    def __bool__(self) -> bool:
        return len(self.keys) > 0

    def mask(self, batch: Any) -> npt.NDArray[np.bool_]:
        """Return which records of an Arrow batch with `key` and `timestamp` are deleted."""
        index = pc.index_in(batch.column("key"), value_set=self.keys)
        listed = index.is_valid().to_numpy(zero_copy_only=False)
        if not listed.any():
            return np.zeros(batch.num_rows, np.bool_)
        before = self.before_us[index.fill_null(0).to_numpy(zero_copy_only=False)]
        times = batch.column("timestamp").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        is_earlier = times.fill_null(-(2**63)).to_numpy(zero_copy_only=False) < before
        return np.asarray(listed & (is_earlier | (before == ALWAYS)))

    def without(self, batch: Any) -> Any:
        """Return the records that are not deleted."""
        deleted = self.mask(batch)
        return batch.filter(pa.array(~deleted)) if deleted.any() else batch


class DeletedList:
    """A list of deleted keys, which is read again when it has changed. Used by one thread."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._version: object = None
        self._keys = DeletedKeys.of({})

    def current(self) -> DeletedKeys:
        """Return the keys of the newest version. Raises PipelineError: without the list, nothing may land."""
        try:
            version = self._newest()
            if version != self._version:
                self._keys = DeletedKeys.of(self._read())
                self._version = version
        except OSError as error:
            reason = error.strerror or error
            raise PipelineError(
                f"cannot read the list of deleted keys {self.address}: {reason}; nothing lands without it"
            ) from None
        return self._keys

    @property
    def _is_table(self) -> bool:
        return "://" in self.address or os.path.isdir(self.address)

    def _newest(self) -> object:
        if self._is_table:
            return _table(self.address).version()
        status = os.stat(self.address)
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> dict[bytes, int]:
        if self._is_table:
            return _limited(self.address, _table_entries(self.address))
        with open(self.address, "rb") as opened:
            begin = opened.read(3)
            if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise PipelineError(f"{self.address} is UTF-16, so no key in it would match: save it as UTF-8")
            if begin != codecs.BOM_UTF8:
                opened.seek(0)
            lines = (line.strip(b"\r\n") for line in opened)
            is_json = self.address.endswith((".json", ".jsonl", ".ndjson"))
            entries = _json_entries(self.address, lines) if is_json else ((line, ALWAYS) for line in lines if line)
            return _limited(self.address, entries)


def _limited(address: str, entries: Iterator[Entry]) -> dict[bytes, int]:
    keys: dict[bytes, int] = {}
    for key, before_us in entries:
        keys[key] = max(before_us, keys.get(key, before_us))
        if len(keys) > KEYS_MAX:
            raise PipelineError(f"{address} lists more than {KEYS_MAX:,} deleted keys: purge them from the topic first")
    return keys


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    key: str | None = None
    text: str | None = None
    before: Annotated[str, msgspec.Meta(min_length=1)] | int | None = None


def _json_entries(address: str, lines: Iterator[bytes]) -> Iterator[Entry]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=_Line)
            if (entry.key is None) == (entry.text is None):
                raise ValueError("give either key or text")
            key = entry.text.encode() if entry.text is not None else base64.b64decode(entry.key or "", validate=True)
            yield key, _before_us(entry.before)
        except (msgspec.MsgspecError, ValueError) as error:
            raise PipelineError(
                f'{address}, line {number}: {error}; write {{"key": BASE64}} or {{"text": KEY}}'
            ) from None


def _before_us(before: str | int | None) -> int:
    if before is None:
        return ALWAYS
    if isinstance(before, int):
        return before * 1000
    time = datetime.fromisoformat(before)
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1_000_000)


def _table(address: str) -> Any:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        return DeltaTable(address)
    except DeltaError as error:
        raise PipelineError(f"cannot read the table of deleted keys {address}: {error}") from None


def _table_entries(address: str) -> Iterator[Entry]:
    rows = _table(address).to_pyarrow_dataset()
    if "key" not in rows.schema.names:
        raise PipelineError(f"the table of deleted keys {address} has no column key")
    has_time = "before" in rows.schema.names
    for batch in rows.to_batches(columns=["key", *(["before"] if has_time else [])]):
        keys = batch.column("key").cast(pa.binary()).to_pylist()
        if has_time:
            times = batch.column("before").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).fill_null(ALWAYS)
        else:
            times = pa.array([ALWAYS] * len(keys), pa.int64())
        yield from ((key, time) for key, time in zip(keys, times.to_pylist(), strict=True) if key is not None)
