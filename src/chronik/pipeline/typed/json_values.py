"""JSON texts into Arrow columns: msgspec checks a text against a struct made for its fields, then each value is fitted.

A text fails as a whole: a record with one bad field is a dead letter, not a row with a null that the producer did not
send. Fields that are not listed are skipped.
"""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import pyarrow as pa

from chronik.pipeline.typed.writer_schema import SchemaError

ESCAPED = re.compile(r'["\\\x00-\x1f]')
"""Characters that msgspec does not match in the names of fields, because JSON escapes them."""

FLOATS_EXACT_BELOW = 2**53

Convert: TypeAlias = Callable[[Any], Any] | None
"""Turns a decoded value, which is not None, into one that Arrow takes; None: it does already. Raises Unreadable."""


class Unreadable(Exception):
    """The text does not fit its fields. The message is the reason."""

    @property
    def is_float(self) -> bool:
        """Return whether the text has a number with a fraction or an exponent in the place of a whole one."""
        return str(self).startswith("Expected `int") and "got `float`" in str(self)


@dataclass(frozen=True, slots=True)
class JsonType:
    """How the JSON of one type becomes a value of an Arrow type. `python` is what msgspec decodes it to."""

    arrow: Any
    python: Any
    convert: Convert = None


@dataclass(frozen=True, slots=True)
class JsonField:
    name: str
    type: JsonType
    is_required: bool = False

    def __post_init__(self) -> None:
        if ESCAPED.search(self.name):
            raise SchemaError(f"no column can have the name {self.name!r}: JSON escapes one of its characters")


def whole(bits: int) -> JsonType:
    limits = msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)
    return JsonType({8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits], Annotated[int, limits])


def _whole_of(value: int | float) -> int:
    if isinstance(value, int):
        return value
    if not value.is_integer() or abs(value) >= FLOATS_EXACT_BELOW:
        raise Unreadable(f"{value!r} is no whole number, or too large to be exact in this form")
    return int(value)


def in_utc(value: datetime.datetime) -> datetime.datetime:
    """Return the time in UTC. Raises Unreadable if its offset puts it outside the years 1 to 9999."""
    try:
        return value.replace(tzinfo=datetime.UTC) if value.tzinfo is None else value.astimezone(datetime.UTC)
    except OverflowError:
        raise Unreadable("a time is outside the years 1 to 9999") from None


WHOLE_FLOAT = JsonType(pa.int64(), whole(64).python | float, _whole_of)
"""A whole number of 64 bits that may be written with a fraction of zero or an exponent."""
TEXT = JsonType(pa.string(), str)
BOOLEAN = JsonType(pa.bool_(), bool)
FLOAT = JsonType(pa.float32(), float)
DOUBLE = JsonType(pa.float64(), float)
DATE = JsonType(pa.date32(), datetime.date)
TIMESTAMP = JsonType(pa.timestamp("us", tz="UTC"), datetime.datetime, in_utc)
BINARY = JsonType(pa.binary(), bytes)
ANY_JSON = JsonType(pa.string(), Any, lambda value: msgspec.json.encode(value).decode())
"""Any JSON, as text."""


def exact_decimal(precision: int, scale: int) -> JsonType:
    unit, context = decimal.Decimal(1).scaleb(-scale), decimal.Context(prec=precision)

    def fitted(value: decimal.Decimal) -> decimal.Decimal:
        try:
            fits = value.quantize(unit, context=context)
        except decimal.InvalidOperation:
            fits = None
        if fits is None or fits != value:
            raise Unreadable(f"{value} does not fit decimal({precision},{scale})")
        return fits

    return JsonType(pa.decimal128(precision, scale), decimal.Decimal, fitted)


def list_of(element: JsonType, *, with_null: bool = True) -> JsonType:
    convert = _each(element.convert)
    kind = pa.list_(pa.field("element", element.arrow))
    python = list[_or_null(element.python, with_null)]  # type: ignore[valid-type, misc]
    return JsonType(kind, python, None if convert is None else lambda values: [convert(value) for value in values])


def map_of(value: JsonType, *, with_null: bool = True) -> JsonType:
    convert = _each(value.convert)
    python = dict[str, _or_null(value.python, with_null)]  # type: ignore[valid-type, misc]

    def converted(given: dict[str, Any]) -> list[tuple[str, Any]]:
        return [(key, each if convert is None else convert(each)) for key, each in given.items()]

    return JsonType(pa.map_(pa.string(), value.arrow), python, converted)


def struct_of(fields: Sequence[JsonField]) -> JsonType:
    kind = pa.struct([pa.field(field.name, field.type.arrow) for field in fields])
    converts = [(f"f{number}", field.name, _each(field.type.convert)) for number, field in enumerate(fields)]

    def converted(value: Any) -> dict[str, Any]:
        found = {}
        for own, name, convert in converts:
            try:
                found[name] = getattr(value, own) if convert is None else convert(getattr(value, own))
            except Unreadable as error:
                raise Unreadable(f"{error} - in {name}") from None
        return found

    return JsonType(kind, object_type(fields), converted)


def object_type(fields: Sequence[JsonField]) -> type[msgspec.Struct]:
    """Return a struct for JSON objects. It numbers its fields: not every name in JSON is a name in Python."""
    members: list[Any] = []
    for number, field in enumerate(fields):
        own, kind = f"f{number}", field.type.python
        members.append((own, kind) if field.is_required else (own, kind | None, None))
    rename = {f"f{number}": field.name for number, field in enumerate(fields)}
    return msgspec.defstruct("Json", members, rename=rename, kw_only=True, gc=False)


def _or_null(kind: Any, with_null: bool) -> Any:
    return kind | None if with_null and kind is not Any else kind


def _each(convert: Convert) -> Convert:
    return None if convert is None else lambda value: None if value is None else convert(value)


class JsonRows:
    """Parses JSON objects into rows of the fields. With `is_single`, the whole text is the value of the only field."""

    def __init__(self, fields: Sequence[JsonField], *, is_single: bool = False) -> None:
        self._fields = fields
        self._is_single = is_single
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            fields[0].type.python if is_single else object_type(fields)
        )
        self._converts = [
            (number, field.name, field.type.convert) for number, field in enumerate(fields) if field.type.convert
        ]
        self.nothing = (None,) * len(fields)
        """The row of a record without a value."""

    def parse(self, text: bytes | memoryview) -> tuple[Any, ...]:
        """Raises Unreadable."""
        try:
            decoded = self._decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Unreadable(str(error) or type(error).__name__) from None
        values = (decoded,) if self._is_single else msgspec.structs.astuple(decoded)
        if not self._converts:
            return values
        fitted = list(values)
        for number, name, convert in self._converts:
            if fitted[number] is not None:
                try:
                    fitted[number] = convert(fitted[number])
                except Unreadable as error:
                    raise Unreadable(f"{error} - at `$.{name}`") from None
        return tuple(fitted)

    def arrays(self, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return one Arrow array for each field."""
        columns = list(zip(*rows, strict=True)) or [()] * len(self._fields)
        return [pa.array(values, field.type.arrow) for field, values in zip(self._fields, columns, strict=True)]
