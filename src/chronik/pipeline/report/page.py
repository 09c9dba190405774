"""A report: one self-contained HTML file, with a light and a dark theme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #57606a; --line: #d0d7de; --back: #ffffff; --strip: #b6e3c6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --back: #0d1117; --strip: #1d5733; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--back); }
h1 { margin-bottom: 0; } h2 { margin-top: 2.2rem; } .made, .none, .hint { color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; font-size: .9rem; }
td, th { font-variant-numeric: tabular-nums; white-space: nowrap; } td.left { white-space: normal; }
th { color: var(--soft); font-weight: 600; } td.left, th.left { text-align: left; }
.verdict { padding: .6rem 1rem; border-left: 4px solid; font-size: 1.1rem; }
.good { border-color: #1a7f37; background: #1a7f3718; } .bad { border-color: #cf222e; background: #cf222e18; }
svg { display: block; max-width: 100%; height: auto; } text { font-size: 11px; fill: var(--soft); }
polyline { fill: none; stroke-width: 2; } .grid { stroke: var(--line); }
.level { stroke: var(--soft); stroke-dasharray: 4 4; }
.strip { fill: var(--strip); } .shade { opacity: .25; }
.gap { fill: #cf222e; background: #cf222e; } .duplicate { fill: #bf8700; background: #bf8700; }
.order { fill: #8250df; background: #8250df; } .mismatch { fill: #cf5a9b; background: #cf5a9b; }
.unexpected { fill: #0969da; background: #0969da; } .expired { fill: #8c959f; background: #8c959f; }
.legend span { margin-right: 1.2rem; color: var(--soft); }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; border-radius: 2px; }
"""


def page(title: str, made: str, verdict: str, is_good: bool, sections: Sequence[str]) -> str:
    """Return the whole file. `made`: when it was made, and of what."""
    body = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{_STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
<p class="made">{escape(made)}</p>
<p class="verdict {"good" if is_good else "bad"}">{escape(verdict)}</p>
{body}
</body>
</html>
"""


def section(title: str, *parts: str, hint: str = "") -> str:
    shown = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{shown}" + "\n".join(parts) + "\n</section>"


def legend(classes: Mapping[str, str]) -> str:
    """Explain the colours. `classes`: each name with its class in the style."""
    names = "".join(f"<span><i class={shown}></i>{name}</span>" for name, shown in classes.items())
    return f'<p class="legend">{names}</p>'


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[str] = ()) -> str:
    """Format a table. Numbers are right-aligned; the columns named in `left` are text."""

    def cell(tag: str, column: str, text: str) -> str:
        return f"<{tag}{' class=left' if column in left else ''}>{escape(text)}</{tag}>"

    head = "".join(cell("th", column, column) for column in columns)
    body = "\n".join(
        "<tr>"
        + "".join(cell("td", column, _shown(value)) for column, value in zip(columns, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
