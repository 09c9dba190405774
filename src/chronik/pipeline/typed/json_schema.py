"""JSON Schema: a schema becomes Arrow types, and a parser of the JSON texts.

| JSON Schema | column |
|---|---|
| object with properties | its properties are columns; inside a property, a struct |
| object with only additionalProperties | map |
| string; with format date, date-time | string; date, timestamp |
| integer (`1`, also written as `1.0` or `1e0`), number, boolean, array | long, double, boolean, array |
| enum or const of strings | string |
| T or null | T |
| anything else, and a type that contains itself | string with the JSON |

Values are checked against these types, not against the schema's other rules (minimum, pattern, ...): the producer's
serializer does that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urldefrag

import numpy as np
import numpy.typing as npt

from chronik.pipeline.typed import json_values
from chronik.pipeline.typed.json_values import ANY_JSON, JsonField, JsonRows, JsonType, Unreadable
from chronik.pipeline.typed.writer_schema import SINGLE, Decoded, Numbers, SchemaError, WriterField

SIMPLE = {"integer": json_values.whole(64), "number": json_values.DOUBLE, "boolean": json_values.BOOLEAN}
WITH_FLOATS = {**SIMPLE, "integer": json_values.WHOLE_FLOAT}
"""For texts that write whole numbers as 1.0. They cost more to read, so each text is first read without them."""
FORMATS = {"date": json_values.DATE, "date-time": json_values.TIMESTAMP}
DEPTH_MAX = 64
TYPES_MAX = 20_000
"""Types in a schema, each counted wherever it is used: types that use the next one twice multiply."""
Place = tuple[str, str]
"""Where a referred schema is: the document's address, and the path inside it."""


