"""SVG drawings as text, for reports that open without a network. Charts are lists of these shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Axis:
    """Maps the values from `low` to `high` to the pixels from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._high, self._start, self._end = low, high, start, end

    def at(self, value: float) -> float:
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)


def element(tag: str, inside: str = "", /, **attributes: object) -> str:
    """Write one element. An attribute such as `text_anchor` is written with a hyphen, and `class_` as class."""
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else value}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{inside}</{tag}>" if inside else f"<{tag}{written}/>"


def text(x: float, y: float, shown: str, anchor: str | None = None, **style: object) -> str:
    return element("text", escape(shown), x=x, y=y, text_anchor=anchor, **style)


def title(shown: str) -> str:
    """Return what a browser shows while the pointer is on the shape around it; nothing if there is no text."""
    return element("title", escape(shown)) if shown else ""


def line(x1: float, y1: float, x2: float, y2: float, **style: object) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **style)


def rect(x: float, y: float, width: float, height: float, name: str = "", **style: object) -> str:
    return element("rect", title(name), x=x, y=y, width=width, height=height, **style)


def circle(x: float, y: float, radius: float, colour: str) -> str:
    return element("circle", cx=x, cy=y, r=radius, fill=colour)


def polyline(points: Iterable[tuple[float, float]], colour: str, name: str = "", **style: object) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("polyline", title(name), points=path, stroke=colour, **style)


def drawing(width: int, height: int, shapes: Sequence[str], /, **attributes: object) -> str:
    inside = "\n".join(("", *shapes, ""))
    return element("svg", inside, viewBox=f"0 0 {width} {height}", **attributes)
