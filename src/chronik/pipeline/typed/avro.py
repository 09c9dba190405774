"""Avro: a schema becomes Arrow types and a program for the compiled loop in `avro_kernel`.

| Avro | column |
|---|---|
| record | its fields are columns; inside a field, a struct |
| enum, uuid | string |
| fixed, bytes | binary |
| [null, T] | T |
| another union | struct with one field for each branch, named after its type; one of them is set |
| decimal | decimal of at most 38 digits, otherwise binary |
| date, timestamp-* | date, timestamp in microseconds |
| time-*, local-timestamp-* | their number: tables have no such types |

A type that contains itself, and an array of items that take no bytes, cannot be columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chronik.pipeline.typed import avro_kernel as kernel
from chronik.pipeline.typed.slots import MEMORY_BYTES_MAX, Buffers, Slot, joined, memory_bytes
from chronik.pipeline.typed.writer_schema import SINGLE, Decoded, Numbers, SchemaError, WriterField

PRIMITIVES: dict[str, tuple[int, Any]] = {
    "boolean": (kernel.BOOL, pa.bool_()),
    "int": (kernel.INT, pa.int32()),
    "long": (kernel.LONG, pa.int64()),
    "float": (kernel.FLOAT, pa.float32()),
    "double": (kernel.DOUBLE, pa.float64()),
    "bytes": (kernel.BYTES, pa.binary()),
    "string": (kernel.TEXT, pa.string()),
}
TIMESTAMP = pa.timestamp("us", tz="UTC")
LOGICAL: dict[tuple[str, str], tuple[int, Any]] = {
    ("int", "date"): (kernel.DATE, pa.date32()),
    ("long", "timestamp-millis"): (kernel.MILLIS, TIMESTAMP),
    ("long", "timestamp-micros"): (kernel.MICROS, TIMESTAMP),
    ("long", "timestamp-nanos"): (kernel.NANOS, TIMESTAMP),
}
DIGITS_MAX = 38
DEPTH_MAX = 64
INSTRUCTIONS_MAX = 50_000
_POWERS = np.array([[10**digits >> 64, 10**digits & (2**64 - 1)] for digits in range(DIGITS_MAX + 1)], np.uint64)


class AvroSchema:
    """A parsed schema with its program. Not changed after it is made."""

    def __init__(self, text: str, references: Sequence[str] = ()) -> None:
        """Parse a schema. `references` are the schemas whose types it uses, the innermost first."""
        self._named: dict[str, tuple[Any, str]] = {}
        self._open: list[str] = []
        self._slots: list[Slot] = []
        self._program: list[tuple[int, int, int, int]] = []
        self._branches: list[int] = []
        self._loops = 0
        try:
            for reference in references:
                self._declare(json.loads(reference), "", 0)
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SchemaError(f"the schema is not JSON: {error}") from None
        try:
            self._declare(schema, "", 0)
            self._compile(schema)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SchemaError(f"the schema is not valid Avro: {type(error).__name__}: {error}") from None

    def _compile(self, schema: Any) -> None:
        schema, namespace = self._resolved(schema, "")
        is_record = isinstance(schema, dict) and schema["type"] in ("record", "error")
        self.record = _full_name(schema, namespace) if is_record else ""
        members = schema["fields"] if is_record else [{"name": SINGLE, "type": schema}]
        inner = _namespace(self.record) if is_record else namespace
        if is_record:
            self._open.append(self.record)
        self.columns = [self._emit(member["type"], inner, nested=False) for member in members]
        self.fields = [
            WriterField(member["name"], column.kind, _is_required(member), tuple(member.get("aliases", ())))
            for member, column in zip(members, self.columns, strict=True)
        ]
        if not self.columns:
            raise SchemaError("the record has no fields")

    # -- types that are defined once and used by name ------------------------------------------------------------------

    def _declare(self, schema: Any, namespace: str, depth: int) -> None:
        """Collect the named types, in the order in which Avro defines them."""
        if depth > DEPTH_MAX:
            raise SchemaError(f"types are nested more than {DEPTH_MAX} deep")
        if isinstance(schema, list):
            for branch in schema:
                self._declare(branch, namespace, depth + 1)
        elif isinstance(schema, dict):
            kind = schema["type"]
            if kind in ("record", "error", "enum", "fixed"):
                name = _full_name(schema, namespace)
                self._named[name] = schema, namespace
                for member in schema.get("fields", ()):
                    self._declare(member["type"], _namespace(name), depth + 1)
            elif kind in ("array", "map"):
                self._declare(schema["items" if kind == "array" else "values"], namespace, depth + 1)
            elif not isinstance(kind, str):
                self._declare(kind, namespace, depth + 1)

    def _resolved(self, schema: Any, namespace: str) -> tuple[Any, str]:
        """Return the definition of a type that is given by its name or wrapped in an object."""
        for _ in range(DEPTH_MAX):
            if isinstance(schema, str) and schema not in PRIMITIVES and schema != "null":
                name = schema if "." in schema or not namespace else f"{namespace}.{schema}"
                name = name if name in self._named else schema
                if name not in self._named:
                    raise SchemaError(f"the type {schema} is not defined")
                return self._named[name]
            if (isinstance(schema, dict) and not isinstance(schema["type"], str)) or (
                isinstance(schema, dict)
                and schema["type"] not in PRIMITIVES
                and schema["type"] not in ("null", "record", "error", "enum", "fixed", "array", "map")
            ):
                schema = schema["type"]
            else:
                return schema, namespace
        raise SchemaError(f"types are nested more than {DEPTH_MAX} deep")

    # -- the program ---------------------------------------------------------------------------------------------------

    def _slot(self, kind: Any, code: int, nested: bool) -> Slot:
        self._slots.append(Slot(len(self._slots), kind, code, nested))
        return self._slots[-1]

    def _add(self, code: int, slot: int = 0, first: int = 0, second: int = 0) -> int:
        if len(self._program) >= INSTRUCTIONS_MAX:
            raise SchemaError("the schema is too large")
        self._program.append((code, slot, first, second))
        return len(self._program) - 1

    def _emit(self, schema: Any, namespace: str, *, nested: bool) -> Slot:
        """Append the instructions that decode one value, and return its slot."""
        schema, namespace = self._resolved(schema, namespace)
        if isinstance(schema, list):
            return self._union(schema, namespace, nested)
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind == "null":
            slot = self._slot(pa.bool_(), kernel.BOOL, nested)  # a column that is always null
            self._add(kernel.NULL, slot.number)
            return slot
        if kind in PRIMITIVES:
            return self._primitive(kind, schema if isinstance(schema, dict) else {}, nested)
        if kind in ("array", "map"):
            return self._repeated(kind, schema, namespace, nested)
        if kind == "enum":
            slot = self._slot(pa.string(), kernel.ENUM, nested)
            slot.symbols = tuple(schema["symbols"])
            self._add(kernel.ENUM, slot.number, len(slot.symbols))
            return slot
        if kind == "fixed":
            return self._fixed(schema, nested)
        return self._struct(schema, _full_name(schema, namespace), nested)

    def _primitive(self, kind: str, schema: dict[str, Any], nested: bool) -> Slot:
        logical = schema.get("logicalType")
        code, arrow = LOGICAL.get((kind, str(logical)), PRIMITIVES[kind])
        digits = _decimal_digits(schema) if kind == "bytes" and logical == "decimal" else None
        if digits is not None:
            slot = self._slot(pa.decimal128(*digits), kernel.DECIMAL, nested)
            self._add(kernel.DECIMAL, slot.number, digits[0])
            return slot
        slot = self._slot(arrow, code, nested)
        self._add(code, slot.number)
        return slot

    def _fixed(self, schema: dict[str, Any], nested: bool) -> Slot:
        size = int(schema["size"])
        digits = _decimal_digits(schema) if schema.get("logicalType") == "decimal" else None
        if digits is not None:
            slot = self._slot(pa.decimal128(*digits), kernel.DECIMAL_FIXED, nested)
            self._add(kernel.DECIMAL_FIXED, slot.number, size, digits[0])
            return slot
        slot = self._slot(pa.binary(), kernel.FIXED, nested)
        slot.size = size
        self._add(kernel.FIXED, slot.number, size)
        return slot

    def _struct(self, schema: dict[str, Any], name: str, nested: bool) -> Slot:
        if name in self._open:
            raise SchemaError(f"the type {name} contains itself")
        if not schema["fields"]:
            raise SchemaError(f"the record {name} has no fields")
        self._open.append(name)
        slot = self._slot(None, kernel.SET, nested)
        self._add(kernel.SET, slot.number, -1)
        slot.children = [self._emit(member["type"], _namespace(name), nested=nested) for member in schema["fields"]]
        names = [member["name"] for member in schema["fields"]]
        slot.kind = pa.struct([pa.field(n, child.kind) for n, child in zip(names, slot.children, strict=True)])
        self._open.pop()
        return slot

    def _repeated(self, kind: str, schema: dict[str, Any], namespace: str, nested: bool) -> Slot:
        item = schema["items" if kind == "array" else "values"]
        if kind == "array" and self._bytes_min(item, namespace, ()) == 0:
            raise SchemaError("an array has items that take no bytes")
        slot = self._slot(None, kernel.SET, nested)
        loop, self._loops = self._loops, self._loops + 1
        begin = self._add(kernel.LOOP, 0, loop)
        if kind == "map":
            keys = self._emit("string", "", nested=True)
            values = self._emit(item, namespace, nested=True)
            slot.kind = pa.map_(pa.string(), values.kind)
            slot.children = [keys, values]
        else:
            values = self._emit(item, namespace, nested=True)
            slot.kind = pa.list_(pa.field("element", values.kind))
            slot.children = [values]
        self._add(kernel.NEXT, 0, loop, begin + 1)
        self._program[begin] = kernel.LOOP, 0, loop, len(self._program)
        self._add(kernel.SET, slot.number, slot.children[0].number)
        return slot

    def _union(self, branches: list[Any], namespace: str, nested: bool) -> Slot:
        union = len(self._branches)
        self._branches += [0] * len(branches)
        begin = self._add(kernel.UNION, 0, union, len(branches))
        present = [number for number, branch in enumerate(branches) if branch not in ("null", {"type": "null"})]
        if not present:
            slot = self._slot(pa.bool_(), kernel.BOOL, nested)
            self._branches[union:] = [begin + 1] * len(branches)
            self._add(kernel.NULL, slot.number)
            return slot
        ends: list[int] = []
        if len(present) == 1:
            self._branches[union + present[0]] = len(self._program)
            slot = self._emit(branches[present[0]], namespace, nested=nested)
        else:
            slot = self._members(branches, present, namespace, nested, union, ends)
        if len(present) < len(branches):
            ends.append(self._add(kernel.JUMP))
            nothing = len(self._program)
            for number in range(len(branches)):
                if number not in present:
                    self._branches[union + number] = nothing
            self._add_nulls(slot)
        for jump in ends:
            self._program[jump] = kernel.JUMP, 0, len(self._program), 0
        return slot

    def _members(
        self, branches: list[Any], present: list[int], namespace: str, nested: bool, union: int, ends: list[int]
    ) -> Slot:
        """Emit a union of several types: a struct with one member for each, of which one is set."""
        slot = self._slot(None, kernel.SET, nested)
        names: list[str] = []
        jumps: list[int] = []
        for number in present:
            resolved, _ = self._resolved(branches[number], namespace)
            names.append(_type_name(resolved))
            self._branches[union + number] = len(self._program)
            self._add(kernel.SET, slot.number, -1)
            slot.children.append(self._emit(branches[number], namespace, nested=nested))
            jumps.append(self._add(kernel.JUMP))
        # All members' slots are known only now.
        for place, jump in enumerate(jumps):
            self._program[jump] = kernel.JUMP, 0, len(self._program), 0
            for other in slot.children[:place] + slot.children[place + 1 :]:
                self._add_nulls(other)
            ends.append(self._add(kernel.JUMP))
        slot.kind = pa.struct([pa.field(n, child.kind) for n, child in zip(names, slot.children, strict=True)])
        return slot

    def _add_nulls(self, slot: Slot) -> None:
        """Append instructions for a null: each array at the same level gets a place for it."""
        self._add(kernel.NULL, slot.number, slot.size if slot.code == kernel.FIXED else slot.words)
        if pa.types.is_struct(slot.kind):
            for child in slot.children:
                self._add_nulls(child)

    def _bytes_min(self, schema: Any, namespace: str, seen: tuple[str, ...]) -> int:
        """Return 0 if a value may take no bytes, otherwise 1."""
        schema, namespace = self._resolved(schema, namespace)
        kind = schema if isinstance(schema, str) else "union" if isinstance(schema, list) else schema["type"]
        if kind == "null":
            return 0
        if kind == "fixed":
            return min(1, int(schema["size"]))
        if kind in ("record", "error"):
            name = _full_name(schema, namespace)
            if name in seen:
                return 1
            sizes = [self._bytes_min(each["type"], _namespace(name), (*seen, name)) for each in schema["fields"]]
            return max(sizes, default=0)
        return 1

    # -- decoding ------------------------------------------------------------------------------------------------------

    def decode(self, data: npt.NDArray[np.uint8], starts: Numbers, stops: Numbers) -> Decoded:
        size = int((stops - starts).sum())
        if len(starts) > 1 and memory_bytes(self._slots, len(starts), size) > MEMORY_BYTES_MAX:
            half = len(starts) // 2
            return joined(
                self.decode(data, starts[:half], stops[:half]), self.decode(data, starts[half:], stops[half:]), half
            )
        buffers = Buffers(self._slots, len(starts), size)
        program = np.array(self._program, np.int64).reshape(-1, 4)
        branches = np.array(self._branches or [0], np.int64)
        loops = np.zeros(self._loops + 1, np.int64)
        counts, sizes, faults = buffers.counts, buffers.sizes, buffers.faults
        filled = *buffers.pools, faults
        kernel.decode(data, starts, stops, program, branches, buffers.table, counts, sizes, loops, _POWERS, *filled)
        bad = np.flatnonzero(faults)
        reasons = [kernel.FAULTS[int(faults[row])] for row in bad]
        return Decoded(buffers.arrays(self.columns), np.flatnonzero(faults == 0), bad, reasons)


def _full_name(schema: dict[str, Any], namespace: str) -> str:
    name = str(schema["name"])
    if "." in name:
        return name
    own = schema.get("namespace", namespace)
    return f"{own}.{name}" if own else name


def _namespace(full_name: str) -> str:
    return full_name.rpartition(".")[0]


def _type_name(schema: Any) -> str:
    """Name a member of a union after its type."""
    if isinstance(schema, dict) and "name" in schema:
        return str(schema["name"]).rpartition(".")[2]
    return str(schema if isinstance(schema, str) else schema["type"])


def _is_required(member: dict[str, Any]) -> bool:
    kind = member["type"]
    allows_null = kind == "null" or (isinstance(kind, list) and "null" in kind)
    return "default" not in member and not allows_null


def _decimal_digits(schema: dict[str, Any]) -> tuple[int, int] | None:
    """Return precision and scale, or None if they are invalid: Avro then ignores the logical type."""
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if (
        isinstance(precision, int)
        and isinstance(scale, int)
        and 0 < precision <= DIGITS_MAX
        and 0 <= scale <= precision
    ):
        return precision, scale
    return None
