"""The measurements of every run, in bench/results/side_by_side.json: rows, tables and plots are made from them.

A run of a workload replaces the samples of earlier runs, unless it is set to add to them: so a machine that is free
only for minutes can run its repetitions in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.rows import Row, compared_row, median, own_row
from bench.servers import CHRONIK


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. With `series` it is a point at `x` of a plot; without a goal it is in plots and tables only.

    The goal applies to the ratio Chronik : peer, or, with `is_own_goal`, to Chronik's own value.
    `cpu_s` and `resident_mb` cover all server processes, during the run and at its end.
    """

    workload: str
    metric: str
    unit: str
    value: float
    goal: str | None = None
    series: str | None = None
    x: float | None = None
    cpu_s: float | None = None
    resident_mb: float | None = None
    is_own_goal: bool = False


@dataclass(slots=True)
class Taken:
    """The repetitions of one figure on one side."""

    values: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        self.values.append(round(figure.value, 4))
        if figure.cpu_s is not None:
            self.cpu_s.append(round(figure.cpu_s, 2))
        if figure.resident_mb is not None:
            self.resident_mb.append(round(figure.resident_mb, 1))


@dataclass(slots=True)
class Measured:
    """One workload's metric on all sides."""

    workload: str
    metric: str
    unit: str
    goal: str | None = None
    series: str | None = None
    x: float | None = None
    is_own_goal: bool = False
    sides: dict[str, Taken] = field(default_factory=dict)

    @property
    def peers(self) -> list[str]:
        return [side for side in self.sides if side != CHRONIK]


class Samples:
    """All measurements, loaded from a file or, without one, empty.

    `is_adding` keeps the samples of earlier runs of the same workloads.
    """

    def __init__(self, path: Path | None, *, is_adding: bool = False) -> None:
        self._path = path
        self._is_adding = is_adding
        self._renewed: set[tuple[str, str, str]] = set()
        self.measured: dict[tuple[str, str], Measured] = {}
        self.smallest_heap_mb: int | None = None
        if path is not None and path.exists():
            self._load(json.loads(path.read_text()))

    def add(self, side: str, figure: Figure) -> None:
        key = (figure.workload, figure.metric)
        measured = self.measured.get(key)
        if measured is None:
            measured = self.measured[key] = Measured(*key, figure.unit)
        measured.unit, measured.goal = figure.unit, figure.goal
        measured.series, measured.x, measured.is_own_goal = figure.series, figure.x, figure.is_own_goal
        if (*key, side) not in self._renewed and not self._is_adding:
            measured.sides.pop(side, None)
        self._renewed.add((*key, side))
        measured.sides.setdefault(side, Taken()).add(figure)

    def save(self) -> None:
        """Write the samples to their file, if they have one."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "smallest_heap_mb": self.smallest_heap_mb,
            "measured": [asdict(measured) for measured in self.measured.values()],
        }
        self._path.write_text(json.dumps(content, indent=1) + "\n")

    def rows(self) -> Iterator[Row]:
        """Yield one row for each peer of each figure that has a goal and both sides, or one for Chronik's own goal."""
        for measured in self.measured.values():
            ours = measured.sides.get(CHRONIK)
            if ours is None or measured.goal is None:
                continue
            if measured.is_own_goal:
                value = median(ours.values)
                yield own_row(measured.workload, measured.metric, measured.unit, value, measured.goal)
                continue
            for peer in measured.peers:
                yield compared_row(
                    measured.workload,
                    measured.metric,
                    measured.unit,
                    ours.values,
                    measured.sides[peer].values,
                    peer,
                    measured.goal,
                )

    def _load(self, content: dict[str, Any]) -> None:
        self.smallest_heap_mb = content["smallest_heap_mb"]
        for saved in content["measured"]:
            sides = {side: Taken(**taken) for side, taken in saved.pop("sides").items()}
            self.measured[saved["workload"], saved["metric"]] = Measured(**saved, sides=sides)
