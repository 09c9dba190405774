"""The audit's report: self-contained, with every fault, for any topic name."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from chronik.pipeline.audit.blocks import ACKED, LANDED, READABLE, Bounds, Finding
from chronik.pipeline.audit.result import AuditResult, summarise
from chronik.pipeline.report.audit import audit_html, faults, sentence
from chronik.pipeline.report.charts import Mark, Series, bar_chart, line_chart, strip_chart, ticks

TIME_MS = 1_700_000_000_000
GIVEN = (ACKED, READABLE, LANDED)


def result(*more: Finding, topic: str = "orders", partitions: int = 2) -> AuditResult:
    found = list(more)
    for partition in range(partitions):
        for side in GIVEN:
            found.append(Finding("count", side, partition, 0, 1000, 1000))
            found.append(Finding("bucket", side, partition, TIME_MS, 1000, 1000, 0))
            found.append(Finding("reach", side, partition, TIME_MS, 1000, 999))
    return summarise(topic, {partition: Bounds(0, 0, 1000) for partition in range(partitions)}, GIVEN, found)


def charts(page: str) -> list[ElementTree.Element]:
    """Return the charts, which must be well-formed: a browser would show only half of a broken one."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_report_contains_all_charts_and_the_verdict() -> None:
    page = audit_html(result(), "now")
    assert len(charts(page)) == 4
    assert not re.search(r"https?://|url\(|@import|<script|<link|<img|src=", page)
    assert "complete: acked 2,000 = readable 2,000 = landed 2,000" in page


def test_the_report_marks_each_fault_and_lists_its_offsets() -> None:
    planted = result(
        Finding("gap", LANDED, 1, 17, 19, 2),
        Finding("duplicate", LANDED, 0, 33, 34, 1),
        Finding("mismatches", LANDED, 0, 0, 0, 1),
        Finding("mismatch", LANDED, 0, 44, 45, 0xABC, 0xDEF),
        Finding("disorder", LANDED, 0, 0, 0, 1),
        Finding("swapped", LANDED, 0, 50, 52, 1),
    )
    page = audit_html(planted, "now")
    assert [fault[:6] for fault in faults(planted)] == [
        (0, "duplicate", "landed", 33, 33, 1),
        (0, "out of order", "landed", 50, 51, 1),
        (0, "altered", "landed", 44, 44, 1),
        (1, "missing", "landed", 17, 18, 2),
    ]
    marks = [rect.get("class", "") for rect in charts(page)[1].iter("rect")]
    assert sorted(marks) == ["duplicate", "gap", "mismatch", "order", "strip", "strip"]
    assert "checksum 00000abc, expected 00000def" in page
    assert sentence(planted).startswith("incomplete: 2 gaps, 1 duplicates, 1 out of order, 1 mismatches")


def test_the_report_escapes_the_topic_name() -> None:
    page = audit_html(result(topic="<script>alert(1)</script>"), "now & then")
    assert "<script" not in page
    assert "now &amp; then" in page


def test_the_report_of_many_partitions_stays_small() -> None:
    page = audit_html(result(partitions=300), "now")
    assert len(charts(page)) == 4
    assert len(page) < 1_000_000


def test_charts_without_data_are_well_formed() -> None:
    empty = summarise("empty", {}, [READABLE], [])
    assert "no record has a time" in audit_html(empty, "now")
    assert charts(bar_chart(["a"], [Series("x", [0])]))
    assert charts(line_chart([Series("x", [1.0], "", [TIME_MS])], [Mark(TIME_MS, TIME_MS, "point")]))
    assert charts(strip_chart([("a", 0, 0, [])]))


def test_timestamps_outside_the_calendar_are_drawn() -> None:
    nanoseconds = 1_700_000_000_000_000_000
    assert charts(line_chart([Series("x", [1.0, 2.0], "", [TIME_MS, nanoseconds])]))


def test_ticks_are_few_and_enclose_the_values() -> None:
    for low, high in ((0, 1), (0, 7), (0, 4999), (0, 1_234_567), (-3, 12), (0, 10**12)):
        steps = ticks(low, high)
        assert steps[0] <= low < high <= steps[-1]
        assert 2 <= len(steps) <= 8
