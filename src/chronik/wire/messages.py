"""Messages of all APIs outside the hot path: decoded into kio's entities, encoded from plain values, by their layouts.

Produce and Fetch work here too, but slower and with copies.

kio's own readers are not safe for a node. They allocate memory for as many elements as an array's count claims and
abort the process when that fails, so 4 bytes from an untrusted client could stop it. They also fail on tagged fields
newer than their schema. This decoder trusts no length that exceeds the bytes at hand. It bounds the number of elements,
since each becomes a Python object many times its wire size. It skips unknown tagged fields.

Values to encode are nested mappings and lists under kio's field names. Numbers are ints; error codes are ints or
ErrorCode; times are ints in milliseconds (kio's timedelta and datetime work too, None is -1); uuids are UUID, None is
zero.
- A field that this version lacks is dropped, so callers fill in the newest version's fields once.
- A missing field takes the schema's default. Without one it is zero, empty, or null if nullable. Arrays are empty even
  if nullable, because clients give a null array another meaning.
- None for a field that is not nullable in this version becomes zero or empty.
- A name that no version of the API has is a bug in the caller: KeyError.
"""

import dataclasses
import struct
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final
from uuid import UUID

from chronik.wire.errors import ErrorCode, MalformedRequest
from chronik.wire.primitives import ELEMENTS_MAX, check_tag_count, read_uvarint, uvarint
from chronik.wire.schema import MISSING, Direction, Field, Structure, has_field, load

Read = Callable[[bytes, int, list[int]], tuple[Any, int]]
"""(body, position, how many array elements and tagged fields the message may still have) -> (value, next position)."""
Put = Callable[[bytearray, Any], None]

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)

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
_TIMES: Final = ("timedelta_i32", "timedelta_i64", "datetime_i64")
_ERROR_CODES: Final[Mapping[int, ErrorCode]] = {code.value: code for code in ErrorCode}


def read_request(key: int, version: int, body: bytes) -> Any:
    """Decode the request at the start of `body`, or raise MalformedRequest."""
    return _decode(key, version, "request", body)


def read_response(key: int, version: int, body: bytes) -> Any:
    """Decode the response at the start of `body`, or raise MalformedRequest."""
    return _decode(key, version, "response", body)


def write_request(key: int, version: int, values: Mapping[str, Any]) -> bytes:
    return _encode(key, version, "request", values)


def write_response(key: int, version: int, values: Mapping[str, Any]) -> bytes:
    return _encode(key, version, "response", values)


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


def _decode(key: int, version: int, direction: Direction, body: bytes) -> Any:
    # Trailing bytes are ignored, as in Kafka: librdkafka's Metadata request for all topics has three extra bytes.
    read = _message_read(key, version, direction)
    try:
        message, _ = read(body, 0, [ELEMENTS_MAX, ELEMENTS_MAX])
    except (struct.error, IndexError) as e:
        raise MalformedRequest(f"API {key} v{version} {direction} cut short at {len(body)} bytes") from e
    except UnicodeDecodeError as e:
        raise MalformedRequest(f"API {key} v{version} {direction} with a string that is not UTF-8") from e
    except OverflowError as e:
        raise MalformedRequest(f"API {key} v{version} {direction} with a timestamp out of range") from e
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
            defaults.append((slot, _absent_value(field)))
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
        count, at = read_uvarint(body, at)
        if count == 0:
            return at
        check_tag_count(count, len(body) - at)
        elements[1] -= count
        if elements[1] < 0:
            raise MalformedRequest(f"a message with more than {ELEMENTS_MAX} tagged fields")
        for _ in range(count):
            tag, at = read_uvarint(body, at)
            size_bytes, at = read_uvarint(body, at)
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
            length, at = read_uvarint(body, at)
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


def _allow(count: int, element_bytes_min: int, left_bytes: int, elements: list[int]) -> None:
    """Deduct `count` from the element budget; before allocating, refuse what the remaining bytes cannot hold."""
    elements[0] -= count
    if count * element_bytes_min > left_bytes or elements[0] < 0:
        raise MalformedRequest(f"{count} elements in {left_bytes} bytes")


