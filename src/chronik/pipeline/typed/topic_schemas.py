"""The schemas of one topic, as its landing meets them: the driver's part of typed landing.

It keeps the schemas that records have shown so far, and decides for the table's current columns which of them fit. The
registry is asked once for each id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from chronik.client.schema_registry import AVRO, JSON_SCHEMA, PROTOBUF, RegistryError, Schema
from chronik.pipeline.errors import PipelineError, Unavailable
from chronik.pipeline.typed.avro import AvroSchema
from chronik.pipeline.typed.debezium import HIDDEN, EnvelopeSchema
from chronik.pipeline.typed.decoding import Decoding
from chronik.pipeline.typed.evolution import VALUE, Incompatible, differences, evolve, is_first
from chronik.pipeline.typed.json_schema import JsonSchema
from chronik.pipeline.typed.writer_schema import Router, SchemaError, WriterSchema, split_id, typed_id

EVOLVE, DEAD_LETTER, STOP = "evolve", "dead-letter", "stop"
AUTO = "auto"
KINDS = {"avro": AVRO, "json-schema": JSON_SCHEMA, "protobuf": PROTOBUF}
FORMATS = (*KINDS, AUTO)
NOT_FOUND = 404

Lookup = Callable[[int, str], Schema]
"""Return the schema with an id; the subject selects the id's context. Raises RegistryError."""


class TopicSchemas:
    """Used by one thread, the one that lands the topic's micro-batches."""

    def __init__(
        self,
        topic: str,
        formats: Mapping[str, str],
        policy: str,
        lookup: Lookup,
        envelope_key: tuple[str, ...] | None = None,
    ) -> None:
        """`formats` has the format of each side that is decoded.

        `envelope_key`: the fields that identify a row, if values are events of Debezium; None if they are not.
        """
        self._envelope_key = envelope_key
        self.can_promote: Callable[[Any, Any], bool] | None = None
        """Whether the table's format can change a column's type so. None: every change that widens it."""
        self._topic = topic
        self._formats = formats
        self._policy = policy
        self._lookup = lookup
        self._known: dict[str, dict[int, WriterSchema | Router | str]] = {side: {} for side in formats}

    def learn(self, missing: Iterable[tuple[str, int]]) -> None:
        """Look up schemas. Raises PipelineError if the registry does not answer."""
        for side, schema_id in sorted(missing):
            self._known[side][schema_id] = self._rows_of(side, self._parsed(side, schema_id))

    def _rows_of(self, side: str, parsed: WriterSchema | Router | str) -> WriterSchema | Router | str:
        """Return the schema of the rows in events of Debezium; any other as it is."""
        found: Any = parsed
        if side != VALUE or self._envelope_key is None or not hasattr(found, "decode"):
            return parsed
        try:
            return EnvelopeSchema(found, self._envelope_key)
        except SchemaError as error:
            return str(error)

    def learn_main(self, side: str, schema_id: int) -> None:
        """Look up a schema, and if it has several types of records, those that records probably have."""
        self.learn([(side, schema_id)])
        found: Any = self._known[side][schema_id]
        if hasattr(found, "main_codes"):
            self.learn((side, typed_id(schema_id, code)) for code in found.main_codes())

    def plan(self, columns: Sequence[Any], taken: frozenset[str]) -> Decoding:
        """Decide how to decode records into a table with these columns, beside the record's own (`taken`).

        Raises PipelineError if the policy is to stop at a change.
        """
        sides: dict[str, dict[int, WriterSchema | Router | str]] = {}
        if self._envelope_key is not None:
            columns = [*columns, *HIDDEN]
        for side, known in self._known.items():
            sides[side] = {}
            for schema_id, schema in known.items():  # in the order in which records have shown them
                if isinstance(schema, (str, Router)):
                    sides[side][schema_id] = schema
                    continue
                try:
                    after = evolve(columns, schema, side, taken)
                    self._check_promotions(columns, after)
                    change = "" if is_first(columns, side) else differences(columns, after)
                    if change and self._policy != EVOLVE:
                        raise Incompatible(f"it {change}, and --on-change is {self._policy}")
                    columns, sides[side][schema_id] = after, schema
                except Incompatible as error:
                    if self._policy == STOP:
                        raise PipelineError(
                            f"the {side}s of {self._topic} have a new schema (id {split_id(schema_id)[0]}): {error}; "
                            "change the table, or choose another --on-change, and start again: nothing is lost"
                        ) from None
                    sides[side][schema_id] = str(error)
        return Decoding(tuple(columns), sides, taken)

    def _check_promotions(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        types = {column.name: column.type for column in after}
        for column in before:
            if self.can_promote is not None and not self.can_promote(column.type, types[column.name]):
                change = f"the type of {column.name} changes from {column.type} to {types[column.name]}"
                raise Incompatible(f"{change}, which the table's format cannot")

    def _parsed(self, side: str, schema_id: int) -> WriterSchema | Router | str:
        schema_id, code = split_id(schema_id)
        router: Any = self._known[side].get(schema_id)
        if code >= 0 and hasattr(router, "schema"):
            try:
                typed: WriterSchema = router.schema(code)
            except SchemaError as error:
                return str(error)
            return typed
        try:
            schema = self._lookup(schema_id, f"{self._topic}-{side}")
        except RegistryError as error:
            if error.status == NOT_FOUND:
                return "the registry has no schema with this id"
            kind = PipelineError if 400 <= error.status < 500 else Unavailable
            raise kind(f"cannot look up the schema {schema_id} of {self._topic}: {error}; check --registry") from None
        expected = KINDS.get(self._formats[side])
        if schema.kind not in KINDS.values() or (expected is not None and schema.kind != expected):
            return f"it is a schema of the type {schema.kind}, and --format is {self._formats[side]}"
        try:
            texts = {reference.name: reference.schema.text for reference in schema.flat()}
            if schema.kind == PROTOBUF:
                from chronik.pipeline.typed.protobuf import protobuf_router

                return protobuf_router(schema.text, texts)
            if schema.kind == JSON_SCHEMA:
                return JsonSchema(schema.text, texts)
            return AvroSchema(schema.text, [*texts.values()])
        except SchemaError as error:
            return str(error)
