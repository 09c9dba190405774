"""The offsets of a topic that have landed, as ranges. A batch that is read again must skip them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Offsets = npt.NDArray[np.int64]

PIECES_MAX = 256
"""Unmerged pieces of one partition. Merging at this number bounds the memory to what the ranges need."""


class LandedOffsets:
    """Sorted ranges per partition that neither overlap nor touch. The driver fills it; after that it is read-only."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[tuple[Offsets, Offsets]]] = {}

    @classmethod
    def of(cls, batches: Iterable[Any]) -> LandedOffsets:
        """Build from Arrow batches with the columns `partition` and `offset`, in any order."""
        landed = cls()
        for batch in batches:
            partitions, offsets = _numbers(batch)
            for partition in np.unique(partitions):
                pieces = landed._pieces.setdefault(int(partition), [])
                pieces.append(_ranges(np.unique(offsets[partitions == partition])))
                if len(pieces) >= PIECES_MAX:
                    pieces[:] = [_merged(pieces)]
        return landed

    @classmethod
    def below(cls, ends: Mapping[int, int]) -> LandedOffsets:
        """Return all offsets below the end of each partition."""
        landed = cls()
        for partition, end in ends.items():
            if end > 0:
                landed._pieces[partition] = [(np.array([0], np.int64), np.array([end], np.int64))]
        return landed

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def ranges(self, partition: int) -> list[tuple[int, int]]:
        """Return (start, stop) pairs; stop is exclusive."""
        starts, stops = self._of(partition)
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    def without(self, batch: Any) -> Any:
        """Return the rows of an Arrow batch that have not landed."""
        partitions, offsets = _numbers(batch)
        fresh = np.ones(len(offsets), dtype=np.bool_)
        for partition in np.unique(partitions):
            starts, stops = self._of(int(partition))
            if len(starts):
                here = partitions == partition
                at = np.searchsorted(starts, offsets[here], side="right") - 1
                fresh[here] = (at < 0) | (offsets[here] >= stops[at])
        return batch if fresh.all() else batch.filter(pa.array(fresh))

    def merged_with(self, others: Iterable[LandedOffsets]) -> LandedOffsets:
        union = LandedOffsets()
        for landed in (self, *others):
            for partition, pieces in landed._pieces.items():
                union._pieces.setdefault(partition, []).extend(pieces)
        return union

    def covers(self, other: LandedOffsets, partition: int, first: int, last: int) -> bool:
        """Return whether these include all offsets of `other` from `first` to `last`."""
        starts, stops = self._of(partition)
        for start, stop in other.ranges(partition):
            low, high = max(start, first), min(stop, last + 1)
            if low < high:
                at = int(np.searchsorted(starts, low, side="right")) - 1
                if at < 0 or stops[at] < high:
                    return False
        return True

    def _of(self, partition: int) -> tuple[Offsets, Offsets]:
        pieces = self._pieces.get(partition)
        if not pieces:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if len(pieces) > 1:
            pieces[:] = [_merged(pieces)]
        return pieces[0]


def first_and_last(batch: Any) -> Iterator[tuple[int, int, int]]:
    """Yield each partition of an Arrow batch with its lowest and highest offset."""
    partitions, offsets = _numbers(batch)
    for partition in np.unique(partitions):
        here = offsets[partitions == partition]
        yield int(partition), int(here.min()), int(here.max())


def widened(spans: Mapping[int, tuple[int, int]], more: Iterable[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    """Extend each partition's offset span to cover the additional spans."""
    union = dict(spans)
    for partition, first, last in more:
        low, high = union.get(partition, (first, last))
        union[partition] = min(low, first), max(high, last)
    return union


def _numbers(batch: Any) -> tuple[npt.NDArray[np.int32], Offsets]:
    partitions, offsets = batch.column("partition"), batch.column("offset")
    return partitions.to_numpy(zero_copy_only=False), offsets.to_numpy(zero_copy_only=False)


def _ranges(offsets: Offsets) -> tuple[Offsets, Offsets]:
    """Turn sorted, unique offsets into ranges."""
    breaks = np.flatnonzero(np.diff(offsets) != 1)
    return offsets[np.concatenate(([0], breaks + 1))], offsets[np.concatenate((breaks, [len(offsets) - 1]))] + 1


def _merged(pieces: list[tuple[Offsets, Offsets]]) -> tuple[Offsets, Offsets]:
    """Merge ranges that may overlap into ranges that neither overlap nor touch."""
    starts = np.concatenate([piece[0] for piece in pieces])
    stops = np.concatenate([piece[1] for piece in pieces])
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    begins = np.concatenate(([True], starts[1:] > reach[:-1]))
    return starts[begins], reach[np.concatenate((begins[1:], [True]))]
