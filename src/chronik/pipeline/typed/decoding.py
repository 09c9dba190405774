"""Split Arrow batches of records into rows with typed columns, and dead letters with their reasons.

A value begins with a zero byte and the id of its schema, 4 bytes, as Confluent's serializers write it. The driver
decides which schemas fit the table (`topic_schemas`) and sends them to the tasks, so executors need no registry. A task
that finds an id which the driver has not seen yet reports it and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from chronik.pipeline.typed.evolution import column_name, fit
from chronik.pipeline.typed.writer_schema import Numbers, Router, WriterSchema, split_id, typed_id

PREFIX_BYTES = 5
NO_ID = -1
REASON_CHARACTERS_MAX = 500


class MissingSchemas(Exception):
    """Records have schemas that the driver has not seen yet: pairs of a side (key or value) and an id."""

    def __init__(self, missing: set[tuple[str, int]]) -> None:
        super().__init__(str(sorted(missing)))
        self.missing = missing


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tasks decode records. Made by the driver for each attempt at a micro-batch."""

    columns: tuple[Any, ...]
    """The table's typed columns, as Arrow fields."""
    sides: Mapping[str, Mapping[int, WriterSchema | Router | str]]
    """For each side that is decoded: its schemas by id, or the reason why records of that schema do not fit."""
    taken: frozenset[str]
    """The record's own columns, in lower case."""

    def split(self, batch: Any) -> tuple[Any, Any, list[str]]:
        """Return rows with the typed columns appended, and the other records with their reasons.

        Raises MissingSchemas.
        """
        count = batch.num_rows
        arrays: dict[str, Any] = {}
        reasons: dict[int, str] = {}
        missing: set[tuple[str, int]] = set()
        for side, schemas in self.sides.items():
            try:
                arrays.update(self._decode(batch.column(side), side, schemas, reasons))
            except MissingSchemas as found:
                missing |= found.missing
        if missing:
            raise MissingSchemas(missing)
        rows = batch
        for column in self.columns:
            values = arrays.get(column.name)
            rows = rows.append_column(
                pa.field(column.name, column.type), pa.nulls(count, column.type) if values is None else values
            )
        if not reasons:
            return rows, batch.slice(0, 0), []
        bad = sorted(reasons)
        is_good = np.ones(count, np.bool_)
        is_good[bad] = False
        texts = [reasons[row][:REASON_CHARACTERS_MAX] for row in bad]
        return rows.filter(pa.array(is_good)), batch.take(pa.array(bad, pa.int64())), texts

    def missing_in(self, batch: Any) -> set[tuple[str, int]]:
        """Return the schemas of the batch that are not known, without decoding it."""
        missing: set[tuple[str, int]] = set()
        for side, schemas in self.sides.items():
            _, _, _, ids = _routed(batch.column(side), schemas)
            missing |= {(side, int(each)) for each in np.unique(ids) if each != NO_ID and int(each) not in schemas}
        return missing

    def _decode(
        self, values: Any, side: str, schemas: Mapping[int, WriterSchema | Router | str], reasons: dict[int, str]
    ) -> dict[str, Any]:
        data, starts, stops, ids = _routed(values, schemas)
        is_null = values.is_null().to_numpy(zero_copy_only=False)
        for row in np.flatnonzero((ids == NO_ID) & ~is_null).tolist():
            reasons.setdefault(row, f"the {side} has no schema id: it does not begin with a zero byte and 4 bytes more")
        different = [int(each) for each in np.unique(ids) if each != NO_ID]
        missing = {(side, each) for each in different if each not in schemas}
        if missing:
            raise MissingSchemas(missing)
        parts: list[tuple[Numbers, dict[str, Any]]] = []
        for schema_id in different:
            rows = np.flatnonzero(ids == schema_id)
            schema, (shown_id, _) = schemas[schema_id], split_id(schema_id)
            if isinstance(schema, Router):
                schema = "the value does not begin with the place of one of its messages"
            if isinstance(schema, str):
                reasons.update((row, f"the {side} has the schema {shown_id}: {schema}") for row in rows.tolist())
                continue
            decoded = schema.decode(data, starts[rows], stops[rows])
            for row, reason in zip(rows[decoded.bad].tolist(), decoded.reasons, strict=True):
                reasons.setdefault(row, f"the {side} does not fit its schema {shown_id}: {reason}")
            names = [column_name(side, field.name, self.taken) for field in schema.fields]
            parts.append((rows[decoded.good], dict(zip(names, decoded.columns, strict=True))))
        if not parts:
            return {}
        return self._joined(parts, len(values))

    def _joined(self, parts: list[tuple[Numbers, dict[str, Any]]], count: int) -> dict[str, Any]:
        """Put the decoded rows of several schemas back in the batch's order; null for rows that have none."""
        places = np.full(count, -1, np.int64)
        order = np.concatenate([rows for rows, _ in parts])
        places[order] = np.arange(len(order))
        in_order = len(order) == count and len(parts) == 1
        indexes = None if in_order else pa.array(places, pa.int64(), mask=places < 0)
        joined: dict[str, Any] = {}
        for column in self.columns:
            if not any(column.name in columns for _, columns in parts):
                continue
            pieces = [
                fit(columns[column.name], column.type) if column.name in columns else pa.nulls(len(rows), column.type)
                for rows, columns in parts
            ]
            whole = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
            joined[column.name] = whole if indexes is None else whole.take(indexes)
        return joined


def _routed(values: Any, schemas: Mapping[int, WriterSchema | Router | str]) -> tuple[Any, Numbers, Numbers, Numbers]:
    """Return the bytes of a binary column, where each value begins and ends after its prefix, and its typed id."""
    data, starts, stops, ids = _prefixes(values)
    starts = starts + PREFIX_BYTES
    for each in np.unique(ids).tolist():
        schema = schemas.get(each)
        if isinstance(schema, Router):
            rows = np.flatnonzero(ids == each)
            codes, starts[rows] = schema.route(data, starts[rows], stops[rows])
            ids[rows] = typed_id(each, codes)
    return data, starts, stops, ids


def _prefixes(values: Any) -> tuple[Any, Numbers, Numbers, Numbers]:
    """Return the bytes of a binary column, the start and end of each value, and its schema's id or NO_ID."""
    _, offsets, content = values.buffers()
    ends = np.frombuffer(offsets, np.int32, len(values) + 1, values.offset * 4).astype(np.int64)
    data = np.frombuffer(content, np.uint8) if content is not None and content.size else np.zeros(1, np.uint8)
    starts, stops = ends[:-1], ends[1:]
    ids = np.full(len(values), NO_ID, np.int64)
    long_enough = np.flatnonzero(stops - starts >= PREFIX_BYTES)
    begin = starts[long_enough]
    marked = long_enough[data[begin] == 0]
    begin = starts[marked] + 1
    ids[marked] = (
        (data[begin].astype(np.int64) << 24)
        | (data[begin + 1].astype(np.int64) << 16)
        | (data[begin + 2].astype(np.int64) << 8)
        | data[begin + 3].astype(np.int64)
    )
    return data, starts, stops, ids
