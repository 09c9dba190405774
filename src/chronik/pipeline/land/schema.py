"""Table schemas: the record's own columns, and the columns that a schema extracts from a JSON value.

Values that cannot be parsed become dead letters with a reason. A value fails as a whole: a record with one bad field is
a dead letter, not a row with a null that the producer did not send. Fields that are not in the schema are still in
`value`. A record without a value (a tombstone) becomes a row of nulls, unless the schema requires a field.
"""

from __future__ import annotations

import datetime
import decimal
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
REASON_CHARACTERS_MAX = 500
KEPT = (datetime.datetime, datetime.date, decimal.Decimal, bytes)
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


class JsonColumns:
    """Splits Arrow batches of records into rows and dead letters by one schema."""

    def __init__(self, fields: StructType) -> None:
        self._fields = fields
        self._decoder = msgspec.json.Decoder(_object_type(fields, "value"))
        self._required = [field.name for field in fields if not field.nullable]
        self._nothing = (None,) * len(fields)

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Return rows with the schema's columns appended, and dead letters with their reasons."""
        parsed: list[tuple[Any, ...]] = []
        good: list[int] = []
        bad: list[int] = []
        reasons: list[str] = []
        for index, value in enumerate(batch.column("value").to_pylist()):
            try:
                parsed.append(self._parse(value))
                good.append(index)
            except Unreadable as error:
                bad.append(index)
                reasons.append(str(error)[:REASON_CHARACTERS_MAX])
        rows = batch.take(pa.array(good, pa.int64())) if bad else batch
        columns = list(zip(*parsed, strict=True)) or [()] * len(self._fields)
        for field, values in zip(self._fields, columns, strict=True):
            kind = arrow_type(field.dataType)
            rows = rows.append_column(pa.field(field.name, kind), pa.array(values, kind))
        dead = batch.take(pa.array(bad, pa.int64()))
        return rows, dead.append_column(pa.field(REASON, pa.string()), pa.array(reasons, pa.string()))

    def _parse(self, value: bytes | None) -> tuple[Any, ...]:
        if value is None:
            if self._required:
                raise Unreadable(f"no value, and {self._required[0]} is required")
            return self._nothing
        try:
            values = msgspec.structs.astuple(self._decoder.decode(value))
            return tuple(map(_to_arrow, self._fields, values))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Unreadable(str(error) or type(error).__name__) from None


class Unreadable(Exception):
    """The value does not fit the schema. The text is the reason."""


def _to_arrow(field: Any, value: Any) -> Any:
    kind = field.dataType
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(kind, spark_types.DecimalType):
        return _decimal(field.name, kind, value)
    if isinstance(kind, spark_types.TimestampType) and value.tzinfo is None:
        return value.replace(tzinfo=datetime.UTC)
    if isinstance(value, KEPT):
        return value
    builtin = msgspec.to_builtins(value, builtin_types=KEPT)
    try:
        pa.scalar(builtin, arrow_type(kind))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise Unreadable(f"{error} - at `$.{field.name}`") from None
    return builtin


def _decimal(name: str, kind: spark_types.DecimalType, value: decimal.Decimal) -> decimal.Decimal:
    try:
        fits = value.quantize(decimal.Decimal(1).scaleb(-kind.scale), context=decimal.Context(prec=kind.precision))
    except decimal.InvalidOperation:
        fits = None
    if fits is None or fits != value:
        raise Unreadable(f"{value} does not fit {kind.simpleString()} - at `$.{name}`")
    return fits


def _object_type(fields: StructType, name: str) -> type[msgspec.Struct]:
    """Number the struct's fields, because JSON allows names that are invalid or special in Python."""
    numbered = {f"f{number}": field for number, field in enumerate(fields)}
    members: list[Any] = []
    for own, field in numbered.items():
        kind = _python_type(field.dataType, field.name)
        members.append((own, kind | None, None) if field.nullable else (own, kind))
    rename = {own: field.name for own, field in numbered.items()}
    return msgspec.defstruct(f"Json_{name}", members, rename=rename, kw_only=True, gc=False)


def _python_type(kind: Any, name: str) -> Any:
    if isinstance(kind, spark_types.DecimalType):
        return decimal.Decimal
    if isinstance(kind, spark_types.ArrayType):
        element = _python_type(kind.elementType, name)
        return list[element | None] if kind.containsNull else list[element]  # type: ignore[valid-type]
    if isinstance(kind, spark_types.MapType):
        value = _python_type(kind.valueType, name)
        return dict[str, value | None] if kind.valueContainsNull else dict[str, value]  # type: ignore[valid-type]
    if isinstance(kind, StructType):
        return _object_type(kind, name)
    return SIMPLE[type(kind)][1]