def _count(
    body: bytes, at: int, flexible: bool, is_nullable: bool, element_bytes_min: int, elements: list[int]
) -> tuple[int, int]:
    """Read the count of an array (-1 for null), and deduct it from the element budget."""
    if flexible:
        count, at = read_uvarint(body, at)
        count -= 1
    else:
        (count,) = _INT32.unpack_from(body, at)
        at += 4
    if count < 0 and (count != -1 or not is_nullable):
        raise MalformedRequest(f"array of {count} elements")
    if count > 0:
        _allow(count, element_bytes_min, len(body) - at, elements)
    return count, at


def _array_read(field: Field, flexible: bool) -> Read:
    one = _one_read(field, flexible, False)
    element_bytes_min = _element_bytes_min(field, flexible)
    is_nullable = field.is_nullable

    def read(body: bytes, at: int, elements: list[int]) -> tuple[Any, int]:
        count, at = _count(body, at, flexible, is_nullable, element_bytes_min, elements)
        if count < 0:
            return None, at
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
        count, at = _count(body, at, flexible, is_nullable, size_bytes, elements)
        if count < 0:
            return None, at
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


def _absent_value(field: Field) -> Any:
    """Return the value of a tagged field that is not on the wire."""
    if field.default is not MISSING:
        return field.default
    if field.is_array:
        return ()
    if field.nested:
        return field.nested.entity(**{inner.name: _absent_value(inner) for inner in field.nested.fields})
    if field.kind in _FORMATS:
        (value,) = struct.unpack(">" + _FORMATS[field.kind], bytes(_element_bytes_min(field, True)))
        convert = _conversion(field)
        return value if convert is None else convert(value)
    return "" if field.kind == "string" else b""


def _encode(key: int, version: int, direction: Direction, values: Mapping[str, Any]) -> bytes:
    out = bytearray()
    _message_put(key, version, direction)(out, values)
    return bytes(out)


@cache
def _message_put(key: int, version: int, direction: Direction) -> Put:
    return _structure_put(load(key, version, direction), key, direction, ())


def _check_names(values: Mapping[str, Any], key: int, direction: Direction, path: tuple[str, ...]) -> None:
    """Raise KeyError for a name that no version of this structure has; ignore names of other versions."""
    for name in values:
        if not has_field(key, direction, path, name):
            place = ".".join((f"API {key} {direction}", *path))
            raise KeyError(f"{place} has no field {name!r} in any version")


def _structure_put(structure: Structure, key: int, direction: Direction, path: tuple[str, ...]) -> Put:
    plain: list[tuple[str, Put, bytes]] = []
    tagged: list[tuple[str, Put, bytes, bytes]] = []
    for field in structure.fields:
        put = _field_put(field, structure.flexible, key, direction, path)
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
        except (struct.error, TypeError, AttributeError, OverflowError) as e:
            e.add_note(f"while writing {structure.entity.__name__}.{name} = {values.get(name)!r}")
            raise
        if known != len(values):
            _check_names(values, key, direction, path)

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


def _field_put(field: Field, flexible: bool, key: int, direction: Direction, path: tuple[str, ...]) -> Put:
    if field.nested:
        one = _structure_put(field.nested, key, direction, (*path, field.name))
    elif field.kind == "uuid":
        one = _put_uuid
    elif field.kind in _TIMES:
        one = _time_put(struct.Struct(">" + _FORMATS[field.kind]), -1 if field.is_nullable else 0)
    elif field.kind in _FORMATS:
        one = _number_put(struct.Struct(">" + _FORMATS[field.kind]))
    else:
        one = _bytes_put(field.kind, flexible, field.is_nullable and not field.is_array)
    if field.is_array:
        return _array_put(one, flexible, field.is_nullable)
    if field.nested and field.is_nullable:
        return _nullable_structure_put(one, field.tag is None)
    return one


def _number_put(number: struct.Struct) -> Put:
    pack = number.pack

    def put(out: bytearray, value: Any) -> None:
        out += pack(0 if value is None else value)

    return put


def _time_put(number: struct.Struct, none_ms: int) -> Put:
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
    length = _INT16 if kind == "string" else _INT32
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
    none_count = -1 if is_nullable else 0

    def put(out: bytearray, values: Any) -> None:
        count = none_count if values is None else len(values)
        out += uvarint(count + 1) if flexible else _INT32.pack(count)
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
