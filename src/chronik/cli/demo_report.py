"""The demo's report: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
.verdict { padding: .6rem 1rem; border-left: 4px solid; }
.good { border-color: #1a7f37; background: #f0fff4; } .bad { border-color: #b42318; background: #fff5f4; }
"""
COLUMNS = ("partition", "leader", "messages", "percent", "deviation", "first_offset", "last_offset", "gaps")


@dataclass(frozen=True, slots=True)
class Chapter:
    """One part of the story: what was done, what came of each record, and what else was measured."""

    title: str
    partitions: Sequence[dict[str, Any]]
    complaint: str | None
    facts: dict[str, str]


def report_html(chapters: Sequence[Chapter]) -> str:
    """The story as a page: each chapter's verdict first, then its table, then how it was made."""
    body = "\n".join(_chapter(chapter) for chapter in chapters)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Chronik demo</title><style>{_STYLE}</style></head>
<body>
<h1>Chronik demo</h1>
{body}
</body>
</html>
"""


def _chapter(chapter: Chapter) -> str:
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(row[column]))}</td>" for column in COLUMNS) + "</tr>\n"
        for row in chapter.partitions
    )
    verdict = chapter.complaint or "Every record was acknowledged and read once, in order."
    items = "".join(f"<li>{escape(name)}: {escape(value)}</li>\n" for name, value in chapter.facts.items())
    return f"""<h2>{escape(chapter.title)}</h2>
<p class="verdict {"bad" if chapter.complaint else "good"}">{escape(verdict)}</p>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}</tbody>
</table>
<ul>
{items}</ul>"""


def _cell(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
