"""The simulator finds each planted bug within the number of seeds that `planted` states: its oracle can fail."""

from __future__ import annotations

import pytest
from tests.sim.planted import PLANTED, Planted

from chronik.testing.sim import Report, run_seed


def first_violation(plant: Planted, seeds_max: int) -> Report | None:
    for seed in range(seeds_max):
        with plant():
            report = run_seed(seed)
        if report.violation is not None:
            return report
    return None


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bug_is_found(plant: Planted) -> None:
    report = first_violation(plant, PLANTED[plant])
    assert report is not None, f"not found within {PLANTED[plant]} seeds"
    with plant():
        again = run_seed(report.seed)
    assert (again.violation, again.trace_hash) == (report.violation, report.trace_hash)
