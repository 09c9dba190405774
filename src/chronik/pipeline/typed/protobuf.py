"""Protobuf: a message becomes Arrow types and tables for the compiled loop in `protobuf_kernel`.

| Protobuf | column |
|---|---|
| the record's message | its fields are columns; a message in a field is a struct |
| int32, sint32, sfixed32; uint32, fixed32; 64 bits signed | int; long; long |
| uint64, fixed64 | decimal(20, 0) |
| bool, float, double, string, bytes | boolean, float, double, string, binary |
| enum | string; a number that has no name is a string, too |
| repeated, map | array, map; empty if there is none |
| google.protobuf.Timestamp; wrappers (Int64Value, ...) | timestamp in microseconds; their value, or null |
| message that contains itself (google.protobuf.Struct, ...), or without fields | string with its JSON |

A field that is not there is null if its presence is explicit (optional, proto2, oneof, a message). Otherwise it has its
type's empty value. Fields of a oneof are columns of which at most one is set. Groups cannot be columns.

A schema may have several messages. The record says which one by a path of numbers after the schema's id, so each of
them is a writer schema of its own: `MessageRouter`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError

from chronik.pipeline.typed import avro_kernel as storage
from chronik.pipeline.typed import protobuf_kernel as kernel
from chronik.pipeline.typed.slots import MEMORY_BYTES_MAX, Buffers, Slot, joined, memory_bytes
from chronik.pipeline.typed.writer_schema import Decoded, Numbers, SchemaError, WriterField
from chronik.schemas.errors import InvalidSchema
from chronik.schemas.protobuf import FILE_NAME, compiled

Data = npt.NDArray[np.uint8]
_ = descriptor_pb2.FieldDescriptorProto
_UNSIGNED = pa.decimal128(20, 0)
SCALARS: dict[int, tuple[int, int, Any]] = {
    _.TYPE_BOOL: (kernel.BOOL, storage.BOOL, pa.bool_()),
    _.TYPE_INT32: (kernel.INT, storage.INT, pa.int32()),
    _.TYPE_SINT32: (kernel.SINT, storage.INT, pa.int32()),
    _.TYPE_SFIXED32: (kernel.SFIXED, storage.INT, pa.int32()),
    _.TYPE_UINT32: (kernel.UINT, storage.LONG, pa.int64()),
    _.TYPE_FIXED32: (kernel.FIXED, storage.LONG, pa.int64()),
    _.TYPE_INT64: (kernel.LONG, storage.LONG, pa.int64()),
    _.TYPE_SINT64: (kernel.SLONG, storage.LONG, pa.int64()),
    _.TYPE_SFIXED64: (kernel.SFIXED_LONG, storage.LONG, pa.int64()),
    _.TYPE_UINT64: (kernel.ULONG, storage.DECIMAL, _UNSIGNED),
    _.TYPE_FIXED64: (kernel.FIXED_LONG, storage.DECIMAL, _UNSIGNED),
    _.TYPE_FLOAT: (kernel.FLOAT, storage.FLOAT, pa.float32()),
    _.TYPE_DOUBLE: (kernel.DOUBLE, storage.DOUBLE, pa.float64()),
    _.TYPE_STRING: (kernel.TEXT, storage.TEXT, pa.string()),
    _.TYPE_BYTES: (kernel.BYTES, storage.BYTES, pa.binary()),
}
"""For each type: how it is read, how its slot stores it, and its column's type."""
TIMESTAMP = "google.protobuf.Timestamp"
WRAPPERS = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
FIELDS_MAX = 20_000
PATH_MAX = 32
Path = tuple[int, ...]


def protobuf_router(text: str, references: Mapping[str, str]) -> MessageRouter:
    """Raises SchemaError."""
    try:
        return MessageRouter(tuple(compiled(text, references).items()))
    except InvalidSchema as error:
        raise SchemaError(error.message) from None


