"""The demo's report: one self-contained HTML file, and its chart for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from chronik.observe.svg import drawing, line, rect, text

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
.facts th, .facts td { text-align: left; font-weight: normal; } .facts th { color: #555; }
.verdict { padding: .6rem 1rem; border-left: 4px solid; }
.good { border-color: #1a7f37; background: #f0fff4; } .bad { border-color: #b42318; background: #fff5f4; }
svg { display: block; max-width: 100%; } rect { fill: #1a7f37; } line { stroke: #b42318; stroke-width: 2; }
text { font-size: 11px; fill: #555; }
"""
GOOD = "Every record was acknowledged and read once, in order."
ROW_HEIGHT, BAR_HEIGHT, CELL_WIDTH, LABEL_WIDTH = 38, 30, 14, 80


@dataclass(frozen=True, slots=True)
class Chart:
    """Acknowledgements over time: by partition, the number in each slice; `mark` is the slice of the event."""

    rows: Sequence[Mapping[int, int]]
    slice_s: float
    mark: int
    mark_text: str

    @property
    def slices(self) -> int:
        return 1 + max((index for row in self.rows for index in row), default=0)


@dataclass(frozen=True, slots=True)
class Chapter:
    """One part of the demo: its title, a table of results, a complaint if it failed, and other measurements."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    complaint: str | None
    facts: dict[str, str]
    chart: Chart | None = None


def chart_lines(chart: Chart) -> list[str]:
    """Return the chart as text: `#` if records were acknowledged, `.` if none were, `x` for the event."""
    lines = []
    for partition, row in enumerate(chart.rows):
        cells = "".join("x" if index == chart.mark else "#" if row.get(index) else "." for index in range(chart.slices))
        lines.append(f"  partition {partition}  {cells}")
    return [*lines, f"  one character is {chart.slice_s:g} s: # acknowledged, . nothing, x {chart.mark_text}"]


def print_facts(facts: Mapping[str, str]) -> None:
    for name, value in facts.items():
        print(f"{name}: {value}")
    print()


def report_html(chapters: Sequence[Chapter], made: str) -> str:
    """Return the demo as a page: each chapter's verdict, then its table and figures. `made`: when and where it ran."""
    body = "\n".join(_chapter(chapter) for chapter in chapters)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Chronik demo</title><style>{_STYLE}</style></head>
<body>
<h1>Chronik demo</h1>
<p>{escape(made)}</p>
{body}
</body>
</html>
"""


def _chapter(chapter: Chapter) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in chapter.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in row) + "</tr>\n" for row in chapter.rows
    )
    facts = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>\n" for name, value in chapter.facts.items()
    )
    return f"""<h2>{escape(chapter.title)}</h2>
<p class="verdict {"bad" if chapter.complaint else "good"}">{escape(chapter.complaint or GOOD)}</p>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}</tbody>
</table>
{"" if chapter.chart is None else _svg(chapter.chart)}<table class="facts">
{facts}</table>"""


def _svg(chart: Chart) -> str:
    """Draw bars of acknowledgements for each partition, and a line at the event."""
    counts = [count for row in chart.rows for count in row.values()]
    highest = 2 * statistics.median(counts or [1])  # delayed acknowledgements arrive in one slice; that bar is cut off
    width, height = LABEL_WIDTH + chart.slices * CELL_WIDTH, len(chart.rows) * ROW_HEIGHT + 20
    shapes = []
    for partition, row in enumerate(chart.rows):
        bottom = (partition + 1) * ROW_HEIGHT
        shapes.append(text(0, bottom - 4, f"partition {partition}"))
        for index, count in sorted(row.items()):
            bar = min(BAR_HEIGHT, max(1, round(BAR_HEIGHT * count / highest)))
            x = LABEL_WIDTH + index * CELL_WIDTH
            shapes.append(rect(x, bottom - bar, CELL_WIDTH - 1, bar))
    x = LABEL_WIDTH + chart.mark * CELL_WIDTH
    shapes += [line(x, 0, x, height - 18), text(x, height - 4, chart.mark_text)]
    shown = drawing(width, height, shapes, width=width, role="img")
    return f"<p>Acknowledged records, each bar {chart.slice_s:g} s:</p>\n{shown}\n"


def _cell(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
