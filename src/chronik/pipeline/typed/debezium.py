"""Debezium's change events: the row after a change as columns, and what kind of change it is.

An event is an envelope with `before`, `after`, `op` and more, as JSON also inside `{"schema", "payload"}`. The
transform ExtractNewRecordState makes a flat row of it, with `__deleted` if it is configured so. `op` is c, u or r (a
row of a snapshot) for a new state, and d for a deletion. Other events (t: truncate, m: message) have no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.typed.writer_schema import Decoded, Numbers, SchemaError, WriterField, WriterSchema

OP, OLD = "chronik_op", "chronik_old"
"""Hidden columns of decoded events: the kind of change, and the identity of the row before it."""
HIDDEN = (pa.field(OP, pa.string()), pa.field(OLD, pa.binary()))
DELETE = "d"
STATES = ("c", "u", "r")
FLAT_DELETED = "__deleted"
_SEPARATOR, _ESCAPE = "\x1f", "\x1e"


def identities(columns: Sequence[Any]) -> Any:
    """Return what identifies each row: the bytes of one column, or the texts of several. Null if any of them is."""
    if len(columns) == 1:
        return _text(columns[0]).cast(pa.binary())
    parts = [
        pc.replace_substring(pc.replace_substring(_text(column), _ESCAPE, _ESCAPE * 2), _SEPARATOR, _ESCAPE + "u")
        for column in columns
    ]
    return pc.binary_join_element_wise(*parts, _SEPARATOR).cast(pa.binary())


def _text(column: Any) -> Any:
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return column
    if pa.types.is_floating(kind) or pa.types.is_nested(kind):
        raise PipelineError(f"a column of the type {kind} cannot be a key: choose another --key")
    return column.cast(pa.string())


class EnvelopeSchema:
    """A schema of events, as the schema of their rows. Has hidden fields for the kind of change."""

    def __init__(self, inner: WriterSchema, key: tuple[str, ...]) -> None:
        self._inner = inner
        self._key = key
        self._number = {field.name: number for number, field in enumerate(inner.fields)}
        self.record = inner.record
        after = self._number.get("after")
        self._is_envelope = "op" in self._number and after is not None
        if self._is_envelope:
            kind = inner.fields[self._number["after"]].kind
            if not pa.types.is_struct(kind):
                raise SchemaError("after is no record, so these are no events of Debezium")
            rows = [WriterField(member.name, member.type) for member in kind]
        else:
            rows = [field for field in inner.fields if field.name != FLAT_DELETED]
        self.fields = [*rows, *(WriterField(hidden.name, hidden.type) for hidden in HIDDEN)]

    def decode(self, data: Any, starts: Numbers, stops: Numbers) -> Decoded:
        decoded = self._inner.decode(data, starts, stops)
        return self._events(decoded) if self._is_envelope else self._flat(decoded)

    def _flat(self, decoded: Decoded) -> Decoded:
        count = len(decoded.good)
        columns = [
            column
            for field, column in zip(self._inner.fields, decoded.columns, strict=True)
            if field.name != FLAT_DELETED
        ]
        mark = self._number.get(FLAT_DELETED)
        is_deleted = pa.array(np.zeros(count, np.bool_))
        if mark is not None:
            is_deleted = pc.fill_null(pc.equal(decoded.columns[mark].cast(pa.string()), "true"), False)
        op = pc.if_else(is_deleted, DELETE, "c")
        return Decoded([*columns, op, pa.nulls(count, pa.binary())], decoded.good, decoded.bad, decoded.reasons)

    def _events(self, decoded: Decoded) -> Decoded:
        op, after = decoded.columns[self._number["op"]].cast(pa.string()), decoded.columns[self._number["after"]]
        number = self._number.get("before")
        before = None if number is None else decoded.columns[number]
        is_delete = pc.fill_null(pc.equal(op, DELETE), False)
        is_state = pc.and_(pc.is_in(op, pa.array(STATES)), after.is_valid())
        is_good = pc.or_(is_delete, is_state)
        columns = []
        for place, member in enumerate(after.type):
            column = pc.struct_field(after, [place])
            old = -1 if before is None else before.type.get_field_index(member.name)
            if before is not None and old >= 0 and before.type.field(old).type == member.type:
                column = pc.if_else(is_delete, pc.struct_field(before, [old]), column)
            columns.append(column)
        old_identity = pa.nulls(len(op), pa.binary())
        if self._key and before is not None and all(before.type.get_field_index(name) >= 0 for name in self._key):
            old_identity = identities([pc.struct_field(before, [before.type.get_field_index(k)]) for k in self._key])
        good = is_good.to_numpy(zero_copy_only=False)
        columns = [column.filter(is_good) for column in (*columns, op, old_identity)]
        bad = np.concatenate([decoded.bad, decoded.good[~good]])
        reasons = [*decoded.reasons, *(_no_row(each) for each in op.filter(pc.invert(is_good)).to_pylist())]
        return Decoded(columns, decoded.good[good], bad, reasons)


class Change(NamedTuple):
    """A change of one row, as JSON of the row. Without JSON, only the record's key identifies the row."""

    is_delete: bool
    row: bytes | None


class _Event(msgspec.Struct):
    before: msgspec.Raw = msgspec.Raw(b"null")
    after: msgspec.Raw = msgspec.Raw(b"null")
    op: str | None = None
    payload: msgspec.Raw = msgspec.Raw(b"null")
    deleted: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"), name=FLAT_DELETED)


class NoRow(Exception):
    """The event is about no row. The text is the reason."""


def json_changes(value: bytes, key: tuple[str, ...]) -> list[Change]:
    """Return the changes of an event: two if the fields of the key differ. Raises NoRow."""
    try:
        event = msgspec.json.decode(value, type=_Event)
        if event.op is None and bytes(event.payload) != b"null":
            value = bytes(event.payload)
            event = msgspec.json.decode(value, type=_Event)
        if event.op is None:
            return [Change(bytes(event.deleted) in (b"true", b'"true"'), value)]
        if event.op == DELETE:
            return [Change(True, None if bytes(event.before) == b"null" else bytes(event.before))]
        if event.op not in STATES or bytes(event.after) == b"null":
            raise NoRow(_no_row(event.op))
        state = Change(False, bytes(event.after))
        if key and bytes(event.before) != b"null":
            old, new = (msgspec.json.decode(row, type=dict[str, Any]) for row in (event.before, event.after))
            if any(old.get(name) != new.get(name) for name in key):
                return [Change(True, bytes(event.before)), state]
    except msgspec.MsgspecError as error:
        raise NoRow(f"no event of Debezium: {error}") from None
    return [state]


def _no_row(op: str | None) -> str:
    return f"an event of Debezium with op {op} and no row: it is about no single row"
