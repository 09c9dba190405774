"""Which offsets and columns a filter of DuckDB needs. Pure: an Arrow expression in, ranges out.

No code here looks into a filter. Arrow itself decides whether a filter can be true for any row of which some facts are
known (the partition, bounds of the offset and the time): a dataset's fragments declare such facts, and Arrow omits the
fragments that contradict the filter. What Arrow does not understand contradicts nothing, so it is read. The filter is
applied to all rows that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as fs

from chronik.pipeline.source.columns import CALENDAR_US_MAX
from chronik.pipeline.source.ranges import RecordRange

PIECES_MAX = 64
"""A filter that leaves more pieces of a partition is read without its gaps."""
GAP_OFFSETS_MIN = 10_000
"""A gap is skipped only if it is longer. A fetch returns whole batches, so short gaps are read anyway."""
TIME = pa.timestamp("us", tz="UTC")

Facts = Any
"""An Arrow expression that is true for some rows."""


class Filter:
    """A filter over the columns of `schema`; None is always true."""

    def __init__(self, expression: Any, schema: Any) -> None:
        self._expression = expression
        self._schema = schema
        self._format = ds.IpcFileFormat()
        self._store = fs.LocalFileSystem()  # never used: the fragments exist only for their facts

    def possible(self, facts: Sequence[Facts]) -> list[bool]:
        """Return for each of the facts whether a row for which they are true may pass the filter."""
        if self._expression is None:
            return [True] * len(facts)
        fragments = [
            self._format.make_fragment(str(number), self._store, partition_expression=fact)
            for number, fact in enumerate(facts)
        ]
        dataset = ds.FileSystemDataset(fragments, self._schema, self._format, self._store)
        kept = {int(fragment.path) for fragment in dataset.get_fragments(self._expression)}
        return [number in kept for number in range(len(facts))]

    def needed(self, columns: Iterable[str]) -> frozenset[str]:
        """Return the columns that the filter uses, and `columns`."""
        used = frozenset(columns)
        if self._expression is None:
            return used
        return used | {field.name for field in self._schema if not self._binds_without(field.name)}

    def _binds_without(self, name: str) -> bool:
        fields = [field for field in self._schema if field.name != name]
        try:
            self.apply(pa.Table.from_pylist([], schema=pa.schema(fields)))
        except (pa.ArrowInvalid, KeyError):
            return False
        return True

    def apply(self, rows: Any) -> Any:
        """Return the rows of an Arrow batch or table that pass the filter."""
        return rows if self._expression is None else rows.filter(self._expression)


def ranges_of(filter_: Filter, bounds: Sequence[RecordRange]) -> list[RecordRange]:
    """Return the parts of the ranges in which rows may pass the filter: in each partition up to PIECES_MAX."""
    filled = [whole for whole in bounds if whole.start < whole.stop]
    possible = filter_.possible([_facts(whole) for whole in filled])
    kept = [whole for whole, is_kept in zip(filled, possible, strict=True) if is_kept]
    if "offset" not in filter_.needed(()):
        return kept
    return [piece for whole in kept for piece in _cut(filter_, whole)]


def time_ms_min(filter_: Filter, facts: Facts) -> int | None:
    """Return a time before which no row with these facts passes the filter; None if there is none after 1970.

    Rows without a time may pass in any case, so a filter that accepts them has no such time.
    """

    def impossible_before(us: int) -> bool:
        early = pc.field("timestamp") < pa.scalar(us, TIME)
        return not filter_.possible([facts & (early | pc.field("timestamp").is_null())])[0]

    if not impossible_before(1000):
        return None
    return _last(impossible_before, 1000, CALENDAR_US_MAX) // 1000


def partition_facts(topic: str, partition: int) -> Facts:
    return (pc.field("topic") == topic) & (pc.field("partition") == pa.scalar(partition, pa.int32()))


def _facts(piece: RecordRange) -> Facts:
    offset = pc.field("offset")
    bounds = (offset >= pa.scalar(piece.start, pa.int64())) & (offset < pa.scalar(piece.stop, pa.int64()))
    return partition_facts(piece.topic, piece.partition) & bounds


def _cut(filter_: Filter, whole: RecordRange) -> list[RecordRange]:
    """Cut off both ends that cannot pass, then the gaps."""

    def is_impossible(start: int, stop: int) -> bool:
        return not filter_.possible([_facts(whole._replace(start=start, stop=stop))])[0]

    start = _last(lambda end: is_impossible(whole.start, end), whole.start, whole.stop)
    length = _last(lambda length: is_impossible(whole.stop - length, whole.stop), 0, whole.stop - start)
    if start + length >= whole.stop:
        return []
    return _without_gaps(filter_, whole._replace(start=start, stop=whole.stop - length))


def _last(is_true: Callable[[int], bool], low: int, high: int) -> int:
    """Return the last number for which `is_true`, which is true for `low` and never again after it was false."""
    while high - low > 0:
        middle = (low + high + 1) // 2
        if is_true(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _without_gaps(filter_: Filter, hull: RecordRange) -> list[RecordRange]:
    """Halve the pieces until they are short, or there are too many."""
    pieces = [hull]
    while pieces:
        halves = [half for piece in pieces for half in _halves(piece)]
        if len(halves) == len(pieces) or len(halves) > PIECES_MAX:
            return _joined(pieces)
        possible = filter_.possible([_facts(half) for half in halves])
        pieces = [half for half, is_kept in zip(halves, possible, strict=True) if is_kept]
    return []


def _halves(piece: RecordRange) -> list[RecordRange]:
    if piece.stop - piece.start <= GAP_OFFSETS_MIN:
        return [piece]
    middle = (piece.start + piece.stop) // 2
    return [piece._replace(stop=middle), piece._replace(start=middle)]


def _joined(pieces: Sequence[RecordRange]) -> list[RecordRange]:
    """Join pieces that follow each other."""
    starts = [pieces[0].start] + [later.start for earlier, later in pairwise(pieces) if later.start > earlier.stop]
    stops = [earlier.stop for earlier, later in pairwise(pieces) if later.start > earlier.stop] + [pieces[-1].stop]
    return [pieces[0]._replace(start=start, stop=stop) for start, stop in zip(starts, stops, strict=True)]
