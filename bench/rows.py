"""Turn samples into judged rows: median, spread, ratio, and whether a goal is met.

A goal is text such as ">= 1.0". With a peer, it applies to the ratio Chronik : peer; without one, to Chronik's own
figure. It is judged on the printed value, so that no table contradicts itself.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
RowKey = tuple[str, str, str | None]

RATIO_DIGITS = 3
_RELATIONS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


def judge(goal: str, value: float) -> bool:
    """Return whether `value` meets `goal`; raise if the goal cannot be parsed."""
    relation, _, bound = goal.partition(" ")
    if relation not in _RELATIONS:
        raise ValueError(f"goal {goal!r} is unknown: write it as '>= 1.0' or '<= 1.0'")
    return _RELATIONS[relation](value, float(bound))


def median(values: Sequence[float]) -> float:
    return rounded(statistics.median(values))


def spread(values: Sequence[float]) -> list[float]:
    return [rounded(min(values)), rounded(max(values))]


def rounded(value: float) -> float:
    """Round to four decimals for small figures, one for large ones: no run is more precise."""
    return round(value, 1 if abs(value) >= 1000 else 4)


def own_row(workload: str, metric: str, unit: str, value: float, goal: str) -> Row:
    """Return a row for a figure of Chronik alone and its own goal."""
    row: Row = {"workload": workload, "metric": metric, "unit": unit, "chronik": rounded(value)}
    row |= {"peer": None, "peer_name": None, "ratio": None}
    return row | {"goal": goal, "met": judge(goal, value), "limit": None}


def compared_row(
    workload: str,
    metric: str,
    unit: str,
    chronik: Sequence[float],
    peer: Sequence[float],
    peer_name: str,
    goal: str,
) -> Row:
    """Return a row with both medians. If the peer's figure is zero, `ratio` is null and the goal missed."""
    ours, theirs = median(chronik), median(peer)
    ratio = round(ours / theirs, RATIO_DIGITS) if theirs else None
    return {
        "workload": workload,
        "metric": metric,
        "unit": unit,
        "chronik": ours,
        "peer": theirs,
        "peer_name": peer_name,
        "ratio": ratio,
        "goal": goal,
        "met": ratio is not None and judge(goal, ratio),
        "limit": None,
        "chronik_spread": spread(chronik),
        "peer_spread": spread(peer),
        "repetitions": min(len(chronik), len(peer)),
    }


def key_of(row: Row) -> RowKey:
    return row["workload"], row["metric"], row["peer_name"]


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Replace old rows with their new measurements, then append the new rows.

    `limit` is written by hand if a goal is out of reach; it stays as long as the goal is missed.
    """
    rows = {key_of(row): row for row in old}
    for row in new:
        before = rows.get(key_of(row))
        limit = None if row["met"] or before is None else before["limit"]
        rows[key_of(row)] = row | {"limit": limit}
    return list(rows.values())
