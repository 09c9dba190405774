"""Which schemas the records of a topic may have: `confluent.value.schema.validation` and its subject name strategy.

A record's key or value begins with a zero byte and the id of its schema, 4 bytes. The id is valid if a version that is
not deleted has it, under the subject that the topic's strategy names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from chronik.schemas.state import State, Version

STRATEGY_PACKAGE = "io.confluent.kafka.serializers.subject."
TOPIC_NAME, RECORD_NAME, TOPIC_RECORD_NAME = (
    f"{STRATEGY_PACKAGE}{name}" for name in ("TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy")
)
STRATEGIES = (TOPIC_NAME, RECORD_NAME, TOPIC_RECORD_NAME)
PREFIX_BYTES = 5
ERRORS_MAX = 100
_MESSAGE = re.compile(r"^((?:  )*)message (\w+) \{", re.MULTILINE)
_PACKAGE = re.compile(r"^package ([\w.]+);", re.MULTILINE)


class SchemaCheck(NamedTuple):
    """What is checked in each record: side is key or value."""

    side: str
    strategy: str


RecordPrefix = tuple[bytes | None, bytes | None]
"""The first bytes of a record's key and value."""


class BatchIds(NamedTuple):
    """The ids in a batch by check, and the records that have none, with the reason."""

    ids: dict[SchemaCheck, set[int]]
    errors: list[tuple[int, str]]


def ids_of(prefixes: Iterable[RecordPrefix], checks: tuple[SchemaCheck, ...]) -> BatchIds:
    """Read the ids. A null value (a tombstone) and a null key need none."""
    ids: dict[SchemaCheck, set[int]] = {check: set() for check in checks}
    errors: list[tuple[int, str]] = []
    sides = [(check.side, 0 if check.side == "key" else 1, ids[check]) for check in checks]
    for number, prefix in enumerate(prefixes):
        for side, place, seen in sides:
            first = prefix[place]
            if first is None:
                continue
            if len(first) < PREFIX_BYTES or first[0]:
                if len(errors) < ERRORS_MAX:
                    errors.append((number, f"the {side} does not begin with a zero byte and a schema id"))
            else:
                seen.add(int.from_bytes(first[1:], "big"))
    return BatchIds(ids, errors)


def unregistered(prefixes: Iterable[RecordPrefix], unknown: dict[SchemaCheck, set[int]]) -> list[tuple[int, str]]:
    """Return the records whose id is unknown, with the reason."""
    errors: list[tuple[int, str]] = []
    for number, prefix in enumerate(prefixes):
        for check, ids in unknown.items():
            first = prefix[0 if check.side == "key" else 1]
            schema_id = -1 if first is None else int.from_bytes(first[1:], "big")
            if schema_id in ids and len(errors) < ERRORS_MAX:
                errors.append(
                    (number, f"the {check.side} has the schema id {schema_id}, which its subject does not have")
                )
    return errors


def is_registered(state: State, topic: str, check: SchemaCheck, schema_id: int) -> bool:
    """Return whether records of the topic may have this schema."""
    if check.strategy == TOPIC_NAME:
        return any(each.id == schema_id for each in state.versions(f"{topic}-{check.side}"))
    prefix = f"{topic}-" if check.strategy == TOPIC_RECORD_NAME else ""
    versions = state.with_id(schema_id, "")
    if not versions:
        return False
    names = record_names(versions[0])
    return any(each.subject.startswith(prefix) and each.subject[len(prefix) :] in names for each in versions)


def record_names(version: Version) -> frozenset[str]:
    """Return the names that a schema's records may have: of Protobuf, those of all messages."""
    if version.kind == "PROTOBUF":
        return _message_names(version.text)
    try:
        tree: Any = json.loads(version.text)
    except (ValueError, RecursionError):
        return frozenset()
    if not isinstance(tree, dict):
        return frozenset({tree} if isinstance(tree, str) else ())
    if version.kind == "JSON":
        return frozenset({str(tree.get("title", ""))})
    name, namespace = str(tree.get("name", tree.get("type"))), tree.get("namespace")
    return frozenset({f"{namespace}.{name}" if namespace and "." not in name else name})


def _message_names(text: str) -> frozenset[str]:
    """Return the full names of the messages of a canonical text, where two spaces indent each level."""
    package = _PACKAGE.search(text)
    path: list[str] = []
    names = set()
    for found in _MESSAGE.finditer(text):
        path = [*path[: len(found[1]) // 2], found[2]]
        names.add(".".join([*([package[1]] if package else []), *path]))
    return frozenset(names)
