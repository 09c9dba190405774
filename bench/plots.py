"""Plots of the results: both axes are logarithmic, because the values span decades.

Each side has a line through its medians, with a bar from the minimum to the maximum of the repetitions. One overview
shows all ratios with their goals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.rows import Row, median
from chronik.observe.svg import Axis, circle, drawing, line, polyline, rect, text

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 60, 50
COLOURS = ("#1f6feb", "#d1242f", "#8250df", "#1a7f37")
MET, MISSED = "#1a7f37", "#d1242f"
ROW_HEIGHT, LABEL_WIDTH, RATIO_WIDTH = 18, 470, 420
RATIO_LEAST, RATIO_MOST = 0.01, 10.0

Line = Sequence[tuple[float, Sequence[float]]]
"""Points: x, and the values of the repetitions at x."""


class LogAxis(Axis):
    """A logarithmic axis that spans whole decades."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        if not values or min(values) <= 0:
            raise ValueError(f"a logarithmic axis needs values above zero, not {list(values)[:5]}")
        low = math.floor(math.log10(min(values)))
        high = max(math.ceil(math.log10(max(values))), low + 1)
        super().__init__(low, high, start, end)
        self.ticks = [10.0**power for power in range(low, high + 1)]

    def at(self, value: float) -> float:
        return super().at(math.log10(value))


def line_plot(title: str, x_label: str, y_label: str, lines: Mapping[str, Line]) -> str:
    every_x = [x for points in lines.values() for x, _ in points]
    every_y = [value for points in lines.values() for _, values in points for value in values]
    across = LogAxis(every_x, LEFT, WIDTH - RIGHT)
    up = LogAxis(every_y, HEIGHT - BOTTOM, TOP)
    parts = [_text(LEFT, 22, title, size=15, weight="bold")]
    for tick in across.ticks:
        x = across.at(tick)
        parts += [_line(x, TOP, x, HEIGHT - BOTTOM), _text(x, HEIGHT - BOTTOM + 16, short(tick), anchor="middle")]
    for tick in up.ticks:
        y = up.at(tick)
        parts += [_line(LEFT, y, WIDTH - RIGHT, y), _text(LEFT - 6, y + 4, short(tick), anchor="end")]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, anchor="middle"))
    parts.append(_text(LEFT, TOP - 8, y_label))
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        medians = [(across.at(x), up.at(median(values))) for x, values in sorted(points)]
        parts.append(polyline(medians, colour, fill="none", stroke_width=2))
        for (x, y), (_, values) in zip(medians, sorted(points), strict=True):
            parts.append(_line(x, up.at(min(values)), x, up.at(max(values)), colour))
            parts.append(circle(x, y, 3.5, colour))
        legend_x = LEFT + 150 * (index + 1)
        parts.append(rect(legend_x, TOP - 18, 12, 12, fill=colour))
        parts.append(_text(legend_x + 17, TOP - 8, name))
    return _svg(WIDTH, HEIGHT, parts)


def ratio_plot(rows: Sequence[Row]) -> str:
    """Plot each compared row's ratio as a dot and its goal as a bar; green if the goal is met."""
    compared = [row for row in rows if row["ratio"]]
    bottom = TOP + ROW_HEIGHT * len(compared)
    across = LogAxis([RATIO_LEAST, RATIO_MOST], LABEL_WIDTH, LABEL_WIDTH + RATIO_WIDTH)
    parts = [_text(10, 22, "Chronik : peer, with the goal as a stroke", size=15, weight="bold")]
    for tick in across.ticks:
        x = across.at(tick)
        parts += [_line(x, TOP, x, bottom), _text(x, TOP - 8, short(tick), anchor="middle")]
    for index, row in enumerate(compared):
        y = TOP + ROW_HEIGHT * index + ROW_HEIGHT / 2
        goal_x = across.at(float(row["goal"].partition(" ")[2]))
        x = across.at(min(RATIO_MOST, max(RATIO_LEAST, row["ratio"])))
        colour = MET if row["met"] else MISSED
        parts.append(_text(LABEL_WIDTH - 12, y + 4, f"{row['workload']}: {row['metric']}", anchor="end", size=10))
        parts.append(_line(goal_x, y - 7, goal_x, y + 7, "#57606a"))
        parts.append(circle(x, y, 4, colour))
        parts.append(_text(LABEL_WIDTH + RATIO_WIDTH + 12, y + 4, f"{row['ratio']:g}", size=10))
    return _svg(LABEL_WIDTH + RATIO_WIDTH + 60, bottom + 15, parts)


def short(value: float) -> str:
    """Return a tick's label: 0.01, 1, 100, 10k, 1M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    background = rect(0, 0, width, height, fill="white")
    style = {"xmlns": "http://www.w3.org/2000/svg", "font_family": "sans-serif"}
    return drawing(width, height, [background, *parts], **style) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#d8dee4") -> str:
    return line(x1, y1, x2, y2, stroke=colour)


def _text(x: float, y: float, shown: str, *, anchor: str = "start", size: int = 11, weight: str = "normal") -> str:
    return text(x, y, shown, anchor, font_size=size, font_weight=weight, fill="#1f2328")
