"""The charts of reports: bars, lines over time, and strips with marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import NamedTuple

from chronik.observe.svg import Axis, circle, drawing, line, polyline, rect, text

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
    start: float
    stop: float
    text: str
    kind: str = "gap"


def bar_chart(labels: Sequence[str], series: Sequence[Series], level: float | None = None, level_text: str = "") -> str:
    """Draw groups of bars. `level` is a horizontal line, such as the mean."""
    highest = max([*(value for one in series for value in one.values), level or 0, 1])
    steps = ticks(0, highest)
    up = Axis(0, steps[-1], CHART_HEIGHT - BOTTOM, TOP)
    group = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    bar = min(BAR_WIDTH_MAX, group * 0.8 / max(1, len(series)))
    shapes = _grid(steps, up)
    for index, label in enumerate(labels):
        middle = LEFT + group * (index + 0.5)
        if len(labels) <= 40 or index % (len(labels) // 40 + 1) == 0:
            shapes.append(text(middle, CHART_HEIGHT - 10, label, "middle"))
        for number, one in enumerate(series):
            x, y = middle + (number - len(series) / 2) * bar, up.at(one.values[index])
            name = f"{label}: {one.name} {one.values[index]:,.0f}"
            height = CHART_HEIGHT - BOTTOM - y
            shapes.append(rect(x, y, max(1.0, bar - 1), height, name, fill=_colour(one, number)))
    if level is not None:
        y = up.at(level)
        shapes.append(line(LEFT, y, WIDTH - RIGHT, y, class_="level"))
        shapes.append(text(WIDTH - RIGHT, y - 4, level_text, "end"))
    return _svg(CHART_HEIGHT, shapes) + _legend(series)


def line_chart(series: Sequence[Series], marks: Iterable[Mark] = ()) -> str:
    """Draw values over time. Marks are time slices across the whole height."""
    times = [time for one in series for time in one.times_ms]
    if not times:
        return '<p class="none">no record has a time</p>'
    marked = list(marks)
    begin, end = min(times), max([*times, *(mark.stop for mark in marked)])
    end = end if end > begin else begin + 1000
    values = [value for one in series for value in one.values]
    steps = ticks(min(0, *values), max(1, *values))
    across = Axis(begin, end, LEFT, WIDTH - RIGHT)
    up = Axis(steps[0], steps[-1], CHART_HEIGHT - BOTTOM, TOP)
    shapes = _grid(steps, up)
    for mark in marked:
        x, stop = (across.at(min(max(time, begin), end)) for time in (mark.start, mark.stop))
        width, height = max(MARK_WIDTH_MIN, stop - x), CHART_HEIGHT - TOP - BOTTOM
        shapes.append(rect(x, TOP, width, height, mark.text, class_=f"{mark.kind} shade"))
    for number, one in enumerate(series):
        points = [(across.at(time), up.at(value)) for time, value in zip(one.times_ms, one.values, strict=True)]
        shapes.append(polyline(points, _colour(one, number), one.name))
        for point in points if len(points) <= 2 else ():
            shapes.append(circle(*point, 3, _colour(one, number)))
    shapes += _scale(begin, end, across, CHART_HEIGHT, as_times=True)
    return _svg(CHART_HEIGHT, shapes) + _legend(series)


def strip_chart(rows: Sequence[tuple[str, float, float, Sequence[Mark]]], *, as_times: bool = False) -> str:
    """Draw a strip for each row from its start to its stop, on one scale, with marks at faults."""
    if not rows:
        return ""
    begin, end = min(start for _, start, _, _ in rows), max(stop for _, _, stop, _ in rows)
    end = end if end > begin else begin + 1
    across = Axis(begin, end, LEFT, WIDTH - RIGHT)
    height = TOP + STRIP_PITCH * len(rows) + BOTTOM
    shapes: list[str] = []
    for index, (label, start, stop, marks) in enumerate(rows):
        y = TOP + STRIP_PITCH * index
        shapes.append(text(LEFT - 8, y + STRIP_HEIGHT - 4, label, "end"))
        x = across.at(start)
        shapes.append(rect(x, y, max(1.0, across.at(stop) - x), STRIP_HEIGHT, class_="strip"))
        for mark in marks:
            x = across.at(mark.start)
            width = max(MARK_WIDTH_MIN, across.at(mark.stop) - x)
            shapes.append(rect(x, y, width, STRIP_HEIGHT, mark.text, class_=mark.kind))
    return _svg(height, shapes + _scale(begin, end, across, height, as_times=as_times))


def ticks(low: float, high: float) -> list[float]:
    """Return round steps from at or below `low` to at or above `high`."""
    raw = max(high - low, 1e-9) / (TICKS - 1)
    power = 10.0 ** len(str(int(raw))[1:]) if raw >= 1 else 1.0
    step = next(times * power for times in (1, 2, 2.5, 5, 10, 20) if times * power >= raw)
    first = (low // step) * step
    steps = [first]
    while steps[-1] < high:
        steps.append(steps[-1] + step)
    return steps if len(steps) > 1 else [first, first + step]


def clock(time_ms: float, span_ms: float) -> str:
    """Format a time in UTC, as precisely as the span requires. Producers may write times outside any calendar."""
    try:
        shown = datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{time_ms:,.0f} ms"
    if span_ms > 2 * 86_400_000:
        return shown.strftime("%Y-%m-%d %H:%M")
    return shown.strftime("%H:%M:%S") if span_ms > 10_000 else shown.strftime("%H:%M:%S.%f")[:-3]


def _grid(steps: Sequence[float], up: Axis) -> list[str]:
    shapes = []
    for value in steps:
        y = up.at(value)
        shapes.append(line(LEFT, y, WIDTH - RIGHT, y, class_="grid"))
        shapes.append(text(LEFT - 8, y + 4, f"{value:,.0f}" if value == int(value) else f"{value:,.1f}", "end"))
    return shapes


def _scale(begin: float, end: float, across: Axis, height: int, *, as_times: bool) -> list[str]:
    shapes = []
    for part in range(TICKS):
        value = begin + (end - begin) * part / (TICKS - 1)
        anchor = "start" if part == 0 else "end" if part == TICKS - 1 else "middle"
        shown = clock(value, end - begin) if as_times else f"{value:,.0f}"
        shapes.append(text(across.at(value), height - 10, shown, anchor))
    return shapes


def _legend(series: Sequence[Series]) -> str:
    shown = "".join(
        f'<span><i style="background:{_colour(one, number)}"></i>{escape(one.name)}</span>'
        for number, one in enumerate(series)
    )
    return f'<p class="legend">{shown}</p>'


def _colour(one: Series, number: int) -> str:
    return one.colour or COLOURS[number % len(COLOURS)]


def _svg(height: int, shapes: Sequence[str]) -> str:
    return drawing(WIDTH, height, shapes, width=WIDTH, height=height, role="img")
