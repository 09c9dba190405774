"""Checksums computed by column equal those in a producer's ledger, record by record."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from chronik.pipeline.audit import checksum as audit_checksum
from chronik.pipeline.audit.checksum import checksums
from chronik.pipeline.source.columns import HEADERS
from chronik.wire.checksum import record_checksum

Row = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None]


def rows(count: int) -> list[Row]:
    chance = random.Random(4)

    def content() -> bytes | None:
        return chance.choice([None, b"", chance.randbytes(chance.randrange(1, 40))])

    def headers() -> list[tuple[str, bytes | None]] | None:
        return chance.choice([None, [], [("h", content()), ("größe", content())]])

    return [(content(), content(), headers()) for _ in range(count)]


def columns(records: list[Row]) -> tuple[Any, Any, Any]:
    named = [None if held is None else [{"key": k, "value": v} for k, v in held] for _, _, held in records]
    return (
        pa.array([key for key, _, _ in records], pa.binary()),
        pa.array([value for _, value, _ in records], pa.binary()),
        pa.array(named, HEADERS),
    )


@pytest.fixture(params=["compiled", "plain"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setitem(__import__("sys").modules, "chronik.pipeline.audit.checksum_kernel", None)
    else:
        pytest.importorskip("numba")


@pytest.mark.usefixtures("either")
def test_each_checksum_equals_that_of_its_record() -> None:
    records = rows(300)
    wanted = [record_checksum(key, value, headers or ()) for key, value, headers in records]
    keys, values, headers = columns(records)
    assert list(checksums(keys, values, headers)) == wanted
    assert list(checksums(keys[17:60], values[17:60], headers[17:60])) == wanted[17:60]
    assert list(checksums(keys[:0], values[:0], headers[:0])) == []


@pytest.mark.usefixtures("either")
def test_null_and_empty_keys_differ_and_headers_are_optional() -> None:
    keys, values = pa.array([None, b""], pa.binary()), pa.array([b"v", b"v"], pa.large_binary())
    assert list(checksums(keys, values)) == [record_checksum(None, b"v"), record_checksum(b"", b"v")]
    assert list(checksums(pa.chunked_array([keys]), pa.chunked_array([values]))) == list(checksums(keys, values))


def test_a_null_header_list_that_spans_entries_counts_as_no_headers() -> None:
    entries = pa.array([{"key": "a", "value": b"1"}, {"key": "b", "value": b"2"}], HEADERS.value_type)
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), entries, HEADERS, mask=pa.array([True, False]))
    keys = pa.array([b"k", b"k"], pa.binary())
    assert list(audit_checksum.checksums(keys, keys, lists)) == [
        record_checksum(b"k", b"k"),
        record_checksum(b"k", b"k", [("b", b"2")]),
    ]
