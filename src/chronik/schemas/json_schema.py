"""JSON Schema: parsing with references, the canonical text, and compatibility by Confluent's (strict) rules.

A new version may read old data only if it accepts all of it. So adding a property to an open content model is
incompatible: old data may have that property with any value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from chronik.schemas.errors import InvalidSchema

DEPTH_MAX = 100
COMPARISONS_MAX = 100_000
"""Pairs of parts that one comparison of two schemas looks at: a few seconds."""
COMBINED = ("allOf", "anyOf", "oneOf")
_BY_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": (
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "propertyNames",
    ),
}
Part = tuple[str, Any]
"""One aspect of a schema: its class, and what belongs to it."""


class JsonSchema:
    """A parsed schema. `references` maps the addresses that `$ref` uses to texts."""

    kind = "JSON"

    def __init__(self, text: str, references: Mapping[str, str]) -> None:
        self.root = _load(text)
        self._documents = {name: _load(each) for name, each in references.items()}
        _check(self.root)
        base = self.root.get("$id", "") if isinstance(self.root, dict) else ""
        self._base = base if isinstance(base, str) else ""
        self._resolved: dict[tuple[str, int], tuple[Any, Any]] = {}
        """By `$ref` and the document that has it."""
        self._anchors: dict[int, dict[str, Any]] = {}
        for pointer in _refs(self.root, 0):
            self.resolve(pointer, self.root)

    def check_new(self) -> None:
        pass

    def canonical(self) -> str:
        return json.dumps(self.root, separators=(",", ":"), ensure_ascii=False)

    def normalized(self) -> str:
        return json.dumps(self.root, separators=(",", ":"), ensure_ascii=False, sort_keys=True)

    def formatted(self, name: str) -> str | None:
        return None

    def problems_reading(self, writer: JsonSchema) -> list[str]:
        """Return why this schema may refuse what `writer` accepts; empty if it never does."""
        try:
            return _Comparison(writer, self).run()
        except RecursionError:
            raise InvalidSchema("the JSON schema is nested too deeply to be compared") from None

    def resolve(self, ref: str, document: Any) -> tuple[Any, Any]:
        """Return the schema that a `$ref` names, and the document that it is in."""
        key = ref, id(document)
        found = self._resolved.get(key)
        if found is None:
            found = self._resolved[key] = self._resolve(ref, document)
        return found

    def _resolve(self, ref: str, document: Any) -> tuple[Any, Any]:
        address, _, pointer = ref.partition("#")
        if address:
            if address == self._base:
                document = self.root
            elif address in self._documents:
                document = self._documents[address]
            else:
                full = _joined(self._base, address)
                found = next(
                    (each for name, each in self._documents.items() if _joined(self._base, name) == full), None
                )
                if found is None:
                    raise InvalidSchema(f"$ref {ref} cannot be resolved: add a reference with the name {address}")
                document = found
        if pointer and not pointer.startswith("/"):
            return self._anchored(document, pointer, ref), document
        return _at(document, pointer, ref), document

    def _anchored(self, document: Any, name: str, ref: str) -> Any:
        anchors = self._anchors.get(id(document))
        if anchors is None:
            anchors = self._anchors[id(document)] = {}
            _collect_anchors(document, anchors, 0)
        if name not in anchors:
            raise InvalidSchema(f"$ref {ref} cannot be resolved: there is no such anchor")
        return anchors[name]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _load(text: str) -> Any:
    try:
        tree = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InvalidSchema(f"the JSON schema is not JSON ({error}): {text[:100]}") from None
    except RecursionError:
        raise InvalidSchema("the JSON schema is nested too deeply") from None
    if not isinstance(tree, (dict, bool)):
        raise InvalidSchema("a JSON schema is an object, true or false")
    return tree


def _check(tree: Any) -> None:
    from jsonschema import SchemaError
    from jsonschema.validators import Draft7Validator, validator_for

    try:
        validator_for(tree, default=Draft7Validator).check_schema(tree)
    except SchemaError as error:
        raise InvalidSchema(f"the JSON schema is invalid: {error.message[:500]}") from None
    except RecursionError:
        raise InvalidSchema("the JSON schema is nested too deeply") from None
    except Exception as error:
        # What the library does not expect: a $schema that is no string, an $id that is no address.
        raise InvalidSchema(f"the JSON schema is invalid: {error!r:.500}") from None


def _refs(tree: Any, depth: int) -> Iterator[str]:
    if depth > DEPTH_MAX:
        raise InvalidSchema(f"the JSON schema is nested more than {DEPTH_MAX} deep")
    if isinstance(tree, dict):
        ref = tree.get("$ref")
        if isinstance(ref, str):
            yield ref
        for name, each in tree.items():
            if name not in ("enum", "const", "default", "examples"):
                yield from _refs(each, depth + 1)
    elif isinstance(tree, list):
        for each in tree:
            yield from _refs(each, depth + 1)


def _joined(base: str, address: str) -> str:
    try:
        return urljoin(base, address)
    except ValueError as error:
        raise InvalidSchema(f"the address {address} in {base or 'a schema without $id'} is no URI: {error}") from None


def _at(document: Any, pointer: str, ref: str) -> Any:
    if not pointer or pointer == "/":
        return document
    for part in pointer[1:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(document, dict) and name in document:
            document = document[name]
        elif isinstance(document, list) and name.isdecimal() and int(name) < len(document):
            document = document[int(name)]
        else:
            raise InvalidSchema(f"$ref {ref} cannot be resolved: there is no {name}")
    return document


def _collect_anchors(tree: Any, anchors: dict[str, Any], depth: int) -> None:
    """Add the schemas that have an anchor; the first one of a name counts."""
    if depth > DEPTH_MAX or not isinstance(tree, (dict, list)):
        return
    if isinstance(tree, dict):
        anchor, own_id = tree.get("$anchor"), tree.get("$id")
        names = (anchor, own_id[1:] if isinstance(own_id, str) and own_id.startswith("#") else None)
        for name in names:
            if isinstance(name, str):
                anchors.setdefault(name, tree)
    for each in tree.values() if isinstance(tree, dict) else tree:
        _collect_anchors(each, anchors, depth + 1)


class _Side:
    """One of the two schemas that are compared."""

    def __init__(self, schema: JsonSchema) -> None:
        self._schema = schema

    def part(self, tree: Any, document: Any) -> tuple[Part, Any]:
        """Return what a schema is: one class, or the combination of several; and the document that it is in."""
        for _ in range(DEPTH_MAX):
            if not (isinstance(tree, dict) and isinstance(tree.get("$ref"), str)):
                break
            tree, document = self._schema.resolve(tree["$ref"], document)
        if tree is False:
            return ("false", {}), document
        if not isinstance(tree, dict):
            return ("empty", {}), document
        parts = list(_parts(tree))
        if not parts:
            return ("empty", tree), document
        return (parts[0] if len(parts) == 1 else ("allOf", parts)), document


def _parts(tree: dict[str, Any]) -> Iterator[Part]:
    kinds = tree.get("type")
    if isinstance(kinds, list):
        yield "anyOf", [_typed(tree, kind) for kind in kinds]
    elif isinstance(kinds, str):
        yield _typed(tree, kinds)
    else:
        for kind, keywords in _BY_TYPE.items():
            if any(name in tree for name in keywords if name != "format"):
                yield kind, tree
    if "const" in tree:
        yield "const", tree
    elif "enum" in tree:
        yield "enum", tree
    if "not" in tree:
        yield "not", tree
    for name in COMBINED:
        if isinstance(tree.get(name), list):
            yield name, tree[name]


def _typed(tree: dict[str, Any], kind: str) -> Part:
    return ("number", {**tree, "type": kind}) if kind in ("integer", "number") else (kind, tree)


class _Comparison:
    """Finds the changes that make old data invalid. Pairs that are being compared are taken as compatible."""

    def __init__(self, old: JsonSchema, new: JsonSchema) -> None:
        self._old, self._new = _Side(old), _Side(new)
        self._roots = old.root, new.root
        self._running: dict[tuple[int, int], int] = {}
        """The depth of each pair that is being compared."""
        self._compared: dict[tuple[int, int], list[str]] = {}
        """The result of each pair that needed no assumption about one that was being compared."""
        self._assumed = DEPTH_MAX
        """The lowest depth of a pair that the current comparison takes as compatible."""
        self._depth = 0
        self._count = 0

    def run(self) -> list[str]:
        old, new = self._roots
        return self._compare(old, old, new, new, "#")

    def _spend(self) -> None:
        self._count += 1
        if self._count > COMPARISONS_MAX:
            raise InvalidSchema(
                f"the schemas are too complex to be compared: more than {COMPARISONS_MAX:,} pairs of parts"
            )

    def _compare(self, old: Any, old_doc: Any, new: Any, new_doc: Any, path: str) -> list[str]:
        self._spend()
        pair, depth = (id(old), id(new)), self._depth
        is_tree = isinstance(old, dict) and isinstance(new, dict)
        if depth > DEPTH_MAX:
            self._assumed = -1
            return []
        if is_tree and pair in self._running:
            self._assumed = min(self._assumed, self._running[pair])
            return []
        if is_tree and pair in self._compared:
            return self._compared[pair]
        outer, self._assumed = self._assumed, DEPTH_MAX
        if is_tree:
            self._running[pair] = depth
        self._depth += 1
        try:
            (old_part, old_doc), (new_part, new_doc) = self._old.part(old, old_doc), self._new.part(new, new_doc)
            problems = self._parts(old_part, old_doc, new_part, new_doc, path)
        finally:
            self._depth -= 1
            self._running.pop(pair, None)
        if is_tree and self._assumed >= depth:
            # Where else the pair is, one of its problems is enough: there may be very many such places.
            self._compared[pair] = problems[:1]
        self._assumed = min(self._assumed, outer)
        return problems

    def _inner(self, old: Any, old_doc: Any, new: Any, new_doc: Any, path: str) -> list[str]:
        """Compare members of combined schemas: parts, or schemas."""
        if isinstance(old, tuple) or isinstance(new, tuple):
            self._spend()
            old_part, old_doc = (old, old_doc) if isinstance(old, tuple) else self._old.part(old, old_doc)
            new_part, new_doc = (new, new_doc) if isinstance(new, tuple) else self._new.part(new, new_doc)
            return self._parts(old_part, old_doc, new_part, new_doc, path)
        return self._compare(old, old_doc, new, new_doc, path)

    def _parts(self, old: Part, old_doc: Any, new: Part, new_doc: Any, path: str) -> list[str]:
        kind, other = old[0], new[0]
        if kind not in COMBINED and other in COMBINED:
            members = new[1]
            if len(members) == 1 or other in ("anyOf", "oneOf"):
                results = [self._inner(old, old_doc, each, new_doc, path) for each in members]
                if not all(results):
                    return []
        elif kind in COMBINED and other not in COMBINED:
            members = old[1]
            if len(members) == 1 or kind == "allOf":
                results = [self._inner(each, old_doc, new, new_doc, path) for each in members]
                if not all(results):
                    return []
        if kind == "false" or other == "empty":
            return []
        if kind in COMBINED and other in COMBINED:
            return self._combined(kind, old[1], old_doc, other, new[1], new_doc, path)
        if kind != other:
            return [_problem("TYPE_CHANGED", path)]
        match kind:
            case "object":
                return self._objects(old[1], old_doc, new[1], new_doc, path)
            case "array":
                return self._arrays(old[1], old_doc, new[1], new_doc, path)
            case "not":
                is_narrower = not _Comparison._reversed(self, new[1]["not"], new_doc, old[1]["not"], old_doc, path)
                return [] if is_narrower else [_problem("NOT_TYPE_EXTENDED", f"{path}/not")]
            case "const":
                return [] if old[1]["const"] == new[1]["const"] else [_problem("ENUM_ARRAY_CHANGED", f"{path}/const")]
            case "enum":
                known = set(map(_key, new[1]["enum"]))
                is_narrower = any(_key(each) not in known for each in old[1]["enum"])
                return [_problem("ENUM_ARRAY_NARROWED", f"{path}/enum")] if is_narrower else []
            case "number":
                return _numbers(old[1], new[1], path)
            case "string":
                return _strings(old[1], new[1], path)
        return []

    def _reversed(self, old: Any, old_doc: Any, new: Any, new_doc: Any, path: str) -> list[str]:
        """Compare with the sides exchanged, for what must not match."""
        self._old, self._new = self._new, self._old
        try:
            return self._compare(old, old_doc, new, new_doc, path)
        finally:
            self._old, self._new = self._new, self._old

    def _combined(
        self, kind: str, olds: list[Any], old_doc: Any, other: str, news: list[Any], new_doc: Any, path: str
    ) -> list[str]:
        olds, news = _distinct(olds), _distinct(news)
        is_single, is_new_single = len(olds) == 1, len(news) == 1
        is_extended = (
            other == "anyOf"
            or (is_single and (is_new_single or other == "oneOf"))
            or (is_new_single and kind == "allOf")
        )
        if kind != other and not is_extended:
            return [_problem("COMBINED_TYPE_CHANGED", path)]
        problems = []
        if len(olds) < len(news) and other == "allOf":
            problems.append(_problem("PRODUCT_TYPE_EXTENDED", path))
        elif len(olds) > len(news) and kind != "allOf":
            problems.append(_problem("SUM_TYPE_NARROWED", path))
        edges = [
            [
                at
                for at, new in enumerate(news)
                if not self._inner(old, old_doc, new, new_doc, f"{path}/{kind}/{number}")
            ]
            for number, old in enumerate(olds)
        ]
        if _matching_size(edges) < min(len(olds), len(news)):
            problems.append(_problem("COMBINED_TYPE_SUBSCHEMAS_CHANGED", path))
        return problems

    def _objects(self, old: dict[str, Any], old_doc: Any, new: dict[str, Any], new_doc: Any, path: str) -> list[str]:
        olds, news = old.get("properties", {}), new.get("properties", {})
        old_required, new_required = set(old.get("required", ())), set(new.get("required", ()))
        problems: list[str] = []
        for name in sorted(olds.keys() | news.keys()):
            where = f"{path}/properties/{name}"
            if name not in news:
                problems += self._removed_property(name, olds[name], old_doc, new, new_doc, where)
            elif name not in olds:
                problems += self._added_property(name, old, old_doc, news[name], new_doc, name in new_required, where)
            else:
                if name in new_required and name not in old_required and not _has_default(news[name]):
                    problems.append(_problem("REQUIRED_ATTRIBUTE_ADDED", f"{path}/required/{name}"))
                problems += self._compare(olds[name], old_doc, news[name], new_doc, where)
        problems += self._additional(old, old_doc, new, new_doc, "additionalProperties", path)
        problems += self._dependencies(old, old_doc, new, new_doc, path)
        problems += _bound(old, new, "maxProperties", path, is_upper=True)
        return problems + _bound(old, new, "minProperties", path, is_upper=False)

    def _removed_property(
        self, name: str, old: Any, old_doc: Any, new: dict[str, Any], new_doc: Any, path: str
    ) -> list[str]:
        if _is_open(new, "Properties"):
            return []
        covering = _covering(new, name, self._spend)
        if covering is not None:
            found = self._compare(old, old_doc, covering, new_doc, path)
            if not found:
                return []
            return [*found, _problem("PROPERTY_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", path)]
        return [] if old is False else [_problem("PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL", path)]

    def _added_property(
        self, name: str, old: dict[str, Any], old_doc: Any, new: Any, new_doc: Any, is_required: bool, path: str
    ) -> list[str]:
        if _is_open(old, "Properties"):
            if self._new.part(new, new_doc)[0][0] == "empty":
                return []
            if not is_required:
                return [_problem("OPTIONAL_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL", path)]
            default = "_WITH_DEFAULT" if _has_default(new) else ""
            return [_problem(f"REQUIRED_PROPERTY{default}_ADDED_TO_OPEN_CONTENT_MODEL", path)]
        problems: list[str] = []
        covering = _covering(old, name, self._spend)
        if covering is not None:
            found = self._compare(covering, old_doc, new, new_doc, path)
            if found:
                problems = [*found, _problem("PROPERTY_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", path)]
        if is_required and not _has_default(new):
            problems.append(_problem("REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL", path))
        return problems

    def _additional(
        self, old: dict[str, Any], old_doc: Any, new: dict[str, Any], new_doc: Any, name: str, path: str
    ) -> list[str]:
        before, after = old.get(name, True), new.get(name, True)
        where = f"{path}/{name}"
        kind = "ADDITIONAL_PROPERTIES" if name == "additionalProperties" else "ADDITIONAL_ITEMS"
        if before is not False and after is False:
            return [_problem(f"{kind}_REMOVED", where)]
        if before is False or after is True or after == {}:
            return []
        if before is True or before == {}:
            return [_problem(f"{kind}_NARROWED", where)]
        return self._compare(before, old_doc, after, new_doc, where)

    def _dependencies(
        self, old: dict[str, Any], old_doc: Any, new: dict[str, Any], new_doc: Any, path: str
    ) -> list[str]:
        olds, news = _dependencies_of(old), _dependencies_of(new)
        problems: list[str] = []
        for name in sorted(news):
            where, before, after = f"{path}/dependencies/{name}", olds.get(name), news[name]
            if isinstance(after, list):
                if not isinstance(before, list):
                    problems.append(_problem("DEPENDENCY_ARRAY_ADDED", where))
                elif not set(after) <= set(before):
                    problems.append(_problem("DEPENDENCY_ARRAY_EXTENDED", where))
            elif before is None or isinstance(before, list):
                problems.append(_problem("DEPENDENCY_SCHEMA_ADDED", where))
            else:
                problems += self._compare(before, old_doc, after, new_doc, where)
        return problems

    def _arrays(self, old: dict[str, Any], old_doc: Any, new: dict[str, Any], new_doc: Any, path: str) -> list[str]:
        old_all, old_each, old_rest = _items(old)
        new_all, new_each, new_rest = _items(new)
        where = f"{path}/items"
        problems: list[str] = []
        if old_all is None and new_all is not None:
            problems.append(_problem("SCHEMA_ADDED", where))
        elif old_all is not None and new_all is not None:
            problems += self._compare(old_all, old_doc, new_all, new_doc, where)
        for number, (before, after) in enumerate(zip(old_each, new_each, strict=False)):
            problems += self._compare(before, old_doc, after, new_doc, f"{where}/{number}")
        for number in range(len(new_each), len(old_each)):
            if new_rest is False and old_each[number] is not False:
                problems.append(_problem("ITEM_REMOVED_FROM_CLOSED_CONTENT_MODEL", f"{where}/{number}"))
            elif isinstance(new_rest, dict) and self._compare(old_each[number], old_doc, new_rest, new_doc, where):
                problems.append(
                    _problem("ITEM_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", f"{where}/{number}")
                )
        for number in range(len(old_each), len(new_each)):
            if old_rest is True and self._new.part(new_each[number], new_doc)[0][0] != "empty":
                problems.append(_problem("ITEM_ADDED_TO_OPEN_CONTENT_MODEL", f"{where}/{number}"))
            elif isinstance(old_rest, dict) and self._compare(old_rest, old_doc, new_each[number], new_doc, where):
                problems.append(_problem("ITEM_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", f"{where}/{number}"))
        rests = {"additionalItems": old_rest}, {"additionalItems": new_rest}
        problems += self._additional(rests[0], old_doc, rests[1], new_doc, "additionalItems", path)
        if new.get("uniqueItems") and not old.get("uniqueItems"):
            problems.append(_problem("UNIQUE_ITEMS_ADDED", f"{path}/uniqueItems"))
        problems += _bound(old, new, "maxItems", path, is_upper=True)
        return problems + _bound(old, new, "minItems", path, is_upper=False)


def _problem(kind: str, path: str) -> str:
    return f'{{errorType:"{kind}", description:"{path} in the new schema refuses what the old one accepts"}}'


def _has_default(tree: Any) -> bool:
    return isinstance(tree, dict) and "default" in tree


def _is_open(tree: dict[str, Any], what: str) -> bool:
    """Return whether the content model accepts any other property."""
    additional = tree.get(f"additional{what}", True)
    unevaluated = tree.get(f"unevaluated{what}", True)
    return additional in (True, {}) and not tree.get("patternProperties") and unevaluated in (True, {})


def _covering(tree: dict[str, Any], name: str, spend: Callable[[], None]) -> Any:
    """Return the schema that a partially open content model has for a property without one of its own.

    RE2 needs linear time: Python's expressions could occupy the process for hours. It has no lookahead, as some
    patterns have; those match nothing here.
    """
    import re2

    for pattern, schema in tree.get("patternProperties", {}).items():
        spend()
        options = re2.Options()
        options.log_errors = False
        try:
            if re2.compile(pattern, options).search(name):
                return schema
        except re2.error:
            continue
    for keyword in ("additionalProperties", "unevaluatedProperties"):
        if isinstance(tree.get(keyword), dict) and tree[keyword]:
            return tree[keyword]
    return None


def _dependencies_of(tree: dict[str, Any]) -> dict[str, Any]:
    names = ("dependencies", "dependentRequired", "dependentSchemas")
    return {key: value for name in names for key, value in tree.get(name, {}).items()}


def _items(tree: dict[str, Any]) -> tuple[Any, list[Any], Any]:
    """Return the schema of all items, those of the first items, and that of further items."""
    items = tree.get("items")
    if isinstance(tree.get("prefixItems"), list):
        return None, tree["prefixItems"], True if items is None else items
    if isinstance(items, list):
        return None, items, tree.get("additionalItems", True)
    return items, [], tree.get("additionalItems", True)


def _bound(old: dict[str, Any], new: dict[str, Any], name: str, path: str, *, is_upper: bool) -> list[str]:
    before, after = old.get(name), new.get(name)
    word = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
    if not isinstance(after, (int, float)) or isinstance(after, bool) or before == after:
        return []
    if not isinstance(before, (int, float)) or isinstance(before, bool):
        return [_problem(f"{word}_ADDED", f"{path}/{name}")]
    if is_upper and after < before:
        return [_problem(f"{word}_DECREASED", f"{path}/{name}")]
    return [_problem(f"{word}_INCREASED", f"{path}/{name}")] if not is_upper and after > before else []


def _numbers(old: dict[str, Any], new: dict[str, Any], path: str) -> list[str]:
    problems = [
        problem
        for name, is_upper in (
            ("maximum", True),
            ("exclusiveMaximum", True),
            ("minimum", False),
            ("exclusiveMinimum", False),
        )
        for problem in _bound(old, new, name, path, is_upper=is_upper)
    ]
    before, after = old.get("multipleOf"), new.get("multipleOf")
    if after is not None and before != after:
        if before is None:
            problems.append(_problem("MULTIPLE_OF_ADDED", f"{path}/multipleOf"))
        elif before % after:
            problems.append(_problem("MULTIPLE_OF_CHANGED", f"{path}/multipleOf"))
    if new.get("type") == "integer" and old.get("type") != "integer":
        problems.append(_problem("TYPE_NARROWED", path))
    return problems


def _strings(old: dict[str, Any], new: dict[str, Any], path: str) -> list[str]:
    problems = _bound(old, new, "maxLength", path, is_upper=True) + _bound(old, new, "minLength", path, is_upper=False)
    if new.get("pattern") is not None and old.get("pattern") != new["pattern"]:
        kind = "PATTERN_ADDED" if old.get("pattern") is None else "PATTERN_CHANGED"
        problems.append(_problem(kind, f"{path}/pattern"))
    return problems


def _distinct(members: list[Any]) -> list[Any]:
    return list({_key(each): each for each in members}.values())


def _key(value: Any) -> Any:
    """Return the same key for equal JSON values: 1 and 1.0 are equal."""
    is_plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return value if is_plain else (json.dumps(value, sort_keys=True),)


def _matching_size(edges: list[list[int]]) -> int:
    """Return the size of a maximum matching: how many old members have a new member of their own."""
    owner: dict[int, int] = {}

    def place(number: int, seen: set[int]) -> bool:
        for at in edges[number]:
            if at not in seen:
                seen.add(at)
                if at not in owner or place(owner[at], seen):
                    owner[at] = number
                    return True
        return False

    return sum(place(number, set()) for number in range(len(edges)))
