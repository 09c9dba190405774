"""The Arrow arrays that a compiled loop fills, and their memory. Shared by Avro and Protobuf.

Each slot is one array. Four pools of memory hold the buffers of all slots: validity, numbers, ends and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from chronik.pipeline.typed import avro_kernel as kernel
from chronik.pipeline.typed.writer_schema import Decoded, bitmap

MEMORY_BYTES_MAX = 1 << 30
"""Address space for one call of the compiled loop. With more, the records are decoded in halves."""


@dataclass(slots=True)
class Slot:
    """One Arrow array. `children` are those of a struct, or the one of the items of an array or map."""

    number: int
    kind: Any
    code: int
    nested: bool
    """Whether it is inside an array or a map, so that a record may add any number of values."""
    children: list[Slot] = field(default_factory=list)
    symbols: Sequence[str] = ()
    size: int = 0
    storage: Any = None
    """The type that the loop fills, if `convert` makes the column's type of it."""
    convert: Callable[[Any], Any] | None = None

    @property
    def words(self) -> int:
        """How many 64-bit numbers a value takes."""
        if self.code in (kernel.DECIMAL, kernel.DECIMAL_FIXED):
            return 2
        return 0 if self.code in (kernel.SET, kernel.BYTES, kernel.TEXT, kernel.FIXED) else 1

    @property
    def has_ends(self) -> bool:
        return self.code in (kernel.BYTES, kernel.TEXT) or pa.types.is_list(self.kind) or pa.types.is_map(self.kind)

    @property
    def has_bytes(self) -> bool:
        return self.code in (kernel.BYTES, kernel.TEXT, kernel.FIXED)


class Buffers:
    """The memory for any records of a total size. A slot has one place for each row, or if nested, for each byte."""

    def __init__(self, slots: Sequence[Slot], rows: int, size: int) -> None:
        self.table = np.full((len(slots), 4), -1, np.int64)
        totals = [0, 0, 0, 0]
        for slot in slots:
            capacity = size if slot.nested else rows
            fixed_bytes = slot.size * rows if slot.code == kernel.FIXED and not slot.nested else 0
            needs = (
                capacity,
                capacity * slot.words,
                capacity + 1 if slot.has_ends else 0,
                max(size, fixed_bytes, slot.size * capacity) if slot.has_bytes else 0,
            )
            for column, need in enumerate(needs):
                if need or column == kernel.VALID_AT:
                    self.table[slot.number, column] = totals[column]
                    totals[column] += need
        ends = np.empty(totals[2], np.int32)
        for slot in slots:
            if slot.has_ends:
                ends[self.table[slot.number, kernel.END_AT]] = 0
        self.pools = np.empty(totals[0], np.uint8), np.empty(totals[1], np.int64), ends, np.empty(totals[3], np.uint8)
        self.counts, self.sizes = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
        self.faults = np.zeros(rows, np.int64)

    def arrays(self, columns: Sequence[Slot]) -> list[Any]:
        return [array_of(slot, self.table, self.counts, self.sizes, self.pools) for slot in columns]


def memory_bytes(slots: Sequence[Slot], rows: int, size: int) -> int:
    return sum(
        (size if slot.nested else rows) * (1 + 8 * slot.words + 4 * slot.has_ends + slot.size) + size * slot.has_bytes
        for slot in slots
    )


def array_of(slot: Slot, table: Any, counts: Any, sizes: Any, pools: tuple[Any, Any, Any, Any]) -> Any:
    """Make the Arrow array of a slot from its part of the pools."""
    built = _built(slot, table, counts, sizes, pools)
    return built if slot.convert is None else slot.convert(built)


def _built(slot: Slot, table: Any, counts: Any, sizes: Any, pools: tuple[Any, Any, Any, Any]) -> Any:
    valid, numbers, ends, content = pools
    count, number = int(counts[slot.number]), slot.number
    present = bitmap(valid[table[number, 0] : table[number, 0] + count])
    if slot.words:
        values = numbers[table[number, 1] : table[number, 1] + count * slot.words]
        return _numeric(slot, count, present, values)
    if slot.code == kernel.FIXED:
        content = content[table[number, 3] : table[number, 3] + int(sizes[number])]
        fixed = pa.Array.from_buffers(pa.binary(slot.size), count, [present, pa.py_buffer(content)])
        return fixed.cast(pa.binary())
    if slot.has_ends:
        offsets = pa.py_buffer(ends[table[number, 2] : table[number, 2] + count + 1])
        if slot.has_bytes:
            content = content[table[number, 3] : table[number, 3] + int(sizes[number])]
            return pa.Array.from_buffers(slot.storage or slot.kind, count, [present, offsets, pa.py_buffer(content)])
        items = [array_of(child, table, counts, sizes, pools) for child in slot.children]
        if pa.types.is_map(slot.kind):
            pair = pa.struct([slot.kind.key_field, slot.kind.item_field])
            items = [pa.Array.from_buffers(pair, len(items[0]), [None], children=items)]
        return pa.Array.from_buffers(slot.kind, count, [present, offsets], children=items)
    children = [array_of(child, table, counts, sizes, pools) for child in slot.children]
    return pa.Array.from_buffers(slot.kind, count, [present], children=children)


def _numeric(slot: Slot, count: int, present: Any, values: Any) -> Any:
    kind = slot.storage or slot.kind
    if slot.code == kernel.ENUM:
        indexes = pa.Array.from_buffers(pa.int32(), count, [present, pa.py_buffer(values.astype(np.int32))])
        return pa.array(slot.symbols, pa.string()).take(indexes)
    if pa.types.is_boolean(kind):
        data: Any = np.packbits(values.astype(np.uint8), bitorder="little")
    elif slot.code == kernel.FLOAT:
        data = values.astype(np.uint32)
    elif slot.code in (kernel.INT, kernel.DATE):
        data = values.astype(np.int32)
    else:
        data = values
    return pa.Array.from_buffers(kind, count, [present, pa.py_buffer(data)])


def joined(first: Decoded, second: Decoded, at: int) -> Decoded:
    columns = [pa.concat_arrays(both) for both in zip(first.columns, second.columns, strict=True)]
    good, bad = (
        np.concatenate((ours, theirs + at)) for ours, theirs in ((first.good, second.good), (first.bad, second.bad))
    )
    return Decoded(columns, good, bad, [*first.reasons, *second.reasons])
