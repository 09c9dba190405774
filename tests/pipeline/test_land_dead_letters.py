"""JSON values as columns, and the reasons for dead letters."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import types as t
from pyspark.sql.types import StructField, StructType
from tests.support.landing import records

from chronik.pipeline.audit.table import find_tables
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.schema import JsonColumns, parse_schema

FIELDS = StructType(
    [
        StructField("id", t.IntegerType(), nullable=False),
        StructField("user-name", t.StringType()),
        StructField("at", t.TimestampType()),
        StructField("price", t.DecimalType(6, 2)),
        StructField("tags", t.ArrayType(t.StringType())),
        StructField("where", StructType([StructField("x", t.DoubleType()), StructField("day", t.DateType())])),
        StructField("more", t.MapType(t.StringType(), t.LongType())),
    ]
)


def split(*values: bytes | None, fields: StructType = FIELDS) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, dead = JsonColumns(fields).split(records(0, range(len(values)), values))
    return rows.to_pylist(), dead.to_pylist()


def test_a_json_value_becomes_columns_with_the_types_of_the_schema() -> None:
    rows, dead = split(
        b'{"id": 7, "user-name": "ann", "at": "2026-01-31T12:00:00+02:00", "price": 12.5, "tags": ["a", null],'
        b'"where": {"x": 1, "day": "2026-02-01"}, "more": {"k": 9}, "unknown": true}',
        b'{"id": 8, "at": "2026-01-31T12:00:00"}',
    )
    assert dead == []
    first, second = rows
    assert (first["id"], first["user-name"], first["price"]) == (7, "ann", decimal.Decimal("12.50"))
    assert first["at"] == datetime.datetime(2026, 1, 31, 10, tzinfo=datetime.UTC)
    assert (first["tags"], first["where"]) == (["a", None], {"x": 1.0, "day": datetime.date(2026, 2, 1)})
    assert (first["more"], first["offset"]) == ([("k", 9)], 0)
    assert second["at"] == datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
    assert (second["user-name"], second["tags"], second["where"]) == (None, None, None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{", "truncated"),
        (b"", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"{}", "required field `id`"),
        (b'{"id": "1"}', "Expected `int`, got `str` - at `$.id`"),
        (b'{"id": 2147483648}', "Expected `int` <= 2147483647 - at `$.id`"),
        (b'{"id": 1, "user-name": 5}', "got `int` - at `$.user-name`"),
        (b'{"id": 1, "price": 1.234}', "1.234 does not fit decimal(6,2) - at `$.price`"),
        (b'{"id": 1, "at": "soon"}', "Invalid RFC3339"),
        (None, "no value, and id is required"),
    ],
)
def test_a_value_that_does_not_parse_is_a_dead_letter_with_a_reason(value: bytes | None, reason: str) -> None:
    rows, dead = split(b'{"id": 1}', value, b'{"id": 2}')
    assert [row["offset"] for row in rows] == [0, 2]
    assert [(letter["offset"], letter["value"]) for letter in dead] == [(1, value)]
    assert reason in dead[0]["reason"]


def test_a_tombstone_is_a_row_of_nulls_if_no_field_is_required() -> None:
    rows, dead = split(None, fields=StructType([StructField("n", t.LongType())]))
    assert (rows[0]["n"], rows[0]["value"], dead) == (None, None, [])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([StructField("Offset", t.LongType())], "the field Offset is listed twice, or is a column of every table"),
        ([StructField("n", t.TimestampNTZType())], "n: the type timestamp_ntz cannot be landed"),
        ([StructField('a"b', t.LongType())], "JSON escapes one of its characters"),
        ([], "has no fields"),
    ],
)
def test_unsupported_schemas_are_rejected(fields: list[StructField], said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        parse_schema(StructType(fields).json(), "s.json")
    with pytest.raises(PipelineError, match="is not a schema"):
        parse_schema('{"type": 5}', "s.json")


def test_an_audit_names_a_field_with_the_name_reason_as_not_compared(tmp_path: Path) -> None:
    names = ["partition", "offset", "timestamp", "date", "reason"]
    for table in ("t", "t_dead_letters"):
        DeltaTable.create(tmp_path / table, pa.schema([pa.field(name, pa.int64()) for name in names]))
    assert [each.derived for each in find_tables(str(tmp_path), "t")] == [("reason",), ()]
