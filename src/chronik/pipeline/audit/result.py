"""Combine the findings of all blocks into one result: counts, offset ranges and the verdict. Without Spark.

`complete`: no record is missing, duplicated, out of order, altered, or present without being in the log. Offsets below
the log start have expired, and records appended after the audit began are ignored: neither count as missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from chronik.pipeline.audit.blocks import ACKED, DELIVERED, LANDED, READABLE, SIDES, Bounds, Finding, bucket_width

BUCKETS_MAX = 60
LISTED_MAX = 10_000
"""Ranges listed in the JSON per partition and kind. Counts are not limited."""
FAULT_COUNTS = ("deleted", "expired", "gaps", "duplicates", "out_of_order", "mismatches", "unexpected")


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets from `first` to `last`. `count` of them are affected: all, some, or copies."""

    side: int
    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    side: int
    offset: int
    found: int
    expected: int
    field: str = "content"
    """`content` with checksums, or `timestamp` with milliseconds."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One side of one partition in one time slice. `reach` is its highest offset in it, or None."""

    partition: int
    side: int
    start_ms: int
    count: int
    missing: int
    reach: int | None


@dataclass(slots=True)
class PartitionResult:
    """The result for one partition. Counts are numbers of offsets; they are 0 for sides that were not given."""

    partition: int
    bounds: Bounds
    counts: Counter[int] = field(default_factory=Counter)
    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    deleted: int = 0
    expired: int = 0
    unacknowledged: int = 0
    verified: int = 0
    timed: int = 0
    headless: int = 0
    disorder: int = 0
    mismatches: int = 0
    gaps: list[Range] = field(default_factory=list)
    duplicates: list[Range] = field(default_factory=list)
    unexpected: list[Range] = field(default_factory=list)
    disordered: list[Range] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return not (self.gaps or self.duplicates or self.unexpected or self.disorder or self.mismatches)

    def missing(self) -> int:
        return _total(self.gaps)

    def lag(self, side: int) -> int:
        """Return the number of records at the log's end that the side has not reached."""
        reached = self.last.get(side, -1)
        return sum(
            gap.last - max(gap.first, reached + 1) + 1 for gap in self.gaps if gap.side == side and gap.last > reached
        )


