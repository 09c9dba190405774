"""Decode a message into kio's entity, by its layout.

kio's own readers are not safe for a node. They allocate memory for as many elements as an array's count claims and
abort the process when that fails, so 4 bytes from an untrusted client could stop it. They also fail on tagged fields
newer than their schema. This decoder trusts no length that exceeds the bytes at hand. It bounds the number of elements,
since each becomes a Python object many times its wire size. It skips unknown tagged fields.
"""

import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final
from uuid import UUID

from chronik.wire.errors import ErrorCode, MalformedRequest
from chronik.wire.primitives import ELEMENTS_MAX
from chronik.wire.schema import MISSING, Direction, Field, Structure, load

__all__ = ["decode"]

Read = Callable[[bytes, int, list[int]], tuple[Any, int]]
"""(body, position, element budget as a list of one) -> (value, next position)."""

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

# struct's format letter for each kind of number; `_CONVERSIONS` has the conversions.
_FORMATS: Final = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float64": "d",
    "uuid": "16s",
    "error_code": "h",
    "timedelta_i32": "i",
    "timedelta_i64": "q",
    "datetime_i64": "q",
}
_ERROR_CODES: Final[Mapping[int, ErrorCode]] = {code.value: code for code in ErrorCode}


def _error_code(value: int) -> ErrorCode:
    # A code newer than the schema is still an error.
    return _ERROR_CODES.get(value, ErrorCode.unknown_server_error)


def _uuid(value: bytes) -> UUID | None:
    return UUID(bytes=value) if any(value) else None


def _timedelta(value: int) -> timedelta:
    return timedelta(milliseconds=value)


def _datetime(value: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=value)


def _nullable_datetime(value: int) -> datetime | None:
    return None if value == -1 else _datetime(value)


_CONVERSIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "error_code": _error_code,
    "uuid": _uuid,
    "timedelta_i32": _timedelta,
    "timedelta_i64": _timedelta,
    "datetime_i64": _datetime,
}


def decode(key: int, version: int, direction: Direction, body: bytes) -> Any:
    """Decode the message at the start of `body`, or raise MalformedRequest.

    Trailing bytes are ignored, as in Kafka: librdkafka's Metadata request for all topics has three extra bytes.
    """
    read = _message_read(key, version, direction)
    try:
        message, _ = read(body, 0, [ELEMENTS_MAX])
    except (struct.error, IndexError) as e:
        raise MalformedRequest(f"API {key} v{version} {direction} cut short at {len(body)} bytes") from e
    except UnicodeDecodeError as e:
        raise MalformedRequest(f"API {key} v{version} {direction} with a string that is not UTF-8") from e
    except OverflowError as e:
        raise MalformedRequest(f"API {key} v{version} {direction} with a time beyond all calendars") from e
    return message


@cache
def _message_read(key: int, version: int, direction: Direction) -> Read:
    return _structure_read(load(key, version, direction))


def _structure_read(structure: Structure) -> Read:
    """Build a reader that unpacks adjacent numbers together and sets slots, since kio's classes are frozen."""
    entity = structure.entity
    new = object.__new__
    steps: list[Callable[[bytes, int, list[int], Any], int]] = []
    numbers: list[Field] = []
    tagged: dict[int, tuple[Any, Read]] = {}
    defaults: list[tuple[Any, Any]] = []
    for field in structure.fields:
        slot = getattr(entity, field.name).__set__
        if field.tag is not None:
            tagged[field.tag] = (slot, _field_read(field, structure.flexible))
            defaults.append((slot, _default(field)))
        elif field.kind in _FORMATS and not field.is_array:
            numbers.append(field)
        else:
            if numbers:
                steps.append(_numbers_step(entity, numbers))
                numbers = []
            steps.append(_field_step(slot, _field_read(field, structure.flexible)))
    if numbers:
        steps.append(_numbers_step(entity, numbers))
    if structure.flexible:
        steps.append(_tags_step(tagged, defaults))

    def read(body: bytes, at: int, elements: list[int]) -> tuple[Any, int]:
        message = new(entity)
        for step in steps:
            at = step(body, at, elements, message)
        return message, at

    return read


