"""Three nodes under everything that can happen to them: nothing that was acknowledged or shown is lost.

The seeds of `KNOWN` are always the same; beside them run fresh ones, and one that fails prints how to see it again.
"""

from __future__ import annotations

import random
from time import perf_counter

import pytest

from chronik.testing.sim import Report, run_seed
from chronik.testing.sim.three_nodes import ThreeNodes

KNOWN = range(8)
FRESH_S = 25.0


def check(report: Report) -> None:
    if report.violation is not None:
        pytest.fail(report.failure(), pytrace=False)


@pytest.mark.parametrize("seed", KNOWN)
def test_nothing_acknowledged_is_lost(seed: int) -> None:
    report = run_seed(seed, ThreeNodes.name)
    check(report)
    assert report.counts["acknowledged"] > 0 and report.counts["read"] > 0


def test_nothing_acknowledged_is_lost_with_fresh_seeds() -> None:
    started_s = perf_counter()
    first = seed = random.randrange(1 << 32)
    while perf_counter() - started_s < FRESH_S:
        check(run_seed(seed, ThreeNodes.name))
        seed += 1
    print(f"{seed - first} fresh seeds from {first}")
