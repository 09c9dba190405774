"""The transactions of one log that are not decided, or not decided for certain.

A transaction begins with its producer's first transactional batch and ends with the marker of that producer. Readers
with isolation level read_committed see no record of it before the marker is below the high watermark.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from chronik.storage.disk import Buffer
from chronik.wire.batch import BatchHeader, Marker, read_marker
from chronik.wire.errors import KafkaError

ENDED_MAX: Final = 256
"""Ended transactions that are kept one by one until their markers are below the high watermark; above it, two
neighbors become one, which lasts as long as both."""


class EndedTransaction(NamedTuple):
    """`last_stable_offset` is the one right after the marker, if everything up to the marker is replicated."""

    first_offset: int
    marker_offset: int
    last_stable_offset: int


@dataclass(slots=True, eq=False)
class OpenTransactions:
    """Transactions without a marker, and those whose marker may not be below the high watermark yet.

    Invariant: `_open` is ordered by first offset, since transactions begin in log order. In `_ended`, both columns
    increase: an entry that starts later and ends earlier than another cannot decide the last stable offset.
    """

    _open: dict[int, int] = field(default_factory=dict)
    """The first offset of each producer's open transaction."""
    _ended: deque[tuple[int, int]] = field(default_factory=deque)
    """The first offset and the marker's offset."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[int]:
        """Yield the producers with an open transaction, by its first offset."""
        return iter(self._open)

    def first_offsets(self) -> Iterator[int]:
        """Yield the first offsets of the open transactions, lowest first."""
        return iter(self._open.values())

    def begin(self, producer_id: int, first_offset: int) -> None:
        """Begin a transaction, unless the producer has one already."""
        self._open.setdefault(producer_id, first_offset)

    def end(self, producer_id: int, marker_offset: int) -> EndedTransaction | None:
        """Return the transaction that the marker ends; None if the producer has none."""
        first_offset = self._open.pop(producer_id, None)
        if first_offset is None:
            return None
        self._note_ended(first_offset, marker_offset)
        return EndedTransaction(first_offset, marker_offset, next(iter(self._open.values()), marker_offset + 1))

    def _note_ended(self, first_offset: int, marker_offset: int) -> None:
        ended = self._ended
        while ended and ended[-1][0] >= first_offset:
            ended.pop()
        ended.append((first_offset, marker_offset))
        if len(ended) > ENDED_MAX:
            pairs = zip(list(ended)[::2], list(ended)[1::2], strict=False)
            self._ended = deque((first[0], second[1]) for first, second in pairs)
            if len(ended) % 2:
                self._ended.append(ended[-1])

    def first_unstable(self, high_watermark: int) -> int | None:
        """Return the first offset of the earliest transaction whose marker is missing or not below the watermark.

        `high_watermark` must be the real one: this forgets the transactions whose markers are below it.
        """
        ended = self._ended
        if not ended and not self._open:
            # Almost always: every fetch comes here.
            return None
        while ended and ended[0][1] < high_watermark:
            ended.popleft()
        first_open = next(iter(self._open.values()), None)
        if not ended:
            return first_open
        return ended[0][0] if first_open is None else min(ended[0][0], first_open)

    def ended(self) -> Iterator[tuple[int, int]]:
        return iter(self._ended)

    def restore(self, open_: Iterable[tuple[int, int]], ended: Iterable[tuple[int, int]]) -> None:
        """Set the state from producers and first offsets, in any order, and the result of `ended`."""
        self._open = dict(sorted(open_, key=lambda item: item[1]))
        self._ended = deque(ended)


def marker_of(header: BatchHeader, batch: Buffer) -> Marker | None:
    """Return the marker in a control batch; None if it has none.

    Compaction may have emptied it, and there are other kinds of control records.
    """
    if header.record_count == 0 or header.producer_id < 0:
        return None
    try:
        return read_marker(batch)
    except KafkaError:
        return None
