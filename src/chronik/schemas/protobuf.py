"""Protobuf schemas: parsing with imports, the canonical text, the serialized descriptor, and compatibility.

A schema is given as a text, or as the serialized descriptor of its file in base64, which Confluent's clients send. The
compatibility rules are those that Confluent documents: reading old records stays possible if no message is removed, no
field changes its kind, no required field is added or removed, and no fields become mutually exclusive.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from chronik.schemas.proto_descriptor import Files
from chronik.schemas.proto_file import SCALARS, Enum, Field, Message, ProtoFile
from chronik.schemas.proto_parser import parse_file
from chronik.schemas.proto_render import canonical_text, normal_text

FILE_NAME = "default"
_SCALAR_GROUPS = {
    name: group
    for group, names in enumerate(
        (
            ("int32", "int64", "uint32", "uint64", "bool"),
            ("sint32", "sint64"),
            ("string", "bytes"),
            ("fixed32", "sfixed32"),
            ("fixed64", "sfixed64"),
            ("float",),
            ("double",),
        )
    )
    for name in names
}
"""Types of the same group have the same encoding, so one can be read as the other. An enum is in the first group."""
_TEXT_GROUP = _SCALAR_GROUPS["string"]


@dataclass(frozen=True, slots=True)
class _Declared:
    """A type, and the file and package that declare it."""

    type: Message | Enum
    file: str
    package: str


class ProtobufSchema:
    """A parsed schema. `references` maps names of imports to their texts, innermost first."""

    kind = "PROTOBUF"

    def __init__(self, text: str, references: Mapping[str, str]) -> None:
        files = _files(text, references)
        self._file = files.declared[FILE_NAME]
        self._descriptor = files.descriptors[FILE_NAME]
        self._types: dict[str, _Declared] = {}
        for name, file in files.declared.items():
            prefix = f".{file.package}" if file.package else ""
            for path, declared in _declared(file.messages, file.enums, prefix):
                self._types[path] = _Declared(declared, name, file.package)

    def check_new(self) -> None:
        pass

    def canonical(self) -> str:
        return canonical_text(self._file)

    def normalized(self) -> str:
        entries = {}
        for path, declared in self._types.items():
            if isinstance(declared.type, Message) and declared.type.is_map_entry and declared.file == FILE_NAME:
                kinds = {each.name: each.kind for each in declared.type.fields}
                entries[path] = kinds["key"], kinds["value"]
        return normal_text(self._file, self._absolute, entries)

    def formatted(self, name: str) -> str | None:
        """Return the schema in another format that clients request, or None if it is unknown."""
        return base64.b64encode(self._descriptor).decode() if name == "serialized" else None

    def problems_reading(self, writer: ProtobufSchema) -> list[str]:
        """Return why this schema cannot read what `writer` wrote; empty if it can."""
        return _Comparison(writer, self).run()

    def resolve(self, kind: str, scope: str) -> str | None:
        """Return the absolute name of a type that is written inside a scope, the innermost declaration first."""
        if kind.startswith("."):
            return kind if kind in self._types else None
        while True:
            if f"{scope}.{kind}" in self._types:
                return f"{scope}.{kind}"
            if not scope:
                return None
            scope = scope.rpartition(".")[0]

    def _absolute(self, kind: str, scope: str) -> str:
        return kind if kind in SCALARS else self.resolve(kind, scope) or kind

    def type(self, path: str) -> _Declared | None:
        return self._types.get(path)

    @property
    def file(self) -> ProtoFile:
        return self._file


def compiled(text: str, references: Mapping[str, str]) -> dict[str, bytes]:
    """Return the serialized descriptors of a schema (FILE_NAME) and its imports, imports first.

    Raises InvalidSchema.
    """
    return _files(text, references).descriptors


def _files(text: str, references: Mapping[str, str]) -> Files:
    files = Files()
    for name, imported in references.items():
        _add(files, name, imported)
    _add(files, FILE_NAME, text)
    return files


def _add(files: Files, name: str, text: str) -> ProtoFile:
    data = _serialized(text)
    if data is not None:
        return files.add_serialized(name, data)
    file = parse_file(text)
    files.add(name, file)
    return file


def _serialized(text: str) -> bytes | None:
    """Return the bytes of a text in base64. No text of a Protobuf file with a declaration is base64: it has spaces."""
    try:
        return base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None


def _declared(messages: list[Message], enums: list[Enum], prefix: str) -> Iterator[tuple[str, Message | Enum]]:
    for enum in enums:
        yield f"{prefix}.{enum.name}", enum
    for message in messages:
        path = f"{prefix}.{message.name}"
        yield path, message
        groups = [each.group for each in message.all_fields() if each.group is not None]
        yield from _declared([*message.messages, *groups], message.enums, path)


@dataclass
class _Comparison:
    """Compares the schema of old records with the one that reads them."""

    old: ProtobufSchema
    new: ProtobufSchema
    problems: list[str] = field(default_factory=list)
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def run(self) -> list[str]:
        old, new = self.old.file, self.new.file
        if old.package != new.package:
            self._add("PACKAGE_CHANGED", "#/", "the package changes")
        scopes = tuple(f".{each.package}" if each.package else "" for each in (old, new))
        self._messages(old.messages, new.messages, scopes[0], scopes[1], "#")
        return self.problems

    def _add(self, kind: str, path: str, text: str) -> None:
        self.problems.append(f'{{errorType:"{kind}", description:"at {path}: {text}"}}')

    def _messages(self, old: list[Message], new: list[Message], old_scope: str, new_scope: str, path: str) -> None:
        known = {each.name: each for each in new}
        for message in old:
            inner = f"{path}/{message.name}"
            successor = known.get(message.name)
            if successor is not None:
                scopes = f"{old_scope}.{message.name}", f"{new_scope}.{message.name}"
                self._message(message, successor, *scopes, inner)
                self._messages(message.messages, successor.messages, *scopes, inner)
            elif not message.is_map_entry:
                self._add("MESSAGE_REMOVED", inner, "the message is removed")

    def _message(self, old: Message, new: Message, old_scope: str, new_scope: str, path: str) -> None:
        old_fields, new_fields = ({each.number: each for each in message.all_fields()} for message in (old, new))
        old_oneofs, new_oneofs = (
            {each.number: oneof.name for oneof in message.oneofs for each in oneof.fields} for message in (old, new)
        )
        self._exclusions(new, old_fields, old_oneofs, path)
        kept_oneofs = {each.name for each in new.oneofs} | {
            name for number, name in old_oneofs.items() if number in new_fields
        }
        for number in sorted({*old_fields, *new_fields}):
            before, after = old_fields.get(number), new_fields.get(number)
            if before is None and after is not None:
                if after.label == "required":
                    self._add("REQUIRED_FIELD_ADDED", f"{path}/{number}", f"the required field {after.name} is added")
            elif after is None and before is not None:
                oneof = old_oneofs.get(number)
                if before.label == "required":
                    self._add(
                        "REQUIRED_FIELD_REMOVED", f"{path}/{number}", f"the required field {before.name} is removed"
                    )
                elif oneof is not None and oneof in kept_oneofs:
                    text = f"the field {before.name} of the oneof {oneof} is removed"
                    self._add("ONEOF_FIELD_REMOVED", f"{path}/{oneof}/{number}", text)
            elif before is not None and after is not None:
                place = f"{path}/{new_oneofs[number]}/{number}" if number in new_oneofs else f"{path}/{number}"
                self._field(before, after, old_scope, new_scope, place)

    def _exclusions(self, new: Message, old_fields: dict[int, Field], old_oneofs: dict[int, str], path: str) -> None:
        """Fields that could all be set become members of one oneof: it keeps only the last one."""
        for oneof in new.oneofs:
            groups, moved = set(), 0
            for each in oneof.fields:
                if each.number in old_oneofs:
                    groups.add(old_oneofs[each.number])
                elif each.number in old_fields:
                    groups.add(str(each.number))
                    moved += 1
            if len(groups) > 1:
                kind = "MULTIPLE_FIELDS_MOVED_TO_ONEOF" if moved > 1 else "FIELD_MOVED_TO_EXISTING_ONEOF"
                self._add(kind, f"{path}/{oneof.name}", f"independent fields become members of the oneof {oneof.name}")

    def _field(self, old: Field, new: Field, old_scope: str, new_scope: str, path: str) -> None:
        sides = (self.old, old, old_scope), (self.new, new, new_scope)
        old_maps, new_maps = (_map_kinds(schema, each, scope) for schema, each, scope in sides)
        if old_maps is None and new_maps is None:
            self._kind(old.kind, new.kind, (old.label, new.label), old_scope, new_scope, path)
        elif old_maps is None or new_maps is None:
            self._add("FIELD_KIND_CHANGED", path, f"the type of {new.name} changes from {old.kind} to {new.kind}")
        else:
            for before, after in zip(old_maps, new_maps, strict=True):
                self._kind(before, after, ("", ""), old_scope, new_scope, path)

    def _kind(self, old: str, new: str, labels: tuple[str, str], old_scope: str, new_scope: str, path: str) -> None:
        old_path, new_path = self.old.resolve(old, old_scope), self.new.resolve(new, new_scope)
        old_group, new_group = (
            _scalar_group(schema, kind, place)
            for schema, kind, place in ((self.old, old, old_path), (self.new, new, new_path))
        )
        if (old_group is None) != (new_group is None):
            self._add("FIELD_KIND_CHANGED", path, f"the type changes from {old} to {new}")
        elif old_group != new_group:
            self._add("FIELD_SCALAR_KIND_CHANGED", path, f"the type changes from {old} to {new}")
        elif old_group is not None:
            if labels[0] and labels[1] and labels[0] != labels[1] and old_group != _TEXT_GROUP:
                text = f"the label of a number changes from {labels[0]} to {labels[1]}"
                self._add("FIELD_NUMERIC_LABEL_CHANGED", path, text)
        else:
            self._message_kinds(old_path or old, new_path or new, path)

    def _message_kinds(self, old: str, new: str, path: str) -> None:
        before, after = self.old.type(old), self.new.type(new)
        if before is None or after is None:
            if old != new:
                self._add("FIELD_NAMED_TYPE_CHANGED", path, f"the type changes from {old} to {new}")
            return
        if _local_name(old, before) != _local_name(new, after):
            self._add("FIELD_NAMED_TYPE_CHANGED", path, f"the type changes from {old} to {new}")
            return
        if (before.file, after.file) == (FILE_NAME, FILE_NAME) or (old, new) in self._seen:
            return  # compared with the file's other messages, or already
        self._seen.add((old, new))
        if isinstance(before.type, Message) and isinstance(after.type, Message):
            count = len(self.problems)
            self._message(before.type, after.type, old, new, path)
            if len(self.problems) > count:
                self._add("FIELD_NAMED_TYPE_CHANGED", path, f"the type {new} changes")


def _map_kinds(schema: ProtobufSchema, each: Field, scope: str) -> tuple[str, str] | None:
    if each.map_kinds is not None:
        return each.map_kinds
    path = schema.resolve(each.kind, scope)
    declared = None if path is None else schema.type(path)
    if declared is None or not isinstance(declared.type, Message) or not declared.type.is_map_entry:
        return None
    kinds = {each.name: each.kind for each in declared.type.fields}
    return kinds["key"], kinds["value"]


def _scalar_group(schema: ProtobufSchema, kind: str, path: str | None) -> int | None:
    """Return None for a message."""
    declared = None if path is None else schema.type(path)
    if declared is not None and isinstance(declared.type, Enum):
        return 0
    return None if declared is not None else _SCALAR_GROUPS.get(kind)


def _local_name(path: str, declared: _Declared) -> str:
    return path.removeprefix(f".{declared.package}") if declared.package else path
