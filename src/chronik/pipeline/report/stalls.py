"""Stall windows as a report: when each partition stalled, for how long, and why."""

from __future__ import annotations

from collections import Counter

from chronik.pipeline.report.charts import Mark, clock, strip_chart
from chronik.pipeline.report.page import legend, page, section, table
from chronik.pipeline.stalls.detector import BEHIND, HANG, REJECTIONS, STOPPED, UNEXPLAINED, WATERMARK, Stall
from chronik.pipeline.stalls.job import TraceResult

STALLS_MAX = 500
_CLASSES = {
    WATERMARK: "gap",
    HANG: "order",
    REJECTIONS: "duplicate",
    STOPPED: "mismatch",
    BEHIND: "unexpected",
    UNEXPLAINED: "expired",
}


def stalls_sentence(result: TraceResult) -> str:
    events = sum(one.events for one in result.traced)
    if not result.stalls:
        return f"no partition with unread records stalled for {result.least_s:g} s or more ({events:,} events)"
    by_cause = Counter(stall.cause for stall in result.stalls)
    causes = ", ".join(f"{count} {cause}" for cause, count in by_cause.most_common())
    return f"{len(result.stalls)} stalls of {result.least_s:g} s or more: {causes} ({events:,} events)"


def stall_line(stall: Stall) -> str:
    lasts = "" if stall.until_ms is not None else ", and continues"
    when = clock(stall.from_ms, 60_000)
    return f"{when} {stall.topic}-{stall.partition}: {stall.seconds:g} s{lasts}: {stall.cause}: {stall.summary}"


def stalls_html(result: TraceResult, made: str) -> str:
    first_ms, last_ms = result.span_ms
    rows = []
    for one in result.traced:
        marks = [
            Mark(stall.from_ms, stall.until_ms or last_ms, stall_line(stall), _CLASSES[stall.cause])
            for stall in result.stalls_in(one)
        ]
        rows.append((f"{one.topic}-{one.partition}"[-14:], one.first_ms, max(one.last_ms, one.first_ms + 1), marks))
    columns = ("from (UTC)", "topic", "partition", "seconds", "cause", "why", "unread", "client")
    stalls = [
        (
            clock(stall.from_ms, last_ms - first_ms),
            stall.topic,
            stall.partition,
            stall.seconds if stall.until_ms is not None else f"{stall.seconds:g}, and continues",
            stall.cause,
            stall.summary,
            stall.evidence["unread"],
            stall.evidence["client"],
        )
        for stall in result.stalls[:STALLS_MAX]
    ]
    left = ("from (UTC)", "topic", "cause", "why", "client")
    listed = table(columns, stalls, left) if stalls else '<p class="none">None.</p>'
    sections = [
        section("Partitions over time", strip_chart(rows, as_times=True), legend(_CLASSES)),
        section("Stalls", listed),
    ]
    return page("Stalls by traces", made, stalls_sentence(result), not result.stalls, sections)
