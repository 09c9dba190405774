"""Tables and plots of the results: bench/results/side_by_side.md, *.svg, and the tables in docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.plots import Line, line_plot, ratio_plot
from bench.rows import Row, key_of, median, rounded
from bench.samples import Measured, Samples, Taken
from bench.servers import CHRONIK

AXES = {
    "partitions": ("Resident memory by partitions", "partitions of one node", "MB"),
    "record size": ("Server CPU of produce by record size", "bytes of a record", "ms/MB"),
    "connections": ("Server CPU of a one-record request by connections", "connections", "us/request"),
    "log size": ("Restart after kill -9 by size of the log", "GB", "s"),
}


def tables(samples: Samples, rows: Sequence[Row]) -> dict[str, str]:
    """Return what docs/benchmarks.md has between markers, by the name in the markers."""
    return {
        "missed goals": missed_goals(rows),
        "own goals": own_goals(samples, rows),
        "side by side": markdown(samples, rows),
    }


def missed_goals(rows: Sequence[Row]) -> str:
    """Format the rows that missed their goal, each with the reason that its `limit` states."""
    missed = [row for row in rows if not row["met"]]
    lines = [f"{len(rows) - len(missed)} of {len(rows)} goals met. Missed:", ""]
    return "\n".join([*lines, *_judged(missed, "reason, if known", [row["limit"] or "-" for row in missed])])


def own_goals(samples: Samples, rows: Sequence[Row]) -> str:
    """Format the rows that `markdown` does not compare with Apache Kafka."""
    compared = {key_of(row) for row in _from(samples, rows)}
    own = [row for row in rows if key_of(row) not in compared]
    return "\n".join(_judged(own, "met", [_met(row) for row in own]))


def markdown(samples: Samples, rows: Sequence[Row]) -> str:
    """Format the compared rows, then the figures without a goal, each as: median (minimum-maximum)."""
    compared = _from(samples, rows)
    missed = [row for row in compared if not row["met"]]
    lines = [f"{len(compared) - len(missed)} of {len(compared)} goals met.", ""]
    for peer in dict.fromkeys(row["peer_name"] for row in compared):
        lines += _table(samples, [row for row in compared if row["peer_name"] == peer], peer)
    others = [one for one in samples.measured.values() if one.goal is None or one.is_own_goal]
    lines += _not_compared(others)
    return "\n".join(lines)


def plots(samples: Samples, rows: Sequence[Row]) -> dict[str, str]:
    """Return SVG by file name; a series without measurements has none."""
    made = {}
    compared = _from(samples, rows)
    if any(row["ratio"] for row in compared):
        made["ratios.svg"] = ratio_plot(compared)
    for series, (title, x_label, y_label) in AXES.items():
        lines = series_lines(samples, series)
        if lines:
            made[f"growth-{series.replace(' ', '-')}.svg"] = line_plot(title, x_label, y_label, lines)
    return made


def _from(samples: Samples, rows: Sequence[Row]) -> list[Row]:
    """Return the rows made from these samples; other rows have another kind of peer."""
    known = {
        (measured.workload, measured.metric, peer) for measured in samples.measured.values() for peer in measured.peers
    }
    return [row for row in rows if key_of(row) in known]


def series_lines(samples: Samples, series: str) -> dict[str, Line]:
    lines: dict[str, list[tuple[float, Sequence[float]]]] = {}
    for measured in samples.measured.values():
        if measured.series == series and measured.x is not None:
            for side, taken in measured.sides.items():
                lines.setdefault(side, []).append((measured.x, taken.values))
    return {side: sorted(line) for side, line in lines.items()}


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: made by bench/run.py -->", f"<!-- end of {name} -->"


def put_between(text: str, name: str, table: str) -> str:
    """Return `text` with `table` between the two markers of this name."""
    begin, end = marks(name)
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"the document lacks the marks {begin!r} and {end!r}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def write(samples: Samples, rows: Sequence[Row], results: Path, document: Path) -> list[Path]:
    made = tables(samples, rows)
    table = f"# Side by side\n\nMade by bench/run.py.\n\n{made['side by side']}\n"
    files = {"side_by_side.md": table, **plots(samples, rows)}
    for name, text in files.items():
        (results / name).write_text(text)
    text = document.read_text()
    for name, table in made.items():
        text = put_between(text, name, table)
    document.write_text(text)
    return [*(results / name for name in files), document]


def _judged(rows: Sequence[Row], last: str, cells: Sequence[str]) -> list[str]:
    """Format rows as they are judged, without spread; `last` names the last column, whose cells are `cells`."""
    lines = [
        f"| workload | metric | unit | {CHRONIK} | peer | ratio | goal | {last} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, cell in zip(rows, cells, strict=True):
        peer = "-" if row["peer_name"] is None else f"{_exact(row['peer'])} ({row['peer_name']})"
        lines.append(
            f"| {row['workload']} | {row['metric']} | {row['unit']} | {_exact(row['chronik'])} | {peer} "
            f"| {_ratio(row)} | {row['goal']} | {cell} |"
        )
    return [*lines, ""]


def _table(samples: Samples, rows: Sequence[Row], peer: str) -> list[str]:
    lines = [
        f"Chronik against {peer}:",
        "",
        f"| workload | metric | unit | {CHRONIK} | {peer} | ratio | goal | met | CPU s | resident MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sides = samples.measured[row["workload"], row["metric"]].sides
        ours, theirs = sides[CHRONIK], sides[peer]
        lines.append(
            f"| {row['workload']} | {row['metric']} | {row['unit']} | {shown(ours.values)} | {shown(theirs.values)} "
            f"| {_ratio(row)} | {row['goal']} | {_met(row)} "
            f"| {_pair(ours.cpu_s, theirs.cpu_s)} | {_pair(ours.resident_mb, theirs.resident_mb)} |"
        )
    return [*lines, ""]


def _not_compared(measured: Sequence[Measured]) -> list[str]:
    if not measured:
        return []
    sides = list(dict.fromkeys(side for one in measured for side in one.sides))
    lines = [
        "Without a goal on the ratio, and how cost grows:",
        "",
        f"| workload | metric | unit | {' | '.join(sides)} |",
        "|---|---|---|" + "---|" * len(sides),
    ]
    for one in measured:
        cells = " | ".join(shown(one.sides.get(side, Taken()).values) for side in sides)
        lines.append(f"| {one.workload} | {one.metric} | {one.unit} | {cells} |")
    return [*lines, ""]


def _ratio(row: Row) -> str:
    return "-" if row["ratio"] is None else f"{row['ratio']:g}"


def _met(row: Row) -> str:
    return "yes" if row["met"] else "**no**"


def shown(values: Sequence[float]) -> str:
    """Format the median and the spread; a single value has no spread."""
    if not values:
        return "-"
    if len(values) == 1:
        return _number(values[0])
    return f"{_number(median(values))} ({_number(min(values))}-{_number(max(values))})"


def _pair(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"{_number(median(ours))} / {_number(median(theirs))}" if ours and theirs else "-"


def _exact(value: float) -> str:
    """Format with the digits that are judged, so that no table contradicts itself."""
    return f"{rounded(value):,.12g}"


def _number(value: float) -> str:
    """Format with three significant digits; whole numbers above 100."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
