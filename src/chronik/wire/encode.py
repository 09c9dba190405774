"""Encode a message from plain Python values, by its layout.

Values are nested mappings and lists under kio's field names. Numbers are ints; error codes are ints or ErrorCode; times
are ints in milliseconds (kio's timedelta and datetime work too, None is -1); uuids are UUID, None is zero.
- A field that this version lacks is dropped, so callers fill in the newest version's fields once.
- A missing field takes the schema's default. Without one it is zero, empty, or null if nullable. Arrays are empty even
  if nullable, because clients give a null array another meaning.
- None for a field that is not nullable in this version becomes zero or empty.
- A name that no version of the API has is a bug in the caller: KeyError.
"""

import dataclasses
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from struct import Struct, error
from typing import Any, Final
from uuid import UUID

from chronik.wire.primitives import uvarint
from chronik.wire.schema import MISSING, Direction, Field, Structure, has_field, load

__all__ = ["encode"]

Put = Callable[[bytearray, Any], None]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)

_NUMBERS: Final = {
    "bool": Struct(">?"),
    "int8": Struct(">b"),
    "int16": Struct(">h"),
    "uint16": Struct(">H"),
    "int32": Struct(">i"),
    "uint32": Struct(">I"),
    "int64": Struct(">q"),
    "uint64": Struct(">Q"),
    "float64": Struct(">d"),
    "error_code": Struct(">h"),
}
_TIMES: Final = {"timedelta_i32": Struct(">i"), "timedelta_i64": Struct(">q"), "datetime_i64": Struct(">q")}


def encode(key: int, version: int, direction: Direction, values: Mapping[str, Any]) -> bytes:
    out = bytearray()
    _message_put(key, version, direction)(out, values)
    return bytes(out)


@cache
def _message_put(key: int, version: int, direction: Direction) -> Put:
    structure = load(key, version, direction)
    return _structure_put(structure, _UnknownNames(key, direction, ()))


class _UnknownNames:
    """Distinguishes names of other versions from names that no version has, for one structure of an API."""

    def __init__(self, key: int, direction: Direction, path: tuple[str, ...]) -> None:
        self._key = key
        self._direction = direction
        self._path = path

    def below(self, name: str) -> "_UnknownNames":
        return _UnknownNames(self._key, self._direction, (*self._path, name))

    def check(self, values: Mapping[str, Any]) -> None:
        for name in values:
            if not has_field(self._key, self._direction, self._path, name):
                place = ".".join((f"API {self._key} {self._direction}", *self._path))
                raise KeyError(f"{place} has no field {name!r} in any version")


def _structure_put(structure: Structure, unknown: _UnknownNames) -> Put:
    plain: list[tuple[str, Put, bytes]] = []
    tagged: list[tuple[str, Put, bytes, bytes]] = []
    for field in structure.fields:
        put = _field_put(field, structure.flexible, unknown)
        default = bytearray()
        put(default, _default(field))
        if field.tag is None:
            plain.append((field.name, put, bytes(default)))
        else:
            tagged.append((field.name, put, bytes(default), uvarint(field.tag)))
    flexible = structure.flexible

    def put_structure(out: bytearray, values: Mapping[str, Any]) -> None:
        known = 0
        name = ""
        try:
            for name, put, default in plain:
                value = values.get(name, MISSING)
                if value is MISSING:
                    out += default
                else:
                    known += 1
                    put(out, value)
            if flexible:
                known += _put_tags(out, values, tagged) if tagged else 0
                if not tagged:
                    out.append(0)
        except (error, TypeError, AttributeError, OverflowError) as e:
            e.add_note(f"while writing {structure.entity.__name__}.{name} = {values.get(name)!r}")
            raise
        if known != len(values):
            unknown.check(values)

    return put_structure


def _put_tags(out: bytearray, values: Mapping[str, Any], tagged: list[tuple[str, Put, bytes, bytes]]) -> int:
    known = 0
    count = 0
    fields = bytearray()
    for name, put, default, tag in tagged:
        value = values.get(name, MISSING)
        if value is MISSING:
            continue
        known += 1
        content = bytearray()
        put(content, value)
        # A tagged field with its default value is not written.
        if content != default:
            count += 1
            fields += tag
            fields += uvarint(len(content))
            fields += content
    out += uvarint(count)
    out += fields
    return known


def _default(field: Field) -> Any:
    if field.default is not MISSING:
        return _plain(field.default)
    if field.is_array:
        return ()
    return {} if field.nested and not field.is_nullable else None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _field_put(field: Field, flexible: bool, unknown: _UnknownNames) -> Put:
    if field.nested:
        one = _structure_put(field.nested, unknown.below(field.name))
    elif field.kind in _NUMBERS:
        one = _number_put(_NUMBERS[field.kind])
    elif field.kind in _TIMES:
        one = _time_put(_TIMES[field.kind], -1 if field.is_nullable else 0)
    elif field.kind == "uuid":
        one = _put_uuid
    else:
        one = _bytes_put(field.kind, flexible, field.is_nullable and not field.is_array)
    if field.is_array:
        return _array_put(one, flexible, field.is_nullable)
    if field.nested and field.is_nullable:
        return _nullable_structure_put(one, field.tag is None)
    return one


def _number_put(number: Struct) -> Put:
    pack = number.pack

    def put(out: bytearray, value: Any) -> None:
        out += pack(0 if value is None else value)

    return put


def _time_put(number: Struct, none_ms: int) -> Put:
    pack = number.pack

    def put(out: bytearray, value: Any) -> None:
        if value is None:
            value = none_ms
        elif isinstance(value, timedelta):
            value = value // _MILLISECOND
        elif isinstance(value, datetime):
            value = (value - _EPOCH) // _MILLISECOND
        out += pack(value)

    return put


def _put_uuid(out: bytearray, value: UUID | None) -> None:
    out += bytes(16) if value is None else value.bytes


def _bytes_put(kind: str, flexible: bool, is_nullable: bool) -> Put:
    length = Struct(">h" if kind == "string" else ">i")
    null = (b"\x00" if flexible else length.pack(-1)) if is_nullable else (b"\x01" if flexible else length.pack(0))

    def put(out: bytearray, value: Any) -> None:
        if value is None:
            out += null
            return
        data = value.encode() if isinstance(value, str) else value
        out += uvarint(len(data) + 1) if flexible else length.pack(len(data))
        out += data

    return put


def _array_put(one: Put, flexible: bool, is_nullable: bool) -> Put:
    length = Struct(">i")
    none_count = -1 if is_nullable else 0

    def put(out: bytearray, values: Any) -> None:
        count = none_count if values is None else len(values)
        out += uvarint(count + 1) if flexible else length.pack(count)
        for value in values or ():
            one(out, value)

    return put


def _nullable_structure_put(structure: Put, has_marker: bool) -> Put:
    def put(out: bytearray, value: Any) -> None:
        if value is None:
            if has_marker:
                out.append(0xFF)
            return
        if has_marker:
            out.append(1)
        structure(out, value)

    return put
