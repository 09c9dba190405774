"""Propose the columns of JSON values from a sample, as a schema that `--schema` takes. Pure.

Every column may be null, because a sample does not prove that a field is always there. A field whose values have types
that no column can hold together is left out, with a note; it is still in the record's `value`. So each object of the
sample fits the proposed schema.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from chronik.pipeline.typed import json_values

FIELDS_MAX = 500
MAP_KEYS_MIN = 50
"""An object with this many different names, all with values of one type, becomes a map."""
MAP_SHARE_MAX = 0.2
"""Only if each of these names is in at most this share of the objects."""
DEPTH_MAX = 20
LONG_MAX = 2**63 - 1
TEXT, DATE, TIMESTAMP = "STRING", "DATE", "TIMESTAMP"
LONG, DOUBLE, BOOLEAN = "BIGINT", "DOUBLE", "BOOLEAN"
LIST, OBJECT = "ARRAY", "STRUCT"
FORBIDDEN = frozenset(' ,;{}()="\\')
"""Characters that Delta tables do not allow in names, or that the landing does not find in JSON's names."""
_DATE_CHARACTERS = 10


@dataclass(slots=True)
class _Seen:
    """What was seen at one place of the values."""

    kinds: set[str] = field(default_factory=set)
    objects: int = 0
    members: dict[str, _Seen] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    element: _Seen | None = None

    def add(self, value: Any, depth: int) -> None:
        if value is None:
            return
        kind = _kind(value)
        self.kinds.add(kind)
        if kind == LIST:
            self.element = self.element or _Seen()
            for each in value if depth < DEPTH_MAX else ():
                self.element.add(each, depth + 1)
        elif kind == OBJECT:
            self.objects += 1
            for name, each in value.items() if depth < DEPTH_MAX else ():
                self.counts[name] = self.counts.get(name, 0) + 1
                self.members.setdefault(name, _Seen()).add(each, depth + 1)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A schema in Spark's short form, one column on each line. `objects`: values of the sample that it describes."""

    text: str
    columns: int
    objects: int
    others: int
    """Values that are no JSON objects. They would be dead letters."""
    notes: tuple[str, ...] = ()


def propose(values: Iterable[bytes | None], taken: Sequence[str]) -> Proposal:
    """Return a schema for the values. `taken`: column names that it must not have."""
    seen, others = _Seen(), 0
    for value in values:
        if value is None:
            continue  # a tombstone is a row of nulls
        try:
            decoded = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            decoded = None
        if isinstance(decoded, dict):
            seen.add(decoded, 0)
        else:
            others += 1
    notes: list[str] = []
    columns: list[str] = []
    used = {name.lower() for name in taken}
    for name, each in seen.members.items():
        place = name
        if fault := _name_fault(name, used):
            notes.append(f"{place} is left out: {fault}")
        elif len(columns) >= FIELDS_MAX:
            notes.append(f"{place} is left out: there are more than {FIELDS_MAX} fields")
        elif (kind := _type(each, place, notes)) is not None:
            columns.append(f"{_quoted(name)} {kind}")
            used.add(name.lower())
    return Proposal(",\n".join(columns) + "\n", len(columns), seen.objects, others, tuple(notes))


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return BOOLEAN
    if isinstance(value, int):
        return LONG if -LONG_MAX - 1 <= value <= LONG_MAX else DOUBLE
    if isinstance(value, float):
        return DOUBLE
    if isinstance(value, str):
        return _kind_of_text(value)
    return LIST if isinstance(value, list) else OBJECT


def _kind_of_text(text: str) -> str:
    """Return DATE or TIMESTAMP only for texts that the landing parses as such."""
    kind, name = (datetime.date, DATE) if len(text) == _DATE_CHARACTERS else (datetime.datetime, TIMESTAMP)
    try:
        found = msgspec.convert(text, kind)
        if isinstance(found, datetime.datetime):
            json_values.in_utc(found)
    except (msgspec.ValidationError, json_values.Unreadable):
        return TEXT
    return name if found.year > 1 else TEXT


def _type(seen: _Seen, place: str, notes: list[str]) -> str | None:
    """Return the type that holds everything seen there, or None, with a note, if there is none."""
    kinds = seen.kinds
    if not kinds:
        notes.append(f"{place} is left out: it was null in the whole sample")
        return None
    if kinds <= {TEXT, DATE, TIMESTAMP}:
        return next(iter(kinds)) if len(kinds) == 1 else TEXT
    if kinds <= {LONG, DOUBLE}:
        return LONG if kinds == {LONG} else DOUBLE
    if len(kinds) > 1:
        notes.append(f"{place} is left out: it was {' and '.join(sorted(kinds))}")
        return None
    (kind,) = kinds
    if kind == LIST:
        assert seen.element is not None
        element = _type(seen.element, f"{place}[]", notes)
        return None if element is None else f"ARRAY<{element}>"
    return kind if kind == BOOLEAN else _object_type(seen, place, notes)


def _object_type(seen: _Seen, place: str, notes: list[str]) -> str | None:
    is_map = len(seen.members) >= MAP_KEYS_MIN and max(seen.counts.values()) <= MAP_SHARE_MAX * seen.objects
    if is_map:
        value, ignored = _Seen(), list[str]()
        for each in seen.members.values():
            _merge(value, each)
        kind = _type(value, f"{place}.*", ignored)
        if kind is not None:
            notes.append(f"{place} is a map: it had {len(seen.members)} different names")
            return f"MAP<STRING, {kind}>"
    members: list[str] = []
    used: set[str] = set()
    for name, each in seen.members.items():
        if fault := _name_fault(name, used):
            notes.append(f"{place}.{name} is left out: {fault}")
        elif (kind := _type(each, f"{place}.{name}", notes)) is not None:
            members.append(f"{_quoted(name)}: {kind}")
            used.add(name.lower())
    if not members:
        notes.append(f"{place} is left out: it had no fields with a type")
        return None
    return f"STRUCT<{', '.join(members)}>"


def _merge(into: _Seen, other: _Seen) -> None:
    into.kinds |= other.kinds
    into.objects += other.objects
    for name, each in other.members.items():
        _merge(into.members.setdefault(name, _Seen()), each)
        into.counts[name] = into.counts.get(name, 0) + other.counts[name]
    if other.element is not None:
        into.element = into.element or _Seen()
        _merge(into.element, other.element)


def _name_fault(name: str, used: set[str]) -> str | None:
    """Return why there cannot be a column of this name."""
    if name.lower() in used:
        return "the table has a column of that name"
    if not name or any(each in FORBIDDEN or not each.isprintable() for each in name):
        return "a table cannot have a column of that name"
    return None


def _quoted(name: str) -> str:
    return name if name.isascii() and name.isidentifier() and name.islower() else f"`{name.replace('`', '``')}`"
