"""A single node, `synced`, with crashes, a bad disk and a bad network: no acknowledged or visible record is lost.

The seeds of `KNOWN` are always the same; new ones run beside them, with the seed in the test's name.
"""

from __future__ import annotations

import pytest
from tests.sim.fresh import fresh_seeds

from chronik.testing.sim import Report, run_seed
from chronik.testing.sim.single_node import SingleNode

KNOWN = range(12)
FRESH = 30


def check(report: Report) -> None:
    if report.violation is not None:
        pytest.fail(report.failure(), pytrace=False)


@pytest.mark.parametrize("seed", KNOWN)
def test_nothing_acknowledged_is_lost(seed: int) -> None:
    report = run_seed(seed)
    check(report)
    assert report.counts["acknowledged"] > 0 and report.counts["read"] > 0


@pytest.mark.parametrize("seed", fresh_seeds(SingleNode.name, FRESH))
def test_nothing_acknowledged_is_lost_with_fresh_seeds(seed: int) -> None:
    check(run_seed(seed))


def test_a_run_stops_after_the_maximum_number_of_events() -> None:
    report = run_seed(1, events_max=2000)
    assert report.events == 2000 and report.violation is None
