"""A Protobuf file as its text declares it: types keep the names and the order in which they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

FIELD_NUMBER_MAX = (1 << 29) - 1
SCALARS = frozenset(
    {"double", "float", "bool", "string", "bytes", "int32", "int64", "uint32", "uint64"}
    | {"sint32", "sint64", "fixed32", "fixed64", "sfixed32", "sfixed64"}
)


class Word(str):
    """A value without quotes: a number, a boolean or the name of an enum's value."""

    __slots__ = ()


Value: TypeAlias = Any
"""Of an option: a text (str), a Word, a dict, or a list of these."""


@dataclass(slots=True)
class Option:
    """`name` is as it is written, for example deprecated, features.field_presence or (my.option).part."""

    name: str
    value: Value


@dataclass(slots=True)
class Field:
    """`kind` is the name of a type as it is written, or map<KEY, VALUE>."""

    name: str
    kind: str
    number: int
    label: str = ""
    options: list[Option] = field(default_factory=list)
    group: Message | None = None

    @property
    def map_kinds(self) -> tuple[str, str] | None:
        if not self.kind.startswith("map<"):
            return None
        key, _, value = self.kind[4:-1].partition(", ")
        return key, value

    def option(self, name: str) -> Value | None:
        return next((each.value for each in self.options if each.name == name), None)


Range: TypeAlias = tuple[int, int]
"""Both ends included."""


@dataclass(slots=True)
class Reserved:
    parts: list[Range | str]


@dataclass(slots=True)
class Extensions:
    ranges: list[Range]
    options: list[Option]


@dataclass(slots=True)
class OneOf:
    name: str
    fields: list[Field] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)


@dataclass(slots=True)
class Extend:
    """Fields that are added to another message."""

    name: str
    fields: list[Field]


@dataclass(slots=True)
class EnumValue:
    name: str
    number: int
    options: list[Option]


@dataclass(slots=True)
class Enum:
    name: str
    values: list[EnumValue] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    reserved: list[Reserved] = field(default_factory=list)


@dataclass(slots=True)
class Message:
    name: str
    fields: list[Field] = field(default_factory=list)
    oneofs: list[OneOf] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    enums: list[Enum] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    reserved: list[Reserved] = field(default_factory=list)
    extensions: list[Extensions] = field(default_factory=list)
    extends: list[Extend] = field(default_factory=list)

    @property
    def is_map_entry(self) -> bool:
        """Whether the message is the entry of a map, as compiled descriptors declare it."""
        return any(each.name == "map_entry" and each.value == "true" for each in self.options)

    def all_fields(self) -> list[Field]:
        return [*self.fields, *(each for oneof in self.oneofs for each in oneof.fields)]


@dataclass(slots=True)
class Method:
    name: str
    request: str
    response: str
    is_request_stream: bool
    is_response_stream: bool
    options: list[Option]


@dataclass(slots=True)
class Service:
    name: str
    methods: list[Method] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)


@dataclass(slots=True)
class ProtoFile:
    syntax: str = ""
    """proto2, proto3, an edition such as 2023, or empty if the text has none (proto2)."""
    package: str = ""
    imports: list[str] = field(default_factory=list)
    public_imports: list[str] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    enums: list[Enum] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)
    extends: list[Extend] = field(default_factory=list)

    @property
    def is_edition(self) -> bool:
        return self.syntax not in ("", "proto2", "proto3")
