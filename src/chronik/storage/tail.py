"""The positions of a log's newest batches: reads at the tail need no index and no scan."""

from array import array
from bisect import bisect_left, bisect_right
from typing import Final, NamedTuple

BATCHES_MAX: Final = 512
"""The maximum kept; above it, the older half is dropped."""


class Span(NamedTuple):
    """Bytes [start, end) of the active segment: whole batches, followed by the one at `next_offset`."""

    start: int
    end: int
    next_offset: int


class Tail:
    """Base offset and position of the last batches of the active segment. Owned by the event loop.

    Invariant: the batches are consecutive, and the last one is the log's last.
    """

    __slots__ = ("offsets", "positions")

    def __init__(self) -> None:
        self.offsets = array("q")
        self.positions = array("q")

    def append(self, base_offset: int, position: int) -> None:
        self.offsets.append(base_offset)
        self.positions.append(position)
        if len(self.offsets) > BATCHES_MAX:
            del self.offsets[: BATCHES_MAX // 2], self.positions[: BATCHES_MAX // 2]

    def clear(self) -> None:
        if self.offsets:
            self.offsets = array("q")
            self.positions = array("q")

    def span(
        self, offset: int, max_bytes: int, upto_offset: int, end_offset: int, end_position: int, min_one_batch: bool
    ) -> Span | None:
        """Return the batches from the one with `offset` on, below `upto_offset`, at most `max_bytes`; None if unknown.

        The log ends at `end_offset` and `end_position`.
        """
        offsets = self.offsets
        if not offsets or offset < offsets[0]:
            return None
        positions = self.positions
        first = bisect_right(offsets, offset) - 1
        start = positions[first]
        if upto_offset >= end_offset:
            stop, next_offset, end = len(offsets), end_offset, end_position
        else:
            stop = bisect_left(offsets, upto_offset)
            if stop == len(offsets) or offsets[stop] > upto_offset:
                # The previous batch reaches beyond the limit, or may.
                stop -= 1
            if stop <= first:
                return Span(start, start, offset)
            next_offset, end = offsets[stop], positions[stop]
        if end - start > max_bytes:
            stop = bisect_right(positions, start + max_bytes) - 1
            if stop <= first:
                if not min_one_batch:
                    return Span(start, start, offset)
                stop = first + 1
                if stop == len(offsets):
                    return Span(start, end_position, end_offset)
            next_offset, end = offsets[stop], positions[stop]
        # Bypass NamedTuple's constructor, which is Python code: nearly every read takes this path.
        return tuple.__new__(Span, (start, end, next_offset))
