"""The demo's page and its chart."""

from collections import Counter

from chronik.cli.demo_report import Chapter, Chart, chart_lines, report_html

CHART = Chart([Counter({0: 5, 1: 5, 5: 2}), Counter({0: 1, 2: 1})], 0.1, 1, "node <1> killed")


def chapter(complaint: str | None, chart: Chart | None = None) -> Chapter:
    return Chapter("A & B", ["partition", "read"], [[0, 6667], [1, None]], complaint, {"<b>": "a & b"}, chart)


def test_the_report_contains_the_verdict_and_escapes_text() -> None:
    page = report_html([chapter(None)], "here & now")
    assert "once, in order" in page
    assert "<th>&lt;b&gt;</th><td>a &amp; b</td>" in page
    assert "<h2>A &amp; B</h2>" in page
    assert "here &amp; now" in page
    assert "<td>6,667</td>" in page
    assert "http" not in page, "it needs nothing but itself"


def test_the_report_shows_a_complaint_only_in_its_own_chapter() -> None:
    page = report_html([chapter(None), chapter("3 missing")], "")
    assert page.count("once, in order") == 1
    assert page.count("3 missing") == 1


def test_the_report_draws_a_bar_for_each_time_slice_with_records() -> None:
    page = report_html([chapter(None, CHART)], "")
    assert page.count("<rect ") == 5
    assert page.count("<line ") == 1
    assert "node &lt;1&gt; killed" in page


def test_the_terminal_chart_marks_the_event_and_the_gaps() -> None:
    first, second, legend = chart_lines(CHART)
    assert first.split() == ["partition", "0", "#x...#"]
    assert second.split() == ["partition", "1", "#x#..."]
    assert "0.1 s" in legend
