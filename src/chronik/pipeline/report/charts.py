"""Charts as SVG text, for reports that open without a network: bars, lines over time, and strips with marks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import NamedTuple

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 84, 16, 28, 30
CHART_HEIGHT = 260
STRIP_HEIGHT, STRIP_PITCH = 16, 24
TICKS = 5
BAR_WIDTH_MAX = 42.0
MARK_WIDTH_MIN = 2.0
"""So that a gap of one record in a million is visible."""
COLOURS = ("#0969da", "#1a7f37", "#8250df", "#bf8700", "#1b7c83", "#a475f9", "#57606a", "#cf5a9b")


class Series(NamedTuple):
    """A line or a row of bars. The points of a line are (milliseconds, value)."""

    name: str
    values: Sequence[float]
    colour: str = ""
    times_ms: Sequence[float] = ()


class Mark(NamedTuple):
    """A highlighted range and its description."""

    start: float
    stop: float
    text: str
    kind: str = "gap"


def bar_chart(labels: Sequence[str], series: Sequence[Series], level: float | None = None, level_text: str = "") -> str:
    """Draw groups of bars. `level` is a horizontal line, such as the mean."""
    highest = max([*(value for one in series for value in one.values), level or 0, 1])
    steps = ticks(0, highest)
    scale = (CHART_HEIGHT - TOP - BOTTOM) / steps[-1]
    group = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    bar = min(BAR_WIDTH_MAX, group * 0.8 / max(1, len(series)))
    shapes = _grid(steps, lambda value: CHART_HEIGHT - BOTTOM - value * scale)
    for at, label in enumerate(labels):
        middle = LEFT + group * (at + 0.5)
        if len(labels) <= 40 or at % (len(labels) // 40 + 1) == 0:
            shapes.append(_text(middle, CHART_HEIGHT - 10, label, "middle"))
        for number, one in enumerate(series):
            height = one.values[at] * scale
            x = middle + (number - len(series) / 2) * bar
            title = _title(f"{label}: {one.name} {one.values[at]:,.0f}")
            shapes.append(
                f'<rect x="{x:.1f}" y="{CHART_HEIGHT - BOTTOM - height:.1f}" width="{max(1.0, bar - 1):.1f}" '
                f'height="{height:.1f}" fill="{_colour(one, number)}">{title}</rect>'
            )
    if level is not None:
        y = CHART_HEIGHT - BOTTOM - level * scale
        shapes.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(_text(WIDTH - RIGHT, y - 4, level_text, "end"))
    return _svg(CHART_HEIGHT, shapes) + _legend(series)


def line_chart(series: Sequence[Series], marks: Iterable[Mark] = ()) -> str:
    """Draw values over time. Marks are time slices across the whole height."""
    times = [time for one in series for time in one.times_ms]
    if not times:
        return '<p class="none">no record has a time</p>'
    marked = list(marks)
    begin, end = min(times), max([*times, *(mark.stop for mark in marked)])
    end = end if end > begin else begin + 1000
    steps = ticks(
        min(0, *(value for one in series for value in one.values)), max(1, *(v for s in series for v in s.values))
    )
    across = (WIDTH - LEFT - RIGHT) / (end - begin)
    up = (CHART_HEIGHT - TOP - BOTTOM) / (steps[-1] - steps[0])

    def x(time: float) -> float:
        return LEFT + (min(max(time, begin), end) - begin) * across

    def y(value: float) -> float:
        return CHART_HEIGHT - BOTTOM - (value - steps[0]) * up

    shapes = _grid(steps, y)
    for mark in marked:
        left, wide = x(mark.start), max(MARK_WIDTH_MIN, x(mark.stop) - x(mark.start))
        shapes.append(
            f'<rect class="{mark.kind} shade" x="{left:.1f}" y="{TOP}" width="{wide:.1f}" '
            f'height="{CHART_HEIGHT - TOP - BOTTOM}">{_title(mark.text)}</rect>'
        )
    for number, one in enumerate(series):
        points = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in zip(one.times_ms, one.values, strict=True))
        shapes.append(f'<polyline points="{points}" stroke="{_colour(one, number)}">{_title(one.name)}</polyline>')
        for time, value in zip(one.times_ms, one.values, strict=True) if len(one.values) <= 2 else ():
            shapes.append(f'<circle cx="{x(time):.1f}" cy="{y(value):.1f}" r="3" fill="{_colour(one, number)}"/>')
    for part in range(TICKS):
        time = begin + (end - begin) * part / (TICKS - 1)
        anchor = "start" if part == 0 else "end" if part == TICKS - 1 else "middle"
        shapes.append(_text(x(time), CHART_HEIGHT - 10, clock(time, end - begin), anchor))
    return _svg(CHART_HEIGHT, shapes) + _legend(series)


def strip_chart(rows: Sequence[tuple[str, float, float, Sequence[Mark]]], *, as_times: bool = False) -> str:
    """Draw a strip for each row from its start to its stop, on one scale, with marks at faults."""
    if not rows:
        return ""
    begin, end = min(start for _, start, _, _ in rows), max(stop for _, _, stop, _ in rows)
    end = end if end > begin else begin + 1
    across = (WIDTH - LEFT - RIGHT) / (end - begin)
    height = TOP + STRIP_PITCH * len(rows) + BOTTOM
    shapes: list[str] = []
    for at, (label, start, stop, marks) in enumerate(rows):
        y = TOP + STRIP_PITCH * at
        shapes.append(_text(LEFT - 8, y + STRIP_HEIGHT - 4, label, "end"))
        shapes.append(_box("strip", LEFT + (start - begin) * across, y, (stop - start) * across, ""))
        for mark in marks:
            left = LEFT + (mark.start - begin) * across
            wide = max(MARK_WIDTH_MIN, (mark.stop - mark.start) * across)
            shapes.append(_box(mark.kind, left, y, wide, mark.text))
    for part in range(TICKS):
        value = begin + (end - begin) * part / (TICKS - 1)
        anchor = "start" if part == 0 else "end" if part == TICKS - 1 else "middle"
        shown = clock(value, end - begin) if as_times else f"{value:,.0f}"
        shapes.append(_text(LEFT + (value - begin) * across, height - 10, shown, anchor))
    return _svg(height, shapes)


def ticks(low: float, high: float) -> list[float]:
    """Return round steps from at or below `low` to at or above `high`."""
    raw = max(high - low, 1e-9) / (TICKS - 1)
    power = 10.0 ** len(str(int(raw))[1:]) if raw >= 1 else 1.0
    step = next(times * power for times in (1, 2, 2.5, 5, 10, 20) if times * power >= raw)
    first = (low // step) * step
    made = [first]
    while made[-1] < high:
        made.append(made[-1] + step)
    return made if len(made) > 1 else [first, first + step]


def clock(time_ms: float, span_ms: float) -> str:
    """Format a time in UTC, as precisely as the span requires. Producers may write times outside any calendar."""
    try:
        shown = datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{time_ms:,.0f} ms"
    if span_ms > 2 * 86_400_000:
        return shown.strftime("%Y-%m-%d %H:%M")
    return shown.strftime("%H:%M:%S") if span_ms > 10_000 else shown.strftime("%H:%M:%S.%f")[:-3]


def _grid(steps: Sequence[float], y: Callable[[float], float]) -> list[str]:
    shapes = []
    for value in steps:
        at = y(value)
        shapes.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        shapes.append(_text(LEFT - 8, at + 4, f"{value:,.0f}" if value == int(value) else f"{value:,.1f}", "end"))
    return shapes


def _box(kind: str, x: float, y: float, width: float, text: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(1.0, width):.1f}" height="{STRIP_HEIGHT}">'
        f"{_title(text) if text else ''}</rect>"
    )


def _legend(series: Sequence[Series]) -> str:
    shown = "".join(
        f'<span><i style="background:{_colour(one, number)}"></i>{escape(one.name)}</span>'
        for number, one in enumerate(series)
    )
    return f'<p class="legend">{shown}</p>'


def _colour(one: Series, number: int) -> str:
    return one.colour or COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _svg(height: float, shapes: Sequence[str]) -> str:
    inside = "\n".join(shapes)
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">\n{inside}\n</svg>'