class JsonSchema:
    """A parsed schema. Only its text is sent to executors; they parse it again."""

    def __init__(self, text: str, references: Mapping[str, str] | None = None) -> None:
        """Parse a schema. `references` are the texts of the schemas that it refers to, by address."""
        self._text = text
        self._references = dict(references or {})
        try:
            self._documents = {"": json.loads(text)} | {
                name: json.loads(other) for name, other in self._references.items()
            }
        except (ValueError, RecursionError) as error:
            raise SchemaError(f"the schema is not JSON: {error}") from None
        root = self._documents[""]
        try:
            self._documents |= {
                urldefrag(str(document["$id"])).url: document
                for document in list(self._documents.values())
                if isinstance(document, dict) and document.get("$id")
            }
        except ValueError as error:
            raise SchemaError(f"an $id of the schema is no URI: {error}") from None
        self._open: list[Place] = []
        self.record = str(root.get("title", "")) if isinstance(root, dict) else ""
        fields, is_single = self._columns(SIMPLE)
        self.fields = [WriterField(field.name, field.type.arrow, field.is_required) for field in fields]
        self._rows = JsonRows(fields, is_single=is_single)
        self._rows_with_floats: JsonRows | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonSchema, (self._text, self._references)

    def _columns(self, simple: Mapping[str, JsonType]) -> tuple[list[JsonField], bool]:
        """Return the fields, and whether the only one is the whole text."""
        self._simple, self._type_count = simple, 0
        root = self._documents[""]
        try:
            fields = self._properties(root, "", 0)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise SchemaError(f"the schema is not valid: {type(error).__name__}: {error}") from None
        if fields is None:
            return [JsonField(SINGLE, self._type(root, "", 0), is_required=True)], True
        if not fields:
            raise SchemaError("the schema has no properties")
        return fields, False

    # -- types ---------------------------------------------------------------------------------------------------------

    def _properties(self, schema: Any, document: str, depth: int) -> list[JsonField] | None:
        """Return the fields of an object with properties, or None for another type."""
        place = self._place(schema, document)
        if place is not None:
            if place in self._open:
                return None
            self._open.append(place)
            found = self._properties(self._at(place), place[0], depth + 1)
            self._open.pop()
            return found
        schema, _ = _without_null(schema)
        if "$ref" in schema:
            return self._properties(schema, document, depth + 1)
        if depth > DEPTH_MAX or schema.get("type", "object") != "object" or not schema.get("properties"):
            return None
        required = frozenset(schema.get("required", ()))
        names = {name.lower() for name in schema["properties"]}
        if len(names) < len(schema["properties"]):
            raise SchemaError("properties differ only in case")
        return [
            JsonField(name, self._type(member, document, depth + 1), name in required and not _takes_null(member))
            for name, member in schema["properties"].items()
        ]

    def _type(self, schema: Any, document: str, depth: int) -> JsonType:
        self._type_count += 1
        if self._type_count > TYPES_MAX:
            raise SchemaError(f"the schema has more than {TYPES_MAX:,} types")
        if depth > DEPTH_MAX or not isinstance(schema, dict):
            return ANY_JSON
        schema, _ = _without_null(schema)
        place = self._place(schema, document)
        if place is not None:
            if place in self._open:
                return ANY_JSON
            self._open.append(place)
            found = self._type(self._at(place), place[0], depth + 1)
            self._open.pop()
            return found
        if any(word in schema for word in ("oneOf", "anyOf", "allOf", "not", "if")):
            return ANY_JSON
        fields = self._properties(schema, document, depth)
        if fields is not None:
            return json_values.struct_of(fields)
        kind, more = schema.get("type"), schema.get("additionalProperties")
        choices = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
        if kind == "string" or (kind is None and choices and all(isinstance(each, str) for each in choices)):
            return FORMATS.get(schema.get("format", ""), json_values.TEXT)
        if kind == "array" and isinstance(schema.get("items"), dict) and "prefixItems" not in schema:
            return json_values.list_of(self._type(schema["items"], document, depth + 1))
        if kind == "object" and isinstance(more, dict) and not schema.get("patternProperties"):
            return json_values.map_of(self._type(more, document, depth + 1))
        return self._simple.get(kind, ANY_JSON) if isinstance(kind, str) else ANY_JSON

    def _place(self, schema: Any, document: str) -> Place | None:
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return None
        address, path = urldefrag(schema["$ref"])
        return (address or document, path)

    def _at(self, place: Place) -> Any:
        address, path = place
        if address not in self._documents:
            raise SchemaError(f"it refers to {address}, which is not among its references")
        found = self._documents[address]
        if path and not path.startswith("/"):
            raise SchemaError(f"it refers to the anchor #{path}: only paths such as #/definitions/NAME are read")
        for step in path.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise SchemaError(f"it refers to {address}#{path}, which does not exist") from None
        return found

    # -- records -------------------------------------------------------------------------------------------------------

    def decode(self, data: npt.NDArray[np.uint8], starts: Numbers, stops: Numbers) -> Decoded:
        view = np.ascontiguousarray(data).data
        rows: list[tuple[Any, ...]] = []
        good: list[int] = []
        bad: list[int] = []
        reasons: list[str] = []
        for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            try:
                rows.append(self._parse(view[start:stop]))
                good.append(number)
            except Unreadable as error:
                bad.append(number)
                reasons.append(str(error))
        return Decoded(self._rows.arrays(rows), np.array(good, np.int64), np.array(bad, np.int64), reasons)

    def _parse(self, text: memoryview) -> tuple[Any, ...]:
        try:
            return self._rows.parse(text)
        except Unreadable as error:
            if not error.is_float:
                raise
        if self._rows_with_floats is None:
            fields, is_single = self._columns(WITH_FLOATS)
            self._rows_with_floats = JsonRows(fields, is_single=is_single)
        return self._rows_with_floats.parse(text)


def _without_null(schema: Any) -> tuple[Any, bool]:
    """Return a schema without its alternative null, and whether it has one."""
    if not isinstance(schema, dict):
        return {}, True
    kinds = schema.get("type")
    if isinstance(kinds, list):
        rest = [kind for kind in kinds if kind != "null"]
        return {**schema, "type": rest[0] if len(rest) == 1 else None}, len(rest) < len(kinds)
    for word in ("oneOf", "anyOf"):
        choices: Sequence[Any] = schema.get(word, ())
        others = [each for each in choices if each != {"type": "null"}]
        if len(others) == 1 and len(choices) == 2 and isinstance(others[0], dict):
            return others[0], True
    return schema, kinds == "null"


def _takes_null(schema: Any) -> bool:
    inner, with_null = _without_null(schema)
    choices = [*inner.get("oneOf", ()), *inner.get("anyOf", ())]
    is_open = not any(word in inner for word in ("type", "$ref", "enum", "const", "properties"))
    return with_null or is_open or any(_takes_null(each) for each in choices)