@dataclass(slots=True)
class AuditResult:
    topic: str
    given: tuple[int, ...]
    partitions: list[PartitionResult]
    slices: list[Slice]
    slice_ms: int
    log_from: str = "headers"
    is_compacted: bool = False
    notes: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    """Columns of the table that are no part of a record. They are not compared."""

    @property
    def verified(self) -> int:
        return sum(partition.verified for partition in self.partitions)

    @property
    def timed(self) -> int:
        return sum(partition.timed for partition in self.partitions)

    @property
    def headless(self) -> int:
        return sum(partition.headless for partition in self.partitions)

    @property
    def verdict(self) -> str:
        return "complete" if all(partition.is_complete for partition in self.partitions) else "incomplete"

    @property
    def last_side(self) -> int:
        return max(self.given)

    def total(self, side: int) -> int | None:
        return sum(partition.counts[side] for partition in self.partitions) if side in self.given else None

    @property
    def expected(self) -> int:
        """Return how many records should have arrived: acknowledged or readable, whichever is more."""
        return max(self.total(ACKED) or 0, self.total(READABLE) or 0)

    @property
    def imbalance(self) -> int:
        counts = [partition.counts[self.last_side] for partition in self.partitions]
        return max(counts, default=0) - min(counts, default=0)

    def share(self, partition: PartitionResult) -> tuple[int, float, int]:
        """Return a partition's records at the last side, percentage of all expected, and deviation from the mean."""
        messages = partition.counts[self.last_side]
        percent = round(100 * messages / self.expected, 1) if self.expected else 0.0
        return messages, percent, round(messages - self.expected / len(self.partitions))

    def to_json(self) -> dict[str, Any]:
        """Return what `chronik pipeline audit --json` prints. docs/pipeline.md defines the sides and the faults."""
        partitions = [self._partition_json(partition) for partition in self.partitions]
        unacknowledged = sum(partition.unacknowledged for partition in self.partitions)
        return {
            "verdict": self.verdict,
            "topic": self.topic,
            **{name: self.total(side) for side, name in enumerate(SIDES)},
            **{name: sum(row[name] for row in partitions) for name in FAULT_COUNTS},
            "unacknowledged": unacknowledged if ACKED in self.given else None,
            "verified": self.verified,
            "timestamps_verified": self.timed,
            "headers_not_compared": self.headless,
            "columns_not_compared": self.derived,
            "imbalance": self.imbalance,
            "log_from": self.log_from,
            "compacted": self.is_compacted,
            "notes": self.notes,
            "partitions": partitions,
            "bucket_ms": self.slice_ms,
            "buckets": self._buckets_json(),
        }

    def _partition_json(self, partition: PartitionResult) -> dict[str, Any]:
        messages, percent, deviation = self.share(partition)
        side = self.last_side
        return {
            "partition": partition.partition,
            **{name: partition.counts[at] if at in self.given else None for at, name in enumerate(SIDES)},
            "messages": messages,
            "percent": percent,
            "deviation": deviation,
            "first_offset": partition.first.get(side),
            "last_offset": partition.last.get(side),
            "log_start_offset": partition.bounds.log_start,
            "end_offset": partition.bounds.end,
            "lag": {SIDES[at]: partition.lag(at) for at in (DELIVERED, LANDED) if at in self.given},
            "deleted": partition.deleted,
            "expired": partition.expired,
            "gaps": partition.missing(),
            "duplicates": _total(partition.duplicates),
            "out_of_order": partition.disorder,
            "mismatches": partition.mismatches,
            "unexpected": _total(partition.unexpected),
            "gap_ranges": _listed(partition.gaps),
            "duplicate_ranges": _listed(partition.duplicates),
            "out_of_order_ranges": _listed(partition.disordered),
            "mismatch_offsets": _listed(partition.mismatched),
            "unexpected_ranges": _listed(partition.unexpected),
        }

    def _buckets_json(self) -> list[dict[str, Any]]:
        """Return the time slices by partition and time. A side that was not given is null."""
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for part in self.slices:
            sides = {name: 0 if side in self.given else None for side, name in enumerate(SIDES)}
            empty = {"partition": part.partition, "start_ms": part.start_ms, **sides, "gaps": 0}
            row = rows.setdefault((part.partition, part.start_ms), empty)
            row[SIDES[part.side]] = part.count
            row["gaps"] += part.missing
        return [row for _, row in sorted(rows.items())]


def _total(ranges: Iterable[Range]) -> int:
    return sum(each.count for each in ranges)


def _listed(faults: Sequence[Range | Mismatch]) -> list[dict[str, Any]]:
    return [{**asdict(fault), "side": SIDES[fault.side]} for fault in faults[:LISTED_MAX]]


def summarise(
    topic: str,
    bounds: Mapping[int, Bounds],
    given: Sequence[int],
    findings: Iterable[Finding],
    *,
    now: Mapping[int, tuple[int, int]] | None = None,
) -> AuditResult:
    """Combine the findings. `now`: each partition's log start and end after the audit, if they may have changed."""
    by_partition: dict[int, list[Finding]] = {partition: [] for partition in bounds}
    for finding in findings:
        by_partition.setdefault(finding.partition, []).append(finding)
    partitions = []
    for partition, own in sorted(by_partition.items()):
        bound = bounds.get(partition, Bounds(0, 0, 0))
        start, end = (now or {}).get(partition, (bound.log_start, bound.end))
        partitions.append(_partition(partition, bound, own, start, end))
    slices, width = _slices([item for own in by_partition.values() for item in own])
    return AuditResult(topic, tuple(sorted(given)), partitions, slices, width)


