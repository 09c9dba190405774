"""Parse JSON values into columns. Values that cannot be parsed become dead letters with a reason.

A value fails as a whole: a record with one bad field is a dead letter, not a row with a null that the producer did not
send. Fields that are not in the schema are still in `value`. A record without a value (a tombstone) becomes a row of
nulls, unless the schema requires a field.
"""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.types import StructType

from chronik.pipeline.land.schema import REASON, SIMPLE, arrow_type

REASON_CHARACTERS_MAX = 500
KEPT = (datetime.datetime, datetime.date, decimal.Decimal, bytes)


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
