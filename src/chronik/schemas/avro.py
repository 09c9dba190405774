"""Avro schemas: parsing with references, the canonical text, and compatibility.

The canonical text is that of Java's library, which other registries store: known attributes in a fixed order, other
properties after them in their own order, a name without its namespace where that is inherited.

Names and defaults are checked in new schemas only, as in Confluent's registry: older libraries did not check them, so
registries that are taken over have schemas whose names and defaults are invalid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from chronik.schemas.errors import InvalidSchema

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
RECORDS = frozenset({"record", "error"})
NAMED = RECORDS | {"enum", "fixed"}
INNER = {"array": "items", "map": "values"}
"""The attribute with the type of the elements."""
DEPTH_MAX = 200
UNION_PAIRS_MAX = 100_000
"""Pairs of branches that the comparison of two schemas looks at, over all unions: a few seconds."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KNOWN = {
    "record": {"type", "name", "namespace", "doc", "fields", "aliases"},
    "error": {"type", "name", "namespace", "doc", "fields", "aliases"},
    "enum": {"type", "name", "namespace", "doc", "symbols", "default", "aliases"},
    "fixed": {"type", "name", "namespace", "doc", "size", "aliases"},
    "array": {"type", "items"},
    "map": {"type", "values"},
}
_RESERVED = {"type", "name", "namespace", "doc", "fields", "items", "values", "symbols", "size", "aliases"}
"""Attributes that Java's library does not keep in a type that has no use for them."""
_FIELD_KNOWN = {"name", "type", "doc", "default", "order", "aliases"}


class AvroSchema:
    """A parsed schema. `references` maps names of references to their texts, innermost first."""

    kind = "AVRO"

    def __init__(self, text: str, references: Mapping[str, str]) -> None:
        self._references = [_load(each) for each in references.values()]
        self._tree = _load(text)
        self._check(is_new=False)

    def _check(self, *, is_new: bool) -> None:
        checker = _Checker(is_new)
        for tree in (*self._references, self._tree):
            checker.check(tree, "", 0)

    def check_new(self) -> None:
        self._check(is_new=True)

    def canonical(self) -> str:
        return json.dumps(_rendered(self._tree, "", is_normal=False), ensure_ascii=False, separators=(",", ":"))

    def normalized(self) -> str:
        return json.dumps(_rendered(self._tree, "", is_normal=True), ensure_ascii=False, separators=(",", ":"))

    def formatted(self, name: str) -> str | None:
        return self.resolved() if name == "resolved" else None

    def resolved(self) -> str:
        """Return one text with every referenced type at its first use."""
        types: dict[str, Any] = {}
        for tree in self._references:
            _collect(tree, "", types)
        return json.dumps(_inlined(self._tree, "", types, set()))

    def inlined(self) -> str:
        """Return the canonical text of a schema without references that has the same types."""
        return AvroSchema(self.resolved(), {}).canonical()

    def problems_reading(self, writer: AvroSchema) -> list[str]:
        """Return why this schema cannot read what `writer` wrote; empty if it can."""
        from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
        from avro.errors import AvroException
        from avro.schema import parse

        trees = [json.loads(each.resolved(), object_hook=_without_logical_type) for each in (self, writer)]
        if max(map(_union_pairs, trees)) > UNION_PAIRS_MAX:
            raise InvalidSchema(
                f"the unions are too large to be compared: more than {UNION_PAIRS_MAX:,} pairs of branches"
            )
        checker: Any = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
        try:
            lenient = {"validate_names": False, "validate_enum_symbols": False}
            result = checker.get_compatibility(*(parse(json.dumps(tree), **lenient) for tree in trees))
        except (AvroException, RecursionError, TypeError, ValueError) as error:
            raise InvalidSchema(f"the Avro schema is invalid: {error}") from None
        if result.compatibility is SchemaCompatibilityType.compatible:
            return []
        kinds = [getattr(kind, "name", str(kind)) for kind in result.incompatibilities]
        places = sorted(result.locations)
        return [
            f"{{errorType:'{kind.upper()}', description:'{message}', additionalInfo:'{', '.join(places)}'}}"
            for kind, message in zip(kinds, sorted(result.messages) or [""] * len(kinds), strict=False)
        ] or ["the schemas are incompatible"]