class MessageRouter:
    """The messages of a schema, by the path in a record. `files` are serialized descriptors, imports first."""

    def __init__(self, files: tuple[tuple[str, bytes], ...]) -> None:
        self.files = files
        proto: Any = descriptor_pb2.FileDescriptorProto
        root = proto.FromString(dict(files)[FILE_NAME])
        self.messages = dict(_paths(root.message_type, (), f"{root.package}." if root.package else ""))
        self._codes = {path: code for code, path in enumerate(self.messages)}
        self._root = root

    def __reduce__(self) -> tuple[Any, ...]:
        return MessageRouter, (self.files,)

    def schema(self, code: int) -> ProtobufSchema:
        """Return the message with this number. Raises SchemaError."""
        return ProtobufSchema(self.files, list(self.messages.values())[code])

    def main_codes(self) -> list[int]:
        """Return the messages at the file's top that no other message of the file uses: what records probably are."""
        used = {each.type_name for message in _all_messages(self._root.message_type) for each in message.field}
        top = [code for path, code in self._codes.items() if len(path) == 1]
        names = list(self.messages.values())
        return [code for code in top if f".{names[code]}" not in used] or top[:1]

    def route(self, data: Data, starts: Numbers, stops: Numbers) -> tuple[Numbers, Numbers]:
        """Return the number of each record's message, -1 if it has no such message, and where its value begins."""
        codes, begins = np.full(len(starts), -1, np.int64), starts + 1
        # The path [0] is one zero byte: the usual case.
        is_first = (starts < stops) & (data[np.minimum(starts, len(data) - 1)] == 0)
        codes[is_first] = self._codes.get((0,), -1)
        for row in np.flatnonzero(~is_first).tolist():
            path, begins[row] = _path(data, int(starts[row]), int(stops[row]))
            codes[row] = self._codes.get(path, -1)
        return codes, begins


def _path(data: Data, at: int, end: int) -> tuple[Path, int]:
    """Read zigzag numbers: how many, then the path."""
    found: list[int] = []
    while not found or len(found) <= found[0]:
        number = shift = 0
        while True:
            if at >= end or shift > 28:
                return (-1,), end
            byte = int(data[at])
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        found.append((number >> 1) ^ -(number & 1))
        if not 0 < found[0] <= PATH_MAX:
            return (-1,), end
    return tuple(found[1:]), at


def _paths(messages: Any, outer: Path, prefix: str) -> Iterator[tuple[Path, str]]:
    for number, message in enumerate(messages):
        path = *outer, number
        yield path, prefix + message.name
        yield from _paths(message.nested_type, path, f"{prefix}{message.name}.")


def _all_messages(messages: Any) -> Iterator[Any]:
    for message in messages:
        yield message
        yield from _all_messages(message.nested_type)


