"""Layouts of Kafka's messages, from kio's classes: one module per API and version, loaded on first use.

A `Structure` lists the fields of one message or nested structure. Everything here is immutable and depends only on
kio's release, so it is cached for the process. `old_layouts` and `new_layouts` have the layouts
that kio lacks.
"""

import dataclasses
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin

from kio.index import load_request_schema, load_response_schema

from chronik.wire.api import known_versions
from chronik.wire.errors import MalformedRequest
from chronik.wire.new_layouts import NEW_REQUESTS, NEW_RESPONSES
from chronik.wire.old_layouts import OLD_REQUESTS, OLD_RESPONSES

Direction = Literal["request", "response"]

MISSING: Final = dataclasses.MISSING


class Field(NamedTuple):
    """One field. `kind` is kio's name of the primitive type; for structures it is "entity" and `nested` is set."""

    name: str
    kind: str
    nested: "Structure | None"
    is_array: bool
    is_nullable: bool
    tag: int | None
    default: Any
    """A plain value; MISSING if the schema defines none."""


class Structure(NamedTuple):
    entity: type[Any]
    flexible: bool
    fields: tuple[Field, ...]
    """In wire order, tagged fields last."""


@cache
def load(key: int, version: int, direction: Direction) -> Structure:
    """Return the layout of a message. Raises MalformedRequest for an unknown key or version."""
    if version not in known_versions(key):
        raise MalformedRequest(f"API {key} has no version {version}")
    return _structure(_entity(key, version, direction))


def _entity(key: int, version: int, direction: Direction) -> Any:
    is_request = direction == "request"
    old = (OLD_REQUESTS if is_request else OLD_RESPONSES).get((key, version))
    if old is not None:
        return old
    new = (NEW_REQUESTS if is_request else NEW_RESPONSES).get((key, version))
    if new is not None:
        return new()
    return load_request_schema(key, version) if is_request else load_response_schema(key, version)


@cache
def has_field(key: int, direction: Direction, path: tuple[str, ...], name: str) -> bool:
    """Whether any version has that field in the structure at `path`; distinguishes an absent field from a misspelt one.

    The newest versions come first: they have nearly all fields, and each version checked imports a module.
    """
    for version in reversed(known_versions(key)):
        structure: Structure | None = load(key, version, direction)
        for step in path:
            structure = next((f.nested for f in structure.fields if f.name == step), None) if structure else None
        if structure and any(field.name == name for field in structure.fields):
            return True
    return False


@cache
def _structure(entity: type[Any]) -> Structure:
    fields = [_field(field) for field in dataclasses.fields(entity)]
    fields.sort(key=lambda field: -1 if field.tag is None else field.tag)
    return Structure(entity, entity.__flexible__, tuple(fields))


def _field(field: "dataclasses.Field[Any]") -> Field:
    type_, is_nullable = _without_none(field.type)
    is_array = get_origin(type_) is tuple
    if is_array:
        # Only uuid elements may be None: kio uses None for the zero uuid.
        type_, _ = _without_none(get_args(type_)[0])
    nested = _structure(type_) if hasattr(type_, "__flexible__") else None
    kind = "entity" if nested else field.metadata["kafka_type"]
    return Field(field.name, kind, nested, is_array, is_nullable, field.metadata.get("tag"), field.default)


def _without_none(type_: Any) -> tuple[Any, bool]:
    if get_origin(type_) not in (UnionType, Union):
        return type_, False
    (inner,) = (arg for arg in get_args(type_) if arg is not NoneType)
    return inner, True