def _numbers_step(entity: type[Any], fields: list[Field]) -> Callable[[bytes, int, list[int], Any], int]:
    layout = struct.Struct(">" + "".join(_FORMATS[field.kind] for field in fields))
    unpack_from, size_bytes = layout.unpack_from, layout.size
    slots = [getattr(entity, field.name).__set__ for field in fields]
    conversions = [_conversion(field) for field in fields]

    def step(body: bytes, at: int, elements: list[int], message: Any) -> int:
        for slot, convert, value in zip(slots, conversions, unpack_from(body, at), strict=True):
            slot(message, value if convert is None else convert(value))
        return at + size_bytes

    return step


def _field_step(slot: Callable[[Any, Any], None], read: Read) -> Callable[[bytes, int, list[int], Any], int]:
    def step(body: bytes, at: int, elements: list[int], message: Any) -> int:
        value, at = read(body, at, elements)
        slot(message, value)
        return at

    return step


def _tags_step(
    tagged: dict[int, tuple[Any, Read]], defaults: list[tuple[Any, Any]]
) -> Callable[[bytes, int, list[int], Any], int]:
    def step(body: bytes, at: int, elements: list[int], message: Any) -> int:
        for slot, default in defaults:
            slot(message, default)
        count, at = _uvarint(body, at)
        if count == 0:
            return at
        _allow(count, 2, len(body) - at, elements)
        for _ in range(count):
            tag, at = _uvarint(body, at)
            size_bytes, at = _uvarint(body, at)
            end = at + size_bytes
            if end > len(body):
                raise MalformedRequest(f"tagged field of {size_bytes} bytes, {len(body) - at} left")
            if tag in tagged:
                slot, read = tagged[tag]
                value, at = read(body, at, elements)
                if at != end:
                    raise MalformedRequest(f"tagged field {tag} is not the {size_bytes} bytes that it claims")
                slot(message, value)
            at = end
        return at

    return step


def _field_read(field: Field, flexible: bool) -> Read:
    if field.is_array:
        if field.kind in _FORMATS:
            return _numbers_read(field, flexible)
        return _array_read(field, flexible)
    # A null tagged structure is omitted entirely, so it has no marker.
    if field.nested and field.is_nullable and field.tag is None:
        return _nullable_structure_read(_structure_read(field.nested))
    return _one_read(field, flexible, field.is_nullable)


def _one_read(field: Field, flexible: bool, is_nullable: bool) -> Read:
    if field.nested:
        return _structure_read(field.nested)
    if field.kind in _FORMATS:
        return _number_read(field)
    return _bytes_read(field.kind, flexible, is_nullable)


def _conversion(field: Field) -> Callable[[Any], Any] | None:
    if field.kind == "datetime_i64" and field.is_nullable:
        return _nullable_datetime
    return _CONVERSIONS.get(field.kind)


def _number_read(field: Field) -> Read:
    layout = struct.Struct(">" + _FORMATS[field.kind])
    convert = _conversion(field)

    def read(body: bytes, at: int, elements: list[int]) -> tuple[Any, int]:
        (value,) = layout.unpack_from(body, at)
        return value if convert is None else convert(value), at + layout.size

    return read


def _bytes_read(kind: str, flexible: bool, is_nullable: bool) -> Read:
    is_string = kind == "string"
    layout = _INT16 if is_string else _INT32

    def read(body: bytes, at: int, elements: list[int]) -> tuple[Any, int]:
        if flexible:
            length, at = _uvarint(body, at)
            length -= 1
        else:
            (length,) = layout.unpack_from(body, at)
            at += layout.size
        if length < 0:
            if length == -1 and is_nullable:
                return None, at
            raise MalformedRequest(f"{kind} of {length} bytes")
        end = at + length
        if end > len(body):
            raise MalformedRequest(f"{kind} of {length} bytes, {len(body) - at} left")
        data = body[at:end]
        return data.decode() if is_string else data, end

    return read


