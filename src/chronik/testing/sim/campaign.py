"""Run many seeds on many cores, in spawned processes whose state does not affect the result."""

from __future__ import annotations

import multiprocessing
import traceback
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from time import perf_counter

from chronik.testing.sim.runner import Report, run_seed

AHEAD = 2
"""Seeds submitted for each core, so that no core is idle."""


@dataclass(slots=True)
class Campaign:
    """The result of a campaign. `failures` are whole reports, each with the command that replays it."""

    scenario: str
    first_seed: int
    seeds: int = 0
    events: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    acknowledged: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def count(self, report: Report) -> None:
        self.seeds += 1
        self.events += report.events
        self.virtual_s += report.virtual_s
        self.acknowledged += report.counts["acknowledged"]
        self.faults.update(report.faults)
        if report.violation is not None:
            self.failures.append(report.failure())

    def summary(self) -> str:
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return (
            f"{self.scenario}: {self.seeds} seeds from {self.first_seed}, {len(self.failures)} with a violation; "
            f"{self.virtual_s:,.0f} virtual seconds in {self.wall_s:.0f} s ({self.seeds / self.wall_s * 60:.0f} seeds "
            f"a minute, {self.events / self.wall_s:,.0f} events/s); {self.acknowledged:,} records acknowledged; "
            f"faults: {faults}"
        )


def _run_seed(seed: int, scenario: str) -> Report:
    """Run a seed in a worker process. Not every exception can be passed to another process, and none names the seed."""
    try:
        return run_seed(seed, scenario)
    except Exception:
        raise RuntimeError(f"{scenario} seed {seed} raised:\n{traceback.format_exc()}") from None


def campaign(scenario: str, first_seed: int, *, seconds: float, jobs: int, failures_max: int = 1) -> Campaign:
    """Run consecutive seeds for `seconds`, or until `failures_max` have failed."""
    result = Campaign(scenario, first_seed)
    started_s = perf_counter()
    next_seed = first_seed
    waiting: set[Future[Report]] = set()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        while True:
            is_over = perf_counter() - started_s > seconds or len(result.failures) >= failures_max
            while not is_over and len(waiting) < jobs * AHEAD:
                waiting.add(pool.submit(_run_seed, next_seed, scenario))
                next_seed += 1
            if not waiting:
                break
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                result.count(future.result())
    result.wall_s = perf_counter() - started_s
    return result
