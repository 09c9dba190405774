"""An audit as a report: counts by partition, offsets over time, lag, and every fault with its offsets."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import accumulate

from chronik.pipeline.audit.blocks import DELIVERED, LANDED, NO_TIME, READABLE, SIDES
from chronik.pipeline.audit.result import AuditResult, PartitionResult
from chronik.pipeline.report.charts import Mark, Series, bar_chart, line_chart, strip_chart
from chronik.pipeline.report.page import legend, page, section, table

SIDE_COLOURS = ("#57606a", "#0969da", "#8250df", "#1a7f37")
LINES_MAX = 16
FAULTS_MAX = 500
Fault = tuple[int, str, str, int, int, int, str]


def sentence(result: AuditResult) -> str:
    """Return the verdict in words."""
    totals = result.to_json()
    sides = " = ".join(f"{name} {totals[name]:,}" for name in SIDES if totals[name] is not None)
    if totals["verdict"] == "complete":
        expired = f" ({totals['expired']:,} of them expired)" if totals["expired"] else ""
        if totals["deleted"]:
            sides = f"{sides.replace(' = ', ', ')}, {totals['deleted']:,} deleted on purpose"
        return f"complete: {sides}{expired}; nothing is missing, duplicated or out of order; {compared(result)}"
    names = ("gaps", "duplicates", "out_of_order", "mismatches", "unexpected")
    faults = ", ".join(f"{totals[name]:,} {name.replace('_', ' ')}" for name in names if totals[name])
    return f"incomplete: {faults} ({sides.replace(' = ', ', ')}); {compared(result)}"


def compared(result: AuditResult) -> str:
    """Return in words which parts of the records were compared, and which were not."""
    parts = []
    for what, number in (("contents", result.verified), ("timestamps", result.timed)):
        parts.append(f"{what} of {number:,} records compared" if number else f"{what} were not compared")
    if not result.verified and result.log_from != "records":
        parts.append("--log records compares those of the log")
    if result.headless:
        parts.append(f"headers of {result.headless:,} records are not in the ledger")
    if result.derived:
        parts.append(f"columns that were not compared: {', '.join(result.derived)}")
    return ", ".join(parts)


def audit_html(result: AuditResult, made: str) -> str:
    totals = result.to_json()
    expected = result.expected / max(1, len(result.partitions))
    labels = [f"partition {partition.partition}" for partition in result.partitions]
    counts = [
        Series(SIDES[side], [partition.counts[side] for partition in result.partitions], SIDE_COLOURS[side])
        for side in result.given
    ]
    sections = [
        section("Per-Partition Breakdown", _breakdown(result)),
        section(
            "Records by partition",
            bar_chart(labels, counts, expected, f"expected on average: {expected:,.0f}"),
            hint=f"Partition imbalance: {result.imbalance:,} {SIDES[result.last_side]} records.",
        ),
        section(
            "Gaps",
            strip_chart([_strip(partition) for partition in result.partitions]),
            legend(_CLASSES),
            hint="Offsets from left to right.",
        ),
        section(
            "Offsets over time",
            line_chart(_reach(result), _gap_times(result)),
            hint=f"The highest offset of the {SIDES[result.last_side]} records in each {result.slice_ms / 1000:g} s; "
            "shaded where records are missing.",
        ),
        section("Lag", _lag(result), hint="Records up to each moment that a side lacks."),
        section("Faults", _faults(result)),
    ]
    if totals["notes"]:
        sections.append(
            section("Notes", "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in totals["notes"]) + "</ul>")
        )
    return page(f"Audit of {result.topic}", made, sentence(result), totals["verdict"] == "complete", sections)


_CLASSES = {
    "missing": "gap",
    "duplicate": "duplicate",
    "out of order": "order",
    "altered": "mismatch",
    "not in the log": "unexpected",
    "aborted": "unexpected",
    "expired": "expired",
}


def _breakdown(result: AuditResult) -> str:
    sides = [SIDES[side] for side in result.given]
    faults = ("gaps", "duplicates", "out_of_order", "mismatches", "expired")
    rows = []
    for row in result.to_json()["partitions"]:
        offsets = "–" if row["first_offset"] is None else f"{row['first_offset']:,}-{row['last_offset']:,}"
        counts = [row[name] for name in ("partition", *sides, "percent")]
        rows.append((*counts, f"{row['deviation']:+,}", offsets, *(row[name] for name in faults)))
    columns = ("partition", *sides, "percent", "deviation", "offsets", *faults)
    return table([name.replace("_", " ") for name in columns], rows)


def _strip(partition: PartitionResult) -> tuple[str, float, float, list[Mark]]:
    start = partition.bounds.log_start
    stop = max(partition.bounds.end, *(last + 1 for last in partition.last.values()), 1)
    marks = [Mark(0, start, f"expired: offsets below {start:,}", "expired")] if start else []
    for _, kind, side, first, last, count, _ in _faults_of(partition):
        marks.append(
            Mark(first, last + 1, f"{side}: {kind}, offsets {first:,} to {last:,} ({count:,})", _CLASSES[kind])
        )
    return f"partition {partition.partition}", 0, stop, marks


def _worst(result: AuditResult) -> set[int]:
    """Return the partitions to draw lines for: those with the most missing records."""
    by_fault = sorted(result.partitions, key=lambda partition: (-partition.missing(), partition.partition))
    return {partition.partition for partition in by_fault[:LINES_MAX]}


def _reach(result: AuditResult) -> list[Series]:
    lines = []
    for partition in sorted(_worst(result)):
        points = [
            (part.start_ms + result.slice_ms, part.reach)
            for part in result.slices
            if part.partition == partition and part.side == result.last_side and part.reach is not None
        ]
        if points:
            lines.append(Series(f"partition {partition}", [reach for _, reach in points], "", [at for at, _ in points]))
    return lines


def _gap_times(result: AuditResult) -> Iterator[Mark]:
    for part in result.slices:
        if part.missing:
            text = f"partition {part.partition}: {part.missing:,} missing among the {SIDES[part.side]} records"
            yield Mark(part.start_ms, part.start_ms + result.slice_ms, text)


def _lag(result: AuditResult) -> str:
    lines = []
    times = sorted({part.start_ms for part in result.slices})
    for side in (READABLE, DELIVERED, LANDED):
        if side in result.given:
            missing = dict.fromkeys(times, 0)
            for part in result.slices:
                missing[part.start_ms] += part.missing if part.side == side else 0
            lines.append(Series(SIDES[side], list(accumulate(missing.values())), SIDE_COLOURS[side], times))
    lagging = [side for side in (DELIVERED, LANDED) if side in result.given]
    rows = [(partition.partition, *map(partition.lag, lagging)) for partition in result.partitions]
    behind_end = table(("partition", *(SIDES[side] for side in lagging)), rows) if lagging else ""
    return line_chart(lines) + (f"<p>At the log's end, not reached yet:</p>{behind_end}" if behind_end else "")


def _faults_of(partition: PartitionResult) -> Iterator[Fault]:
    for kind, ranges in (
        ("missing", partition.gaps),
        ("duplicate", partition.duplicates),
        ("out of order", partition.disordered),
        ("aborted", [item for item in partition.unexpected if item.side == READABLE]),
        ("not in the log", [item for item in partition.unexpected if item.side != READABLE]),
    ):
        for item in ranges:
            yield partition.partition, kind, SIDES[item.side], item.first, item.last, item.count, ""
    for wrong in partition.mismatched:
        text = f"checksum {wrong.found:08x}, expected {wrong.expected:08x}"
        if wrong.field == "timestamp":
            text = f"timestamp {_time(wrong.found)}, expected {_time(wrong.expected)}"
        yield partition.partition, "altered", SIDES[wrong.side], wrong.offset, wrong.offset, 1, text


def _time(time_ms: int) -> str:
    return "none" if time_ms == NO_TIME else f"{time_ms:,} ms"


def faults(result: AuditResult) -> list[Fault]:
    """Return all faults by partition: kind, side, first and last offset, count, and a detail."""
    return [fault for partition in result.partitions for fault in _faults_of(partition)]


def _faults(result: AuditResult) -> str:
    listed = faults(result)
    if not listed:
        return '<p class="none">None.</p>'
    columns = ("partition", "what", "side", "first offset", "last offset", "records", "detail")
    shown = table(columns, listed[:FAULTS_MAX], ("what", "side", "detail"))
    left = len(listed) - FAULTS_MAX
    return shown + (f'<p class="hint">And {left:,} more: see --json.</p>' if left > 0 else "")
