"""Offset ranges as the tasks of one Spark job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from chronik.pipeline.columns import RecordRange

__all__ = ["split"]


def split(ranges: Sequence[RecordRange], parts_min: int = 0, rows_max: int = 0) -> list[RecordRange]:
    """Return non-empty ranges, cut to get about `parts_min` ranges, and none above `rows_max` (0: unlimited)."""
    filled = [wanted for wanted in ranges if wanted.stop > wanted.start]
    total = sum(wanted.stop - wanted.start for wanted in filled)
    made: list[RecordRange] = []
    for wanted in filled:
        size = wanted.stop - wanted.start
        parts = 1 if parts_min <= len(filled) else max(1, round(size / total * parts_min))
        if rows_max:
            parts = max(parts, -(-size // rows_max))
        parts = min(parts, size)
        edges = [wanted.start + size * part // parts for part in range(parts + 1)]
        made += [wanted._replace(start=start, stop=stop) for start, stop in pairwise(edges)]
    return made
