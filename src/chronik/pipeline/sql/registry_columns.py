"""Typed columns of a topic in a query, by the schemas that its subject has in a schema registry.

The columns are fixed before the query starts: those of all versions of the subject TOPIC-value that fit together. A
record that does not fit has null in them, and the reason in `decode_error`; no row is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from chronik.client.schema_registry import RegistryClient
from chronik.pipeline.sql.topic_table import ERROR, TAKEN
from chronik.pipeline.typed.decoding import MissingSchemas
from chronik.pipeline.typed.topic_schemas import AUTO, DEAD_LETTER, EVOLVE, TopicSchemas

VALUE = "value"


class RegistryColumns:
    """Threads share it."""

    def __init__(self, topic: str, ids: Sequence[int], registry: RegistryClient) -> None:
        first = TopicSchemas(topic, {VALUE: AUTO}, EVOLVE, registry.schema)
        for schema_id in ids:
            first.learn_main(VALUE, schema_id)
        self.columns: Sequence[Any] = first.plan((), TAKEN).columns
        # Schemas that appear while the query runs must fit the columns that it has.
        self._schemas = TopicSchemas(topic, {VALUE: AUTO}, DEAD_LETTER, registry.schema)
        for schema_id in ids:
            self._schemas.learn_main(VALUE, schema_id)
        self._decoding = self._schemas.plan(self.columns, TAKEN)
        self._lock = threading.Lock()

    def append(self, batch: Any) -> tuple[Any, int]:
        """Return the rows in their order with the typed columns and ERROR, and how many rows have an error."""
        while True:
            try:
                rows, bad, reasons = self._decoding.split(batch)
                break
            except MissingSchemas as found:
                with self._lock:
                    self._schemas.learn(found.missing)
                    self._decoding = self._schemas.plan(self.columns, TAKEN)
        names = [*batch.schema.names, *(column.name for column in self.columns), ERROR]
        rows = rows.append_column(pa.field(ERROR, pa.string()), pa.nulls(rows.num_rows, pa.string()))
        if not reasons:
            return rows.select(names), 0
        for column in self.columns:
            bad = bad.append_column(pa.field(column.name, column.type), pa.nulls(bad.num_rows, column.type))
        bad = bad.append_column(pa.field(ERROR, pa.string()), pa.array(reasons, pa.string()))
        whole = pa.Table.from_batches([rows.select(names), bad.select(names)]).combine_chunks()
        order = np.argsort(whole.column("offset").to_numpy(), kind="stable")
        return whole.take(pa.array(order)).to_batches()[0], len(reasons)
