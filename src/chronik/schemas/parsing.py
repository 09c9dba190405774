"""Parse a schema of any type, and compare schemas under a compatibility level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from chronik.schemas.errors import InvalidSchema

TYPES = ("AVRO", "JSON", "PROTOBUF")
LEVELS = ("NONE", "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE")


class Parsed(Protocol):
    """A parsed schema."""

    @property
    def kind(self) -> str: ...

    def check_new(self) -> None:
        """Raise InvalidSchema if the text breaks a rule that only schemas which are registered now must keep."""

    def canonical(self) -> str: ...

    def normalized(self) -> str: ...

    def formatted(self, name: str, /) -> str | None:
        """Return the text in another format that clients request, or None if the type has no such format."""

    def problems_reading(self, writer: Any, /) -> list[str]: ...


def parse(kind: str, text: str, references: Mapping[str, str]) -> Parsed:
    """Raise InvalidSchema if the text is not a schema. `references` are in the order in which a parser needs them."""
    if kind == "AVRO":
        from chronik.schemas.avro import AvroSchema

        return AvroSchema(text, references)
    if kind == "JSON":
        from chronik.schemas.json_schema import JsonSchema

        return JsonSchema(text, references)
    if kind == "PROTOBUF":
        from chronik.schemas.protobuf import ProtobufSchema

        return ProtobufSchema(text, references)
    raise InvalidSchema(f"Invalid schema type {kind}: this registry has {', '.join(TYPES)}")


def incompatibilities(level: str, new: Parsed, previous: Sequence[Parsed]) -> list[str]:
    """Return why `new` may not follow the `previous` versions, oldest first; empty if it may."""
    if level == "NONE" or not previous:
        return []
    compared = previous if level.endswith("_TRANSITIVE") else previous[-1:]
    problems: list[str] = []
    for old in reversed(compared):
        if old.kind != new.kind:
            problems.append(f"the new schema has type {new.kind}, an earlier version has type {old.kind}")
            continue
        if level.startswith(("BACKWARD", "FULL")):
            problems += new.problems_reading(old)
        if level.startswith(("FORWARD", "FULL")):
            problems += old.problems_reading(new)
    return problems
