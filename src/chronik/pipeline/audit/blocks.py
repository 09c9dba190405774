"""Compare all sides of an audit for one block of a partition's offsets: the core of the audit, without Spark.

A block is `size` consecutive offsets. Each side is rows of offset ranges; if records are known one by one, each range
is one offset. The block is cut wherever a row starts or stops. All offsets in such a segment are alike, so a log known
by its batches costs one step per batch. The result is findings, which stay few whatever the number of records.
`result` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

ACKED, READABLE, DELIVERED, LANDED, CONTROL, MARK, ABORTED = range(7)
"""The side of a row. CONTROL: offsets without visible records. MARK: not data, but makes sure that its block is
examined. ABORTED: the producer has aborted the transaction of these records, so no side may have them.
"""
SIDES = ("acked", "readable", "delivered", "landed")

BY_POSITION = 1
"""Everything readable below a committed position."""
DELETED = 2
"""The record's key is listed as deleted, so the table should not have it."""
EXACT_TIME = 4
"""The row has the record's own timestamp, or none that a table can hold, and not that of its batch."""

NO_CHECKSUM = -1
NO_TIME = -(2**63)
RANGES_MAX = 10_000
"""Listed ranges of each kind per block. Counts are not limited."""
BUCKETS_PER_BLOCK = 16
DENSE_FROM = 8
"""If there is a row for at least every eighth offset, one segment per offset is faster than searching the edges."""
BUCKET_MS_MIN = 1_000

Array = Any


