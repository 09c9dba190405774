"""Table schemas: the record's own columns, and the columns that a schema extracts from a JSON value.

Values that cannot be parsed become dead letters with a reason. Fields that are not in the schema are still in `value`.
A record without a value (a tombstone) becomes a row of nulls, unless the schema requires a field.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import types as spark_types
from pyspark.sql.types import StructType

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.columns import HEADERS
from chronik.pipeline.typed import json_values
from chronik.pipeline.typed.json_values import JsonField, JsonRows, JsonType, Unreadable
from chronik.pipeline.typed.writer_schema import SchemaError

DATE = "date"
"""The partition column of the tables. It is in the directory name, not in the file."""
REASON = "reason"
REASON_CHARACTERS_MAX = 500
EXAMPLE = "write it as in id BIGINT NOT NULL, name STRING, at TIMESTAMP"
RECORD_SCHEMA = pa.schema(
    {"key": pa.binary(), "value": pa.binary(), "headers": HEADERS, "partition": pa.int32(), "offset": pa.int64()}
    | {"timestamp": pa.timestamp("us", tz="UTC")}
)
"""The columns of every table. They are cast to these types, whichever source delivered them."""
RECORD_COLUMNS = frozenset({*RECORD_SCHEMA.names, DATE})


SIMPLE: dict[type, JsonType] = {
    spark_types.StringType: json_values.TEXT,
    spark_types.BooleanType: json_values.BOOLEAN,
    spark_types.ByteType: json_values.whole(8),
    spark_types.ShortType: json_values.whole(16),
    spark_types.IntegerType: json_values.whole(32),
    spark_types.LongType: json_values.whole(64),
    spark_types.FloatType: json_values.FLOAT,
    spark_types.DoubleType: json_values.DOUBLE,
    spark_types.DateType: json_values.DATE,
    spark_types.TimestampType: json_values.TIMESTAMP,
    spark_types.BinaryType: json_values.BINARY,
}


def table_schema(fields: StructType | None) -> Any:
    """Return the schema of a topic's table. `date` is last: it is the partition column, and not in any file."""
    parsed = [pa.field(field.name, json_type(field.dataType).arrow) for field in fields or ()]
    return pa.schema([*RECORD_SCHEMA, *parsed, pa.field(DATE, pa.date32())])


def dead_letter_schema() -> Any:
    return pa.schema([*RECORD_SCHEMA, pa.field(REASON, pa.string()), pa.field(DATE, pa.date32())])


def parse_schema(text: str, name: str) -> StructType:
    """Parse either of Spark's schema formats: `id BIGINT NOT NULL, name STRING`, or JSON. Needs a running session."""
    try:
        is_json = text.lstrip().startswith("{")
        fields = StructType.fromJson(json.loads(text)) if is_json else StructType.fromDDL(" ".join(text.split()))
        assert isinstance(fields, StructType)
    except (PySparkException, ValueError, KeyError, TypeError, AttributeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PipelineError(f"{name} is not a schema ({first}): {EXAMPLE}") from None
    if not fields.fields:
        raise PipelineError(f"{name} has no fields: {EXAMPLE}")
    taken = {*RECORD_SCHEMA.names, DATE}
    for field in fields:
        if field.name.lower() in taken:
            raise PipelineError(
                f"{name}: the field {field.name} is listed twice, or is a column of every table "
                f"({', '.join(RECORD_SCHEMA.names)}, {DATE}): leave it out, it is part of value"
            )
        taken.add(field.name.lower())
        try:
            _json_fields(StructType([field]))
        except (PipelineError, SchemaError) as error:
            raise PipelineError(f"{name}: {field.name}: {error}") from None
    return fields


def json_type(kind: Any) -> JsonType:
    """Return how JSON becomes a type of Spark. Raises PipelineError if the type cannot be landed."""
    if isinstance(kind, spark_types.DecimalType):
        return json_values.exact_decimal(kind.precision, kind.scale)
    if isinstance(kind, spark_types.ArrayType):
        return json_values.list_of(json_type(kind.elementType), with_null=kind.containsNull)
    if isinstance(kind, spark_types.StructType):
        return json_values.struct_of(_json_fields(kind))
    if isinstance(kind, spark_types.MapType) and isinstance(kind.keyType, spark_types.StringType):
        return json_values.map_of(json_type(kind.valueType), with_null=kind.valueContainsNull)
    if type(kind) not in SIMPLE:
        raise PipelineError(f"the type {kind.simpleString()} cannot be landed: use string, and cast it when reading")
    return SIMPLE[type(kind)]


def _json_fields(fields: StructType) -> list[JsonField]:
    return [JsonField(field.name, json_type(field.dataType), not field.nullable) for field in fields]


class JsonColumns:
    """Splits Arrow batches of records into rows and dead letters by one schema."""

    def __init__(self, fields: StructType) -> None:
        self._types = fields
        self._fields = _json_fields(fields)
        self._rows = JsonRows(self._fields)
        self._required = [field.name for field in self._fields if field.is_required]

    def only(self, names: Sequence[str]) -> JsonColumns:
        """Return the same for some of the fields."""
        return JsonColumns(StructType([field for field in self._types if field.name in names]))

    def split(self, batch: Any, values: Sequence[bytes | None] | None = None) -> tuple[Any, Any]:
        """Return rows with the schema's columns appended, and dead letters with their reasons.

        `values`: the texts to parse, instead of the records' values.
        """
        parsed: list[tuple[Any, ...]] = []
        good: list[int] = []
        bad: list[int] = []
        reasons: list[str] = []
        for index, value in enumerate(batch.column("value").to_pylist() if values is None else values):
            try:
                parsed.append(self._parse(value))
                good.append(index)
            except Unreadable as error:
                bad.append(index)
                reasons.append(str(error)[:REASON_CHARACTERS_MAX])
        rows = batch.take(pa.array(good, pa.int64())) if bad else batch
        for field, values in zip(self._fields, self._rows.arrays(parsed), strict=True):
            rows = rows.append_column(pa.field(field.name, field.type.arrow), values)
        dead = batch.take(pa.array(bad, pa.int64()))
        return rows, dead.append_column(pa.field(REASON, pa.string()), pa.array(reasons, pa.string()))

    def _parse(self, value: bytes | None) -> tuple[Any, ...]:
        if value is not None:
            return self._rows.parse(value)
        if self._required:
            raise Unreadable(f"no value, and {self._required[0]} is required")
        return self._rows.nothing
