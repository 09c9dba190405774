"""Five nodes that come and go, with uneven placement and bad disks: no acknowledged or visible record is lost."""

from __future__ import annotations

import pytest
from tests.sim.fresh import fresh_seeds

from chronik.testing.sim import Report, run_seed
from chronik.testing.sim.five_nodes import FiveNodes

KNOWN = range(6)
FRESH = 6


def check(report: Report) -> None:
    if report.violation is not None:
        pytest.fail(report.failure(), pytrace=False)


@pytest.mark.parametrize("seed", KNOWN)
def test_nothing_acknowledged_is_lost(seed: int) -> None:
    report = run_seed(seed, FiveNodes.name)
    check(report)
    assert report.counts["acknowledged"] > 0 and report.counts["read"] > 0


@pytest.mark.parametrize("seed", fresh_seeds(FiveNodes.name, FRESH))
def test_nothing_acknowledged_is_lost_with_fresh_seeds(seed: int) -> None:
    check(run_seed(seed, FiveNodes.name))