class Rows(NamedTuple):
    """Columns of equal length. `seq` is the position in a file of receipts, where order matters."""

    side: Array
    start: Array
    stop: Array
    seq: Array
    time_ms: Array
    checksum: Array
    flags: Array
    bare: Array
    """The checksum without headers of a record that has some. A producer's report may omit them."""

    def of(self, side: int) -> Rows:
        chosen = self.side == side
        return Rows(*(column[chosen] for column in self))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an audit examines in one partition.

    `begin`: where the audit starts; 0 by default. `log_start` and `end`: the log bounds when the audit began.
    """

    begin: int
    log_start: int
    end: int

    @property
    def first(self) -> int:
        """Return the first offset that is audited."""
        return min(max(self.begin, self.log_start), self.end)


class Finding(NamedTuple):
    """`start` and `stop` are offsets, `stop` exclusive. For buckets, they are a time and a width in milliseconds.

    The kinds, by what they describe:
    - a number: count (offsets), deleted (on purpose, from the table), expired, unacknowledged, verified (contents),
      timed (timestamps), headless (contents without the headers), mismatches, disorder
    - a range: gap, unexpected, duplicate; gap-ahead and unexpected-ahead are beyond the log end as the audit began
    - a place: order, swapped, mismatch (number: the checksum found, extra: the expected one), retimed (the same with
      timestamps)
    - a block: sequence (start and stop: the offsets that came first and last, number and extra: their places in the
      receipts), bucket (number: offsets, extra: missing), reach (number: the highest offset in that time)
    """

    kind: str
    side: int
    partition: int
    start: int
    stop: int
    number: int
    extra: int = 0


class Block:
    """Arrays with one value per segment. Segment i is `edges[i]` up to but not including `edges[i + 1]`.

    `given`: the sides of this audit, READABLE among them. `downstream`: those that should have what is readable.
    """

    def __init__(
        self,
        partition: int,
        base: int,
        size: int,
        rows: Rows,
        bounds: Bounds,
        given: Sequence[int],
        *,
        is_compacted: bool = False,
    ) -> None:
        self.partition, self.base, self.bounds = partition, base, bounds
        self.given, self.is_compacted = tuple(given), is_compacted
        self.is_dense = len(rows.start) > size // DENSE_FROM
        self.edges = self._cut(rows, base, size)
        self.lengths = np.diff(self.edges)
        self.segments = len(self.lengths)
        offsets = self.edges[:-1]
        self.audited = offsets >= bounds.begin
        self.in_log = self.audited & (offsets >= bounds.log_start) & (offsets < bounds.end)
        self.expired = self.audited & (offsets < bounds.log_start)
        self.ahead = offsets >= bounds.end
        self.rows = {side: rows.of(side) for side in given}
        self.control = self._cover(rows.of(CONTROL)) > 0
        readable = rows.of(READABLE)
        self.deleted = self._cover(Rows(*(column[readable.flags & DELETED > 0] for column in readable))) > 0
        self.aborted = (self._cover(rows.of(ABORTED)) > 0) & self.audited
        self.copies = {side: self._cover(self.rows[side]) * self.audited for side in given}
        self.copies[READABLE] *= self.in_log
        self.has = {side: copies > 0 for side, copies in self.copies.items()}
        for side in given:
            if (self.rows[side].flags & BY_POSITION).any():
                self.has[side] &= self.has[READABLE]
                self.copies[side] = self.has[side].astype(np.int64)
        self.downstream = [side for side in (DELIVERED, LANDED) if side in given]
        if is_compacted:
            # Only the latest record of each key is readable. The other sides may have or lack older ones.
            for side in self.downstream:
                self.copies[side] = self.copies[side] * self.has[READABLE]
                self.has[side] &= self.has[READABLE]

    def _cut(self, rows: Rows, base: int, size: int) -> Array:
        if self.is_dense:
            return base + np.arange(size + 1, dtype=np.int64)
        own = np.array([base, base + size, self.bounds.begin, self.bounds.log_start, self.bounds.end], np.int64)
        edges = np.unique(np.concatenate((rows.start, rows.stop, own)))
        return edges[(edges >= base) & (edges <= base + size)]

    def _at(self, offsets: Array) -> Array:
        """Return the segments that start at these offsets."""
        if self.is_dense:
            return np.clip(offsets - self.base, 0, self.segments)
        return np.searchsorted(self.edges, offsets)

    def _cover(self, rows: Rows) -> Array:
        """Return how many rows cover each segment."""
        change = np.zeros(self.segments + 1, np.int64)
        np.add.at(change, self._at(rows.start), 1)
        np.add.at(change, self._at(rows.stop), -1)
        return np.cumsum(change[:-1])

    def _total(self, chosen: Array) -> int:
        """Return the number of offsets in the chosen segments."""
        return int(self.lengths[chosen].sum())

    def findings(self) -> Iterator[Finding]:
        missing = self._missing()
        for side in self.given:
            yield from self._counts(side)
            yield from self._ranges("gap", side, missing[side] & ~self.ahead)
            yield from self._ranges("gap-ahead", side, missing[side] & self.ahead)
            yield from self._ranges("duplicate", side, self.copies[side] > 1, self.copies[side] - 1)
        yield from self._ranges("unexpected", READABLE, self.has[READABLE] & self.aborted)
        for side in self.downstream if not self.is_compacted else ():
            unknown = self.has[side] & (~self.has[READABLE] | self.aborted) & ~self.expired
            if ACKED in self.given:
                unknown &= ~missing[READABLE]  # that is a gap of the log
            too_early = self.ahead & ~self.aborted
            yield from self._ranges("unexpected", side, unknown & ~too_early)
            yield from self._ranges("unexpected-ahead", side, unknown & too_early)
        if LANDED in self.given and self.deleted.any():
            deleted = self.deleted & self.has[READABLE] & ~self.aborted
            yield from self._one("deleted", LANDED, self._total(deleted & ~self.has[LANDED]))
            yield from self._ranges("unexpected", LANDED, deleted & self.has[LANDED])
        if ACKED in self.given:
            yield from self._one("expired", ACKED, self._total(self.has[ACKED] & self.expired))
            yield from self._one("unacknowledged", READABLE, self._total(self.has[READABLE] & ~self.has[ACKED]))
        yield from self._order()
        altered: dict[int, Array] = {}
        yield from self._contents(altered)
        yield from self._timestamps(altered)
        yield from self._times(missing)

    def _missing(self) -> dict[int, Array]:
        """Return, for each side, the offsets that it should have but does not."""
        nothing = np.zeros(self.segments, bool)
        missing = dict.fromkeys(self.given, nothing)
        # A log that is not compacted has no holes.
        lost = nothing if self.is_compacted else self.in_log & ~self.has[READABLE] & ~self.control
        if ACKED in self.given:
            lost = lost | (self.has[ACKED] & ~self.has[READABLE] & ~self.expired)
        missing[READABLE] = lost
        for side in self.downstream:
            missing[side] = self.has[READABLE] & ~self.has[side] & ~self.aborted
        if LANDED in self.downstream:
            missing[LANDED] &= ~self.deleted
        return missing

    def _counts(self, side: int) -> Iterator[Finding]:
        chosen = self.has[side] & ~self.ahead
        found = np.flatnonzero(chosen)
        if len(found):
            start, stop = int(self.edges[found[0]]), int(self.edges[found[-1] + 1])
            yield Finding("count", side, self.partition, start, stop, self._total(chosen))

    def _one(self, kind: str, side: int, count: int) -> Iterator[Finding]:
        if count:
            yield Finding(kind, side, self.partition, self.base, self.base, count)

    def _ranges(self, kind: str, side: int, chosen: Array, copies: Array | None = None) -> Iterator[Finding]:
        starts, stops = runs(chosen)
        weights = self.lengths if copies is None else self.lengths * copies
        for start, stop in zip(starts[:RANGES_MAX], stops[:RANGES_MAX], strict=True):
            first, end = int(self.edges[start]), int(self.edges[stop])
            yield Finding(kind, side, self.partition, first, end, int(weights[start:stop].sum()))
        if len(starts) > RANGES_MAX:
            # Report the remaining ranges as one range, with the number of offsets that are affected.
            start, stop = starts[RANGES_MAX], stops[-1]
            rest = int((weights[start:stop] * chosen[start:stop]).sum())
            yield Finding(kind, side, self.partition, int(self.edges[start]), int(self.edges[stop]), rest)

    def _order(self) -> Iterator[Finding]:
        """Check receipts in file order: find records that came after one with a higher offset."""
        if DELIVERED not in self.given:
            return
        rows = self.rows[DELIVERED]
        if not len(rows.seq) or (rows.flags & BY_POSITION).any():
            return
        by_offset = np.lexsort((rows.seq, rows.start))
        starts, seqs = rows.start[by_offset], rows.seq[by_offset]
        first = np.ones(len(starts), bool)
        first[1:] = starts[1:] != starts[:-1]
        starts, seqs = starts[first], seqs[first]
        descents = np.flatnonzero(seqs[1:] < seqs[:-1])
        yield from self._one("disorder", DELIVERED, len(descents))
        for at in descents[:RANGES_MAX]:
            yield Finding("order", DELIVERED, self.partition, int(starts[at]), int(starts[at + 1]) + 1, 1)
        early, late = int(seqs.argmin()), int(seqs.argmax())
        # For comparison with neighbouring blocks: which receipts of this block came first and last.
        places = int(seqs[early]), int(seqs[late])
        yield Finding("sequence", DELIVERED, self.partition, int(starts[early]), int(starts[late]), *places)

    def _contents(self, altered: dict[int, Array]) -> Iterator[Finding]:
        """Compare checksums with those of the first side that has one for the offset. `altered`: where they differ.

        A ledger may not cover the headers of a record. Then key and value are compared with it, and the headers among
        the other sides.
        """
        by_ledger = np.zeros(self.segments, bool)
        headless = 0
        expected = np.full(self.segments, NO_CHECKSUM, np.int64)
        verified = np.zeros(self.segments, bool)
        for side in self.given:
            rows = self.rows[side]
            known = (rows.checksum != NO_CHECKSUM) & (rows.start >= self.bounds.begin)
            at, found = self._at(rows.start[known]), rows.checksum[known]
            fresh = expected[at] == NO_CHECKSUM
            verified[at[~fresh]] = True
            # The first row of an offset sets the expected checksum. Reversed, so that it is written last.
            expected[at[fresh][::-1]] = found[fresh][::-1]
            wrong = found != expected[at]
            if side == ACKED:
                by_ledger[at] = True
            else:
                excused = wrong & by_ledger[at] & (rows.bare[known] == expected[at])
                expected[at[excused][::-1]] = found[excused][::-1]
                by_ledger[at[excused]] = False
                headless += int(excused.sum())
                wrong = found != expected[at]
            altered[side] = at[wrong]
            yield from self._mismatches(side, at[wrong], found[wrong], expected)
        yield from self._one("verified", READABLE, int(verified.sum()))
        yield from self._one("headless", ACKED, headless)

    def _timestamps(self, altered: dict[int, Array]) -> Iterator[Finding]:
        """Compare timestamps with those of the first side that has the offset's own. Altered records count once."""
        expected = np.full(self.segments, NO_TIME, np.int64)
        known, timed = np.zeros(self.segments, bool), np.zeros(self.segments, bool)
        for side in self.given:
            rows = self.rows[side]
            exact = ((rows.flags & EXACT_TIME) > 0) & (rows.start >= self.bounds.begin)
            at, found = self._at(rows.start[exact]), rows.time_ms[exact]
            fresh = ~known[at]
            timed[at[~fresh]] = True
            expected[at[fresh][::-1]] = found[fresh][::-1]
            known[at] = True
            wrong = (found != expected[at]) & ~np.isin(at, altered.get(side, ()))
            yield from self._one("mismatches", side, int(wrong.sum()))
            for segment, time_ms in list(zip(at[wrong], found[wrong], strict=True))[:RANGES_MAX]:
                place = int(self.edges[segment])
                yield Finding("retimed", side, self.partition, place, place + 1, int(time_ms), int(expected[segment]))
        yield from self._one("timed", READABLE, int(timed.sum()))

    def _mismatches(self, side: int, at: Array, found: Array, expected: Array) -> Iterator[Finding]:
        by_offset = np.argsort(at, kind="stable")
        at, found = at[by_offset], found[by_offset]
        swapped = np.zeros(len(at), bool)
        for one in range(len(at) - 1):
            other = one + 1
            is_exchanged = found[one] == expected[at[other]] and found[other] == expected[at[one]]
            if is_exchanged and not swapped[one] and at[one] != at[other]:
                swapped[one] = swapped[other] = True
                start, stop = int(self.edges[at[one]]), int(self.edges[at[other]]) + 1
                yield Finding("swapped", side, self.partition, start, stop, 1)
        yield from self._one("disorder", side, int(swapped.sum()) // 2)
        yield from self._one("mismatches", side, int((~swapped).sum()))
        for segment, checksum in list(zip(at[~swapped], found[~swapped], strict=True))[:RANGES_MAX]:
            place = int(self.edges[segment])
            yield Finding("mismatch", side, self.partition, place, place + 1, int(checksum), int(expected[segment]))

    def _times(self, missing: dict[int, Array]) -> Iterator[Finding]:
        """Count each side's offsets per time slice. Each offset has one time, from any side that knows it."""
        times = np.full(self.segments, NO_TIME, np.int64)
        for side in (ACKED, LANDED, DELIVERED, READABLE):
            if side in self.given:
                rows = self.rows[side]
                known = rows.time_ms != NO_TIME
                at = self._at(rows.start[known])
                spread = np.full(self.segments, NO_TIME, np.int64)
                spread[at[::-1]] = rows.time_ms[known][::-1]
                covered = self._cover(rows) > 0
                times = np.where((times == NO_TIME) & covered, _carried(spread), times)
        times = _carried(times)
        known_times = times != NO_TIME
        if not known_times.any():
            return
        lowest, highest = int(times[known_times].min()), int(times[known_times].max())
        width = bucket_width((highest - lowest) / BUCKETS_PER_BLOCK)
        buckets = np.where(known_times, times // width - lowest // width, 0)
        slices = int(buckets.max()) + 1
        for side in self.given:
            has, lacks = np.flatnonzero(self.has[side] & ~self.ahead), np.flatnonzero(missing[side])
            counts = np.bincount(buckets[has], self.lengths[has], slices).astype(np.int64)
            gaps = np.bincount(buckets[lacks], self.lengths[lacks], slices).astype(np.int64)
            reach = np.zeros(slices, np.int64)
            reach[buckets[has]] = self.edges[has + 1] - 1  # in ascending order, so the highest remains
            for bucket in np.flatnonzero(counts + gaps):
                begin = (int(bucket) + lowest // width) * width
                yield Finding("bucket", side, self.partition, begin, width, int(counts[bucket]), int(gaps[bucket]))
                if counts[bucket]:
                    yield Finding("reach", side, self.partition, begin, width, int(reach[bucket]))


def bucket_width(least_ms: float) -> int:
    """Return the smallest of 1, 2, 4, 8 ... seconds that is at least `least_ms`. Narrow slices nest in wider ones."""
    width = BUCKET_MS_MIN
    while width < least_ms:
        width *= 2
    return width


def runs(chosen: Array) -> tuple[Array, Array]:
    """Return where each run of true values starts and stops."""
    edges = np.diff(np.concatenate(([0], chosen.astype(np.int8), [0])))
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)


def _carried(times: Array) -> Array:
    """Replace each unknown time by the last known time before it, or else by the first known time after it."""
    known = times != NO_TIME
    if not known.any():
        return times
    last = np.maximum.accumulate(np.where(known, np.arange(len(times)), -1))
    return times[np.where(last < 0, int(np.flatnonzero(known)[0]), last)]
