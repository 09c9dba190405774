"""A node alone, `synced`, under crashes, a bad disk and a bad network: nothing that was acknowledged or shown is lost.

The seeds of `KNOWN` are always the same; beside them run fresh ones, and one that fails prints how to see it again.
"""

from __future__ import annotations

import random
from time import perf_counter

import pytest

from chronik.testing.sim import Report, run_seed

KNOWN = range(12)
FRESH_S = 12.0


def check(report: Report) -> None:
    if report.violation is not None:
        pytest.fail(report.failure(), pytrace=False)


@pytest.mark.parametrize("seed", KNOWN)
def test_nothing_acknowledged_is_lost(seed: int) -> None:
    report = run_seed(seed)
    check(report)
    assert report.counts["acknowledged"] > 0 and report.counts["read"] > 0


def test_nothing_acknowledged_is_lost_with_fresh_seeds() -> None:
    started_s = perf_counter()
    first = seed = random.randrange(1 << 32)
    while perf_counter() - started_s < FRESH_S:
        check(run_seed(seed))
        seed += 1
    print(f"{seed - first} fresh seeds from {first}")


def test_a_run_can_be_cut_short() -> None:
    report = run_seed(1, events_max=2000)
    assert report.events == 2000 and report.violation is None
