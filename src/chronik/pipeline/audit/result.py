"""Combine the findings of all blocks into one result: counts, offset ranges and the verdict. Without Spark.

`complete`: no record is missing, duplicated, out of order, altered, or present without being in the log. Offsets below
the log start have expired, and records appended after the audit began are ignored: neither count as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from chronik.pipeline.audit.blocks import ACKED, DELIVERED, LANDED, READABLE, SIDES, Bounds, Finding, bucket_width

COMPLETE, INCOMPLETE = "complete", "incomplete"
BUCKETS_MAX = 60
LISTED_MAX = 10_000
"""Ranges listed in the JSON per partition and kind. Counts are not limited."""
FAULT_COUNTS = ("expired", "gaps", "duplicates", "out_of_order", "mismatches", "unexpected")


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
    counts: dict[int, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    expired: int = 0
    unacknowledged: int = 0
    verified: int = 0
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

    def missing(self, side: int | None = None) -> int:
        return sum(found.count for found in self.gaps if side in (None, found.side))

    def lag(self, side: int) -> int:
        """Return the number of records at the log's end that the side has not reached."""
        reached = self.last.get(side, -1)
        return sum(
            found.last - max(found.first, reached + 1) + 1
            for found in self.gaps
            if found.side == side and found.last > reached
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

    @property
    def verdict(self) -> str:
        return COMPLETE if all(found.is_complete for found in self.partitions) else INCOMPLETE

    @property
    def last_side(self) -> int:
        """Return the last of the audited sides."""
        return max(self.given)

    def total(self, side: int) -> int | None:
        return sum(found.counts.get(side, 0) for found in self.partitions) if side in self.given else None

    @property
    def expected(self) -> int:
        """Return how many records should have arrived: acknowledged or readable, whichever is more."""
        return max(self.total(ACKED) or 0, self.total(READABLE) or 0)

    @property
    def imbalance(self) -> int:
        counts = [found.counts.get(self.last_side, 0) for found in self.partitions]
        return max(counts, default=0) - min(counts, default=0)

    def share(self, found: PartitionResult) -> tuple[int, float, int]:
        """Return a partition's records at the last side, percentage of all expected, and deviation from the mean."""
        messages = found.counts.get(self.last_side, 0)
        percent = round(100 * messages / self.expected, 1) if self.expected else 0.0
        return messages, percent, round(messages - self.expected / len(self.partitions))

    def to_json(self) -> dict[str, Any]:
        """Return what `chronik pipeline audit --json` prints. interface.md defines the names."""
        partitions = [self._partition_json(found) for found in self.partitions]
        return {
            "verdict": self.verdict,
            "topic": self.topic,
            **{name: self.total(side) for side, name in enumerate(SIDES)},
            **{name: sum(row[name] for row in partitions) for name in FAULT_COUNTS},
            "unacknowledged": sum(found.unacknowledged for found in self.partitions) if ACKED in self.given else None,
            "verified": sum(found.verified for found in self.partitions),
            "imbalance": self.imbalance,
            "log_from": self.log_from,
            "compacted": self.is_compacted,
            "notes": self.notes,
            "partitions": partitions,
            "bucket_ms": self.slice_ms,
            "buckets": self._buckets_json(),
        }

    def _partition_json(self, found: PartitionResult) -> dict[str, Any]:
        messages, percent, deviation = self.share(found)
        side = self.last_side
        return {
            "partition": found.partition,
            **{name: found.counts.get(at, 0) if at in self.given else None for at, name in enumerate(SIDES)},
            "messages": messages,
            "percent": percent,
            "deviation": deviation,
            "first_offset": found.first.get(side),
            "last_offset": found.last.get(side),
            "log_start_offset": found.bounds.log_start,
            "end_offset": found.bounds.end,
            "lag": {SIDES[at]: found.lag(at) for at in (DELIVERED, LANDED) if at in self.given},
            "expired": found.expired,
            "gaps": found.missing(),
            "duplicates": sum(extra.count for extra in found.duplicates),
            "out_of_order": found.disorder,
            "mismatches": found.mismatches,
            "unexpected": sum(extra.count for extra in found.unexpected),
            "gap_ranges": _listed(found.gaps),
            "duplicate_ranges": _listed(found.duplicates),
            "out_of_order_ranges": _listed(found.disordered),
            "mismatch_offsets": _listed(found.mismatched),
            "unexpected_ranges": _listed(found.unexpected),
        }

    def _buckets_json(self) -> list[dict[str, Any]]:
        """Return the time slices by partition and time. A side that was not given is null."""
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for part in self.slices:
            row = rows.setdefault(
                (part.partition, part.start_ms),
                {
                    "partition": part.partition,
                    "start_ms": part.start_ms,
                    **{name: 0 if side in self.given else None for side, name in enumerate(SIDES)},
                    "gaps": 0,
                },
            )
            row[SIDES[part.side]] = part.count
            row["gaps"] += part.missing
        return [row for _, row in sorted(rows.items())]


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
    for partition, found in sorted(by_partition.items()):
        bound = bounds.get(partition, Bounds(0, 0, 0))
        start, end = (now or {}).get(partition, (bound.log_start, bound.end))
        partitions.append(_partition(partition, bound, found, start, end))
    slices, width = _slices([item for found in by_partition.values() for item in found])
    return AuditResult(topic, tuple(sorted(given)), partitions, slices, width)


def _partition(
    partition: int, bounds: Bounds, findings: list[Finding], start_now: int, end_now: int
) -> PartitionResult:
    result = PartitionResult(partition, bounds)
    ranges: dict[str, list[Range]] = {"gap": [], "unexpected": [], "duplicate": []}
    for found in findings:
        match found.kind:
            case "count":
                side = found.side
                result.counts[side] = result.counts.get(side, 0) + found.number
                result.first[side] = min(found.start, result.first.get(side, found.start))
                result.last[side] = max(found.stop - 1, result.last.get(side, found.stop - 1))
            case "expired" | "unacknowledged" | "verified" | "disorder" | "mismatches":
                setattr(result, found.kind, getattr(result, found.kind) + found.number)
            case "gap" | "unexpected" | "duplicate":
                ranges[found.kind].append(Range(found.side, found.start, found.stop - 1, found.number))
            case "gap-ahead" | "unexpected-ahead":
                # With acks=1, a record may become readable only after the log ends were read.
                lost = _clipped(Range(found.side, found.start, found.stop - 1, found.number), end_now)
                if lost is not None:
                    ranges[found.kind.removesuffix("-ahead")].append(lost)
                    if found.kind == "gap-ahead":
                        result.counts[ACKED] = result.counts.get(ACKED, 0) + lost.count
            case "order" | "swapped":
                result.disordered.append(Range(found.side, found.start, found.stop - 1, 1))
            case "mismatch":
                result.mismatched.append(Mismatch(found.side, found.start, found.number, found.extra))
    result.gaps = _merged(ranges["gap"])
    if start_now > bounds.log_start:
        result.gaps, gone = _expired(result.gaps, start_now)
        result.expired += gone
    result.duplicates = sorted(ranges["duplicate"], key=lambda item: (item.side, item.first))
    result.unexpected = _merged(ranges["unexpected"])
    across = _order_across([found for found in findings if found.kind == "sequence"])
    result.disorder += len(across)
    result.disordered = sorted([*result.disordered, *across], key=lambda item: (item.side, item.first))
    result.mismatched.sort(key=lambda item: (item.side, item.offset))
    return result


def _clipped(found: Range, first: int) -> Range | None:
    """Return the part of a range at or above an offset."""
    if found.last < first:
        return None
    if found.first >= first:
        return found
    return Range(found.side, first, found.last, min(found.count, found.last - first + 1))


def _expired(gaps: list[Range], log_start: int) -> tuple[list[Range], int]:
    """Drop what retention removed during the audit, on all sides. Return the remaining gaps and the expired count."""
    left = [clipped for gap in gaps if (clipped := _clipped(gap, log_start)) is not None]
    gone = sum(gap.count for gap in gaps if gap.side == READABLE) - sum(g.count for g in left if g.side == READABLE)
    return left, gone


def _merged(ranges: list[Range]) -> list[Range]:
    """Merge adjacent ranges, so that a gap across several blocks is one gap."""
    made: list[Range] = []
    for found in sorted(ranges, key=lambda item: (item.side, item.first)):
        before = made[-1] if made else None
        whole = before is not None and before.count == before.last - before.first + 1
        if before is not None and whole and before.side == found.side and before.last + 1 == found.first:
            made[-1] = Range(found.side, before.first, found.last, before.count + found.count)
        else:
            made.append(found)
    return made


def _order_across(sequences: list[Finding]) -> list[Range]:
    """Find disorder between blocks: a block's first receipt precedes the last receipt of a lower block."""
    found: list[Range] = []
    latest: Finding | None = None
    for block in sorted(sequences, key=lambda item: item.start):
        if latest is not None and block.number < latest.extra:
            low, high = sorted((latest.stop, block.start))
            found.append(Range(DELIVERED, low, high, 1))
        if latest is None or block.extra > latest.extra:
            latest = block
    return found


def _slices(findings: list[Finding]) -> tuple[list[Slice], int]:
    """Bring the buckets of all blocks to one width, few enough to read."""
    buckets = [found for found in findings if found.kind == "bucket"]
    if not buckets:
        return [], bucket_width(0)
    span = max(found.start + found.stop for found in buckets) - min(found.start for found in buckets)
    width = max(bucket_width(span / BUCKETS_MAX), max(found.stop for found in buckets))
    counts: dict[tuple[int, int, int], tuple[int, int]] = {}
    reach: dict[tuple[int, int, int], int] = {}
    for found in findings:
        key = (found.partition, found.side, found.start // width * width)
        if found.kind == "bucket":
            count, missing = counts.get(key, (0, 0))
            counts[key] = (count + found.number, missing + found.extra)
        elif found.kind == "reach":
            reach[key] = max(found.number, reach.get(key, 0))
    return [Slice(*key, count, missing, reach.get(key)) for key, (count, missing) in sorted(counts.items())], width