class ProtobufSchema:
    """One message with its tables for the loop. Executors get the descriptors, and make the tables again."""

    def __init__(self, files: tuple[tuple[str, bytes], ...], name: str) -> None:
        self._files = files
        self.record = name
        pool: Any = descriptor_pool.DescriptorPool()
        for _, data in files:
            pool.AddSerializedFile(data)
        descriptor = pool.FindMessageTypeByName(name)
        self._class = message_factory.GetMessageClass(descriptor)
        self._slots: list[Slot] = []
        self._messages: list[tuple[int, int]] = []
        self._fields: list[list[int]] = []
        self._nulls: list[tuple[int, int]] = []
        self._oneofs = 0
        self._open: list[str] = []
        if descriptor.GetOptions().map_entry or not descriptor.fields:
            raise SchemaError(f"the message {name} has no fields, or is the entry of a map")
        by_name = self._message(descriptor, nested=False)
        self.columns = [by_name[field.name] for field in descriptor.fields]
        self.fields = [
            WriterField(field.name, slot.kind, field.is_required, number=field.number)
            for field, slot in zip(descriptor.fields, self.columns, strict=True)
        ]
        if len({field.name.lower() for field in self.fields}) < len(self.fields):
            raise SchemaError("fields differ only in case")

    def __reduce__(self) -> tuple[Any, ...]:
        return ProtobufSchema, (self._files, self.record)

    # -- tables --------------------------------------------------------------------------------------------------------

    def _slot(self, kind: Any, code: int, nested: bool) -> Slot:
        self._slots.append(Slot(len(self._slots), kind, code, nested))
        return self._slots[-1]

    def _message(self, descriptor: Any, *, nested: bool) -> dict[str, Slot]:
        """Add the rows of a message; return the slots of its fields."""
        if len(self._open) >= kernel.DEPTH_MAX:
            raise SchemaError(f"messages are nested more than {kernel.DEPTH_MAX} deep")
        self._open.append(descriptor.full_name)
        ordered = sorted(descriptor.fields, key=lambda field: field.number)
        begin = len(self._fields)
        if begin + len(ordered) > FIELDS_MAX:
            raise SchemaError("the message has too many fields")
        self._messages.append((begin, begin + len(ordered)))
        self._fields += [[-1] * 10 for _ in ordered]
        oneofs: dict[str, int] = {}
        found = {}
        for place, field in enumerate(ordered, begin):
            row = self._fields[place]
            row[kernel.NUMBER] = field.number
            row[kernel.FLAGS] = (
                kernel.REPEATED * field.is_repeated
                + kernel.EXPLICIT * bool(field.has_presence)
                + kernel.REQUIRED * field.is_required
            )
            if field.containing_oneof is not None:
                name = field.containing_oneof.name
                if name not in oneofs:
                    oneofs[name], self._oneofs = self._oneofs, self._oneofs + 1
                row[kernel.ONEOF] = oneofs[name]
            found[field.name] = (
                self._repeated(field, row, nested) if field.is_repeated else self._single(field, row, nested)
            )
        self._open.pop()
        return found

    def _single(self, field: Any, row: list[int], nested: bool) -> Slot:
        slot, number = self._value(field, row, nested)
        row[kernel.SLOT] = number
        row[kernel.NULLS] = len(self._nulls)
        self._add_nulls(slot, is_hidden=number < 0)
        row[kernel.NULLS_END] = len(self._nulls)
        return slot

    def _repeated(self, field: Any, row: list[int], nested: bool) -> Slot:
        slot = self._slot(None, storage.SET, nested)
        row[kernel.SLOT] = slot.number
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            row[kernel.CODE], row[kernel.CHILD] = kernel.MESSAGE, len(self._messages)
            entry = self._message(field.message_type, nested=True)
            slot.children = [entry["key"], entry["value"]]
            slot.kind = pa.map_(entry["key"].kind, entry["value"].kind)
            row[kernel.COUNTED] = entry["key"].number
            return slot
        item, row[kernel.ITEM] = self._value(field, row, nested=True)
        slot.children = [item]
        slot.kind = pa.list_(pa.field("element", item.kind))
        row[kernel.COUNTED] = item.number
        return slot

    def _value(self, field: Any, row: list[int], nested: bool) -> tuple[Slot, int]:
        """Return the slot of a value, and the slot that the loop sets for it: none for a wrapper's message."""
        message = field.message_type
        if field.type == _.TYPE_GROUP:
            raise SchemaError(f"the field {field.name} is a group")
        if message is None:
            code, stored, kind = SCALARS.get(field.type, (kernel.INT, storage.INT, pa.int32()))
            slot = self._slot(kind, stored, nested)
            if field.enum_type is not None:
                slot.kind, slot.storage, slot.convert = pa.string(), kind, _Names(field.enum_type)
            row[kernel.CODE] = code
            return slot, slot.number
        if message.full_name == TIMESTAMP:
            slot = self._slot(pa.timestamp("us", tz="UTC"), storage.MICROS, nested)
            row[kernel.CODE] = kernel.TIMESTAMP
            return slot, slot.number
        if message.full_name in self._open or not message.fields or _contains_itself(message):
            slot = self._slot(pa.string(), storage.BYTES, nested)
            slot.storage, slot.convert = pa.binary(), _Json(message_factory.GetMessageClass(message))
            row[kernel.CODE] = kernel.BYTES
            return slot, slot.number
        row[kernel.CODE] = kernel.MESSAGE
        if message.full_name in WRAPPERS:
            row[kernel.CHILD] = len(self._messages)
            inner = self._message(message, nested=nested)["value"]
            return inner, -1
        slot = self._slot(None, storage.SET, nested)
        row[kernel.CHILD] = len(self._messages)
        by_name = self._message(message, nested=nested)
        slot.children = [by_name[each.name] for each in message.fields]
        slot.kind = pa.struct([pa.field(each.name, by_name[each.name].kind) for each in message.fields])
        return slot, slot.number

    def _add_nulls(self, slot: Slot, *, is_hidden: bool) -> None:
        """Add the slots that get a place for a field that is not there: its own, and the members of a struct."""
        self._nulls.append((slot.number, slot.words))
        if not is_hidden and pa.types.is_struct(slot.kind):
            for child in slot.children:
                self._add_nulls(child, is_hidden=False)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def decode(self, data: Data, starts: Numbers, stops: Numbers) -> Decoded:
        size = int((stops - starts).sum())
        if len(starts) > 1 and memory_bytes(self._slots, len(starts), size) > MEMORY_BYTES_MAX:
            half = len(starts) // 2
            first, second = (starts[:half], stops[:half]), (starts[half:], stops[half:])
            return joined(self.decode(data, *first), self.decode(data, *second), half)
        columns, faults = self._decode(data, starts, stops)
        unordered = np.flatnonzero(faults == kernel.UNORDERED)
        reasons = {int(row): kernel.FAULTS[int(faults[row])] for row in np.flatnonzero(faults) if row not in unordered}
        if not len(unordered):
            bad = np.array(sorted(reasons), np.int64)
            return Decoded(columns, np.flatnonzero(faults == 0), bad, [reasons[row] for row in bad.tolist()])
        return self._with_ordered(columns, data, starts, stops, faults, reasons)

    def _decode(self, data: Data, starts: Numbers, stops: Numbers) -> tuple[list[Any], Numbers]:
        buffers = Buffers(self._slots, len(starts), int((stops - starts).sum()))
        messages, fields = np.array(self._messages, np.int64), np.array(self._fields, np.int64)
        nulls = np.array(self._nulls or [(0, 0)], np.int64)
        seen = np.zeros(self._oneofs + 1, np.int64)
        counts, sizes = buffers.counts, buffers.sizes
        filled = *buffers.pools, buffers.faults
        kernel.decode(data, starts, stops, messages, fields, nulls, seen, buffers.table, counts, sizes, *filled)
        return buffers.arrays(self.columns), buffers.faults

    def _with_ordered(
        self, columns: list[Any], data: Data, starts: Numbers, stops: Numbers, faults: Numbers, reasons: dict[int, str]
    ) -> Decoded:
        """Let Google's library write the records that have another order, and decode them again."""
        rows, values = [], []
        for row in np.flatnonzero(faults == kernel.UNORDERED).tolist():
            try:
                parsed: Any = self._class.FromString(data[starts[row] : stops[row]].tobytes())
                values.append(parsed.SerializeToString(deterministic=True))
                rows.append(row)
            except (DecodeError, ValueError):
                reasons[row] = "the value is not valid Protobuf"
        ends = np.cumsum([len(value) for value in values], dtype=np.int64)
        begins = ends - np.array([len(value) for value in values], np.int64)
        again, again_faults = self._decode(np.frombuffer(b"".join(values) + b"\0", np.uint8), begins, ends)
        for row, fault in zip(rows, again_faults.tolist(), strict=True):
            if fault:
                reasons[row] = kernel.FAULTS.get(fault, "the value has no order that can be read")
        second = [row for row, fault in zip(rows, again_faults.tolist(), strict=True) if not fault]
        order = np.concatenate([np.flatnonzero(faults == 0), np.array(second, np.int64)])
        places = pa.array(np.argsort(order, kind="stable"))
        whole = [pa.concat_arrays(both).take(places) for both in zip(columns, again, strict=True)]
        bad = np.array(sorted(reasons), np.int64)
        return Decoded(whole, np.sort(order), bad, [reasons[row] for row in bad.tolist()])


