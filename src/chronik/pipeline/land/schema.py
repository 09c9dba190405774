"""Table schemas: the record's own columns, and the columns that a schema extracts from a JSON value."""

from __future__ import annotations

import datetime
import json
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import types as spark_types
from pyspark.sql.types import StructType

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.columns import HEADERS

DATE = "date"
"""The partition column of the tables. It is in the directory name, not in the file."""
REASON = "reason"
EXAMPLE = "write it as in id BIGINT NOT NULL, name STRING, at TIMESTAMP"
RECORD_SCHEMA = pa.schema(
    {"key": pa.binary(), "value": pa.binary(), "headers": HEADERS, "partition": pa.int32(), "offset": pa.int64()}
    | {"timestamp": pa.timestamp("us", tz="UTC")}
)
"""The columns of every table. They are cast to these types, whichever source delivered them."""


def _whole(bits: int) -> Any:
    return Annotated[int, msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)]


SIMPLE: dict[type, tuple[Any, Any]] = {
    spark_types.StringType: (pa.string(), str),
    spark_types.BooleanType: (pa.bool_(), bool),
    spark_types.ByteType: (pa.int8(), _whole(8)),
    spark_types.ShortType: (pa.int16(), _whole(16)),
    spark_types.IntegerType: (pa.int32(), _whole(32)),
    spark_types.LongType: (pa.int64(), _whole(64)),
    spark_types.FloatType: (pa.float32(), float),
    spark_types.DoubleType: (pa.float64(), float),
    spark_types.DateType: (pa.date32(), datetime.date),
    spark_types.TimestampType: (pa.timestamp("us", tz="UTC"), datetime.datetime),
    spark_types.BinaryType: (pa.binary(), bytes),
}
"""Each type in Arrow, and the Python type that its JSON is decoded to."""


def table_schema(fields: StructType | None) -> Any:
    """Return the schema of a topic's table. `date` is last: it is the partition column, and not in any file."""
    parsed = [pa.field(field.name, arrow_type(field.dataType)) for field in fields or ()]
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
        raise PipelineError(f"{name} is no schema ({first}): {EXAMPLE}") from None
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
            arrow_type(field.dataType)
        except PipelineError as error:
            raise PipelineError(f"{name}: {field.name}: {error}") from None
    return fields


def arrow_type(kind: Any) -> Any:
    if isinstance(kind, spark_types.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, spark_types.ArrayType):
        return pa.list_(pa.field("element", arrow_type(kind.elementType)))
    if isinstance(kind, spark_types.StructType):
        return pa.struct([pa.field(field.name, arrow_type(field.dataType)) for field in kind])
    if isinstance(kind, spark_types.MapType) and isinstance(kind.keyType, spark_types.StringType):
        return pa.map_(pa.string(), arrow_type(kind.valueType))
    if type(kind) not in SIMPLE:
        raise PipelineError(f"the type {kind.simpleString()} cannot be landed: use string, and cast it when reading")
    return SIMPLE[type(kind)][0]