def _partition(
    partition: int, bounds: Bounds, findings: list[Finding], start_now: int, end_now: int
) -> PartitionResult:
    result = PartitionResult(partition, bounds)
    ranges: dict[str, list[Range]] = {"gap": [], "unexpected": [], "duplicate": []}
    for finding in findings:
        span = Range(finding.side, finding.start, finding.stop - 1, finding.number)
        match finding.kind:
            case "count":
                result.counts[span.side] += span.count
                result.first[span.side] = min(span.first, result.first.get(span.side, span.first))
                result.last[span.side] = max(span.last, result.last.get(span.side, span.last))
            case (
                "deleted" | "expired" | "unacknowledged" | "verified" | "timed" | "headless" | "disorder" | "mismatches"
            ):
                setattr(result, finding.kind, getattr(result, finding.kind) + finding.number)
            case "gap" | "unexpected" | "duplicate":
                ranges[finding.kind].append(span)
            case "gap-ahead" | "unexpected-ahead":
                # With acks=1, a record may become readable only after the log ends were read.
                if (lost := _clipped(span, end_now)) is not None:
                    ranges[finding.kind.removesuffix("-ahead")].append(lost)
                    if finding.kind == "gap-ahead":
                        result.counts[ACKED] += lost.count
            case "order" | "swapped":
                result.disordered.append(replace(span, count=1))
            case "mismatch":
                result.mismatched.append(Mismatch(finding.side, finding.start, finding.number, finding.extra))
            case "retimed":
                times = finding.number, finding.extra
                result.mismatched.append(Mismatch(finding.side, finding.start, *times, "timestamp"))
    result.gaps = _merged(ranges["gap"])
    if start_now > bounds.log_start:
        result.gaps, gone = _expired(result.gaps, start_now)
        result.expired += gone
    result.duplicates = sorted(ranges["duplicate"], key=_place)
    result.unexpected = _merged(ranges["unexpected"])
    across = _order_across([finding for finding in findings if finding.kind == "sequence"])
    result.disorder += len(across)
    result.disordered = sorted([*result.disordered, *across], key=_place)
    result.mismatched.sort(key=lambda item: (item.side, item.offset))
    return result


def _clipped(span: Range, first: int) -> Range | None:
    """Return the part of a range at or above an offset."""
    if span.last < first:
        return None
    if span.first >= first:
        return span
    return replace(span, first=first, count=min(span.count, span.last - first + 1))


def _expired(gaps: list[Range], log_start: int) -> tuple[list[Range], int]:
    """Drop what retention removed during the audit, on all sides. Return the remaining gaps and the expired count."""
    left = [clipped for gap in gaps if (clipped := _clipped(gap, log_start)) is not None]
    before, after = (_total(each for each in ranges if each.side == READABLE) for ranges in (gaps, left))
    return left, before - after


def _merged(ranges: list[Range]) -> list[Range]:
    """Merge adjacent ranges, so that a gap across several blocks is one gap."""
    merged: list[Range] = []
    for span in sorted(ranges, key=_place):
        before = merged[-1] if merged else span
        is_whole = before.count == before.last - before.first + 1
        if is_whole and before.side == span.side and before.last + 1 == span.first:
            merged[-1] = Range(span.side, before.first, span.last, before.count + span.count)
        else:
            merged.append(span)
    return merged


def _place(span: Range) -> tuple[int, int]:
    return span.side, span.first


def _order_across(sequences: list[Finding]) -> list[Range]:
    """Find disorder between blocks: a block's first receipt precedes the last receipt of a lower block."""
    disordered: list[Range] = []
    latest: Finding | None = None
    for block in sorted(sequences, key=lambda item: item.start):
        if latest is not None and block.number < latest.extra:
            low, high = sorted((latest.stop, block.start))
            disordered.append(Range(DELIVERED, low, high, 1))
        if latest is None or block.extra > latest.extra:
            latest = block
    return disordered


def _slices(findings: list[Finding]) -> tuple[list[Slice], int]:
    """Bring the buckets of all blocks to one width, few enough to read."""
    buckets = [finding for finding in findings if finding.kind == "bucket"]
    if not buckets:
        return [], bucket_width(0)
    span = max(finding.start + finding.stop for finding in buckets) - min(finding.start for finding in buckets)
    width = max(bucket_width(span / BUCKETS_MAX), max(finding.stop for finding in buckets))
    counts: Counter[tuple[int, int, int]] = Counter()
    missing: Counter[tuple[int, int, int]] = Counter()
    reach: dict[tuple[int, int, int], int] = {}
    for finding in findings:
        key = (finding.partition, finding.side, finding.start // width * width)
        if finding.kind == "bucket":
            counts[key] += finding.number
            missing[key] += finding.extra
        elif finding.kind == "reach":
            reach[key] = max(finding.number, reach.get(key, 0))
    return [Slice(*key, count, missing[key], reach.get(key)) for key, count in sorted(counts.items())], width