def _union_pairs(tree: Any) -> int:
    """Return how many pairs of branches the comparison of a schema with itself has."""
    if isinstance(tree, list):
        return len(tree) ** 2 + sum(map(_union_pairs, tree))
    if not isinstance(tree, dict):
        return 0
    kind = tree["type"]
    if isinstance(kind, (dict, list)):
        return _union_pairs(kind)
    if kind in RECORDS:
        return sum(_union_pairs(field["type"]) for field in tree["fields"])
    return _union_pairs(tree[INNER[kind]]) if kind in INNER else 0


def _without_logical_type(tree: dict[str, Any]) -> dict[str, Any]:
    """It does not affect compatibility, and the library warns of each one that it does not know."""
    return {name: value for name, value in tree.items() if name != "logicalType"}


def _load(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        # A bare name of a primitive type is accepted, as in Java's parser.
        if text.strip() in PRIMITIVES:
            return text.strip()
        raise InvalidSchema(f"the Avro schema is not JSON: {text[:100]}") from None
    except RecursionError:
        raise InvalidSchema("the Avro schema is nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _full_name(tree: Mapping[str, Any], namespace: str) -> tuple[str, str]:
    """Return the full name of a named type, and its namespace."""
    name = tree.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidSchema(f"an Avro type {tree.get('type')} has no name")
    if "." in name:
        return name, name.rpartition(".")[0]
    given = tree.get("namespace", namespace)
    space = given if isinstance(given, str) else namespace
    return (f"{space}.{name}" if space else name), space


class _Checker:
    """Checks trees, of which each may use the types of those before it. `is_new`: names and defaults, too."""

    def __init__(self, is_new: bool) -> None:
        self._known: set[str] = set()
        self._is_new = is_new

    def check(self, tree: Any, namespace: str, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise InvalidSchema(f"the Avro schema is nested more than {DEPTH_MAX} deep")
        if isinstance(tree, str):
            self._check_name(tree, namespace)
        elif isinstance(tree, list):
            self._check_union(tree, namespace, depth)
        elif isinstance(tree, dict):
            self._check_object(tree, namespace, depth)
        else:
            raise InvalidSchema(f"{json.dumps(tree)[:100]} is not an Avro type")

    def _check_name(self, name: str, namespace: str) -> None:
        if name not in PRIMITIVES and _resolve(name, namespace, self._known) is None:
            raise InvalidSchema(f'the Avro type "{name}" is not defined: define it first, or add a reference')

    def _check_union(self, tree: list[Any], namespace: str, depth: int) -> None:
        seen: set[str] = set()
        for branch in tree:
            if isinstance(branch, list):
                raise InvalidSchema("an Avro union may not contain another union directly")
            self.check(branch, namespace, depth + 1)
            key = _branch_key(branch, namespace, self._known)
            if key in seen:
                raise InvalidSchema(f"the Avro union has the branch {key} twice")
            seen.add(key)

    def _check_object(self, tree: dict[str, Any], namespace: str, depth: int) -> None:
        kind = tree.get("type")
        if isinstance(kind, (dict, list)):
            self.check(kind, namespace, depth + 1)
        elif kind in NAMED:
            self._check_named(tree, kind, namespace, depth)
        elif kind in INNER:
            self.check(tree.get(INNER[kind]), namespace, depth + 1)
        elif isinstance(kind, str):
            self._check_name(kind, namespace)
        else:
            raise InvalidSchema(f"an Avro type has no type: {json.dumps(tree)[:100]}")

    def _check_named(self, tree: dict[str, Any], kind: str, namespace: str, depth: int) -> None:
        name, space = _full_name(tree, namespace)
        if self._is_new and not all(_NAME.fullmatch(part) for part in name.split(".")):
            raise InvalidSchema(f"{name} is not a valid Avro name")
        if name in self._known:
            raise InvalidSchema(f"the Avro type {name} is defined twice")
        self._known.add(name)
        _check_aliases(tree, name)
        if kind == "enum":
            _check_symbols(tree, name, self._is_new)
        elif kind == "fixed":
            size = tree.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise InvalidSchema(f"the Avro type {name} has no valid size")
        else:
            self._check_fields(tree, name, space, depth)

    def _check_fields(self, tree: dict[str, Any], record: str, namespace: str, depth: int) -> None:
        fields = tree.get("fields")
        if not isinstance(fields, list):
            raise InvalidSchema(f"the Avro record {record} has no fields")
        names: set[str] = set()
        for field in fields:
            name = field.get("name") if isinstance(field, dict) else None
            if not isinstance(name, str) or not name or (self._is_new and not _NAME.fullmatch(name)):
                raise InvalidSchema(f"a field of the Avro record {record} has no valid name: {name}")
            if name in names:
                raise InvalidSchema(f"the Avro record {record} has the field {name} twice")
            if "type" not in field:
                raise InvalidSchema(f"the field {name} of the Avro record {record} has no type")
            names.add(name)
            _check_aliases(field, f"{record}.{name}")
            self.check(field["type"], namespace, depth + 1)
            if self._is_new and "default" in field and not _fits(field["default"], field["type"]):
                shown = json.dumps(field["default"])[:100]
                raise InvalidSchema(f"the default {shown} of the field {name} of {record} does not have its type")


def _check_aliases(tree: dict[str, Any], name: str) -> None:
    aliases = tree.get("aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise InvalidSchema(f"the aliases of {name} are not a list of names")


def _check_symbols(tree: dict[str, Any], name: str, is_new: bool) -> None:
    symbols = tree.get("symbols")
    if not isinstance(symbols, list) or not all(isinstance(each, str) for each in symbols):
        raise InvalidSchema(f"the Avro enum {name} has no symbols")
    if is_new and not all(_NAME.fullmatch(each) for each in symbols):
        raise InvalidSchema(f"the Avro enum {name} has no valid symbols")
    if len(set(symbols)) != len(symbols):
        raise InvalidSchema(f"the Avro enum {name} has a symbol twice")
    if "default" in tree and tree["default"] not in symbols:
        raise InvalidSchema(f"the default of the Avro enum {name} is not one of its symbols")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a default has its field's type. A union's default may have the type of any branch."""
    if isinstance(kind, list):
        return any(_fits(value, branch) for branch in kind)
    name = kind.get("type") if isinstance(kind, dict) else kind
    if isinstance(name, (dict, list)):
        return _fits(value, name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "null":
        return value is None
    if name == "boolean":
        return isinstance(value, bool)
    if name in ("int", "long"):
        bits = 31 if name == "int" else 63
        is_whole = is_number and (isinstance(value, int) or value.is_integer())
        return is_whole and -(1 << bits) <= value < 1 << bits
    if name in ("float", "double"):
        return is_number or value in ("NaN", "Infinity", "-Infinity")
    if name in ("string", "bytes", "fixed", "enum"):
        return isinstance(value, str)
    if name == "array":
        return isinstance(value, list)
    if name in ("map", "record", "error"):
        return isinstance(value, dict)
    return True


def _resolve(name: str, namespace: str, known: Any) -> str | None:
    full = f"{namespace}.{name}" if namespace and "." not in name else name
    return full if full in known else name if name in known else None


def _branch_key(branch: Any, namespace: str, known: set[str]) -> str:
    if isinstance(branch, dict):
        kind = branch.get("type")
        if isinstance(kind, (dict, list)):
            return _branch_key(kind, namespace, known)
        return _full_name(branch, namespace)[0] if kind in NAMED else str(kind)
    return (_resolve(branch, namespace, known) if isinstance(branch, str) else None) or str(branch)


def _collect(tree: Any, namespace: str, types: dict[str, Any]) -> None:
    """Add the definition of each named type, with its namespace."""
    if isinstance(tree, list):
        for branch in tree:
            _collect(branch, namespace, types)
    elif isinstance(tree, dict):
        kind = tree.get("type")
        if isinstance(kind, (dict, list)):
            _collect(kind, namespace, types)
        elif kind in NAMED:
            name, namespace = _full_name(tree, namespace)
            types[name] = {**tree, "name": name}
            for field in tree["fields"] if kind in RECORDS else ():
                _collect(field["type"], namespace, types)
        elif kind in INNER:
            _collect(tree[INNER[kind]], namespace, types)


def _inlined(tree: Any, namespace: str, types: dict[str, Any], done: set[str]) -> Any:
    """Return the tree with full names, and the definition of a referenced type at its first use."""
    if isinstance(tree, list):
        return [_inlined(branch, namespace, types, done) for branch in tree]
    if isinstance(tree, str):
        if tree in PRIMITIVES:
            return tree
        name = _resolve(tree, namespace, done) or _resolve(tree, namespace, types) or tree
        return name if name in done or name not in types else _inlined(types[name], "", types, done)
    kind = tree.get("type")
    if isinstance(kind, (dict, list)):
        return _inlined(kind, namespace, types, done)
    if kind in NAMED:
        name, space = _full_name(tree, namespace)
        if name in done:
            return name
        done.add(name)
        found = {**tree, "name": name}
        found.pop("namespace", None)
        if kind in RECORDS:
            found["fields"] = [{**each, "type": _inlined(each["type"], space, types, done)} for each in tree["fields"]]
        return found
    if kind in INNER:
        return {**tree, INNER[kind]: _inlined(tree[INNER[kind]], namespace, types, done)}
    resolved = _inlined(kind, namespace, types, done)
    return {**tree, "type": resolved} if kind in PRIMITIVES else resolved


def _rendered(tree: Any, namespace: str, *, is_normal: bool) -> Any:
    """Return the tree as Java's library writes it. A normal form also sorts properties and omits redundant parts."""
    if isinstance(tree, list):
        return [_rendered(branch, namespace, is_normal=is_normal) for branch in tree]
    if isinstance(tree, str):
        # A name in the same namespace is written without it.
        prefix, _, name = tree.rpartition(".")
        return name if prefix and prefix == namespace else tree
    kind = tree["type"]
    if isinstance(kind, (dict, list)):
        return _rendered(kind, namespace, is_normal=is_normal)
    others = {name: value for name, value in tree.items() if name not in _RESERVED | _KNOWN.get(kind, set())}
    if is_normal:
        others = dict(sorted(others.items()))
    if kind == "array":
        return {"type": kind, "items": _rendered(tree["items"], namespace, is_normal=is_normal), **others}
    if kind == "map":
        return {"type": kind, "values": _rendered(tree["values"], namespace, is_normal=is_normal), **others}
    if kind not in NAMED:
        return (
            {"type": kind, **others} if others and kind in PRIMITIVES else _rendered(kind, namespace, is_normal=False)
        )
    full, space = _full_name(tree, namespace)
    found: dict[str, Any] = {"type": kind, "name": full.rpartition(".")[2]}
    if space != namespace:
        found["namespace"] = space
    if tree.get("doc") is not None:
        found["doc"] = tree["doc"]
    if kind == "enum":
        found["symbols"] = tree["symbols"]
        if "default" in tree:
            found["default"] = tree["default"]
    elif kind == "fixed":
        found["size"] = tree["size"]
    else:
        found["fields"] = [_rendered_field(field, space, is_normal=is_normal) for field in tree["fields"]]
    found.update(others)
    if tree.get("aliases"):
        found["aliases"] = sorted(tree["aliases"]) if is_normal else tree["aliases"]
    return found


def _rendered_field(field: dict[str, Any], namespace: str, *, is_normal: bool) -> dict[str, Any]:
    found = {"name": field["name"], "type": _rendered(field["type"], namespace, is_normal=is_normal)}
    if field.get("doc") is not None:
        found["doc"] = field["doc"]
    if "default" in field:
        found["default"] = field["default"]
    if field.get("order", "ascending") != "ascending":
        found["order"] = field["order"]
    if field.get("aliases"):
        found["aliases"] = sorted(field["aliases"]) if is_normal else field["aliases"]
    others = {name: value for name, value in field.items() if name not in _FIELD_KNOWN}
    return {**found, **(dict(sorted(others.items())) if is_normal else others)}
