"""The figures of a long run, written to bench/results/soak.json when it ends.

    seconds, operations, faults {kind: count}, anomalies {kind: count}, longest_unavailability_ms {kind: ms}
    measured {name: {unit, value, goal, met}}        what the runs measured beside that

Keys that others write there (the simulator's `seeds`) are left as they are.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from chronik.testing.anomalies import KINDS
from chronik.testing.history import Report

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "soak.json"


class SoakResults:
    """What all soak tests of one run found."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._operations = 0
        self._faults: Counter[str] = Counter()
        self._anomalies: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._unavailable_ms: dict[str, float] = {}
        self._measured: dict[str, dict[str, Any]] = {}

    def history(self, report: Report) -> None:
        self._operations += report.operations
        self._anomalies.update(report.counts())

    def fault(self, kind: str) -> None:
        self._faults[kind] += 1

    def unavailable(self, kind: str, longest_ms: float) -> None:
        self._unavailable_ms[kind] = max(longest_ms, self._unavailable_ms.get(kind, 0.0))

    def measure(self, name: str, value: float, unit: str, at_most: float | None = None) -> None:
        """A figure, and whether it is what the issue asks for; the worst of several counts."""
        before = self._measured.get(name)
        worst = value if before is None else max(value, before["value"])
        goal = None if at_most is None else f"<= {at_most:g}"
        met = None if at_most is None else worst <= at_most
        self._measured[name] = {"unit": unit, "value": round(worst, 3), "goal": goal, "met": met}

    def write(self, path: Path = RESULTS) -> None:
        """Replaces the file's keys that are this run's, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"seeds": 0}
        found.update(
            {
                "seconds": round(time.monotonic() - self._started_s),
                "operations": self._operations,
                "faults": dict(sorted(self._faults.items())),
                "anomalies": dict(self._anomalies),
                "longest_unavailability_ms": {kind: round(ms) for kind, ms in sorted(self._unavailable_ms.items())},
                "measured": dict(sorted(self._measured.items())),
            }
        )
        new = path.with_suffix(".json.new")
        new.write_text(json.dumps(found, indent=2) + "\n")
        os.replace(new, path)


def quantile_s(metrics: str, name: str, quantile: float) -> float | None:
    """The upper bound of the bucket of a Prometheus histogram that holds this quantile; None where nothing was seen."""
    buckets: list[tuple[float, float]] = []
    for line in metrics.splitlines():
        if line.startswith(f"{name}_bucket{{"):
            bound = line.partition('le="')[2].partition('"')[0]
            buckets.append((float(bound), float(line.rpartition(" ")[2])))
    if not buckets or buckets[-1][1] == 0:
        return None
    return next(bound for bound, count in sorted(buckets) if count >= quantile * buckets[-1][1])