def _contains_itself(message: Any) -> bool:
    """Return whether a message contains its own type, through other messages or directly."""
    found: dict[str, Any] = {}
    left = [message]
    while left:
        for field in left.pop().fields:
            inner = field.message_type
            if inner is not None and inner.full_name not in found:
                found[inner.full_name] = inner
                left.append(inner)
    return message.full_name in found


class _Names:
    """Turns the numbers of an enum into names."""

    def __init__(self, enum: Any) -> None:
        self._names = {number: value.name for number, value in enum.values_by_number.items()}

    def __call__(self, numbers: Any) -> Any:
        values = numbers.fill_null(0).to_numpy(zero_copy_only=False)
        different, places = np.unique(values, return_inverse=True)
        names = pa.array([self._names.get(int(each), str(each)) for each in different], pa.string())
        return names.take(pa.array(places, pa.int64(), mask=numbers.is_null().to_numpy(zero_copy_only=False)))


class _Json:
    """Turns serialized messages into JSON. It creates Python objects: only for types that have no columns."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __call__(self, values: Any) -> Any:
        return pa.array([None if each is None else self._json(each) for each in values.to_pylist()], pa.string())

    def _json(self, data: bytes) -> str:
        try:
            shown = json_format.MessageToDict(self._kind.FromString(data), preserving_proto_field_name=True)
        except (DecodeError, json_format.Error, KeyError, RecursionError, TypeError, ValueError):
            return "null"
        return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