def _uvarint(body: bytes, at: int) -> tuple[int, int]:
    value = body[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    for shift in (7, 14, 21, 28):
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise MalformedRequest("varint longer than five bytes")


def _allow(count: int, element_bytes_min: int, left_bytes: int, elements: list[int]) -> None:
    """Deduct `count` from the element budget; before allocating, refuse what the remaining bytes cannot hold."""
    elements[0] -= count
    if count * element_bytes_min > left_bytes or elements[0] < 0:
        raise MalformedRequest(f"{count} elements in {left_bytes} bytes")


def _count(body: bytes, at: int, flexible: bool, is_nullable: bool) -> tuple[int, int]:
    if flexible:
        count, at = _uvarint(body, at)
        count -= 1
    else:
        (count,) = _INT32.unpack_from(body, at)
        at += 4
    if count < 0 and (count != -1 or not is_nullable):
        raise MalformedRequest(f"array of {count} elements")
    return count, at


def _array_read(field: Field, flexible: bool) -> Read:
    one = _one_read(field, flexible, False)
    element_bytes_min = _element_bytes_min(field, flexible)
    is_nullable = field.is_nullable

    def read(body: bytes, at: int, elements: list[int]) -> tuple[Any, int]:
        count, at = _count(body, at, flexible, is_nullable)
        if count <= 0:
            return None if count else (), at
        _allow(count, element_bytes_min, len(body) - at, elements)
        items = []
        for _ in range(count):
            item, at = one(body, at, elements)
            items.append(item)
        return tuple(items), at

    return read


def _numbers_read(field: Field, flexible: bool) -> Read:
    letter = _FORMATS[field.kind]
    size_bytes = struct.calcsize(">" + letter)
    convert = _conversion(field)
    is_nullable = field.is_nullable

    def read(body: bytes, at: int, elements: list[int]) -> tuple[Any, int]:
        count, at = _count(body, at, flexible, is_nullable)
        if count <= 0:
            return None if count else (), at
        _allow(count, size_bytes, len(body) - at, elements)
        end = at + count * size_bytes
        values: tuple[Any, ...]
        if convert is None:
            values = struct.unpack_from(f">{count}{letter}", body, at)
        else:
            values = tuple(convert(value) for (value,) in struct.iter_unpack(">" + letter, body[at:end]))
        return values, end

    return read


def _nullable_structure_read(structure: Read) -> Read:
    def read(body: bytes, at: int, elements: list[int]) -> tuple[Any, int]:
        # The marker is an int8: negative for null.
        return structure(body, at + 1, elements) if body[at] < 0x80 else (None, at + 1)

    return read


def _element_bytes_min(field: Field, flexible: bool) -> int:
    if field.nested:
        return max(1, _structure_bytes_min(field.nested))
    if field.kind in _FORMATS:
        return struct.calcsize(">" + _FORMATS[field.kind])
    return 1 if flexible else (2 if field.kind == "string" else 4)


def _structure_bytes_min(structure: Structure) -> int:
    size_bytes = 1 if structure.flexible else 0
    for field in structure.fields:
        if field.tag is not None:
            continue
        if field.is_array:
            size_bytes += 1 if structure.flexible else 4
        elif field.nested and field.is_nullable:
            size_bytes += 1
        else:
            size_bytes += _element_bytes_min(field, structure.flexible)
    return size_bytes


def _default(field: Field) -> Any:
    """Return the value of a tagged field that is not on the wire."""
    if field.default is not MISSING:
        return field.default
    if field.is_array:
        return ()
    if field.nested:
        return field.nested.entity(**{inner.name: _default(inner) for inner in field.nested.fields})
    if field.kind in _FORMATS:
        (value,) = struct.unpack(">" + _FORMATS[field.kind], bytes(_element_bytes_min(field, True)))
        convert = _conversion(field)
        return value if convert is None else convert(value)
    return "" if field.kind == "string" else b""
