"""Hand-made SVG plots: both axes are logarithmic, because the values span decades.

Each side has a line through its medians, with a bar from the minimum to the maximum of the repetitions. One overview
shows all ratios with their goals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from bench.rows import Row, median

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 60, 50
COLOURS = ("#1f6feb", "#d1242f", "#8250df", "#1a7f37")
MET, MISSED = "#1a7f37", "#d1242f"
ROW_HEIGHT, LABEL_WIDTH, RATIO_WIDTH = 18, 470, 420
RATIO_LEAST, RATIO_MOST = 0.01, 10.0

Line = Sequence[tuple[float, Sequence[float]]]
"""Points: x, and the values of the repetitions at x."""


class LogAxis:
    """Maps values to pixels on a logarithmic axis that spans whole decades."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        if not values or min(values) <= 0:
            raise ValueError(f"a logarithmic axis needs values above zero, not {list(values)[:5]}")
        self._low = math.floor(math.log10(min(values)))
        self._high = max(math.ceil(math.log10(max(values))), self._low + 1)
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        return [10.0**power for power in range(self._low, self._high + 1)]


def line_plot(title: str, x_label: str, y_label: str, lines: Mapping[str, Line]) -> str:
    every_x = [x for line in lines.values() for x, _ in line]
    every_y = [value for line in lines.values() for _, values in line for value in values]
    across = LogAxis(every_x, LEFT, WIDTH - RIGHT)
    up = LogAxis(every_y, HEIGHT - BOTTOM, TOP)
    parts = [_text(LEFT, 22, title, size=15, weight="bold")]
    for tick in across.ticks():
        x = across.at(tick)
        parts += [_line(x, TOP, x, HEIGHT - BOTTOM), _text(x, HEIGHT - BOTTOM + 16, short(tick), anchor="middle")]
    for tick in up.ticks():
        y = up.at(tick)
        parts += [_line(LEFT, y, WIDTH - RIGHT, y), _text(LEFT - 6, y + 4, short(tick), anchor="end")]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, anchor="middle"))
    parts.append(_text(LEFT, TOP - 8, y_label))
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = sorted(line)
        places = [(across.at(x), up.at(median(values))) for x, values in points]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (_, values) in zip(places, points, strict=True):
            parts.append(_line(x, up.at(min(values)), x, up.at(max(values)), colour))
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>')
        legend_x = LEFT + 150 * (index + 1)
        parts.append(f'<rect x="{legend_x}" y="{TOP - 18}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(legend_x + 17, TOP - 8, name))
    return _svg(WIDTH, HEIGHT, parts)


def ratio_plot(rows: Sequence[Row]) -> str:
    """Plot each compared row's ratio as a dot and its goal as a bar; green if the goal is met."""
    compared = [row for row in rows if row["ratio"]]
    bottom = TOP + ROW_HEIGHT * len(compared)
    across = LogAxis([RATIO_LEAST, RATIO_MOST], LABEL_WIDTH, LABEL_WIDTH + RATIO_WIDTH)
    parts = [_text(10, 22, "Chronik : peer, with the goal as a stroke", size=15, weight="bold")]
    for tick in across.ticks():
        x = across.at(tick)
        parts += [_line(x, TOP, x, bottom), _text(x, TOP - 8, short(tick), anchor="middle")]
    for index, row in enumerate(compared):
        y = TOP + ROW_HEIGHT * index + ROW_HEIGHT / 2
        goal_x = across.at(float(row["goal"].partition(" ")[2]))
        x = across.at(min(RATIO_MOST, max(RATIO_LEAST, row["ratio"])))
        colour = MET if row["met"] else MISSED
        parts.append(_text(LABEL_WIDTH - 12, y + 4, f"{row['workload']}: {row['metric']}", anchor="end", size=10))
        parts.append(_line(goal_x, y - 7, goal_x, y + 7, "#57606a"))
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(_text(LABEL_WIDTH + RATIO_WIDTH + 12, y + 4, f"{row['ratio']:g}", size=10))
    return _svg(LABEL_WIDTH + RATIO_WIDTH + 60, bottom + 15, parts)


def short(value: float) -> str:
    """Return a tick's label: 0.01, 1, 100, 10k, 1M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def _svg(width: int, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height:g}" fill="white"/>', *parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#d8dee4") -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, weight: str = "normal") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style} fill="#1f2328">{escape(text)}</text>'
