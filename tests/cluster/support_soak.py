"""The results of long runs, in bench/results/soak.json: a section for each test, written when that test ends.

    runs {test: {date, passed, seconds, operations, faults, anomalies, longest_unavailability_ms, measured, machine}}
    seconds, operations, faults {kind: count}, anomalies {kind: count}, longest_unavailability_ms {kind: ms}
                                                     over all sections: sums, and the longest
    measured {name: {unit, value, goal, met}}        other measurements of the runs

A section replaces the previous one of the same test; other keys (the simulator's `seeds`) stay unchanged.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronik.testing.anomalies import KINDS
from chronik.testing.history import Report

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "soak.json"


class SoakResults:
    """The results of one soak test."""

    def __init__(self, test: str) -> None:
        self.test = test
        self._started_s = time.monotonic()
        self._machine = machine()
        self.operations = 0
        self.faults: Counter[str] = Counter()
        self.anomalies: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self.unavailable_ms: dict[str, float] = {}
        self._measured: dict[str, dict[str, Any]] = {}

    def history(self, report: Report) -> None:
        self.operations += report.operations
        self.anomalies.update(report.counts())

    def simulated(self, acknowledged: int, faults: Mapping[str, int], violations: int) -> None:
        """Add a run of the simulator: its faults are marked as simulated, and each violation is an anomaly."""
        self.operations += acknowledged
        self.faults.update({f"simulated {kind}": count for kind, count in faults.items()})
        self.anomalies["simulator-violation"] += violations

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1

    def unavailable(self, kind: str, longest_ms: float) -> None:
        self.unavailable_ms[kind] = max(longest_ms, self.unavailable_ms.get(kind, 0.0))

    def measure(self, name: str, value: float, unit: str, at_most: float | None = None) -> None:
        """Record a measurement and whether it meets its goal; of several, the worst is kept."""
        before = self._measured.get(name)
        count = 1 if before is None else before["count"] + 1
        worst = value if before is None else max(value, before["value"])
        goal = None if at_most is None else f"<= {at_most:g}"
        met = None if at_most is None else worst <= at_most
        self._measured[name] = {"unit": unit, "value": round(worst, 3), "count": count, "goal": goal, "met": met}

    def write(self, passed: bool, path: Path = RESULTS) -> None:
        """Write this test's section to the file, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"seeds": 0}
        runs = {**found.get("runs", {}), self.test: self._section(passed)}
        found.update({**_totals(list(runs.values())), "runs": dict(sorted(runs.items()))})
        new = path.with_suffix(".json.new")
        new.write_text(json.dumps(found, indent=2) + "\n")
        os.replace(new, path)

    def _section(self, passed: bool) -> dict[str, Any]:
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "passed": passed,
            "seconds": round(time.monotonic() - self._started_s),
            "operations": self.operations,
            "faults": dict(sorted(self.faults.items())),
            "anomalies": dict(self.anomalies),
            "longest_unavailability_ms": {kind: round(ms) for kind, ms in sorted(self.unavailable_ms.items())},
            "measured": dict(sorted(self._measured.items())),
            "machine": self._machine,
        }


def _totals(runs: list[dict[str, Any]]) -> dict[str, Any]:
    faults: Counter[str] = Counter()
    anomalies: Counter[str] = Counter()
    unavailable_ms: dict[str, int] = {}
    measured: dict[str, Any] = {}
    for run in runs:
        faults.update(run["faults"])
        anomalies.update(run["anomalies"])
        measured.update(run["measured"])
        for kind, ms in run["longest_unavailability_ms"].items():
            unavailable_ms[kind] = max(ms, unavailable_ms.get(kind, 0))
    return {
        "seconds": sum(run["seconds"] for run in runs),
        "operations": sum(run["operations"] for run in runs),
        "faults": dict(sorted(faults.items())),
        "anomalies": dict(anomalies),
        "longest_unavailability_ms": dict(sorted(unavailable_ms.items())),
        "measured": dict(sorted(measured.items())),
    }


def machine() -> dict[str, Any]:
    """Return the machine and the load under which the results were measured."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory_gb": round(pages / 1024**3, 1),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }
