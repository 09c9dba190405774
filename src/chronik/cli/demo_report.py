"""The demo's report: one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import Any

from chronik.cli.account import COLUMNS

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
tr:last-child td { font-weight: 600; } .verdict { padding: .6rem 1rem; border-left: 4px solid; }
.good { border-color: #1a7f37; background: #f0fff4; } .bad { border-color: #b42318; background: #fff5f4; }
"""


def report_html(rows: list[dict[str, Any]], complaint: str | None, facts: dict[str, str]) -> str:
    """The account as a page: the verdict first, then the table, then how it was made."""
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(row[column]))}</td>" for column in COLUMNS) + "</tr>\n" for row in rows
    )
    verdict = complaint or "Every record that was produced was acknowledged and read once, in order."
    items = "".join(f"<li>{escape(name)}: {escape(value)}</li>\n" for name, value in facts.items())
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Chronik demo</title><style>{_STYLE}</style></head>
<body>
<h1>Chronik demo</h1>
<p class="verdict {"bad" if complaint else "good"}">{escape(verdict)}</p>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}</tbody>
</table>
<ul>
{items}</ul>
</body>
</html>
"""


def _cell(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
