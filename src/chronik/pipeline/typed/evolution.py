"""How a table's columns follow the schemas of its topic. Pure: columns and a schema in, new columns out.

A field that is new becomes a column, and every column may be null. A type widens if each value of the narrower type has
the same value in the wider one. A field that is gone stays a column, null in new rows. Everything else is refused, with
a reason: a type that changes in another way, and a rename. A rename cannot be told from a removal and an addition by
the names alone. So it is one if the new field has the number of the old one or lists the old name as an alias, or if
both fields are required and have the same type: no compatible change replaces one required field by another.

Columns that other jobs added are not changed, unless a schema has a field of that name and a type that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from chronik.pipeline.typed.writer_schema import SINGLE, WriterSchema

KEY, VALUE = "key", "value"
RECORD, SIDE, REQUIRED, NUMBER = b"chronik.record", b"chronik.side", b"chronik.required", b"chronik.number"
"""Metadata of the columns that schemas have added: the record's type and side, whether it was required, its number."""
_WHOLE = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]


class Incompatible(Exception):
    """The columns cannot hold the records of a schema. The text is the reason."""


def column_name(side: str, name: str, taken: frozenset[str]) -> str:
    """Return the column of a field. `taken` are the record's own columns, in lower case."""
    return f"{side}_{name}" if side == KEY or name.lower() in taken or name == SINGLE else name


def evolve(columns: Sequence[Any], schema: WriterSchema, side: str, taken: frozenset[str]) -> list[Any]:
    """Return the columns that hold what they held and the schema's records. Raises Incompatible."""
    by_name = {column.name: column for column in columns}
    lower = {column.name.lower(): column.name for column in columns}
    names = {column_name(side, field.name, taken) for field in schema.fields}
    metadata = {RECORD: schema.record.encode(), SIDE: side.encode()}
    for field in schema.fields:
        name = column_name(side, field.name, taken)
        existing = by_name.get(name)
        if existing is None:
            if lower.get(name.lower(), name) != name or name.lower() in taken:
                raise Incompatible(f"the field {name} differs from the column {lower.get(name.lower())} only in case")
            renamed = _renamed_from(field, by_name.values(), names, schema.record, side, taken)
            if renamed is not None:
                remedy = f"if it is a new field, add the column {name} to the table"
                raise Incompatible(f"the field {renamed} is renamed to {name}: {remedy}")
            marks = metadata | {REQUIRED: b"true" if field.is_required else b"false"}
            if field.number is not None:
                marks[NUMBER] = str(field.number).encode()
            by_name[name] = pa.field(name, field.kind, metadata=marks)
            lower[name.lower()] = name
        else:
            by_name[name] = existing.with_type(widest(existing.type, field.kind, name))
    return list(by_name.values())


def is_first(columns: Sequence[Any], side: str) -> bool:
    """Return whether no schema has added a column for this side yet."""
    return not any((column.metadata or {}).get(SIDE) == side.encode() for column in columns)


def differences(before: Sequence[Any], after: Sequence[Any]) -> str:
    """Describe the change of columns; empty if there is none."""
    types = {column.name: column.type for column in before}
    added = [column.name for column in after if column.name not in types]
    widened = [column.name for column in after if column.name in types and column.type != types[column.name]]
    parts = [f"adds {', '.join(added)}"] * bool(added) + [f"widens {', '.join(widened)}"] * bool(widened)
    return " and ".join(parts)


def _renamed_from(
    field: Any, columns: Any, names: set[str], record: str, side: str, taken: frozenset[str]
) -> str | None:
    aliases = {column_name(side, alias, taken) for alias in field.aliases}
    for column in columns:
        marks = column.metadata or {}
        if column.name in names or marks.get(SIDE) != side.encode() or marks.get(RECORD) != record.encode():
            continue
        was_required = marks.get(REQUIRED) == b"true"
        is_same = field.number is not None and marks.get(NUMBER) == str(field.number).encode()
        if is_same or column.name in aliases or (field.is_required and was_required and column.type == field.kind):
            return str(column.name)
    return None


def widest(old: Any, new: Any, name: str) -> Any:
    """Return the type that holds the values of both. Raises Incompatible."""
    if old == new:
        return old
    if old in _WHOLE and new in _WHOLE:
        return _WHOLE[max(_WHOLE.index(old), _WHOLE.index(new))]
    if {old, new} == {pa.float32(), pa.float64()}:
        return pa.float64()
    if pa.float64() in (old, new) and (old in _WHOLE[:3] or new in _WHOLE[:3]):
        return pa.float64()
    if pa.types.is_decimal(old) and pa.types.is_decimal(new) and old.scale == new.scale:
        return old if old.precision >= new.precision else new
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        members = {member.name: member.type for member in old}
        for member in new:
            kind = members.get(member.name)
            known = kind is not None
            members[member.name] = widest(kind, member.type, f"{name}.{member.name}") if known else member.type
        if len({member.lower() for member in members}) < len(members):
            raise Incompatible(f"fields of {name} differ only in case")
        return pa.struct([pa.field(member, kind) for member, kind in members.items()])
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(pa.field("element", widest(old.value_type, new.value_type, f"{name}.element")))
    if pa.types.is_map(old) and pa.types.is_map(new) and old.key_type == new.key_type:
        return pa.map_(old.key_type, widest(old.item_type, new.item_type, f"{name}.value"))
    raise Incompatible(f"the type of {name} changes from {old} to {new}")


def plain_type(kind: Any) -> Any:
    """Return a type of a table's schema with the names of inner fields that files have here."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(member.name, plain_type(member.type)) for member in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", plain_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    return kind


def fit(array: Any, kind: Any) -> Any:
    """Return the array with a type that `widest` made of its own. The array is not a slice of another one."""
    if array.type == kind:
        return array
    buffers, count = array.buffers(), len(array)
    if pa.types.is_struct(kind):
        members = {member.name: array.field(number) for number, member in enumerate(array.type)}
        children = [
            fit(members[member.name], member.type) if member.name in members else pa.nulls(count, member.type)
            for member in kind
        ]
        return pa.Array.from_buffers(kind, count, buffers[:1], children=children)
    if pa.types.is_list(kind):
        return pa.Array.from_buffers(kind, count, buffers[:2], children=[fit(array.values, kind.value_type)])
    if pa.types.is_map(kind):
        pair = pa.struct([kind.key_field, kind.item_field])
        children = [array.keys, fit(array.items, kind.item_type)]
        entries = pa.Array.from_buffers(pair, len(children[0]), [None], children=children)
        return pa.Array.from_buffers(kind, count, buffers[:2], children=[entries])
    return array.cast(kind)
